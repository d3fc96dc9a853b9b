"""Asynchronous, without a bound: every push counts at once, however stale it is (Hogwild-style asynchronous SGD)."""

from __future__ import annotations

from collections.abc import Sequence

from ps.consistency.policy import NOTHING, Alone, Decision, Due, Pace, PushEvent, Seat, Verdict
from ps.types import Incarnation

_ALWAYS = Decision(Verdict.ADMIT, "asp admits every push")
_PACE = Pace()


class Asp(Alone):
    """No bound on staleness. Stateless."""

    def set_live(self, seats: Sequence[Seat]) -> None:
        """See `Policy.set_live`; nothing depends on it."""

    def decide(self, event: PushEvent) -> Decision:
        """See `Policy.decide`."""
        del event
        return _ALWAYS

    def due(self) -> Due:
        """Nothing ever waits."""
        return NOTHING

    def must_take(self, incarnation: Incarnation) -> bool:
        """Nobody waits for anybody."""
        return False

    def pace(self) -> Pace:
        """There are no clocks."""
        return _PACE
