"""Asynchronous, without a bound: every push counts at once, however stale it is (Hogwild-style asynchronous SGD)."""

from __future__ import annotations

from collections.abc import Sequence

from ps.consistency.policy import Decision, PushEvent, Verdict
from ps.types import Incarnation

_ALWAYS = Decision(Verdict.ADMIT, "asp admits every push")


class Asp:
    """No bound on staleness. Stateless."""

    def set_live(self, workers: Sequence[Incarnation]) -> None:
        """See `Policy.set_live`; nothing depends on it."""

    def decide(self, event: PushEvent) -> Decision:
        """See `Policy.decide`."""
        del event
        return _ALWAYS
