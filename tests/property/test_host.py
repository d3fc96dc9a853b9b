"""Any interleaving of pushes, retries, polls, pulls and evictions: each push counts once per shard, everyone is told.

The model counts: SGD with lr 1 and gradients of 1, so a shard's weight is minus the number of pushes applied.
"""

from __future__ import annotations

import random

import pytest

from ps.rpc.wire import Status
from ps.server.host import Host
from tests.support.clock import FakeClock
from tests.support.shards import Answered, Client, admitted, started

STEPS = 1500


class Worker:
    """Pushes with up to three numbers under way, each in randomly cut messages, with copies."""

    def __init__(self, client: Client, dice: random.Random) -> None:
        self.client = client
        self.dice = dice
        self.flying: list[tuple[int, tuple[int, ...]]] = []
        self.sequence = 0
        self.asked: list[tuple[Answered, tuple[int, ...]]] = []
        self.next = dict.fromkeys(client.all, 0)
        """Shard → numbers that are known to be applied; from replies only."""

    def act(self) -> None:
        """Start a push, deliver a message of one, deliver a copy, poll, or pull."""
        if self.sequence <= min(self.next.values()) + 2 and self.dice.random() < 0.6:
            self._cut(self.sequence)
            self.sequence += 1
        elif self.flying and self.dice.random() < 0.8:
            self._deliver(*self.flying.pop(self.dice.randrange(len(self.flying))))
        elif self.sequence and self.dice.random() < 0.5:
            number = self.dice.randrange(max(0, self.sequence - 4), self.sequence)
            self._deliver(number, tuple(self.client.all), poll=self.dice.random() < 0.5)
        else:
            self._pull()
        self._settle()

    def finish(self) -> None:
        """Send again, in order, whatever may not have counted."""
        for number in range(self.sequence):
            self._deliver(number, tuple(self.client.all))
        self._settle()
        assert all(not answered.waiting for answered, _ in self.asked)

    def _cut(self, number: int) -> None:
        shards = self.client.all[:]
        self.dice.shuffle(shards)
        at = self.dice.randrange(1, len(shards) + 1)
        self.flying += [(number, part) for part in (tuple(shards[:at]), tuple(shards[at:])) if part]

    def _deliver(self, number: int, shards: tuple[int, ...], *, poll: bool = False) -> None:
        self.asked.append((self.client.push(number, shards=shards, poll=poll), shards))

    def _pull(self) -> None:
        answered = self.client.pull()
        weights = self.client.weights(answered.payload)
        versions = [row.version.counter for row in answered.reply.shards]
        assert weights == [-float(version) for version in versions]

    def _settle(self) -> None:
        for answered, shards in self.asked:
            if answered.waiting or answered.reply.refused:
                continue
            weights = self.client.weights(answered.payload, shards) if answered.payload.numel() else []
            for index, row in enumerate(answered.reply.shards):
                self.next[row.shard] = max(self.next[row.shard], row.next_sequence)
                if row.status in (Status.OK, Status.DUPLICATE):
                    assert weights[index] == -float(row.version.counter)
        self.asked = [(answered, shards) for answered, shards in self.asked if answered.waiting]


@pytest.mark.parametrize("seed", range(4))
def test_each_push_counts_once_whatever_the_order(seed: int) -> None:
    """Three workers, messages cut and delivered at random, copies and polls: weights equal the numbers pushed."""
    dice = random.Random(seed)
    numbers = (10, 11, 12)
    host, first = started(workers=numbers, host=Host(exact=True, clock=FakeClock()))
    workers = [Worker(Client(host, first.map, number), dice) for number in numbers]
    for _ in range(STEPS):
        dice.choice(workers).act()
    for worker in workers:
        worker.finish()
    total = sum(worker.sequence for worker in workers)
    assert total > STEPS / 10
    assert first.weights(first.pull().payload) == [-float(total)] * 3
    progress = host.progress()
    assert [shard.pushes for shard in progress.shards] == [total] * 3
    assert sum(progress.staleness.values()) == 3 * total
    for worker in workers:
        assert set(worker.next.values()) == {worker.sequence}


def test_an_eviction_in_the_middle_keeps_shards_consistent() -> None:
    """A worker is evicted with pushes under way: nothing of it counts later, others go on, weights match versions."""
    dice = random.Random(99)
    host, first = started(workers=(10, 11), host=Host(exact=True, clock=FakeClock()))
    doomed, other = (Worker(Client(host, first.map, number), dice) for number in (10, 11))
    for _ in range(200):
        dice.choice((doomed, other)).act()
    early = doomed.client.push(min(doomed.next.values()) + 1)
    host.install_members(admitted(11))
    assert early.reply.fenced or early.statuses
    before = [shard.pushes for shard in host.progress().shards]
    assert doomed.client.push(doomed.sequence).reply.fenced
    assert [shard.pushes for shard in host.progress().shards] == before
    for _ in range(100):
        other.act()
    other.finish()
    answered = other.client.pull()
    versions = [row.version.counter for row in answered.reply.shards]
    assert other.client.weights(answered.payload) == [-float(version) for version in versions]
