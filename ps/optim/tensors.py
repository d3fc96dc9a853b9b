"""A torch.optim class run over a shard's pieces as tensors of their own: what needs shapes, or gets rows.

Adafactor and Muon look at a whole tensor to update one of its elements; sparse gradients are updates of some rows of a
matrix. There is nothing to gain from laying such pieces end to end, so the class sees each one in its shape and keeps
its state as it does anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor

from ps.optim.apply import ShardOptimizer, accepted, construct, raw_step
from ps.optim.spec import ServedOptimizer
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
        if hyper != self._hyper:
            self._optimizer.param_groups[0].update(hyper)
            self._hyper = hyper
        return self._optimizer
