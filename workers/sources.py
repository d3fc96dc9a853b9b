"""What can be leased, and how positions become batches: tensors here, datasets by a loader, shards by number."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, Protocol, TypeAlias, TypedDict, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ps.errors import ConfigError, UnsupportedError

B_co = TypeVar("B_co", covariant=True)
"""A batch."""

Data: TypeAlias = "Dataset[object] | Sequence[object] | Tensor | tuple[Tensor, ...]"
"""Data with numbered samples: a map-style dataset, a sequence, a tensor, or tensors of equal length."""

MakeShard: TypeAlias = "Callable[[int], Iterable[object]]"
"""Gives the samples of a numbered shard, the same ones in each worker."""

LAST = ("merge", "short", "drop")
CONTEXTS = ("forkserver", "spawn", "fork")


class Options(TypedDict, total=False):
    """Options of `Worker.epochs`, for its overloads."""

    shuffle: bool
    barrier: bool
    num_workers: int
    pin_memory: bool
    prefetch_factor: int
    persistent_workers: bool
    multiprocessing_context: str
    worker_init_fn: Callable[[int], None] | None


@dataclass(frozen=True, slots=True)
class Piece(Generic[B_co]):
    """A batch, and its place in the leased range that it belongs to: usually it is all of it."""

    batch: B_co | None
    """None: the range turned out to be empty."""
    samples: int | None = None
    """None: as many as the range has positions."""
    begins: bool = True
    ends: bool = True


class Source(Protocol[B_co]):
    """Turns ranges into batches. Not thread-safe: for the training thread."""

    ahead: int
    """Ranges that it takes from the plan before the first of them is asked for; 0: each when it is needed."""

    def load(self, plan: Iterator[Tensor]) -> Iterator[Piece[B_co]]:
        """Batches of the planned sample ids, in order. Calls `next(plan)` again even after its end."""
        ...

    def end_epoch(self) -> None:
        """An epoch is over, or was left."""
        ...

    def close(self) -> None:
        """End what was started. Idempotent; bounded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How samples are fetched and collated. Raises `ConfigError` naming the argument of `epochs` that is wrong."""

    collate_fn: Callable[[list[object]], object] | None = None
    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int = 2
    persistent_workers: bool = True
    multiprocessing_context: str = "forkserver"
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ConfigError(f"epochs(num_workers={self.num_workers}) must not be negative")
        if self.prefetch_factor < 1:
            raise ConfigError(f"epochs(prefetch_factor={self.prefetch_factor}) must be at least 1")
        if self.multiprocessing_context not in CONTEXTS:
            known = ", ".join(CONTEXTS)
            raise ConfigError(
                f"epochs(multiprocessing_context={self.multiprocessing_context!r}) must be one of: {known}"
            )

    @property
    def pins(self) -> bool:
        """Whether batches go into pinned memory: asked for, and there is an accelerator."""
        return self.pin_memory and torch.accelerator.is_available()


class InMemory:
    """Batches cut out of tensors, in this process: loader processes could only copy them."""

    ahead = 0

    def __init__(self, data: Tensor | Sequence[Tensor], *, pins: bool = False) -> None:
        self._data = data
        self._pins = pins

    def load(self, plan: Iterator[Tensor]) -> Iterator[Piece[object]]:
        """See `Source.load`."""
        for ids in plan:
            yield Piece(self.fetch(ids))

    def fetch(self, ids: Tensor) -> object:
        """The batch: a tensor of a tensor, a tuple of tensors of several."""
        if isinstance(self._data, Tensor):
            return self._rows(self._data, ids)
        return tuple(self._rows(tensor, ids) for tensor in self._data)

    def end_epoch(self) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to end."""

    def _rows(self, tensor: Tensor, ids: Tensor) -> Tensor:
        rows = tensor[ids.to(tensor.device)]
        return rows.pin_memory() if self._pins and rows.device.type == "cpu" else rows


def loader_seed(seed: int, stream: int, worker: str) -> int:
    """Seed of the loader processes' own random numbers: differs between the workers of a job. Pure."""
    digest = hashlib.sha256(f"{seed}:{stream}:{worker}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


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


def check_shards(make_shard: object, shards: int, loading: Loading) -> MakeShard:
    """Raise `ConfigError` or `UnsupportedError` naming what is wrong with numbered shards."""
    if not callable(make_shard) or hasattr(make_shard, "__getitem__"):
        raise ConfigError(
            f"epochs(shards={shards}) takes a function from a shard's number to its samples, got "
            f"{type(make_shard).__name__}; leave shards= out for data with __len__ and __getitem__"
        )
    if shards < 1:
        raise ConfigError(f"epochs(shards={shards}) must be at least 1")
    if loading.num_workers:
        raise UnsupportedError(
            f"epochs(shards=..., num_workers={loading.num_workers}): shards are read in the worker's own process. Let "
            "the function return a torch DataLoader(..., batch_size=None, num_workers=...) over the shard"
        )
    return make_shard


def length_of(dataset: object) -> int:
    """Samples in the dataset. Raises `UnsupportedError` for data without sample numbers, `ConfigError` if empty."""
    if isinstance(dataset, IterableDataset):
        raise UnsupportedError(
            f"{type(dataset).__name__} is an IterableDataset: it has no sample numbers that could be leased to "
            "workers. Use a map-style dataset (__len__ and __getitem__), or split it into numbered shards: "
            "epochs(make_shard, shards=K, ...), where make_shard(number) gives the samples of one"
        )
    tensors = tensors_of(dataset)
    if tensors is not None:
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) != 1:
            raise ConfigError(f"epochs(): tensors of different lengths: {lengths}")
        length = lengths[0]
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        length = len(cast(Sized, dataset))
    else:
        hint = "; a function that makes numbered shards needs shards=K" if callable(dataset) else ""
        raise UnsupportedError(
            f"epochs() takes a dataset with __len__ and __getitem__, a tensor or a tuple of tensors, got "
            f"{type(dataset).__name__}{hint}"
        )
    if length < 1:
        raise ConfigError("epochs(): the dataset is empty")
    return length


def tensors_of(dataset: object) -> Sequence[Tensor] | None:
    """The tensors behind a dataset that is nothing but tensors."""
    if isinstance(dataset, Tensor):
        return [dataset]
    if isinstance(dataset, tuple) and dataset and all(isinstance(item, Tensor) for item in dataset):
        return dataset
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        return dataset.tensors
    return None
