"""Optimizers of the golden cases, each made for the model it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

from tests.support.models import Words


def cast(dtype: torch.dtype, optimizer: Callable[[nn.Module], Optimizer]) -> Callable[[nn.Module], Optimizer]:
    """With the model in this dtype."""
    return lambda model: optimizer(model.to(dtype))


def by_name(name: str, **options: object) -> Callable[[nn.Module], Optimizer]:
    """A class of torch.optim over all parameters."""
    kind: Callable[..., Optimizer] = getattr(torch.optim, name)
    return lambda model: kind(model.parameters(), **options)


def muon(model: nn.Module) -> Optimizer:
    """Over the matrices; it takes nothing else."""
    return Muon([param for param in model.parameters() if param.dim() == 2], lr=0.02)


def words_groups(model: nn.Module) -> Optimizer:
    """Dense and sparse parameters in groups with settings of their own; decay for the dense one only."""
    assert isinstance(model, Words) and model.head is not None
    groups: list[dict[str, Any]] = [
        {"params": model.head.parameters(), "weight_decay": 0.1},
        {"params": [model.bags.weight], "lr": 0.2},
        {"params": [model.words.weight]},
    ]
    return Adagrad(groups, lr=0.05)


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
