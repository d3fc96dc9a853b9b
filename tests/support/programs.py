"""Random training programs, as data: layers, an optimizer with param groups, and what happens at each step.

A program is trained by whatever `attach` it is given, so plain PyTorch and servers can be compared. Layers map
(batch, width) to (batch, width), whatever their shape, dtype and number of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import Optimizer

from tests.support.oracle import Attach

WIDTH = 6
BATCH = 4
ROWS = 11

DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
}  # fmt: skip

KINDS = ("linear", "wide", "conv", "norm", "scalar", "empty", "turned", "twice", "tied", "sometimes", "unused",
         "frozen", "ragged", "table", "dense table", "tied table")  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One ingredient."""

    kind: str
    dtype: str = "float32"
    size: int = 5
    """Of its inner dimension."""


@dataclass(frozen=True)
class Event:
    """What is special about one step."""

    forgets_zero_grad: bool = False
    skips_backward: bool = False
    lr_factor: float = 1.0
    absent: int | None = None
    """The gradient of this parameter is set to None."""
    flips: int | None = None
    """This parameter is frozen, or thawed, before the step."""
    clips: bool = False


@dataclass(frozen=True)
class Program:
    """All of it."""

    layers: tuple[Layer, ...]
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    groups: tuple[dict[str, Any], ...]
    """Settings of the param groups; parameters go to them in turn."""
    left_out: int | None
    """This parameter is in no group."""
    events: tuple[Event, ...]
    accumulate: int = 1
    servers: int = 1
    shard_bytes: int = 0
    message_bytes: int = 8 << 20


class Part(nn.Module):
    """A layer of a model. Adds what it makes of its input to that, so that widths always fit."""

    def __init__(self, layer: Layer, before: nn.Linear) -> None:
        super().__init__()
        self.kind = layer.kind
        dtype, size = DTYPES[layer.dtype], layer.size
        if layer.kind in ("tied", "tied table"):
            dtype = torch.float32
        self.inner: nn.Module = nn.Identity()
        match layer.kind:
            case "wide":
                self.inner = nn.Linear(WIDTH, 10 * size, dtype=dtype)
            case "conv":
                self.inner = nn.Conv2d(1, size, 3, dtype=dtype)
                kernel = self.inner.weight
                kernel.data = kernel.data.contiguous(memory_format=torch.channels_last)
            case "norm":
                self.inner = nn.BatchNorm1d(WIDTH, momentum=None if size == 1 else 0.1)
            case "scalar":
                self.factor = nn.Parameter(torch.tensor(0.5, dtype=dtype))
            case "empty":
                self.factor = nn.Parameter(torch.zeros(0, size, dtype=dtype))
            case "turned":
                self.factor = nn.Parameter((torch.randn(size, WIDTH, dtype=dtype) / 4).t())
            case "ragged":
                self.factor = nn.Parameter(torch.randn(1, size, 1, WIDTH, dtype=dtype) / 4)
            case "tied":
                self.inner = nn.Linear(WIDTH, WIDTH)
                self.inner.weight = before.weight
            case "table" | "dense table":
                self.inner = nn.Embedding(ROWS, size, sparse=layer.kind == "table", dtype=dtype)
            case "tied table":
                self.inner = nn.Embedding(WIDTH, WIDTH, sparse=True)
                self.inner.weight = before.weight
            case _:
                self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.calls = 0
        for param in self.parameters() if layer.kind == "frozen" else ():
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) → (batch, width)."""
        self.calls += 1
        if self.kind == "unused" or (self.kind == "sometimes" and self.calls % 2):
            return x
        hidden = self._apply_to(x)
        hidden = hidden.real if hidden.is_complex() else hidden
        hidden = hidden.to(x.dtype).reshape(len(x), -1)
        return torch.tanh(x + (hidden * torch.cos(torch.arange(hidden.shape[1]))).sum(1, keepdim=True) / WIDTH)

    def _apply_to(self, x: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        match self.kind:
            case "conv":
                return self._run(x.to(dtype)[:, None, :, None].expand(-1, -1, -1, WIDTH))
            case "scalar":
                return x * self.factor
            case "empty":
                return x * self.factor.sum()
            case "turned":
                return x.to(dtype) @ self.factor
            case "ragged":
                return x.to(dtype) @ self.factor[0, :, 0].t()
            case "twice":
                once = self._run(x.to(dtype))
                return self._run(once)
            case "norm":
                return self._run(x)
            case "table" | "dense table" | "tied table":
                return self._run((x.abs() * 50).long() % (WIDTH if self.kind == "tied table" else ROWS))
        return self._run(x.to(dtype))

    def _run(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Drawn(nn.Module):
    """The model of a program, with a first and a last layer that are always there."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Part(layer, self.first) for layer in layers)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) → (batch, 2)."""
        x = torch.tanh(self.first(x))
        for part in self.parts:
            x = part(x)
        out: Tensor = self.last(x)
        return out


def taken(model: Drawn, program: Program) -> list[nn.Parameter]:
    """The parameters that the program's optimizer gets: those that it takes, but for one that is left out."""
    parts = [part for part in model.parts if isinstance(part, Part) and part.kind in ("table", "tied table")]
    tables = {id(param) for part in parts for param in part.parameters()}
    dense_too = {id(model.first.weight)}
    found = []
    for index, param in enumerate(model.parameters()):
        whole = param.is_contiguous() and not param.is_complex()
        fits = {
            "SparseAdam": id(param) in tables - dense_too,
            "Muon": param.dim() == 2 and whole and id(param) not in tables and param.numel() > 0,
            "Adafactor": whole and id(param) not in tables and param.numel() > 0,
        }.get(program.optimizer, True)
        if fits and index != program.left_out:
            found.append(param)
    return found


def optimizer_of(model: Drawn, program: Program) -> Optimizer | None:
    """None if there is nothing to train."""
    params = taken(model, program)
    groups = [
        {"params": chosen, **settings}
        for number, settings in enumerate(program.groups)
        if (chosen := params[number :: len(program.groups)])
    ]
    kind: Any = getattr(torch.optim, program.optimizer)
    return kind(groups, **dict(program.options)) if groups else None


def train(program: Program, attach: Attach) -> Drawn | None:
    """Build, attach and train; None if there is nothing to train."""
    torch.manual_seed(1)
    model = Drawn(program.layers)
    optimizer = optimizer_of(model, program)
    if optimizer is None:
        return None
    attach(model, optimizer, accumulate=program.accumulate)
    params = list(model.parameters())
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        for event in program.events:
            _step(model, params, optimizer, event)
    return model


def _step(model: Drawn, params: list[nn.Parameter], optimizer: Optimizer, event: Event) -> None:
    if not event.forgets_zero_grad:
        model.zero_grad()
    if event.flips is not None:
        param = params[event.flips % len(params)]
        param.requires_grad_(not param.requires_grad)
    for group in optimizer.param_groups:
        group["lr"] *= event.lr_factor
    loss = model(torch.randn(BATCH, WIDTH)).square().mean() + 1e-3 * model.last.bias.sum()
    if loss.requires_grad and not event.skips_backward:
        backward(loss)
    if event.absent is not None:
        params[event.absent % len(params)].grad = None
    if event.clips:
        for param in params:
            if param.grad is not None and not param.is_complex():
                param.grad *= 0.3
    optimizer.step()
