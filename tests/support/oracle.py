"""Training runs that plain PyTorch and torch-ps must agree on. A run doesn't know which of the two it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from tests.support import loops, nets
from tests.support.models import Mixed, Mlp, Moody, Strided, Tied, Waves, Words, batches

STEPS = 50

HALF_DTYPES = (torch.float16, torch.bfloat16)


class Attach(Protocol):
    """`worker.attach`, or `plain`."""

    def __call__(
        self, model: nn.Module, optimizer: Optimizer, *, accumulate: int = 1, on_nonfinite: str = "raise"
    ) -> Optimizer:
        """Convert the optimizer in place."""
        ...


Loop = Callable[[nn.Module, Optimizer, Attach], None]
"""Attaches and trains."""


def plain(model: nn.Module, optimizer: Optimizer, *, accumulate: int = 1, on_nonfinite: str = "raise") -> Optimizer:
    """The oracle: nothing is attached. 16-bit parameters get float32 masters, from which they are cast at each step."""
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


REPEATED_ROWS = "SGD adds rows that occur twice to the weights one by one; here they are summed before they are sent"
REPEATED_HALF_ROWS = "rows that occur twice are summed and sent in 16 bits; the oracle's master gets them in 32"
STRIDED_SUMS = "sums over a tensor in another memory order round differently; servers hold tensors row-major"

FUSED = "the oracle itself runs the fused kernel"


@dataclass(frozen=True)
class Case:
    """A run: what is built and how it is trained."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    loop: Loop = simple
    splits: bool = True
    """Whether small shards split its tensors; optimizers that need whole ones are kept whole."""
    bound: float = 0.0
    """How far from plain PyTorch, relative and absolute, where exact kernels are not bitwise it; `because` says why."""
    because: str = ""


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
    "adadelta": Case(Mlp, by_name("Adadelta", lr=1.0, weight_decay=0.01)),
    "adamax": Case(Mlp, by_name("Adamax", lr=0.01, weight_decay=0.01)),
    "nadam": Case(Mlp, by_name("NAdam", lr=0.01, weight_decay=0.01, decoupled_weight_decay=True)),
    "radam": Case(Mlp, by_name("RAdam", lr=0.01, weight_decay=0.01)),
    "asgd": Case(Mlp, by_name("ASGD", lr=0.05, t0=10, weight_decay=0.01)),
    "rprop": Case(Mlp, by_name("Rprop", lr=0.01)),
    "adam_amsgrad_maximize": Case(Mlp, by_name("Adam", lr=0.001, amsgrad=True, maximize=True)),
    "sgd_maximize_dampening": Case(Mlp, by_name("SGD", lr=0.001, maximize=True, momentum=0.9, dampening=0.5)),
    "rmsprop_maximize": Case(Mlp, by_name("RMSprop", lr=0.001, maximize=True)),
    "adafactor": Case(Mlp, by_name("Adafactor", lr=0.05, weight_decay=0.01), splits=False),
    "adafactor_scalar_unused": Case(Moody, by_name("Adafactor", lr=0.05), splits=False),
    "adafactor_strided": Case(Strided, by_name("Adafactor", lr=0.05), splits=False, bound=1e-6, because=STRIDED_SUMS),
    "muon": Case(Mlp, muon, splits=False),
    "complex64": Case(Waves, adamw),
    "complex128_sgd": Case(partial(Waves, torch.complex128), double(sgd_full)),
    "bfloat16": Case(Mlp, cast(torch.bfloat16, adamw)),
    "bfloat16_sgd_unused": Case(Moody, cast(torch.bfloat16, sgd_full)),
    "float16": Case(Mlp, cast(torch.float16, adam)),
    "bfloat16_adafactor": Case(Mlp, cast(torch.bfloat16, by_name("Adafactor", lr=0.05)), splits=False),
    "mixed_dtypes": Case(Mixed, adamw),
    "expanded_gradients": Case(Strided, sgd_full, expanded),
    "sparse_sgd": Case(Words, sgd_plain, rows, bound=1e-6, because=REPEATED_ROWS),
    "sparse_sgd_momentum": Case(Words, sgd_nesterov, rows, bound=1e-5, because=REPEATED_ROWS),
    "sparse_adagrad": Case(Words, by_name("Adagrad", lr=0.05, lr_decay=0.01), rows),
    "sparse_adagrad_groups": Case(Words, words_groups, rows),
    "sparse_adagrad_bfloat16": Case(
        Words, cast(torch.bfloat16, by_name("Adagrad", lr=0.05)), rows, bound=1e-2, because=REPEATED_HALF_ROWS
    ),
    "sparse_adagrad_accumulate": Case(Words, by_name("Adagrad", lr=0.05), rows_in_micro_batches),
    "sparse_adam": Case(partial(Words, head=False), by_name("SparseAdam", lr=0.01), rows),
    "warm_up_chain_and_plateau": Case(Mlp, sgd_full, loops.warm_up_chain),
    "accumulate_5": Case(Mlp, adamw, loops.micro_batches),
    "accumulate_3_scaled": Case(Mlp, adam, loops.scaled_micro_batches),
    "nonfinite_skip": Case(Mlp, adamw, loops.nonfinite("skip")),
    "nonfinite_zero": Case(Mlp, sgd_full, loops.nonfinite("zero")),
    "no_backward_and_continue": Case(Mlp, adamw, loops.no_backward),
    "forgotten_zero_grad_backward_twice": Case(Mlp, sgd_full, loops.careless),
    "ema_norms_regulariser_after_step": Case(Mlp, adamw, loops.reads_back),
    "deepcopy_and_save_after_attach": Case(Mlp, adam, loops.distilled),
    "frozen_thawed_frozen": Case(Mlp, adamw, loops.flipped),
    "groups_of_all_kinds": Case(Mlp, loops.many_groups),
    "branching": Case(nets.Branching, adamw),
    "parametrizations": Case(nets.Parametrized, adam),
    "transformer_and_lstm": Case(nets.Attentive, sgd_full),
    "lazy_after_a_dry_run": Case(nets.lazy, adam),
    "autocast_bfloat16": Case(Mlp, adamw, loops.autocast),
    "scaler_unscale_clip_hook": Case(Mlp, adamw_fused, loops.scaled_and_clipped, bound=1e-6, because=FUSED),
    "checkpointed": Case(nets.Checkpointed, adamw),
    "compiled_before": Case(nets.compiled, adamw),
    "compiled_after": Case(Mlp, adamw, loops.compiled_after),
    "data_parallel": Case(nets.parallel, adamw),
    "functional_call": Case(Mlp, adam, loops.functional),
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
