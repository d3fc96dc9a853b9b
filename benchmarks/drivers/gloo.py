"""Baseline: data-parallel training of two workers over gloo, with SGD.

- `flat`: one allreduce of one flat tensor, then the update of the weights.
- `ddp`: DistributedDataParallel over the model's tensors, with an optimizer. Its gradients come from a backward pass
  that does no arithmetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from serve import serve
from tensors import Tensors
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Constant(torch.autograd.Function):
    """A scalar whose gradient by the tensor is given."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, value: Tensor, grad: Tensor) -> Tensor:
        """Zero."""
        ctx.save_for_backward(grad)
        return value.new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, _: Tensor) -> tuple[Tensor, None]:
        """The gradient, without a copy."""
        (grad,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad, None


class Model(Tensors):
    """The tensors with a forward pass."""

    def __init__(self, numel: int, tensors: int) -> None:
        super().__init__(numel, tensors)
        self.grads = [torch.ones_like(value) for value in self.values]

    def forward(self) -> Tensor:
        """A loss whose gradient is one everywhere."""
        constant = cast("Callable[[Tensor, Tensor], Tensor]", Constant.apply)
        losses = [constant(value, grad) for value, grad in zip(self.values, self.grads, strict=True)]
        total: Tensor = torch.stack(losses).sum()
        return total


def flat(numel: int, tensors: int) -> tuple[Callable[[], None], Callable[[int], object]]:
    """Step and check of `flat`."""
    size = numel * tensors
    weights, grads = torch.zeros(size), torch.ones(size)

    def step() -> None:
        dist.all_reduce(grads)
        grads.div_(dist.get_world_size())
        weights.add_(grads, alpha=-0.1)

    return step, lambda steps: [float(weights.min()), float(weights.max())]


def ddp(numel: int, tensors: int) -> tuple[Callable[[], None], Callable[[int], object]]:
    """Step and check of `ddp`."""
    model = Model(numel, tensors)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step() -> None:
        wrapped().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step, lambda steps: model.edges()


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["flat", "ddp"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--store", required=True, help="file of the rendezvous")
    parser.add_argument("--numel", type=int, required=True, help="elements of each tensor")
    parser.add_argument("--tensors", type=int, required=True)
    options = parser.parse_args()
    store = dist.FileStore(options.store, options.world)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=options.rank, world_size=options.world, timeout=timedelta(seconds=300)
    )
    step, check = (flat if options.mode == "flat" else ddp)(options.numel, options.tensors)
    serve(step, check)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
