"""A slow worker does not hold up a job: whole jobs on virtual time, through the real streams and the real leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor

from ps.alone import LocalControl, LocalJob, LocalMember
from ps.control.api import Lease, LeaseAsk, LeaseVerdict, StreamSpec
from tests.support.turns import Turns
from workers import Worker
from workers.config import WorkerConfig
from workers.data import Stream
from workers.sources import InMemory, Piece

BATCH = 5
POLL_S = 0.05


class Control(LocalControl):
    """A line to the coordinator that waits on virtual time."""

    def __init__(self, job: LocalJob, turns: Turns) -> None:
        super().__init__(job)
        self._turns = turns

    def lease(self, ask: LeaseAsk, *, wait_s: float = 2.0) -> Lease:
        """See `Control.lease`."""
        lease = super().lease(ask, wait_s=0.0)
        if lease.verdict is LeaseVerdict.WAIT and wait_s:
            self._turns.sleep(POLL_S)
        return lease


class Ahead(InMemory):
    """Takes from its plan what a DataLoader with processes takes, and when: `ahead` at first, then one for each."""

    def __init__(self, data: Tensor, ahead: int) -> None:
        super().__init__(data)
        self.ahead = ahead

    def load(self, plan: Iterator[Tensor]) -> Iterator[Piece[object]]:
        """See `Source.load`."""
        taken = list(islice(plan, self.ahead))
        while taken:
            ids = taken.pop(0)
            taken += islice(plan, 1)
            yield Piece(self.fetch(ids))


class Job:
    """Workers that need so many units of time for a batch, and what each of them did."""

    def __init__(self, *, batches: int, epochs: int = 1, ahead: int = 0, lookahead_s: float = 4.0) -> None:
        self.turns = Turns()
        self.samples = batches * BATCH
        self.epochs, self.ahead, self.lookahead_s = epochs, ahead, lookahead_s
        self.job = LocalJob(clock=self.turns)
        self.leaves: dict[int, int] = {}
        """Worker → batches after which it breaks off, and stays in the job without asking for more."""
        self.seen: Counter[int] = Counter()
        self.done: list[int] = []

    def run(self, *units: float, begin: float = 0.0, barrier: bool = False) -> float:
        """Time from the first batch to the end of the job; the last worker joins at `begin`."""
        self.done = [0] * len(units)
        last = len(units) - 1
        scripts = [
            lambda number=number, unit=unit: self._script(number, unit, begin * (number == last), barrier)
            for number, unit in enumerate(units)
        ]
        return self.turns.run(scripts)

    def _script(self, number: int, unit: float, begin: float, barrier: bool) -> None:
        self.turns.sleep(begin)
        member = LocalMember(self.job)
        member.control = Control(self.job, self.turns)
        spec = StreamSpec(stream=0, length=self.samples, seed=0, epochs=self.epochs, shuffle=True)
        source = Ahead(torch.arange(self.samples), self.ahead) if self.ahead else InMemory(torch.arange(self.samples))
        config = WorkerConfig(lookahead_s=self.lookahead_s)
        with Worker(member, config, clock=self.turns) as worker:
            stream = Stream(
                worker, spec, source, batch_size=BATCH, last="merge", barrier=barrier, needs_push=lambda: False
            )
            for epoch in stream:
                for batch in epoch:
                    if self.done[number] == self.leaves.get(number, -1):
                        self.turns.sleep(250.0)  # with a batch in its hands
                        return
                    assert isinstance(batch, Tensor)
                    self.turns.sleep(unit)
                    self.seen.update(batch.tolist())
                    self.done[number] += 1


def ideal(batches: int, *units: float) -> float:
    """The time that no schedule can beat: all of them busy to the very end."""
    return batches / sum(1 / unit for unit in units)


@pytest.mark.parametrize("ahead", [0, 8])
@pytest.mark.parametrize("lookahead_s", [0.3, 4.0, 1000.0])
@pytest.mark.parametrize(
    ("batches", "units"),
    [(80, (1, 1, 20)), (42, (1, 20)), (122, (1, 1, 1, 4)), (125, (1, 1, 1, 20)), (120, (1, 2, 4, 8))],
)
def test_within_1_3_of_the_ideal(batches: int, units: tuple[float, ...], ahead: int, lookahead_s: float) -> None:
    """Up to 20 times slower, with 8 batches fetched ahead or none, however long leases may be: the job is in time.

    8 batches fetched ahead by a worker 20 times slower took a job of 40 units 169.
    """
    job = Job(batches=batches, ahead=ahead, lookahead_s=lookahead_s)
    took = job.run(*units)
    assert took <= 1.3 * ideal(batches, *units)
    assert job.seen == Counter(range(job.samples))


@pytest.mark.parametrize("ahead", [0, 8])
def test_several_epochs_with_a_barrier(ahead: int) -> None:
    """Each epoch's end is an end: the slow worker does a batch or two in each, and nobody waits for it in vain."""
    job = Job(batches=50, epochs=4, ahead=ahead)
    assert job.run(1, 20, barrier=True) <= 1.3 * ideal(4 * 50, 1, 20)
    assert set(job.seen.values()) == {4} and job.done[1] >= 4


def test_several_epochs_without_a_barrier() -> None:
    """The slow worker is busy until the very end."""
    job = Job(batches=50, epochs=4, ahead=8)
    assert job.run(1, 1, 20) <= 1.1 * ideal(4 * 50, 1, 1, 20)
    assert set(job.seen.values()) == {4} and job.done[2] >= 4


def test_a_slow_worker_that_joins_late() -> None:
    """It gets one batch before anybody knows that it is slow, and no second one near the end."""
    job = Job(batches=100, ahead=8)
    assert job.run(1, 1, 20, begin=25.0) <= 1.1 * 50
    assert job.done[2] == 1


def test_the_slow_one_does_the_rest_when_the_fast_one_stops_asking() -> None:
    """A fast worker stands still near the end, a batch in its hands: the other loses patience and does the others."""
    job = Job(batches=30, ahead=8)
    job.leaves = {0: 20}
    job.run(1, 20)
    assert job.done[0] == 20 and job.done[1] == 10
    assert job.seen == Counter(range(job.samples))
