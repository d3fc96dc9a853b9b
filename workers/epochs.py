"""`Worker.epochs`: its forms, by what is iterated over, and what it opens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn, TypeVar, Unpack, cast, overload

from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from ps.clock import Clock
from ps.control.api import Control, StreamSpec
from workers.data import Stream
from workers.lifecycle import Lifecycle
from workers.loader import source_of
from workers.numbered import NumberedShards
from workers.share import Share
from workers.sources import (
    Data,
    Loading,
    MakeShard,
    Options,
    Source,
    check_arguments,
    check_shards,
    length_of,
    loader_seed,
)

B = TypeVar("B")
S = TypeVar("S")
Tensors = TypeVar("Tensors", bound="tuple[Tensor, ...]")


class Streams:
    """The part of a worker that hands out data. Not thread-safe: for the training thread."""

    control: Control
    lifecycle: Lifecycle
    clock: Clock
    lookahead_s: float

    def __init__(self) -> None:
        self.share = Share()
        self._streams: list[Stream[object]] = []
        self._streams_opened = 0

    @property
    def name(self) -> str:
        """The worker's name in the job."""
        raise NotImplementedError

    def drain(self) -> NoReturn:
        """See `Worker.drain`."""
        raise NotImplementedError

    def flush(self) -> None:
        """See `Worker.flush`."""
        raise NotImplementedError

    def step_aside(self) -> None:
        """See `Worker.step_aside`."""
        raise NotImplementedError

    def abandon(self) -> None:
        """See `Worker.abandon`."""
        raise NotImplementedError

    @property
    def in_epoch(self) -> bool:
        """Whether an epoch of any stream is being iterated over."""
        return any(stream.open for stream in self._streams)

    # fmt: off
    @overload
    def epochs(self, dataset: Tensor, batch_size: int, count: int = 1, seed: int = 0, last: str = "merge",
               **options: Unpack[Options]) -> Stream[Tensor]: ...
    @overload
    def epochs(self, dataset: Tensors, batch_size: int, count: int = 1, seed: int = 0, last: str = "merge",
               **options: Unpack[Options]) -> Stream[Tensors]: ...
    @overload
    def epochs(self, dataset: TensorDataset, batch_size: int, count: int = 1, seed: int = 0, last: str = "merge",
               **options: Unpack[Options]) -> Stream[tuple[Tensor, ...]]: ...
    @overload
    def epochs(self, dataset: Tensor, batch_size: int, count: int = 1, seed: int = 0, last: str = "merge",
               *, collate_fn: Callable[[list[Tensor]], B], **options: Unpack[Options]) -> Stream[B]: ...
    @overload
    def epochs(self, dataset: tuple[Tensor, ...], batch_size: int, count: int = 1, seed: int = 0, last: str = "merge",
               *, collate_fn: Callable[[list[tuple[Tensor, ...]]], B], **options: Unpack[Options]) -> Stream[B]: ...
    @overload
    def epochs(self, dataset: Dataset[S] | Sequence[S], batch_size: int, count: int = 1, seed: int = 0,
               last: str = "merge", *, collate_fn: Callable[[list[S]], B], **options: Unpack[Options]) -> Stream[B]: ...
    @overload
    def epochs(self, dataset: Dataset[object] | Sequence[object], batch_size: int, count: int = 1, seed: int = 0,
               last: str = "merge", **options: Unpack[Options]) -> Stream[object]: ...
    @overload
    def epochs(self, dataset: Callable[[int], Iterable[Tensor]], batch_size: int, count: int = 1, seed: int = 0,
               last: str = "merge", *, shards: int, **options: Unpack[Options]) -> Stream[Tensor]: ...
    @overload
    def epochs(self, dataset: Callable[[int], Iterable[S]], batch_size: int, count: int = 1, seed: int = 0,
               last: str = "merge", *, shards: int, collate_fn: Callable[[list[S]], B],
               **options: Unpack[Options]) -> Stream[B]: ...
    @overload
    def epochs(self, dataset: Callable[[int], Iterable[object]], batch_size: int, count: int = 1, seed: int = 0,
               last: str = "merge", *, shards: int, **options: Unpack[Options]) -> Stream[object]: ...
    # fmt: on

    def epochs(
        self,
        dataset: object,
        batch_size: int,
        count: int = 1,
        seed: int = 0,
        last: str = "merge",
        *,
        shuffle: bool = True,
        barrier: bool = False,
        shards: int | None = None,
        collate_fn: Callable[[list[S]], B] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
        multiprocessing_context: str = "forkserver",
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> Stream[object]:
        """Iterate over `count` epochs of a dataset that all workers share: each sample goes to one worker per epoch.

        `dataset` is map-style, a sequence, a tensor, or a tuple of tensors; every worker gives the same one, and calls
        `epochs` in the same order. `seed` decides the order, `last` the fate of a short last batch (`merge` it into
        the one before if it is shorter than half a batch, give it `short`, or `drop` it, which counts as done),
        `barrier` whether an epoch starts only when the one before is done everywhere.

        With `shards=K` it is a function instead, that gives the samples of shard 0..K-1, in the same order in each
        worker; shards are leased whole, and `last` is about the last batch of each.

        A batch counts as done once a push made after it was applied: batches that the loop skips (`continue`, or a
        scaler that skips its step) with the next push, and at the end of the epoch, if none comes. A shard counts as
        done when all its batches do. Leaving the loop early hands the rest back, a begun shard as a whole. Without
        crashes each sample is done exactly once per epoch, then.

        `num_workers` loader processes fetch and collate ahead, in order, as torch's `DataLoader` does, whose options
        the last ones are. They start at once; what is ahead shrinks towards the end of the epoch, so that no other
        worker has to wait for it. Datasets and functions are pickled to them, except with
        `multiprocessing_context="fork"`, best used before `attach`. Tensors need none: they are indexed here.

        In a process group `batch_size` is each rank's: ranges are cut by that times the ranks, and each rank gets its
        part of each such batch, so that all of them have equally many. Parts of the last one may differ by a sample; if
        it has fewer samples than there are ranks, which `merge` avoids, it is left out, with a warning.

        Raises `ConfigError`, or `UnsupportedError` for data without sample numbers, before others hear of it; `Refused`
        if it differs from other workers' data.
        """
        self._check_usable()
        check_arguments(batch_size, count, seed, last)
        loading = Loading(
            collate_fn=cast("Callable[[list[object]], object] | None", collate_fn),
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
        )
        source: Source[object]
        if shards is not None:
            make_shard: MakeShard = check_shards(dataset, shards, loading)
            length, share = shards, Share()
            source = NumberedShards(make_shard, batch_size * self.share.ranks, last, loading, self.share)
            batch_size, last = 1, "short"  # in shards: what the coordinator hears
        else:
            length, share, batch_size = length_of(dataset), self.share, batch_size * self.share.ranks
            name = share.label(self.name)
            source = source_of(cast(Data, dataset), loading, loader_seed(seed, self._streams_opened, name))
        spec = StreamSpec(stream=self._streams_opened, length=length, seed=seed, epochs=count, shuffle=shuffle)
        try:
            stream = Stream(
                self, spec, source,
                batch_size=batch_size, last=last, barrier=barrier, needs_push=self._needs_push, share=share,
            )  # fmt: skip
        except BaseException:
            source.close()
            raise
        self._streams_opened += 1
        self._streams.append(stream)
        self._opened(stream)
        return stream

    def _hand_back(self) -> None:
        for stream in self._streams:
            stream.hand_back()

    def _close_streams(self) -> None:
        for stream in self._streams:
            stream.close()

    def _check_usable(self) -> None:
        """Raise what has happened to the worker, or that it has left."""
        raise NotImplementedError

    def _needs_push(self) -> bool:
        """Whether a batch is done only with a push."""
        raise NotImplementedError

    def _opened(self, stream: Stream[object]) -> None:
        """A stream was opened."""
        raise NotImplementedError
