"""How far trained weights are from those of plain PyTorch, and how far they may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch import Tensor

from tests.numerics.cases import CASES, run
from tests.support.oracle import weights

Record = Callable[[str, object], None]
"""pytest's `record_property`: what it is given becomes part of the test's report, where the matrix finds it."""

FEW_ULP = {
    torch.float32: 1e-6,
    torch.float64: 1e-14,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    torch.complex64: 1e-6,
    torch.complex128: 1e-14,
    torch.int64: 0.0,
    torch.bool: 0.0,
}
"""Bounds on `distance` for fused kernels, whose vector tails round differently."""


@cache
def expected(name: str) -> dict[str, Tensor]:
    """What plain PyTorch makes of the case."""
    return weights(run(name))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Not one bit differs; 0 and -0 do."""
    mine, theirs = (value.contiguous().view(-1).view(torch.uint8) for value in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(mine, theirs)


def distance(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest |got - wanted| / (1 + |wanted|), 0 only if all bits are the same."""
    assert got.keys() == wanted.keys()
    largest = 0.0
    for name, value in got.items():
        if not same_bits(value, wanted[name]):
            a, b = value.to(torch.complex128), wanted[name].to(torch.complex128)
            largest = max(largest, float(((a - b).abs() / (1 + b.abs())).max()), 5e-324, key=_nan_is_largest)
    return largest


def _nan_is_largest(value: float) -> float:
    return value if value == value else float("inf")


def check_exact(name: str, column: str, got: Mapping[str, Tensor], record: Record) -> None:
    """Under exact kernels: the same bits, or what the case says."""
    bound = CASES[name].bound
    _check(name, column, got, bound, record)


def check_fused(name: str, column: str, got: Mapping[str, Tensor], record: Record) -> None:
    """Under fused kernels: a few ulp of the coarsest dtype, or what the case says."""
    bound = max(CASES[name].bound, *(FEW_ULP[value.dtype] for value in got.values()))
    _check(name, column, got, bound, record)


def _check(name: str, column: str, got: Mapping[str, Tensor], bound: float, record: Record) -> None:
    found = distance(got, expected(name))
    record("golden", (name, column, found))
    assert found <= bound, f"{name} ({column}): {found:.1e} from plain PyTorch, bound {bound:g}"
