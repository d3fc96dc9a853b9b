"""ssp: nobody is answered further ahead of the slowest than the bound."""

from __future__ import annotations

import pytest

from ps.consistency.policy import NOTHING, PushEvent, Seat, Verdict
from ps.consistency.ssp import Ssp
from ps.types import Incarnation, Part, ShardId

A, B = Incarnation(10), Incarnation(11)


def push(policy: Ssp, worker: Incarnation, number: int) -> Verdict:
    return policy.decide(PushEvent(ShardId(0), worker, number, 0)).verdict


def make(bound: int, *workers: Incarnation) -> Ssp:
    policy = Ssp(bound)
    policy.set_live([Seat(worker) for worker in workers])
    return policy


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_first_push_beyond_the_bound_is_parked_until_the_slowest_moves(bound: int) -> None:
    """It is applied at once; one push of the slowest worker lets it go on."""
    policy = make(bound, A, B)
    assert [push(policy, A, number) for number in range(bound)] == [Verdict.ADMIT] * bound
    assert push(policy, A, bound) is Verdict.PARK
    assert policy.due() is NOTHING
    assert policy.must_take(B) and not policy.must_take(A)
    assert push(policy, B, 0) is Verdict.ADMIT
    assert policy.due().answers == ((A, bound),)
    assert policy.due() is NOTHING


def test_the_reason_says_how_far_it_is() -> None:
    """For logs and status."""
    policy = make(1, A, B)
    push(policy, A, 0)
    reason = policy.decide(PushEvent(ShardId(0), A, 1, 0)).reason
    assert reason == "2 clocks ahead of the slowest worker, only 1 are allowed"


def test_a_death_of_the_slowest_lets_the_others_go_on() -> None:
    """At once, without a further push."""
    policy = make(0, A, B)
    assert push(policy, A, 0) is Verdict.PARK
    policy.set_live([Seat(A)])
    assert policy.due().answers == ((A, 0),)


def test_a_parked_worker_that_dies_is_forgotten() -> None:
    """There is nobody to answer."""
    policy = make(0, A, B)
    push(policy, A, 0)
    policy.set_live([Seat(B)])
    assert policy.due() is NOTHING
    assert push(policy, B, 0) is Verdict.ADMIT


def test_a_newcomer_starts_beside_the_slowest() -> None:
    """While its clock is agreed on it holds the others as the slowest does, and afterwards from there."""
    policy = make(1, A)
    for number in range(5):
        push(policy, A, number)
    policy.set_live([Seat(A), Seat(B, Part.ENTERING)])
    assert policy.pace().entry == 5
    assert push(policy, A, 5) is Verdict.ADMIT
    assert push(policy, A, 6) is Verdict.PARK
    policy.set_live([Seat(A), Seat(B, Part.IN, 5)])
    assert policy.due() is NOTHING
    push(policy, B, 0)
    assert policy.due().answers == ((A, 6),)


def test_alone_nothing_is_ever_parked() -> None:
    """One worker is its own slowest."""
    policy = make(0, A)
    assert {push(policy, A, number) for number in range(10)} == {Verdict.ADMIT}
