"""Leased data: `worker.epochs(...)` gives epochs, an epoch gives batches, each sample goes to one worker per epoch."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from ps.clock import Clock
from ps.control.api import Control, DataRange, Lease, LeaseAsk, LeaseVerdict, StreamSpec
from ps.errors import ConfigError, PsError, UnsupportedError
from workers.ledger import Ledger
from workers.lifecycle import Lifecycle

log = logging.getLogger(__name__)

Batch: TypeAlias = "object"
"""What a dataset's samples collate to; for tensors a tuple of tensors."""

Data: TypeAlias = "Dataset[object] | Sequence[object] | Tensor | tuple[Tensor, ...]"
"""What `epochs` takes: a map-style dataset, a tensor, or tensors of equal length."""

LAST = ("merge", "short", "drop")

_LEASE_WAIT_S = 2.0
"""How long the coordinator may hold a request for data before it answers that there is none yet."""

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

    def drain(self) -> None:
        """Hand everything back, leave the job and raise `WorkerDrained`."""
        ...

    def flush(self) -> None:
        """Push what has been accumulated."""
        ...

    def abandon(self) -> None:
        """Forget what has been accumulated: its samples are handed back."""
        ...


class Stream:
    """One call of `worker.epochs`: an iterator over `Epoch`s. Not thread-safe: for the training thread."""

    def __init__(
        self,
        feed: Feed,
        spec: StreamSpec,
        dataset: Data,
        *,
        batch_size: int,
        last: str,
        barrier: bool,
        needs_push: Callable[[], bool],
    ) -> None:
        self._feed = feed
        self._spec = spec
        self._fetch = fetcher(dataset)
        self._batch_size = batch_size
        self._last = last
        self._barrier = barrier
        self._orders: OrderedDict[int, Tensor] = OrderedDict()
        self._pace = _Pace(feed.clock, feed.lookahead_s)
        self._sizes: list[int] = []
        self._ended = False
        self.open = False
        """Whether an epoch is being iterated over."""
        self.ledger = Ledger(feed.control, feed.clock, needs_push=needs_push)
        self.next_epoch = feed.control.open_stream(spec)
        """The epoch that comes next; of a stream that others have begun, first the oldest that is not done."""

    def __iter__(self) -> Iterator[Epoch]:
        return self

    def __next__(self) -> Epoch:
        self._feed.lifecycle.check()
        if self._feed.lifecycle.draining:
            self._feed.drain()
        if self._ended or self.next_epoch >= self._spec.epochs:
            raise StopIteration
        self.next_epoch += 1
        return Epoch(self, self.next_epoch - 1)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Batches of an epoch, lease after lease; whatever ends it early hands back what was not trained on."""
        self.ledger.consume()
        self.open = True
        try:
            while self._more(epoch):
                batch = self.ledger.hand_out(self._sizes.pop(0))
                samples = self._fetch(self._ids(batch))
                self._pace.start()
                yield samples
                self._pace.stop()
                self.ledger.consume()
            self._feed.flush()
            self.ledger.finish()
        finally:
            self.open = False
            self.hand_back()

    def hand_back(self) -> None:
        """Leave the current epoch; does nothing between epochs."""
        self._sizes.clear()
        self._feed.abandon()
        if self._feed.lifecycle.fatal:
            return
        try:
            self.ledger.hand_back()
        except PsError as error:  # often on the way out of another error, which says more
            log.warning("could not hand back data: %s", error)

    def _more(self, epoch: int) -> bool:
        """Make sure that a leased batch is there; False at the end of the epoch. Blocks while others hold the rest."""
        self._feed.lifecycle.check()
        if self._feed.lifecycle.draining:
            self._feed.drain()
        if self._sizes:
            return True
        self.ledger.acknowledge()
        # Samples of our own that no push covers yet may be all that is left: don't wait for ourselves.
        wait_s = 0.0 if self.ledger.unpushed else _LEASE_WAIT_S
        while True:
            lease = self._feed.control.lease(self._ask(epoch), wait_s=wait_s)
            if lease.verdict is LeaseVerdict.RANGE:
                self._accept(lease)
                return True
            if lease.verdict is not LeaseVerdict.WAIT:
                self._ended = lease.verdict is LeaseVerdict.STREAM_END
                return False
            self._feed.flush()
            self.ledger.finish()
            wait_s = _LEASE_WAIT_S
            self._feed.lifecycle.check()
            if self._feed.lifecycle.draining:
                self._feed.drain()

    def _ask(self, epoch: int) -> LeaseAsk:
        return LeaseAsk(
            stream=self._spec.stream,
            epoch=epoch,
            batch_size=self._batch_size,
            batches=self._pace.batches(),
            last=self._last,
            barrier=self._barrier,
        )

    def _accept(self, lease: Lease) -> None:
        assert lease.range is not None and lease.batch_sizes
        self.ledger.leased(lease.range)
        self._sizes = list(lease.batch_sizes)

    def _ids(self, batch: DataRange) -> Tensor:
        """Sample ids of a range of positions."""
        if not self._spec.shuffle:
            return torch.arange(batch.begin, batch.end)
        if batch.epoch not in self._orders:
            self._orders[batch.epoch] = permutation(self._spec.seed, batch.epoch, self._spec.length)
            while len(self._orders) > 2:  # the epoch, and the one before: ranges may come back late
                self._orders.popitem(last=False)
        return self._orders[batch.epoch][batch.begin : batch.end]


class Epoch:
    """One epoch of a stream; iterate over it for batches. `break` and errors hand back what was not trained on."""

    def __init__(self, stream: Stream, index: int) -> None:
        self.index = index
        """0 for the first epoch. A worker that joins late starts at the oldest unfinished one."""
        self._stream = stream

    def __iter__(self) -> Iterator[Batch]:
        return self._stream.batches(self.index)

    def __repr__(self) -> str:
        return f"Epoch({self.index})"


class _Pace:
    """Seconds per batch of this worker, and how many batches that makes for the lookahead."""

    def __init__(self, clock: Clock, lookahead_s: float) -> None:
        self._clock = clock
        self._lookahead_s = lookahead_s
        self._mean_s: float | None = None
        self._started_s = 0.0
        self._asked = 0

    def start(self) -> None:
        """A batch is handed out."""
        self._started_s = self._clock.now()

    def stop(self) -> None:
        """The next is asked for."""
        took_s = self._clock.now() - self._started_s
        mean_s = took_s if self._mean_s is None else self._mean_s
        self._mean_s = mean_s + _PACE_WEIGHT * (took_s - mean_s)

    def batches(self) -> int:
        """How many to lease now: one at first, then at most twice as many as before."""
        if self._mean_s is None:
            self._asked = 1
        else:
            wanted = int(self._lookahead_s / max(self._mean_s, 1e-6))
            self._asked = max(1, min(wanted, 2 * self._asked, _MOST_BATCHES))
        return self._asked


def check_arguments(batch_size: int, count: int, seed: int, last: str) -> None:
    """Raise `ConfigError` naming the argument of `epochs` that is wrong."""
    if batch_size < 1:
        raise ConfigError(f"epochs(batch_size={batch_size}) must be at least 1")
    if count < 1:
        raise ConfigError(f"epochs(count={count}) must be at least 1")
    if seed < 0:
        raise ConfigError(f"epochs(seed={seed}) must not be negative")
    if last not in LAST:
        raise ConfigError(f"epochs(last={last!r}) must be one of: {', '.join(LAST)}")


def length_of(dataset: Data) -> int:
    """Samples in the dataset. Raises `UnsupportedError` for iterable datasets, `ConfigError` for an empty one."""
    if isinstance(dataset, IterableDataset):
        raise UnsupportedError(
            f"{type(dataset).__name__} is an IterableDataset: it has no sample numbers that could be leased to "
            "workers. Use a map-style dataset (__len__ and __getitem__)"
        )
    tensors = _tensors(dataset)
    if tensors is not None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise ConfigError(f"epochs(): tensors of different lengths: {lengths}")
        length = lengths[0]
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        length = len(cast("Sequence[object]", dataset))
    else:
        raise UnsupportedError(
            f"epochs() takes a dataset with __len__ and __getitem__, a tensor or a tuple of tensors, got "
            f"{type(dataset).__name__}"
        )
    if length < 1:
        raise ConfigError("epochs(): the dataset is empty")
    return length


def fetcher(dataset: Data) -> Callable[[Tensor], Batch]:
    """A function from sample ids to the batch: tensors are indexed, other samples go through `default_collate`."""
    tensors = _tensors(dataset)
    if tensors is not None:
        if isinstance(dataset, Tensor):
            return lambda ids: dataset[ids.to(dataset.device)]
        return lambda ids: tuple(tensor[ids.to(tensor.device)] for tensor in tensors)
    many = getattr(dataset, "__getitems__", None)
    if callable(many):
        return lambda ids: default_collate(many(ids.tolist()))
    samples = cast("Sequence[object]", dataset)
    return lambda ids: default_collate([samples[index] for index in ids.tolist()])


def _tensors(dataset: Data) -> Sequence[Tensor] | None:
    """The tensors behind a dataset that is nothing but tensors."""
    if isinstance(dataset, Tensor):
        return [dataset]
    if isinstance(dataset, tuple) and dataset and all(isinstance(item, Tensor) for item in dataset):
        return cast("tuple[Tensor, ...]", dataset)
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        return dataset.tensors
    return None
