"""Random schedules: ssp's bound is never exceeded, bsp's rounds hold everybody once and are the same on all shards.

Several shards, each with a policy of its own, are told of joins, leaves and deaths at different times, as servers are;
clocks of joiners are agreed on in two steps, as the coordinator does it. Nobody may be left waiting at the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from ps.consistency.backup import Backup
from ps.consistency.parse import choice
from ps.consistency.policy import Closed, Policy, PushEvent, PushKey, Ruling, Seat, Verdict
from ps.types import Incarnation, Part, ShardId

SHARDS = 3


@dataclass
class Shard:
    """One shard on a server of its own: news come when it looks."""

    policy: Policy
    seen: int = 0
    closed: list[tuple[PushKey, ...]] = field(default_factory=list)
    rulings_seen: int = 0
    next: dict[Incarnation, int] = field(default_factory=dict)


@dataclass
class Worker:
    """What a worker has under way."""

    incarnation: Incarnation
    step: int = 0
    unsent: set[int] = field(default_factory=set)
    unanswered: set[int] = field(default_factory=set)
    begun: int | None = None
    """The clock of the step that it computes; None while its last push is not answered everywhere."""


class Job:
    """Shards, workers, and a coordinator that agrees on clocks."""

    def __init__(self, name: str, dice: random.Random) -> None:
        made = choice(name)
        self.first = made.first
        self.dice = dice
        self.shards = [Shard(made.make()) for _ in range(SHARDS)]
        self.shards[0].policy.appoint()
        self.rulings: list[Ruling] = []
        self.seats: dict[Incarnation, Seat] = {}
        self.version = 0
        self.asked: dict[Incarnation, tuple[int, dict[int, int]]] = {}
        """Entering worker → (version that asks, shard → its entry)."""
        self.starting: dict[Incarnation, int] = {}
        """Worker that is in → version that every shard must have seen before it starts."""
        self.workers: dict[Incarnation, Worker] = {}
        self.deaths = 0

    # ---- coordinator ----

    def join(self, incarnation: Incarnation) -> None:
        self.version += 1
        if self.first is None:
            self.seats[incarnation] = Seat(incarnation)
            self.starting[incarnation] = self.version
            return
        self.seats[incarnation] = Seat(incarnation, Part.ENTERING)
        self.asked[incarnation] = (self.version, {})

    def gone(self, incarnation: Incarnation) -> None:
        self.version += 1
        del self.seats[incarnation]
        self.asked.pop(incarnation, None)
        self.starting.pop(incarnation, None)
        self.workers.pop(incarnation, None)

    def agree(self) -> None:
        for incarnation, (asked_at, entries) in list(self.asked.items()):
            if len(entries) == SHARDS:
                assert self.first is not None
                self.version += 1
                clock = self.first(list(entries.values()))
                self.seats[incarnation] = Seat(incarnation, Part.IN, clock)
                self.starting[incarnation] = self.version
                del self.asked[incarnation]
                assert asked_at < self.version
        for incarnation, version in list(self.starting.items()):
            if all(shard.seen >= version for shard in self.shards):
                del self.starting[incarnation]
                self.workers[incarnation] = Worker(incarnation, begun=self.seats[incarnation].clock)

    # ---- servers ----

    def hear(self, index: int) -> None:
        shard = self.shards[index]
        if shard.seen < self.version:
            shard.seen = self.version
            shard.policy.set_live(list(self.seats.values()))
            for asked_at, entries in self.asked.values():
                entry = shard.policy.pace().entry
                if asked_at <= shard.seen and entry is not None:
                    entries[index] = entry
        if index and shard.rulings_seen < len(self.rulings):
            shard.policy.follow(self.rulings[shard.rulings_seen :])
            shard.rulings_seen = len(self.rulings)
        self.settle(index)

    def settle(self, index: int) -> None:
        shard = self.shards[index]
        due = shard.policy.due()
        for closed in due.rounds:
            self.close(index, closed)
        for key in (*due.answers, *due.dropped):
            self.answer(index, key)
        self.rulings += shard.policy.rulings()

    def close(self, index: int, closed: Closed) -> None:
        assert closed.pushes and list(closed.pushes) == sorted(set(closed.pushes))
        self.shards[index].closed.append(closed.pushes)
        for key in closed.pushes:
            self.answer(index, key)

    def answer(self, index: int, key: PushKey) -> None:
        worker = self.workers.get(key[0])
        if worker is not None:
            assert worker.step == key[1] and index in worker.unanswered, "answered twice"
            worker.unanswered.remove(index)

    # ---- workers ----

    def send(self, worker: Worker) -> None:
        index = self.dice.choice(sorted(worker.unsent))
        worker.unsent.remove(index)
        shard = self.shards[index]
        stale = len(shard.closed) - self.base.get(worker.incarnation, 0) if index == 0 else 0
        event = PushEvent(ShardId(index), worker.incarnation, worker.step, stale)
        decision = shard.policy.decide(event)
        assert decision.verdict is not Verdict.REFUSE, decision
        if decision.verdict in (Verdict.ADMIT, Verdict.DROP):
            self.answer(index, (worker.incarnation, worker.step))
        self.settle(index)

    def act(self, worker: Worker) -> None:
        if worker.unsent:
            self.send(worker)
        elif not worker.unanswered:
            if worker.begun is None:  # the answer to its last push is in: it begins the next step
                worker.begun = self.clock(worker)
                worker.step += 1
                self.base[worker.incarnation] = len(self.shards[0].closed)
            else:
                worker.begun = None
                worker.unsent, worker.unanswered = set(range(SHARDS)), set(range(SHARDS))

    base: dict[Incarnation, int]

    def clock(self, worker: Worker) -> int:
        return self.seats[worker.incarnation].clock + worker.step + 1

    def spread(self, *, newcomers: bool) -> int:
        """Furthest step that anybody computes, less the fewest pushes that anybody has made on all shards; counting who
        is in its first step or not."""
        begun = [self.seats[w.incarnation].clock + w.step for w in self.workers.values() if w.begun is not None]
        pushed = [
            self.seats[w.incarnation].clock + w.step + (w.begun is None and not w.unsent)
            for w in self.workers.values()
            if w.step or newcomers
        ]
        return max(begun) - min(pushed) if begun and pushed else 0


def play(name: str, seed: int, *, events: int, deaths: bool) -> Job:
    """Random joins, leaves at any moment if `deaths`, news and messages in any order; then everybody goes on to equal
    numbers of steps, to see that nobody is stuck."""
    dice = random.Random(seed)
    job = Job(name, dice)
    job.base = {}
    number = 10
    for _ in range(events):
        job.agree()
        chance = dice.random()
        if chance < 0.03 and len(job.seats) < 5:
            number += 1
            job.join(Incarnation(number))
        elif chance < 0.045 and deaths and len(job.seats) > 1:
            job.gone(dice.choice(sorted(job.seats)))
            job.deaths += 1
        elif chance < 0.2 or not job.workers:
            job.hear(dice.randrange(SHARDS))
        else:
            job.act(job.workers[dice.choice(sorted(job.workers))])
        if name.startswith("ssp"):
            bound = int(name.removeprefix("ssp:"))
            assert job.spread(newcomers=False) <= bound and job.spread(newcomers=True) <= bound + 1
    finish(job)
    return job


def finish(job: Job) -> None:
    """Everybody goes on, whoever can; all must get 20 steps further."""
    for _ in range(2 * SHARDS):
        for index in range(SHARDS):
            job.hear(index)
        job.agree()
    assert job.workers.keys() == job.seats.keys()
    goal = {worker.incarnation: worker.step + 20 for worker in job.workers.values()}
    for _ in range(20_000):
        for worker in job.workers.values():
            job.act(worker)
        for index in range(SHARDS):
            job.hear(index)
        if all(worker.step >= goal[worker.incarnation] for worker in job.workers.values()):
            return
    raise AssertionError("somebody is stuck")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_never_exceeds_its_bound_and_nobody_waits_for_ever(bound: int, seed: int) -> None:
    """No worker ever begins a step more than S ahead of the slowest, through joins, leaves and deaths; one more while a
    newcomer is in its first step."""
    play(f"ssp:{bound}", seed, events=3000, deaths=True)


@pytest.mark.parametrize("seed", range(12))
def test_bsp_rounds_are_the_same_on_all_shards(seed: int) -> None:
    """Without deaths each round has the same pushes everywhere, whenever who heard of whom; and each push is in one."""
    job = play("bsp", seed, events=3000, deaths=False)
    shortest = min(len(shard.closed) for shard in job.shards)
    assert shortest > 20
    assert len({tuple(shard.closed[:shortest]) for shard in job.shards}) == 1
    keys = [key for pushes in job.shards[0].closed for key in pushes]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("seed", range(8))
def test_bsp_goes_on_through_deaths(seed: int) -> None:
    """Rounds may differ between shards then, but nobody waits for ever, and no push is in two rounds of a shard."""
    job = play("bsp", seed, events=3000, deaths=True)
    assert job.deaths > 5
    for shard in job.shards:
        keys = [key for pushes in shard.closed for key in pushes]
        assert len(keys) == len(set(keys))


@pytest.mark.parametrize("deaths", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_backup_workers(seed: int, deaths: bool) -> None:
    """One shard decides: without deaths rounds are the same everywhere and leave out no more than B; nobody waits for
    ever."""
    job = play("bsp:backup=2", seed, events=3000, deaths=deaths)
    assert isinstance(job.shards[0].policy, Backup)
    if not deaths:
        shortest = min(len(shard.closed) for shard in job.shards)
        assert shortest > 20
        assert len({tuple(shard.closed[:shortest]) for shard in job.shards}) == 1
        assert {len(pushes) for pushes in job.shards[0].closed} >= {3}
