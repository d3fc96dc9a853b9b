"""The asynchronous choice: no bound."""

from __future__ import annotations

import pytest

from ps.consistency.asp import Asp
from ps.consistency.policy import Policy, PushEvent, Verdict
from ps.types import Incarnation, ShardId


@pytest.mark.parametrize("staleness", [0, 10**9, None])
def test_every_push_is_admitted(staleness: int | None) -> None:
    """However stale, and across epochs; the reason can be logged."""
    policy: Policy = Asp()
    policy.set_live([])
    decision = policy.decide(PushEvent(ShardId(0), Incarnation(1), 5, staleness))
    assert decision.verdict is Verdict.ADMIT
    assert decision.reason == "asp admits every push"
