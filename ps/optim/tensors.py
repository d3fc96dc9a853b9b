"""A torch.optim class run over a shard's pieces as tensors of their own: what needs shapes, or gets rows.

Adafactor and Muon look at a whole tensor to update one of its elements; sparse gradients are updates of some rows of a
matrix. There is nothing to gain from laying such pieces end to end, so the class sees each one in its shape and keeps
its state as it does anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from ps.optim.apply import ShardOptimizer, accepted, construct, raw_step
from ps.optim.spec import ServedOptimizer
from ps.optim.state import PieceEntries
from ps.sharding.spec import Shard
from ps.types import Hyper


class Optimizer(Protocol):
    """Applies pushes to one shard. Not thread-safe: the shard's lock guards it."""

    def apply(self, grads: Tensor, present: bytes, hyper: Hyper) -> None:
        """One optimizer step on the pieces whose bit in `present` is set; the others are left alone.

        `grads` has the weights' dtype. It is flat and of their size or, in shards whose gradients are rows, sparse and
        coalesced, of the shape of the piece. It is not kept. `hyper` has passed `check_values`.
        """
        ...

    def export_state(self) -> list[PieceEntries]:
        """A copy of the state of each piece."""
        ...

    def import_state(self, pieces: Sequence[PieceEntries]) -> None:
        """Replace the state of each piece, copying it. It has been checked as `state.unpack` does."""
        ...


def optimizer_for(shard: Shard, optimizer: ServedOptimizer, weights: Tensor, *, exact: bool) -> Optimizer:
    """What runs the class over `weights`, the shard's flat tensor, in place; `exact` as for `ShardOptimizer`."""
    if any(piece.shape is not None for piece in shard.pieces):
        return TensorOptimizer(shard, optimizer, weights)
    return ShardOptimizer(shard, optimizer, weights, exact=exact)


class TensorOptimizer:
    """See `Optimizer`. Runs the for-loop kernels, as torch itself does by default on CPUs: always exact."""

    def __init__(self, shard: Shard, optimizer: ServedOptimizer, weights: Tensor) -> None:
        """`weights` is the shard's flat tensor; it is changed in place by `apply`."""
        self._stretches = [(piece.offset, piece.offset + piece.numel) for piece in shard.pieces]
        self._params = [
            weights[begin:end].view(piece.shape if piece.shape is not None else (piece.numel,))
            for piece, (begin, end) in zip(shard.pieces, self._stretches, strict=True)
        ]
        self._class = cast("type[torch.optim.Optimizer]", getattr(torch.optim, optimizer.name))
        self._step: Callable[[torch.optim.Optimizer], object] = raw_step(self._class)
        self._optimizer: torch.optim.Optimizer | None = None
        """Made at the first push, when hyper-parameters are known."""
        self._hyper: Hyper = ()
        self._as_rows = {key.name for key in optimizer.state if key.like_gradient and shard.row_elems}
        self._imported: list[PieceEntries] = [{} for _ in shard.pieces]
        """State that waits for the optimizer to be made."""

    def apply(self, grads: Tensor, present: bytes, hyper: Hyper) -> None:
        """See `Optimizer`."""
        if not any(present):
            return
        optimizer = self._with(hyper)
        try:
            for index, (param, (begin, end)) in enumerate(zip(self._params, self._stretches, strict=True)):
                if present[index >> 3] >> (index & 7) & 1:
                    param.grad = grads if grads.is_sparse else grads[begin:end].view(param.shape)
            self._run(optimizer, sparse=grads.is_sparse)
        finally:
            for param in self._params:
                param.grad = None

    def export_state(self) -> list[PieceEntries]:
        """See `Optimizer`."""
        if self._optimizer is None:
            return self._imported
        return [_exported(self._optimizer.state.get(param, {})) for param in self._params]

    def import_state(self, pieces: Sequence[PieceEntries]) -> None:
        """See `Optimizer`."""
        if self._optimizer is None:
            self._imported = list(pieces)
            return
        self._optimizer.state.clear()
        for param, entries in zip(self._params, pieces, strict=True):
            if entries:
                self._optimizer.state[param] = {
                    key: _imported(value, param, rows=key in self._as_rows) for key, value in entries.items()
                }

    def _run(self, optimizer: torch.optim.Optimizer, *, sparse: bool) -> None:
        if not sparse:
            self._step(optimizer)
            return
        # Ids were checked when they came; torch warns, once, unless it is told not to check them again.
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            self._step(optimizer)

    def _with(self, hyper: Hyper) -> torch.optim.Optimizer:
        """The optimizer, with these hyper-parameters in force."""
        if self._optimizer is None:
            kernels = ("foreach", "fused")
            choice: dict[str, object] = {key: False for key in kernels if key in accepted(self._class.__name__)}
            self._optimizer = construct(self._class, self._params, hyper, choice)
            if any(self._imported):
                self.import_state(self._imported)
            self._imported = []
        if hyper != self._hyper:
            self._optimizer.param_groups[0].update(hyper)
            self._hyper = hyper
        return self._optimizer


def _exported(state: dict[str, object]) -> PieceEntries:
    """Copies of a parameter's state as tensors: counts are Python ints, momentum of rows may be sparse."""
    found: PieceEntries = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            found[key] = value.to_dense() if value.is_sparse else value.clone(memory_format=torch.contiguous_format)
        elif value is not None:
            found[key] = torch.tensor(value, dtype=torch.int64)
    return found


def _imported(value: Tensor, param: Tensor, *, rows: bool) -> object:
    if value.dim():
        return value.to(param.device).to_sparse(1) if rows else value.to(param.device, copy=True)
    return int(value) if value.dtype is torch.int64 else value.clone()
