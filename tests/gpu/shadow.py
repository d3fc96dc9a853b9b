"""A shadow of an attached optimizer: the same class on the CPU, fed with the very gradients that are pushed.

Servers here keep their shards on the CPU and run exact kernels, so whatever the GPU computes, the weights that come
back must equal the shadow's in every bit: nothing was lost or torn on the way to the host and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Make = Callable[[Sequence[Tensor]], Optimizer]


class Shadow:
    """Steps along with an optimizer, one worker or several in turn, and compares after each step."""

    def __init__(self, model: nn.Module, make: Make) -> None:
        self.steps = 0
        self._params = [param.detach().cpu().clone().requires_grad_() for param in model.parameters()]
        self._optimizer = make(self._params)

    def follow(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Watch `optimizer`, which trains `model`, from its next step on."""

        def before(*_: object) -> None:
            for mine, theirs in zip(self._params, model.parameters(), strict=True):
                mine.grad = None if theirs.grad is None else theirs.grad.cpu()

        def after(*_: object) -> None:
            self._optimizer.step()
            self.steps += 1
            for mine, (name, theirs) in zip(self._params, model.named_parameters(), strict=True):
                assert torch.equal(mine.detach(), theirs.detach().cpu()), f"{name} differs after step {self.steps}"

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
