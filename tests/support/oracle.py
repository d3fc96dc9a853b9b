"""Training runs that plain PyTorch and torch-ps must agree on. A run doesn't know which of the two it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.functional import mse_loss
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from tests.support import loops
from tests.support.models import batches

STEPS = 50

HALF_DTYPES = (torch.float16, torch.bfloat16)


class Attach(Protocol):
    """`worker.attach`, or `plain`."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        accumulate: int = 1,
        on_nonfinite: str = "raise",
        buffers: str | Mapping[str, str] | None = None,
        buffers_every: int = 1,
    ) -> Optimizer:
        """Convert the optimizer in place."""
        ...


Loop = Callable[[nn.Module, Optimizer, Attach], None]
"""Attaches and trains."""


def plain(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    accumulate: int = 1,
    on_nonfinite: str = "raise",
    buffers: str | Mapping[str, str] | None = None,
    buffers_every: int = 1,
) -> Optimizer:
    """The oracle: nothing is attached. 16-bit parameters get float32 masters, from which they are cast at each step."""
    del buffers, buffers_every  # of one process they are what they are
    groups = optimizer.param_groups
    masters = {
        param: param.detach().float() for group in groups for param in group["params"] if param.dtype in HALF_DTYPES
    }
    for group in groups if masters else ():
        group["params"] = [masters.get(param, param) for param in group["params"]]

    def to_masters(*_: object) -> None:
        for param, master in masters.items():
            master.grad = None if param.grad is None else param.grad.float()

    def from_masters(*_: object) -> None:
        with torch.no_grad():
            for param, master in masters.items():
                param.copy_(master)

    if masters:
        optimizer.state.clear()
        optimizer.zero_grad = model.zero_grad  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(to_masters)
        optimizer.register_step_post_hook(from_masters)
    if accumulate > 1:
        loops.Averaged(optimizer, accumulate)
    if on_nonfinite != "raise":
        loops.forgiving(optimizer, on_nonfinite)
    return optimizer


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of one batch."""
    return mse_loss(model(x), y)


def simple(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """The loop that everybody writes."""
    attach(model, optimizer)
    for x, y in batches(STEPS, dtype=next(model.parameters()).dtype):
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        optimizer.step()


def scheduled_before(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Schedulers made before attach; clipping by norm and by value."""
    schedulers = [StepLR(optimizer, 10, 0.5), OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)]
    attach(model, optimizer)
    _scheduled(model, optimizer, schedulers)


def scheduled_after(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Schedulers made after attach; clipping by norm and by value."""
    attach(model, optimizer)
    _scheduled(model, optimizer, [StepLR(optimizer, 10, 0.5), OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)])


def _scheduled(model: nn.Module, optimizer: Optimizer, schedulers: Sequence[LRScheduler]) -> None:
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def scaled(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """GradScaler, with an inf step at every tenth batch, which must be skipped."""
    attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7)
    for step, (x, y) in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        backward(scaler.scale(loss * float("inf") if step % 10 == 3 else loss))
        scaler.step(optimizer)
        scaler.update()


def closures(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """`step(closure)`; its loss comes back."""
    attach(model, optimizer)
    for x, y in batches(STEPS):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            backward(loss)
            return loss

        value = optimizer.step(closure)  # type: ignore[arg-type]
        assert isinstance(value, Tensor) and value.item() >= 0


def accumulated(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Gradients of three batches to a step, kept in place between steps (`set_to_none=False`)."""
    attach(model, optimizer)
    for step, (x, y) in enumerate(batches(STEPS)):
        backward(loss_of(model, x, y) / 3)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def thawed(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """The head is frozen after ten steps and thawed after thirty."""
    attach(model, optimizer)
    for step, (x, y) in enumerate(batches(STEPS)):
        if step in (10, 30):
            for param in list(model.children())[-1].parameters():
                param.requires_grad_(step == 30)
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        optimizer.step()


def expanded(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Gradients whose elements share memory, as an expanded scalar."""
    attach(model, optimizer)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        for param in model.parameters():
            assert param.grad is not None
            param.grad = param.grad.mean().expand_as(param)
        optimizer.step()


def rows(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """The simple loop; torch's Adagrad warns unless it is told whether to check its sparse tensors."""
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        simple(model, optimizer, attach)


def rows_in_micro_batches(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Sparse gradients and `attach(accumulate=3)`."""
    attach(model, optimizer, accumulate=3)
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        for x, y in batches(STEPS):
            optimizer.zero_grad()
            backward(loss_of(model, x, y))
            optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters and buffers by name, as copies."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors}
