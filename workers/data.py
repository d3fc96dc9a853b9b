"""Leased data: `worker.epochs(...)` gives epochs, an epoch gives batches, each sample goes to one worker per epoch."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Generic, Protocol

import torch
from torch import Tensor

from ps.clock import Clock
from ps.control.api import Control, DataRange, Lease, LeaseAsk, LeaseVerdict, StreamSpec
from ps.errors import PsError
from workers.ledger import Ledger
from workers.lifecycle import Lifecycle
from workers.share import Share
from workers.sources import B_co, Source

log = logging.getLogger(__name__)

_LEASE_WAIT_S = 2.0
"""How long the coordinator may hold a request for data before it answers that there is none yet."""

_GRACE_S = 0.2
"""How long a worker without data may hold up a round of others: they may be about to acknowledge the rest."""

_ALL = Share()

_MOST_BATCHES = 4096
_PACE_WEIGHT = 0.3
"""Weight of the newest batch in the moving mean of seconds per batch."""


def permutation(seed: int, epoch: int, length: int) -> Tensor:
    """Order of the samples in an epoch: int64 tensor of `length` sample ids, by position. Pure.

    `torch.randperm` with a generator of its own, seeded with the first 63 bits of SHA-256 of `"seed:epoch"`.
    """
    digest = hashlib.sha256(f"{seed}:{epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randperm(length, generator=generator)


class Feed(Protocol):
    """The worker, as its data streams see it."""

    control: Control
    lifecycle: Lifecycle
    clock: Clock
    lookahead_s: float

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch of any stream is being iterated over."""
        ...

    def drain(self) -> None:
        """Hand everything back, leave the job and raise `WorkerDrained`."""
        ...

    def flush(self) -> None:
        """Push what has been accumulated."""
        ...

    def step_aside(self) -> None:
        """Nothing will be pushed until there is data again: others need not wait for it."""
        ...

    def abandon(self) -> None:
        """Forget what has been accumulated: its samples are handed back."""
        ...


class Stream(Generic[B_co]):
    """One call of `worker.epochs`: an iterator over `Epoch`s. Not thread-safe: for the training thread."""

    def __init__(
        self,
        feed: Feed,
        spec: StreamSpec,
        source: Source[B_co],
        *,
        batch_size: int,
        last: str,
        barrier: bool,
        needs_push: Callable[[], bool],
        share: Share = _ALL,
    ) -> None:
        """`batch_size` in positions, of all ranks together: 1 where each stands for a shard.

        `share` is this rank's part of a batch's samples, where they are numbered here.
        """
        self._feed = feed
        self._spec = spec
        self._source = source
        self._batch_size = batch_size
        self._last = last
        self._barrier = barrier
        self._share = share
        self._orders: OrderedDict[int, Tensor] = OrderedDict()
        self._pace = _Pace(feed.clock, feed.lookahead_s)
        # Leased batches in order: first those that the source has taken already, then those that it may take.
        self._taken: deque[DataRange] = deque()
        self._planned: deque[DataRange] = deque()
        self._ended = False
        self._inner = False  # within an epoch of another stream: what is accumulated is that one's
        self.open = False
        """Whether an epoch is being iterated over."""
        self.ledger = Ledger(feed.control, feed.clock, needs_push=needs_push)
        self.next_epoch = feed.control.open_stream(spec)
        """The epoch that comes next; of a stream that others have begun, first the oldest that is not done."""

    def __iter__(self) -> Iterator[Epoch[B_co]]:
        return self

    def __next__(self) -> Epoch[B_co]:
        self._check()
        if self._ended or self.next_epoch >= self._spec.epochs:
            self.close()
            raise StopIteration
        self.next_epoch += 1
        return Epoch(self, self.next_epoch - 1)

    def batches(self, epoch: int) -> Iterator[B_co]:
        """Batches of an epoch, lease after lease; whatever ends it early hands back what was not trained on."""
        self.ledger.consume()
        self._inner = self._feed.in_epoch
        self.open = True
        try:
            while self._supply(epoch):
                yield from self._load(epoch)
            self._settle()
        finally:
            self.open = False
            self.hand_back()
            self._source.end_epoch()

    def hand_back(self) -> None:
        """Leave the current epoch; does nothing between epochs."""
        self._planned.clear()
        self._taken.clear()
        if not self._inner:
            self._feed.abandon()
        if self._feed.lifecycle.fatal:
            return
        try:
            self.ledger.hand_back()
        except PsError as error:  # often on the way out of another error, which says more
            log.warning("could not hand back data: %s", error)

    def close(self) -> None:
        """End loader processes. Idempotent; bounded."""
        self._source.close()

    def _load(self, epoch: int) -> Iterator[B_co]:
        """Batches of what is leased, and of what can be had in the meantime without waiting."""
        self._pace.start()
        for piece in self._source.load(_Plan(lambda: self._next_ids(epoch))):
            if piece.begins:
                taken = self._taken.popleft()
                self.ledger.hand_out(taken.end - taken.begin, samples=piece.samples, whole=piece.ends)
            else:
                self.ledger.hand_out_more(piece.samples or 0, whole=piece.ends)
            if piece.batch is not None:
                yield piece.batch
            if piece.ends:
                self._pace.stop()
            self.ledger.consume()
            self._check()
            if piece.ends:
                self._pace.start()

    def _next_ids(self, epoch: int) -> Tensor | None:
        """Sample ids of the next leased batch, for the source; None when there is none just now."""
        # Not before the pace is known: a worker may turn out to be slow. Then the source fills up in the next round.
        if not self._planned and self._source.ahead and self._pace.known:
            self.ledger.acknowledge()
            lease = self._feed.control.lease(self._ask(epoch), wait_s=0.0)
            if lease.verdict is LeaseVerdict.RANGE:
                self._accept(lease)
        if not self._planned:
            return None
        self._taken.append(self._planned.popleft())
        ids = self._ids(self._taken[-1])
        return ids[self._share.of(len(ids))]

    def _supply(self, epoch: int) -> bool:
        """Make sure that a leased batch is there; False at the end of the epoch. Blocks while others hold the rest."""
        self._check()
        if self._planned:
            return True
        self.ledger.acknowledge()
        # Samples of our own that no push covers yet may be all that is left: don't wait for ourselves.
        wait_s = 0.0 if self.ledger.unpushed else _GRACE_S
        while True:
            lease = self._feed.control.lease(self._ask(epoch), wait_s=wait_s)
            if lease.verdict is LeaseVerdict.RANGE:
                self._accept(lease)
                return True
            if lease.verdict is not LeaseVerdict.WAIT:
                self._ended = lease.verdict is LeaseVerdict.STREAM_END
                return False
            self._settle()
            if wait_s:
                self._feed.step_aside()
            wait_s = _LEASE_WAIT_S if wait_s else _GRACE_S
            self._check()

    def _settle(self) -> None:
        """Nothing more comes for now: push what is left of an accumulation, and count what was handed out as done."""
        if not self._inner:
            self._feed.flush()
        self.ledger.finish()

    def _check(self) -> None:
        self._feed.lifecycle.check()
        if self._feed.lifecycle.draining:
            self._feed.drain()

    def _ask(self, epoch: int) -> LeaseAsk:
        ahead = len(self._taken) + len(self._planned)
        return LeaseAsk(
            stream=self._spec.stream,
            epoch=epoch,
            batch_size=self._batch_size,
            batches=self._pace.batches(least=self._source.ahead - ahead),
            last=self._last,
            barrier=self._barrier,
            batch_s=self._pace.mean_s,
            ahead=ahead,
        )

    def _accept(self, lease: Lease) -> None:
        assert lease.range is not None and lease.batch_sizes
        begin = lease.range.begin
        for size in lease.batch_sizes:
            batch = replace(lease.range, begin=begin, end=begin + size)
            begin = batch.end
            if self._share.reaches(size):
                self.ledger.leased(batch)
                self._planned.append(batch)
            else:  # all ranks must have equally many batches
                log.warning("%d samples of epoch %d are left out: too few for all ranks", size, batch.epoch)
                self.ledger.leave_out(batch)

    def _ids(self, batch: DataRange) -> Tensor:
        """Sample ids of a range of positions."""
        if not self._spec.shuffle:
            return torch.arange(batch.begin, batch.end)
        if batch.epoch not in self._orders:
            self._orders[batch.epoch] = permutation(self._spec.seed, batch.epoch, self._spec.length)
            while len(self._orders) > 2:  # the epoch, and the one before: ranges may come back late
                self._orders.popitem(last=False)
        return self._orders[batch.epoch][batch.begin : batch.end]


class Epoch(Generic[B_co]):
    """One epoch of a stream; iterate over it for batches. `break` and errors hand back what was not trained on."""

    def __init__(self, stream: Stream[B_co], index: int) -> None:
        self.index = index
        """0 for the first epoch. A worker that joins late starts at the oldest unfinished one."""
        self._stream = stream

    def __iter__(self) -> Iterator[B_co]:
        return self._stream.batches(self.index)

    def __repr__(self) -> str:
        return f"Epoch({self.index})"


class _Plan:
    """An iterator that may go on after its end: asked again, it looks again."""

    def __init__(self, look: Callable[[], Tensor | None]) -> None:
        self._look = look

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        found = self._look()
        if found is None:
            raise StopIteration
        return found


class _Pace:
    """Seconds per batch of this worker, fetching included, and how many batches that makes for the lookahead."""

    def __init__(self, clock: Clock, lookahead_s: float) -> None:
        self._clock = clock
        self._lookahead_s = lookahead_s
        self._batches = 0
        self._started_s = 0.0
        self._asked = 0
        self.mean_s = 0.0
        """Moving mean of seconds per batch; 0 before the first is done."""

    @property
    def known(self) -> bool:
        """Whether a batch has been done."""
        return self._batches > 0

    def start(self) -> None:
        """A batch is wanted, and could be had."""
        self._started_s = self._clock.now()

    def stop(self) -> None:
        """It is done: the next is asked for."""
        took_s = self._clock.now() - self._started_s
        self._batches += 1
        # The first batch pays for all that is slow once only: as soon as there is a second, it counts no more.
        weight = 1.0 if self._batches <= 2 else _PACE_WEIGHT
        self.mean_s += weight * (took_s - self.mean_s)

    def batches(self, *, least: int) -> int:
        """How many to lease now: one at first, then `least` or more, at most twice as many as before."""
        if not self.known:
            self._asked = 1
        else:
            wanted = int(self._lookahead_s / max(self.mean_s, 1e-6))
            self._asked = max(1, least, min(wanted, 2 * self._asked, _MOST_BATCHES))
        return self._asked
