"""bsp: a round closes when everybody who takes part has pushed, and never without a newcomer that counts for it."""

from __future__ import annotations

from ps.consistency.bsp import Bsp
from ps.consistency.policy import NOTHING, Closed, Policy, PushEvent, Seat, Verdict
from ps.types import Incarnation, Part, ShardId

A, B, C = Incarnation(10), Incarnation(11), Incarnation(12)


def push(policy: Policy, worker: Incarnation, number: int) -> int:
    decision = policy.decide(PushEvent(ShardId(0), worker, number, 0))
    assert decision.verdict is Verdict.COLLECT, decision
    assert f"round {decision.round}" in decision.reason
    return decision.round


def closed(policy: Policy) -> list[Closed]:
    due = policy.due()
    assert not due.answers and not due.dropped
    return list(due.rounds)


def make(*workers: Incarnation) -> Bsp:
    policy = Bsp()
    policy.set_live([Seat(worker) for worker in workers])
    return policy


def test_a_round_closes_with_the_last_push_in_the_order_of_workers() -> None:
    """Whoever comes first: the pushes are named in ascending order, each round once."""
    policy = make(A, B, C)
    for number in range(3):
        for worker in (C, A):
            assert push(policy, worker, number) == number
            assert policy.due() is NOTHING
        push(policy, B, number)
        assert closed(policy) == [Closed(number, ((A, number), (B, number), (C, number)))]
        assert policy.due() is NOTHING


def test_one_worker_closes_its_rounds_alone() -> None:
    """Like asp."""
    policy = make(A)
    for number in range(3):
        push(policy, A, number)
        assert closed(policy) == [Closed(number, ((A, number),))]


def test_a_death_closes_the_round_at_once() -> None:
    """With what is there, the dead worker's push included if it came; the round is marked as shrunk only without it."""
    policy = make(A, B, C)
    for worker in (A, B):
        push(policy, worker, 0)
    policy.set_live([Seat(A), Seat(B)])
    assert closed(policy) == [Closed(0, ((A, 0), (B, 0)), shrunk=True)]
    push(policy, A, 1)
    policy.set_live([Seat(B)])
    assert policy.due() is NOTHING, "B has not pushed yet"
    push(policy, B, 1)
    assert closed(policy) == [Closed(1, ((A, 1), (B, 1)))]


def test_everybody_gone_leaves_nothing_open() -> None:
    """The last worker's contribution counts, although nobody is left to be waited for."""
    policy = make(A, B)
    push(policy, A, 0)
    policy.set_live([])
    assert closed(policy) == [Closed(0, ((A, 0),), shrunk=True)]


def test_who_steps_aside_is_not_waited_for() -> None:
    """Nor may it push before it has come back."""
    policy = make(A, B)
    policy.set_live([Seat(A), Seat(B, Part.OUT)])
    push(policy, A, 0)
    assert closed(policy) == [Closed(0, ((A, 0),))]
    decision = policy.decide(PushEvent(ShardId(0), B, 0, 0))
    assert decision.verdict is Verdict.REFUSE and "takes no part" in decision.reason


def test_a_newcomer_keeps_unopened_rounds_open_until_its_first_is_known() -> None:
    """Rounds that somebody had pushed to close without it, the next ones wait: for the agreement, then for its push."""
    policy = make(A)
    push(policy, A, 0)
    assert len(closed(policy)) == 1
    policy.set_live([Seat(A), Seat(B, Part.ENTERING)])
    assert policy.pace().entry == 1
    push(policy, A, 1)
    assert policy.due() is NOTHING, "round 1 could be B's first"
    policy.set_live([Seat(A), Seat(B, Part.IN, 2)])
    assert closed(policy) == [Closed(1, ((A, 1),))]
    push(policy, A, 2)
    assert policy.due() is NOTHING
    assert push(policy, B, 0) == 2
    assert closed(policy) == [Closed(2, ((A, 2), (B, 0)))]


def test_a_newcomer_may_be_ahead_of_a_shard() -> None:
    """On a shard that is behind, its push waits for its round."""
    policy = make(A)
    policy.set_live([Seat(A), Seat(B, Part.IN, 1)])
    assert push(policy, B, 0) == 1
    assert push(policy, A, 0) == 0
    assert closed(policy) == [Closed(0, ((A, 0),))]
    push(policy, A, 1)
    assert closed(policy) == [Closed(1, ((A, 1), (B, 0)))]


def test_the_slowest_must_be_taken_in() -> None:
    """Whoever a round waits for is never told to come later."""
    policy = make(A, B)
    push(policy, A, 0)
    assert (policy.must_take(A), policy.must_take(B)) == (False, True)
    assert policy.pace().spread == 1
