"""Which `torch.optim` classes are served, and which of their hyper-parameters travel with a push. Imports no torch.

The servers run the class itself. Most classes update an element from nothing but that element's gradient, weight,
state and step count, so they run over flat shards, however these cut the tensors. Others need whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from ps.errors import UnsupportedError
from ps.types import Hyper, HyperValue


class StateKind(Enum):
    """What an entry of an optimizer's state is, for a parameter or a piece of one."""

    NUMBER = "number"
    """0-dim, float32 or float64."""
    COUNT = "count"
    """A Python int; travels as a 0-dim int64 tensor."""
    ELEMENTS = "elements"
    """One for each element of the parameter."""
    ROWS = "rows"
    """One for each row of a matrix, or stack of matrices: the parameter's shape with the last size 1."""
    COLUMNS = "columns"
    """One for each column: the last but one size is 1."""


@dataclass(frozen=True, slots=True)
class StateKey:
    """One entry of a parameter's state."""

    name: str
    kind: StateKind = StateKind.ELEMENTS
    optional: bool = False
    """Whether it depends on hyper-parameters or the parameter's shape."""
    like_gradient: bool = False
    """Whether it is sparse where gradients are. It travels dense."""


_STEP = StateKey("step", StateKind.NUMBER)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOptimizer:
    """An optimizer that servers can run."""

    name: str
    """Class name in torch.optim."""
    keys: tuple[str, ...]
    """Hyper-parameters that travel, in this order; all in the class's `defaults`."""
    state: tuple[StateKey, ...] = ()
    """What the class keeps for a parameter once that has had a gradient, in the class's order."""
    fused: bool = False
    """Whether the class has a fused kernel on the CPU."""
    whole_tensors: bool = False
    """Whether its pieces must never be split."""
    dense: bool = True
    """Whether it takes dense gradients."""
    sparse: bool = False
    """Whether it takes sparse gradients."""
    complex: bool = True
    """Whether it takes complex parameters."""


_KERNEL_KEYS = ("foreach", "fused")
"""Choices of kernel: the servers make their own."""

_FLAGS = frozenset({"nesterov", "maximize", "amsgrad", "decoupled_weight_decay", "centered"})
"""Keys whose value is True or False; all others but `_TEXTS` are numbers or tuples of numbers and None."""

_TEXTS = frozenset({"adjust_lr_fn"})
"""Keys whose value is a string or None."""

_REFUSED_FLAGS = {
    "differentiable": "gradients can't flow through a step that runs on the servers",
    "capturable": "the step runs on the servers, outside any CUDA graph",
}
"""Flags in `defaults` that change what a step means: refused when True, never sent."""

_ADAM = (_STEP, StateKey("exp_avg"), StateKey("exp_avg_sq"), StateKey("max_exp_avg_sq", optional=True))

_TABLE = (
    ServedOptimizer(
        name="SGD",
        keys=("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
        state=(StateKey("momentum_buffer", optional=True, like_gradient=True),),
        fused=True,
        sparse=True,
    ),
    ServedOptimizer(
        name="Adam",
        keys=("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
        state=_ADAM,
        fused=True,
    ),
    ServedOptimizer(
        name="AdamW",
        keys=("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
        state=_ADAM,
        fused=True,
    ),
    ServedOptimizer(
        name="Adagrad",
        keys=("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize"),
        state=(_STEP, StateKey("sum")),
        fused=True,
        sparse=True,
    ),
    ServedOptimizer(
        name="RMSprop",
        keys=("lr", "momentum", "alpha", "eps", "centered", "weight_decay", "maximize"),
        state=(
            _STEP,
            StateKey("square_avg"),
            StateKey("momentum_buffer", optional=True),
            StateKey("grad_avg", optional=True),
        ),
    ),
    ServedOptimizer(
        name="Adadelta",
        keys=("lr", "rho", "eps", "weight_decay", "maximize"),
        state=(_STEP, StateKey("square_avg"), StateKey("acc_delta")),
    ),
    ServedOptimizer(
        name="Adamax",
        keys=("lr", "betas", "eps", "weight_decay", "maximize"),
        state=(_STEP, StateKey("exp_avg"), StateKey("exp_inf")),
    ),
    ServedOptimizer(
        name="NAdam",
        keys=("lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"),
        state=(_STEP, StateKey("mu_product", StateKind.NUMBER), StateKey("exp_avg"), StateKey("exp_avg_sq")),
    ),
    ServedOptimizer(
        name="RAdam",
        keys=("lr", "betas", "eps", "weight_decay", "maximize", "decoupled_weight_decay"),
        state=(_STEP, StateKey("exp_avg"), StateKey("exp_avg_sq")),
    ),
    ServedOptimizer(
        name="ASGD",
        keys=("lr", "lambd", "alpha", "t0", "weight_decay", "maximize"),
        state=(_STEP, StateKey("eta", StateKind.NUMBER), StateKey("mu", StateKind.NUMBER), StateKey("ax")),
    ),
    ServedOptimizer(
        name="Rprop",
        keys=("lr", "etas", "step_sizes", "maximize"),
        state=(_STEP, StateKey("prev"), StateKey("step_size")),
    ),
    ServedOptimizer(
        name="Adafactor",
        keys=("lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"),
        state=(
            _STEP,
            StateKey("row_var", StateKind.ROWS, optional=True),
            StateKey("col_var", StateKind.COLUMNS, optional=True),
            StateKey("variance", optional=True),
        ),
        whole_tensors=True,
        complex=False,
    ),
    ServedOptimizer(
        name="Muon",
        keys=("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
        state=(StateKey("momentum_buffer"),),
        whole_tensors=True,
        complex=False,
    ),
    ServedOptimizer(
        name="SparseAdam",
        keys=("lr", "betas", "eps", "maximize"),
        state=(StateKey("step", StateKind.COUNT), StateKey("exp_avg"), StateKey("exp_avg_sq")),
        dense=False,
        sparse=True,
        complex=False,
    ),
)

SERVED: Mapping[str, ServedOptimizer] = {served.name: served for served in _TABLE}
"""The allow-list, by class name."""

_REASONS = {
    "LBFGS": "it calls the closure several times per step, which servers can't do",
}
"""Classes of torch.optim that are not served, and why."""


@runtime_checkable
class _Scalar(Protocol):
    """A 0-dim tensor or numpy scalar."""

    def item(self) -> object:
        """The Python number."""
        ...


def served(optimizer: str) -> ServedOptimizer:
    """The served optimizer with this class name. Raises `UnsupportedError` by name, with the reason."""
    found = SERVED.get(optimizer)
    if found is None:
        reason = _REASONS.get(optimizer, "only classes of torch.optim are served")
        raise UnsupportedError(
            f"optimizer {optimizer} can't be run on the servers: {reason}. Served are: {', '.join(SERVED)}"
        )
    return found


def hyper(group: Mapping[str, object], optimizer: ServedOptimizer) -> Hyper:
    """The hyper-parameters of one param group that travel: (key, value) in the order of `optimizer.keys`.

    0-dim tensors are read with `.item()`. Raises `UnsupportedError` for a missing key, for a value that is no
    number, flag or tuple of numbers, for NaN, and for `differentiable=True` or `capturable=True`.
    """
    for flag, reason in _REFUSED_FLAGS.items():
        if group.get(flag):
            raise UnsupportedError(f"{optimizer.name} with {flag}=True can't be served: {reason}")
    missing = [key for key in optimizer.keys if key not in group]
    if missing:
        raise UnsupportedError(f"{optimizer.name}: param group has no {', '.join(missing)}")
    return tuple((key, _value(optimizer.name, key, group[key])) for key in optimizer.keys)


def check_hyper(values: Hyper, optimizer: ServedOptimizer) -> None:
    """Check hyper-parameters that came over the wire. Raises `UnsupportedError` as `hyper` does."""
    keys = tuple(key for key, _ in values)
    if keys != optimizer.keys:
        raise UnsupportedError(f"{optimizer.name} takes {', '.join(optimizer.keys)}; got {', '.join(keys) or 'none'}")
    for key, value in values:
        _value(optimizer.name, key, value)


def check_param(optimizer: ServedOptimizer, name: str, *, dtype: str, sparse: bool) -> None:
    """Check that the class takes a parameter that is to be trained. Raises `UnsupportedError`, naming both."""
    if dtype.startswith("complex") and not optimizer.complex:
        raise UnsupportedError(f"{optimizer.name} does not support complex parameters, and {name!r} is {dtype}")
    if sparse and not optimizer.sparse:
        takers = ", ".join(other.name for other in SERVED.values() if other.sparse)
        raise UnsupportedError(
            f"{optimizer.name} does not support sparse gradients, and the embedding of {name!r} has sparse=True: leave "
            f"that out, or use one of {takers}"
        )
    if not sparse and not optimizer.dense:
        raise UnsupportedError(
            f"{optimizer.name} does not support dense gradients, and {name!r} belongs to no nn.Embedding or "
            "nn.EmbeddingBag with sparse=True: use another class, or leave the parameter out of the optimizer"
        )


def check_rows(optimizer: ServedOptimizer, name: str, values: Hyper) -> None:
    """Check hyper-parameters of the group of a sparse parameter. Raises `UnsupportedError`, naming it."""
    if dict(values).get("weight_decay"):
        raise UnsupportedError(
            f"{optimizer.name}: weight_decay is not compatible with sparse gradients, and the embedding of {name!r} "
            "has sparse=True; put it into a param group with weight_decay=0"
        )


def _value(name: str, key: str, value: object) -> HyperValue:
    """The plain value of a number, flag or tuple of numbers."""
    if key in _FLAGS:
        if not isinstance(value, bool):
            raise UnsupportedError(f"{name}: {key} is {value!r}; expected True or False")
        return value
    if key in _TEXTS:
        if value is not None and not isinstance(value, str):
            raise UnsupportedError(f"{name}: {key} is {value!r}; expected a string or None")
        return value
    if isinstance(value, tuple | list):
        return tuple(None if item is None else _number(name, key, item) for item in value)
    return _number(name, key, value)


def _number(name: str, key: str, value: object) -> float | int:
    plain = value if isinstance(value, int | float) or not isinstance(value, _Scalar) else value.item()
    if isinstance(plain, bool) or not isinstance(plain, int | float) or math.isnan(plain):
        raise UnsupportedError(f"{name}: {key} is {plain!r}; expected a number")
    return plain
