"""Training runs that plain PyTorch and torch-ps must agree on. A run doesn't know which of the two it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from tests.support.models import Mlp, Moody, Strided, Tied, batches

STEPS = 50

Attach = Callable[[nn.Module, Optimizer], Optimizer]
"""`worker.attach`, or `plain`."""

Loop = Callable[[nn.Module, Optimizer, Attach], None]
"""Attaches and trains."""


def plain(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """The oracle: nothing is attached."""
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


def double(optimizer: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """In double precision."""
    return lambda model: optimizer(model.double())


def sgd_plain(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05)


def sgd_full(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01)


def sgd_nesterov(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def adamw_fused(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01, fused=True)


def adagrad(model: nn.Module) -> Optimizer:
    return Adagrad(model.parameters(), lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1)


def rmsprop(model: nn.Module) -> Optimizer:
    return RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True)


def grouped(model: nn.Module) -> Optimizer:
    """Two param groups with different settings; the first layer is in none."""
    layers: list[list[Tensor]] = [list(layer.parameters()) for layer in model.modules() if isinstance(layer, nn.Linear)]
    groups: list[dict[str, Any]] = [
        {"params": layers[1], "lr": 0.02, "weight_decay": 0.0},
        {"params": [param for layer in layers[2:] for param in layer]},
    ]
    return AdamW(groups, lr=0.005)


@dataclass(frozen=True)
class Case:
    """A run: what is built and how it is trained."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    loop: Loop = simple


CASES: dict[str, Case] = {
    "sgd": Case(Mlp, sgd_plain),
    "sgd_momentum_decay": Case(Mlp, sgd_full),
    "sgd_nesterov": Case(Mlp, sgd_nesterov),
    "adam": Case(Mlp, adam),
    "adamw": Case(Mlp, adamw),
    "adagrad": Case(Mlp, adagrad),
    "rmsprop": Case(Mlp, rmsprop),
    "float64": Case(Mlp, double(adamw)),
    "groups": Case(Mlp, grouped),
    "scheduler_before_clipping": Case(Mlp, adamw, scheduled_before),
    "scheduler_after_clipping": Case(Mlp, sgd_full, scheduled_after),
    "scaler_inf_step": Case(Mlp, sgd_full, scaled),
    "closures": Case(Mlp, adam, closures),
    "accumulated": Case(Mlp, adam, accumulated),
    "thawed": Case(Mlp, adamw, thawed),
    "unused_frozen_scalar_adam": Case(Moody, adam),
    "unused_frozen_scalar_sgd": Case(Moody, sgd_full),
    "tied": Case(Tied, adamw),
    "strided": Case(Strided, sgd_full),
}
"""By name, so that a script in another process can run one."""


def run(name: str, attach: Attach = plain) -> nn.Module:
    """Train the case of this name and return the model. The caller pulls the weights if they are elsewhere."""
    case = CASES[name]
    torch.manual_seed(7)
    model = case.model()
    case.loop(model, case.optimizer(model), attach)
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, as copies."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
