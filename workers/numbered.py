"""Iterable data as numbered shards: a shard is leased as one position, and brings its samples batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from torch import Tensor
from torch.utils.data import default_collate

from workers.share import Share
from workers.sources import Loading, MakeShard, Piece

S = TypeVar("S")


def cut_samples(samples: Iterable[S], size: int, last: str) -> Iterator[tuple[list[S], bool]]:
    """Batches of `size` samples, each with whether it is the last one; `last` decides on a short rest. Pure.

    Reads one batch ahead.
    """
    iterator, held = iter(samples), list[S]()
    while batch := list(islice(iterator, size)):
        if len(batch) < size and last == "drop":
            break
        if last == "merge" and held and 2 * len(batch) < size:
            held += batch
            break
        if held:
            yield held, False
        held = batch
    if held:
        yield held, True


class NumberedShards:
    """`Source` of shards that a function makes from their numbers."""

    ahead = 0

    def __init__(
        self, make_shard: MakeShard, batch_size: int, last: str, loading: Loading, share: Share | None = None
    ) -> None:
        """`batch_size` of all ranks together: each of them reads all of the shard, and takes its share of a batch."""
        self._make_shard = make_shard
        self._batch_size = batch_size
        self._last = last
        self._share = share or Share()
        self._collate: Callable[[list[object]], object] = loading.collate_fn or default_collate
        self._pins = loading.pins

    def load(self, plan: Iterator[Tensor]) -> Iterator[Piece[object]]:
        """See `Source.load`. A shard is read while its batches are asked for."""
        for numbers in plan:
            for number in numbers.tolist():
                yield from self._batches(number)

    def end_epoch(self) -> None:
        """Nothing to end."""

    def close(self) -> None:
        """Nothing to end."""

    def _batches(self, number: int) -> Iterator[Piece[object]]:
        begins = True
        for samples, ends in cut_samples(self._make_shard(number), self._batch_size, self._last):
            mine = samples[self._share.of(len(samples))] if self._share.reaches(len(samples)) else []
            batch = self._pinned(self._collate(mine)) if mine else None
            yield Piece(batch, len(samples), begins, ends)
            begins = False
        if begins:
            yield Piece(None, 0)

    def _pinned(self, batch: object) -> object:
        if not self._pins:
            return batch
        from torch.utils.data._utils.pin_memory import pin_memory  # the one a DataLoader uses

        pinned: object = pin_memory(batch)  # type: ignore[no-untyped-call]
        return pinned
