"""Gradients that travel as rows: those of `nn.Embedding(sparse=True)` and the like.

A row that occurs several times in a gradient is summed here, so that it travels once. Adagrad and SparseAdam do the
same themselves; torch's SGD adds such rows to the weights one after the other, which can round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ps.errors import UnsupportedError
from ps.finite import all_finite
from ps.sharding.layout import ROW_ID_BYTES, rows_bytes, values_offset
from ps.sharding.spec import ParamSpec, Shard
from ps.types import ShardId
from workers.routing import Message
from workers.staging import Cut, Layout, Pieces

_HALF = (torch.float16, torch.bfloat16)


def as_rows(grad: Tensor, spec: ParamSpec) -> Tensor:
    """The gradient of a sparse parameter, coalesced; of a dense one, as its weight tied to a Linear gets, all rows.

    Raises `UnsupportedError` naming the parameter for any other layout.
    """
    if grad.layout is torch.strided:
        ids = torch.arange(spec.shape[0], device=grad.device).unsqueeze(0)
        return torch.sparse_coo_tensor(ids, grad, spec.shape, check_invariants=False, is_coalesced=True)
    if grad.layout is not torch.sparse_coo or grad.sparse_dim() != 1:
        raise UnsupportedError(
            f"the gradient of {spec.name!r} is neither dense nor made of rows ({grad.layout}); sparse gradients are "
            "served as nn.Embedding(sparse=True) makes them: COO with one sparse dimension"
        )
    if grad.is_coalesced() or grad.dtype not in _HALF:
        return grad.coalesce()
    summed = grad.float().coalesce()  # rounded once, however often a row occurs
    values = summed.values().to(grad.dtype)
    return torch.sparse_coo_tensor(summed.indices(), values, spec.shape, check_invariants=False, is_coalesced=True)


class _Stretch(NamedTuple):
    """The rows of one shard within its parameter's gradient."""

    shard: Shard
    cut: Cut
    ids: Tensor
    values: Tensor


class RowsOutgoing:
    """`Staged` for shards whose gradients are rows. The payload is made for each push: as large as the rows in it."""

    def __init__(self, layout: Layout, message: Message) -> None:
        self.message = message
        self.source = message
        self.payload = torch.empty(0, dtype=torch.uint8)
        self.pieces: Pieces = []
        """Of shards that have rows: these."""
        self.rows: dict[ShardId, int] = {}
        self._shards = [(layout.plan.shards[shard], layout.shards[shard].pieces[0]) for shard in message.shards]

    def gather(self, source: Callable[[Cut], Tensor | None]) -> None:
        """Lay out the rows of what `source` has for each parameter, as `as_rows` makes it."""
        found = [self._stretch(shard, cut, source(cut)) for shard, cut in self._shards]
        self.rows = {part.shard.id: len(part.ids) for part in found}
        sizes = [rows_bytes(part.shard, len(part.ids)) for part in found]
        offsets = tuple(sum(sizes[:index]) for index in range(len(sizes)))
        self.source = Message(shards=self.message.shards, offsets=offsets, nbytes=sum(sizes))
        self.payload = torch.zeros(sum(sizes), dtype=torch.uint8)
        self.pieces = [
            (part.cut, self._write(part, at)) for part, at in zip(found, offsets, strict=True) if len(part.ids)
        ]

    def ready(self) -> None:
        """See `Staged`; `gather` is over when it returns."""

    def finite(self) -> bool:
        """Whether all values are finite."""
        return all(all_finite(values) for _, values in self.pieces)

    def _stretch(self, shard: Shard, cut: Cut, grad: Tensor | None) -> _Stretch:
        if grad is None:
            return _Stretch(shard, cut, torch.empty(0, dtype=torch.int64), torch.empty(0))
        ids = grad.indices()[0]
        edges = torch.tensor([shard.rows.start, shard.rows.stop], device=ids.device)
        begin, end = torch.searchsorted(ids, edges).tolist()
        return _Stretch(shard, cut, ids[begin:end], grad.values()[begin:end])

    def _write(self, part: _Stretch, at: int) -> Tensor:
        """Copy ids and values to byte `at` of the payload; returns the values there."""
        count = len(part.ids)
        self.payload[at : at + count * ROW_ID_BYTES].view(torch.int64).copy_(part.ids)
        begin = at + values_offset(count)
        nbytes = part.values.numel() * part.values.element_size()
        values = self.payload[begin : begin + nbytes].view(part.values.dtype).view(part.values.shape)
        return values.copy_(part.values)
