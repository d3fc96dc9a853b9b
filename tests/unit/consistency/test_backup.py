"""bsp with backup workers: one shard chooses for all, exactly B are left out, and nobody waits for ever."""

from __future__ import annotations

from ps.consistency.backup import Backup
from ps.consistency.policy import NOTHING, Closed, Policy, PushEvent, Ruling, Seat, Verdict
from ps.types import Incarnation, Part, ShardId

A, B, C = Incarnation(10), Incarnation(11), Incarnation(12)


def pair(backups: int, *workers: Incarnation) -> tuple[Backup, Backup]:
    """The shard that decides, and another one."""
    decider, other = Backup(backups), Backup(backups)
    decider.appoint()
    for policy in (decider, other):
        policy.set_live([Seat(worker) for worker in workers])
    return decider, other


def push(policy: Policy, worker: Incarnation, number: int, staleness: int | None = 0) -> Verdict:
    return policy.decide(PushEvent(ShardId(0), worker, number, staleness)).verdict


def test_a_round_closes_without_the_slowest_on_all_shards() -> None:
    """The other shard has different first ones, and keeps all until the ruling comes."""
    decider, other = pair(1, A, B, C)
    assert push(other, C, 0) is push(other, B, 0) is Verdict.COLLECT
    assert other.due() is NOTHING
    assert push(decider, B, 0) is Verdict.COLLECT
    assert decider.due() is NOTHING
    push(decider, A, 0)
    assert decider.due().rounds == (Closed(0, ((A, 0), (B, 0))),)
    rulings = decider.rulings()
    assert rulings == (Ruling(0, ((A, 0), (B, 0))),) and decider.rulings() == ()
    other.follow(rulings)
    assert other.due() is NOTHING, "A's push is not here yet"
    push(other, A, 0)
    assert other.due().rounds == (Closed(0, ((A, 0), (B, 0))),)


def test_a_late_push_is_dropped_everywhere_wherever_it_is() -> None:
    """Kept already: answered. Still on its way: dropped when it comes."""
    decider, other = pair(1, A, B, C)
    push(other, C, 0)
    assert push(decider, C, 0, staleness=1) is Verdict.DROP
    rulings = decider.rulings()
    assert rulings == (Ruling(0, dropped=((C, 0),)),)
    assert decider.due() is NOTHING
    other.follow(rulings)
    assert other.due().dropped == ((C, 0),)
    assert push(decider, C, 1, staleness=2) is Verdict.DROP
    other.follow(decider.rulings())
    assert other.due() is NOTHING
    assert push(other, C, 1) is Verdict.DROP
    assert push(decider, C, 2) is Verdict.COLLECT


def test_across_epochs_nothing_is_in_time() -> None:
    """Weights of another epoch are not the newest."""
    decider, _ = pair(0, A)
    assert push(decider, A, 0, staleness=None) is Verdict.DROP


def test_rulings_may_come_in_any_order_and_again() -> None:
    """Rounds are applied in the order in which they were ruled on."""
    decider, other = pair(1, A, B, C)
    for number in range(2):
        for worker in (A, B):
            push(decider, worker, number)
            push(other, worker, number)
        decider.due()
    first, second = decider.rulings()
    other.follow((second,))
    assert other.due() is NOTHING
    other.follow((first, second))
    assert [closed.pushes for closed in other.due().rounds] == [((A, 0), (B, 0)), ((A, 1), (B, 1))]
    other.follow((second, first))
    assert other.due() is NOTHING


def test_with_too_few_workers_one_is_enough() -> None:
    """Never a round of nobody."""
    decider, _ = pair(3, A, B)
    assert decider.due() is NOTHING
    push(decider, A, 0)
    assert decider.due().rounds == (Closed(0, ((A, 0),)),)


def test_deaths_and_those_who_step_aside_close_rounds() -> None:
    """Fewer are needed then."""
    decider, _ = pair(1, A, B, C)
    push(decider, A, 0)
    decider.set_live([Seat(A), Seat(B), Seat(C, Part.OUT)])
    assert decider.due().rounds == (Closed(0, ((A, 0),)),)
    decider.set_live([Seat(A), Seat(B), Seat(C)])
    push(decider, B, 0)
    decider.set_live([Seat(A, Part.KEPT), Seat(B, Part.KEPT)])
    assert decider.due().rounds == (Closed(0, ((B, 0),)),)


def test_a_dead_workers_push_counts_only_where_it_was_ruled_on() -> None:
    """Not ruled on: forgotten. Ruled on, but not here: the round is the mean of those that are."""
    decider, other = pair(0, A, B, C)
    push(decider, C, 0)
    push(other, C, 0)
    for policy in (decider, other):
        policy.set_live([Seat(A), Seat(B)])
        assert policy.due().dropped == ((C, 0),)
    push(decider, A, 0)
    push(decider, B, 0)
    assert decider.due().rounds == (Closed(0, ((A, 0), (B, 0))),)
    push(other, A, 0)
    other.follow(decider.rulings())
    assert other.due() is NOTHING
    other.set_live([Seat(A)])
    assert other.due().rounds == (Closed(0, ((A, 0),), shrunk=True),)
