"""Mean of the pushes of a round to one shard.

Two ways. *In order*: gradients are kept until the round closes and summed in ascending order of their workers, so that
the bits don't depend on who came first; memory N payloads for N workers. *As they come*: each is added to a running
sum, after which its payload is not needed any more; memory one shard, and one payload until there is a second one.
Either way the mean is exact for a single push: nothing is summed or divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ps.sharding.spec import Shard
from ps.types import Hyper, Incarnation

Key = tuple[Incarnation, int]
"""A worker and its push number."""


@dataclass(slots=True, eq=False)
class Contribution:
    """One push to one shard, as it waits for its round."""

    key: Key
    gradient: Tensor | None
    """As `DenseShard.gradient` gives it: flat and dense, or sparse rows; None = no gradient at all."""
    present: bytes
    hyper: Hyper
    staleness: int | None
    owner: object = None
    """Who has to hear that the gradient's memory isn't needed any more."""


@dataclass(frozen=True, slots=True)
class Mean:
    """What a round comes to."""

    gradient: Tensor | None
    """May be memory of the aggregate, valid until its next call."""
    present: bytes
    hyper: Hyper
    """Those of the lowest-numbered worker."""
    staleness: tuple[int | None, ...]


@dataclass(slots=True)
class _Sum:
    """Sum of some gradients. Of one it is that very gradient, in borrowed memory."""

    total: Tensor | None = None
    first: Contribution | None = None
    """Whose gradient `total` is, while it is just that."""

    def mean(self, count: int) -> Tensor | None:
        """The sum divided by `count`, in place unless the memory is borrowed."""
        if self.total is None or count == 1:
            return self.total
        if self.total.is_sparse:
            rows = self.total.coalesce()
            return torch.sparse_coo_tensor(
                rows.indices(), rows.values() / count, rows.shape, check_invariants=False, is_coalesced=True
            )
        return self.total / count if self.first is not None else self.total.div_(count)


@dataclass(slots=True)
class _Open:
    """A round that is being collected."""

    pushes: list[Contribution] = field(default_factory=list)
    sum: _Sum = field(default_factory=_Sum)


class Aggregate:
    """Collects rounds of one shard. Not thread-safe: the shard's lock guards it."""

    def __init__(self, shard: Shard, *, ordered: bool) -> None:
        self._shard = shard
        self._ordered = ordered
        self._open: dict[int, _Open] = {}
        self._buffer: Tensor | None = None
        """Memory for the sum, kept between rounds."""

    def add(self, round_number: int, push: Contribution) -> list[Contribution]:
        """Take a push in; returns those whose gradients aren't needed any more, this one perhaps among them."""
        entry = self._open.setdefault(round_number, _Open())
        entry.pushes.append(push)
        if push.gradient is None:
            return [push]
        return [] if self._ordered else self._absorb(entry.sum, push)

    def close(self, round_number: int, keys: Sequence[Key]) -> tuple[Mean, list[Contribution]]:
        """End a round with exactly these pushes; returns their mean, and those whose gradients had still been kept.

        Other pushes stay for a later call; that is possible in order only.
        """
        entry = self._open.pop(round_number)
        rest = [push for push in entry.pushes if push.key not in keys]
        if rest:
            self._open[round_number] = _Open(rest)
        pushes = sorted((push for push in entry.pushes if push.key in keys), key=lambda push: push.key)
        assert len(pushes) == len(keys) and (self._ordered or not rest), (keys, entry)
        kept = [entry.sum.first] if entry.sum.first is not None else []
        if self._ordered:
            kept = [push for push in pushes if push.gradient is not None]
            for push in pushes:
                if push.gradient is not None:
                    self._absorb(entry.sum, push)
        mean = Mean(
            gradient=entry.sum.mean(len(pushes)),
            present=union([push.present for push in pushes]),
            hyper=pushes[0].hyper,
            staleness=tuple(push.staleness for push in pushes),
        )
        return mean, kept

    def drop(self, key: Key) -> list[Contribution]:
        """Forget one push, in order only; returns it if its gradient had been kept."""
        assert self._ordered
        for entry in self._open.values():
            for push in entry.pushes:
                if push.key == key:
                    entry.pushes.remove(push)
                    return [push] if push.gradient is not None else []
        return []

    def clear(self) -> None:
        """Forget everything."""
        self._open.clear()
        self._buffer = None

    def _absorb(self, into: _Sum, push: Contribution) -> list[Contribution]:
        """Add a gradient; returns the pushes whose memory isn't needed from now on."""
        assert push.gradient is not None
        if into.total is None:
            into.total, into.first = push.gradient, push
            return []
        done = [push] if into.first is None else [into.first, push]
        if push.gradient.is_sparse:
            # Rows of both, in order; those of equal ids are summed in that order when the round closes.
            into.total = _joined(into.total, push.gradient)
        elif into.first is None:
            self._add(into.total, push)
        else:
            into.total = self._sum_of_two(into.first, push)
        into.first = None
        for absorbed in done:
            absorbed.gradient = None
        return done

    def _sum_of_two(self, first: Contribution, second: Contribution) -> Tensor:
        assert first.gradient is not None and second.gradient is not None
        out = self._take_buffer(first.gradient)
        if self._complete(first.present) and self._complete(second.present):
            return torch.add(first.gradient, second.gradient, out=out)
        out.zero_()
        self._add(out, first)
        self._add(out, second)
        return out

    def _add(self, total: Tensor, push: Contribution) -> None:
        """Add the pieces that a push has; what the others' memory holds is not defined."""
        assert push.gradient is not None
        if self._complete(push.present):
            total.add_(push.gradient)
            return
        for index, piece in enumerate(self._shard.pieces):
            if push.present[index >> 3] >> (index & 7) & 1:
                stretch = slice(piece.offset, piece.offset + piece.numel)
                total[stretch].add_(push.gradient[stretch])

    def _take_buffer(self, like: Tensor) -> Tensor:
        """The kept memory, unless another open round uses it."""
        buffer = self._buffer
        if buffer is None or any(entry.sum.total is buffer for entry in self._open.values()):
            self._buffer = buffer = torch.empty_like(like)
        return buffer

    def _complete(self, present: bytes) -> bool:
        return present == everything(len(self._shard.pieces))


def everything(pieces: int) -> bytes:
    """The bitmap of a push that has all pieces."""
    return ((1 << pieces) - 1).to_bytes((pieces + 7) // 8, "little")


def union(bitmaps: Sequence[bytes]) -> bytes:
    """Pieces that any of the pushes has."""
    if len(bitmaps) == 1:
        return bitmaps[0]
    total = 0
    for bitmap in bitmaps:
        total |= int.from_bytes(bitmap, "little")
    return total.to_bytes(max(map(len, bitmaps), default=0), "little")


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.cat([first._indices(), second._indices()], dim=1),
        torch.cat([first._values(), second._values()]),
        first.shape,
        check_invariants=False,
    )
