"""`all_finite`: one cheap pass that never errs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ps.finite import all_finite

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("index", [0, 500, 1000])
def test_one_bad_element_is_found(dtype: torch.dtype, bad: float, index: int) -> None:
    """Wherever it is, in any dtype."""
    tensor = torch.randn(1001).to(dtype)
    assert all_finite(tensor)
    tensor[index] = bad
    assert not all_finite(tensor)


def test_both_infinities_are_found() -> None:
    """inf and -inf do not cancel out."""
    assert not all_finite(torch.tensor([float("inf"), float("-inf")]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_huge_values_are_finite(dtype: torch.dtype) -> None:
    """Their sum overflows, they don't."""
    assert all_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))


@pytest.mark.parametrize("tensor", [torch.empty(0), torch.arange(3), torch.tensor(True), torch.tensor(1.0)])
def test_empty_integer_and_scalar_tensors(tensor: Tensor) -> None:
    """Nothing to find."""
    assert all_finite(tensor)


def test_imaginary_parts_count() -> None:
    """A complex number is finite when both parts are."""
    assert not all_finite(torch.tensor([complex(1.0, float("nan"))]))
