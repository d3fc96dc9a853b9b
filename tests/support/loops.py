"""Training loops as people write them, for golden cases. None knows whether the optimizer runs here or on servers.

What is read from the model between steps goes into the next loss: were it stale, the result would differ.
"""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.func import functional_call
from torch.nn.functional import mse_loss
from torch.optim import AdamW, Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.models import batches

if TYPE_CHECKING:
    from tests.support.oracle import Attach

COUNT = 20
"""Steps, or micro-batches, of each loop."""


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of one batch."""
    return mse_loss(model(x), y)


def warm_up_chain(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Warm-up and then cosine, made before attach; the plateau scheduler, made after."""
    chain = lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5),
            lr_scheduler.CosineAnnealingLR(optimizer, COUNT),
        ],
        milestones=[5],
    )
    attach(model, optimizer)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, threshold=0.5)
    for x, y in batches(COUNT):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        backward(loss)
        optimizer.step()
        chain.step()
        plateau.step(loss.item())


def micro_batches(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """`attach(accumulate=5)`, clipping each micro-batch, clearing gradients in all the ways there are."""
    attach(model, optimizer, accumulate=5)
    for step, (x, y) in enumerate(batches(COUNT)):
        backward(loss_of(model, x, y))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step % 3 == 0:
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=step % 3 == 1)


def scaled_micro_batches(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """`attach(accumulate=3)` under a GradScaler, which leaves out every fifth micro-batch for an inf in it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=6)
    attach(model, optimizer, accumulate=3)
    for step, (x, y) in enumerate(batches(COUNT)):
        loss = loss_of(model, x, y)
        backward(scaler.scale(loss * float("inf") if step % 5 == 1 else loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def nonfinite(policy: str) -> Callable[[nn.Module, Optimizer, Attach], None]:
    """An inf or NaN gradient in every fourth step, left to `on_nonfinite`."""

    def loop(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
        attach(model, optimizer, on_nonfinite=policy)
        for step, (x, y) in enumerate(batches(COUNT)):
            optimizer.zero_grad()
            backward(loss_of(model, x, y))
            grad = next(model.parameters()).grad
            if step % 4 == 1 and grad is not None:
                grad.view(-1)[3] = float("nan" if step % 8 == 1 else "-inf")
            optimizer.step()

    return loop


def no_backward(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Steps without any gradient before the first backward and in between; skipped batches."""
    attach(model, optimizer)
    optimizer.step()
    for step, (x, y) in enumerate(batches(COUNT - 1)):
        optimizer.zero_grad()
        if step % 5 == 2:
            continue
        if step % 5 != 4:
            backward(loss_of(model, x, y))
        optimizer.step()


def careless(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """zero_grad forgotten but for every third step; backward twice through the same graph."""
    attach(model, optimizer)
    for step, (x, y) in enumerate(batches(COUNT)):
        loss = loss_of(model, x, y)
        backward(loss, retain_graph=True)
        backward(0.5 * loss)
        optimizer.step()
        if step % 3 == 2:
            optimizer.zero_grad()


def reads_back(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """A moving average, `state_dict()`, weight norms and a regulariser, all taken right after `step()`."""
    attach(model, optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    factor = torch.tensor(1.0)
    penalty = torch.tensor(0.0)
    for x, y in batches(COUNT):
        optimizer.zero_grad()
        backward(factor * loss_of(model, x, y) + penalty)
        optimizer.step()
        average.update_parameters(model)
        norms = [param.detach().norm() for param in model.parameters()]
        saved = [value.double().sum().item() for value in model.state_dict().values()]
        factor = 1.0 + 0.1 * mse_loss(average(x), y).detach() + 1e-3 * torch.stack(norms).sum() + 1e-3 * sum(saved)
        penalty = 1e-3 * torch.stack([param.square().sum() for param in model.parameters()]).sum()


def distilled(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """A copy by `copy.deepcopy` or `torch.save`, made after attach, is the teacher of the next steps."""
    attach(model, optimizer)
    teacher: nn.Module | None = None
    for step, (x, y) in enumerate(batches(COUNT)):
        optimizer.zero_grad()
        target = y if teacher is None else 0.5 * (y + teacher(x).detach())
        backward(loss_of(model, x, target))
        optimizer.step()
        if step % 6 == 2:
            teacher = copy.deepcopy(model)
        if step % 6 == 5:
            stored = io.BytesIO()
            torch.save(model, stored)
            teacher = cast(nn.Module, torch.load(io.BytesIO(stored.getvalue()), weights_only=False))


def flipped(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """The first layer starts frozen, is thawed, and frozen again with its gradient left behind."""
    first = list(next(model.children()).parameters())
    for param in first:
        param.requires_grad_(False)
    attach(model, optimizer)
    for step, (x, y) in enumerate(batches(COUNT)):
        if step in (6, 14):
            for param in first:
                param.requires_grad_(step == 6)
        optimizer.zero_grad(set_to_none=step != 14)
        backward(loss_of(model, x, y))
        optimizer.step()


def autocast(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Forward in bfloat16 where torch thinks fit; float32 weights."""
    attach(model, optimizer)
    for x, y in batches(COUNT):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse_loss(model(x).float(), y)
        backward(loss)
        optimizer.step()


def scaled_and_clipped(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """A GradScaler made before attach, `unscale_` and clipping, NaN steps; a step hook that reads the weights."""
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=5)
    norms: list[Tensor] = []
    optimizer.register_step_post_hook(lambda *_: norms.append(next(model.parameters()).detach().norm()))
    attach(model, optimizer)
    for step, (x, y) in enumerate(batches(COUNT)):
        optimizer.zero_grad()
        loss = loss_of(model, x, y) * (1.0 + 0.1 * (norms[-1] if norms else 0.0))
        backward(scaler.scale(loss * float("nan") if step % 6 == 4 else loss))
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()


def compiled_after(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """Compiled once it is attached."""
    attach(model, optimizer)
    fast = torch.compile(model, backend="eager")
    for x, y in batches(COUNT):
        optimizer.zero_grad()
        backward(mse_loss(fast(x), y))
        optimizer.step()


def functional(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """`functional_call` on the parameters, and gradients by `autograd.grad` that are set by hand."""
    attach(model, optimizer)
    params: dict[str, Tensor] = dict(model.named_parameters())
    for x, y in batches(COUNT):
        loss = mse_loss(cast(Tensor, functional_call(model, params, (x,))), y)
        for param, grad in zip(params.values(), torch.autograd.grad(loss, list(params.values())), strict=True):
            param.grad = grad
        optimizer.step()


def many_groups(model: nn.Module) -> Optimizer:
    """Groups of different lr, betas and decay, one of lr 0 and one of frozen parameters."""
    layers = [list(layer.parameters()) for layer in model.modules() if isinstance(layer, nn.Linear)]
    for param in layers[2]:
        param.requires_grad_(False)
    return AdamW(
        [
            {"params": layers[0][:1], "lr": 0.02, "betas": (0.5, 0.9), "weight_decay": 0.0},
            {"params": layers[0][1:], "lr": 0.0},
            {"params": layers[1], "eps": 1e-4, "amsgrad": True},
            {"params": layers[2], "lr": 0.5},
        ],
        lr=0.005,
        weight_decay=0.1,
    )


class Averaged:
    """What `attach(accumulate=every)` means, in plain PyTorch: a step with the mean gradient of each `every` calls.

    The mean is over those calls that find any gradient, and gradients are left as they were found.
    """

    def __init__(self, optimizer: Optimizer, every: int) -> None:
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        self._every = every
        self._step = optimizer.step
        self._kept: list[list[Tensor | None]] = []
        optimizer.step = self._count  # type: ignore[method-assign,assignment]

    def _count(self) -> None:
        self._kept.append([None if param.grad is None else param.grad.clone() for param in self._params])
        if len(self._kept) >= self._every:
            self.flush()

    def flush(self) -> None:
        """A step with what has been kept, for the end of an epoch."""
        if not self._kept:
            return
        seen = sum(any(grad is not None for grad in grads) for grads in self._kept)
        last = [param.grad for param in self._params]
        for index, param in enumerate(self._params):
            grads = [grad for grads in self._kept if (grad := grads[index]) is not None]
            param.grad = functools.reduce(torch.add, grads) / seen if grads else None
        self._kept.clear()
        self._step()
        for param, grad in zip(self._params, last, strict=True):
            param.grad = grad


def forgiving(optimizer: Optimizer, policy: str) -> None:
    """What `attach(on_nonfinite=policy)` means, in plain PyTorch."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    step = optimizer.step

    def careful() -> None:
        grads = [param.grad for param in params if param.grad is not None]
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        if policy == "zero":
            for grad in grads:
                grad.nan_to_num_(0.0, 0.0, 0.0)
        if finite or policy == "zero":
            step()

    optimizer.step = careful  # type: ignore[method-assign,assignment]


def normed(
    *, accumulate: int = 1, buffers: str | dict[str, str] | None = None, buffers_every: int = 1
) -> Callable[[nn.Module, Optimizer, Attach], None]:
    """A model with buffers; every fifth loss depends on what it makes of the batch in evaluation mode."""

    def loop(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
        attach(model, optimizer, accumulate=accumulate, buffers=buffers, buffers_every=buffers_every)
        for step, (x, y) in enumerate(batches(COUNT)):
            optimizer.zero_grad()
            seen = model.eval()(x).detach() if step % 5 == 4 else 0.0
            backward(mse_loss(model.train()(x), y + seen))
            optimizer.step()

    return loop


def reads_state(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """`optimizer.state_dict()` after every third step; what is in it scales the next loss."""
    attach(model, optimizer)
    scale: float | Tensor = 1.0
    for step, (x, y) in enumerate(batches(COUNT)):
        optimizer.zero_grad()
        backward(loss_of(model, x, y) * scale)
        optimizer.step()
        if step % 3 == 0:
            state = optimizer.state_dict()["state"]
            assert list(state) == list(range(len(list(model.parameters()))))
            scale = 1.0 + sum(kept["exp_avg"].norm() + kept["step"] for kept in state.values()) / 50


def attached_midway(model: nn.Module, optimizer: Optimizer, attach: Attach) -> None:
    """A few steps before attach: the servers go on with the optimizer's state."""
    for step, (x, y) in enumerate(batches(COUNT)):
        if step == COUNT // 3:
            attach(model, optimizer)
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        optimizer.step()
