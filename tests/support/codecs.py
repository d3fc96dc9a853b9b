"""The table of all codecs, their error bounds, and tensors that try them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NAMES = [
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int8:stochastic",
    "topk:0.01",
    "topk:0.3",
    "topk:1",
    "topk:0.1:values=bf16",
    "sign",
]
KINDS = [
    "zeros",
    "negative zeros",
    "constant",
    "normal",
    "denormal",
    "smallest",
    "huge",
    "mixed",
    "spike",
    "mostly zero",
]


def make(kind: str, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A finite tensor of an adversarial kind."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(numel, generator=generator, dtype=torch.float64)
    limits = torch.finfo(dtype)
    values = {
        "zeros": noise * 0,
        "negative zeros": noise * 0 * -1,
        "constant": torch.full_like(noise, 0.3),
        "normal": noise * 1e-3,
        "denormal": noise * limits.smallest_normal / 4,
        "smallest": noise.sign() * limits.smallest_normal * limits.eps,
        "huge": noise.sign() * limits.max,
        "mixed": noise * 10 ** (noise * 8),
        "spike": torch.where(torch.arange(numel) == numel // 2, limits.max, noise * 1e-6),
        "mostly zero": torch.where(noise.abs() > 2, noise, 0.0),
    }[kind]
    return values.clamp(limits.min, limits.max).to(dtype)


def cut(tensor: Tensor, size: int) -> list[Tensor]:
    """Blocks of a flat tensor."""
    return [tensor[begin : begin + size] for begin in range(0, len(tensor), size)]


def bound_cast(wire: torch.dtype) -> Callable[[Tensor, Tensor], None]:
    """max(u |x|, u n), saturated at the largest value."""

    def check(x: Tensor, y: Tensor) -> None:
        limits = torch.finfo(wire)
        unit = limits.eps / 2
        limit = (x.abs() * unit).clamp(min=unit * limits.smallest_normal) * (1 + 1e-6)
        limit = limit + (x.abs() - limits.max).clamp(min=0)
        assert ((x - y).abs() <= limit).all()

    return check


def bound_int8(steps: float) -> Callable[[Tensor, Tensor], None]:
    """`steps` of a/127 per block, or 2^-100."""

    def check(x: Tensor, y: Tensor) -> None:
        largest = torch.finfo(torch.float32).max
        beyond = (x.abs() - largest).clamp(min=0)
        x = x.clamp(-largest, largest)
        for block, back, extra in zip(cut(x, 256), cut(y, 256), cut(beyond, 256), strict=True):
            top = float(block.abs().max())
            limit = max(top * (steps / 127 + 2**-20), 2.0**-100) + extra
            assert ((block - back).abs() <= limit).all()
        assert (y[x == 0] == 0).all()

    return check


def bound_sparse(ratio: float, *, bf16: bool = False) -> Callable[[Tensor, Tensor], None]:
    """The count of elements is exact, nothing left out is larger than what was sent, and what was sent is exact."""

    def check(x: Tensor, y: Tensor) -> None:
        count = min(max(1, round(ratio * len(x))), int(x.float().count_nonzero()))
        sent = y != 0
        assert int(sent.count_nonzero()) <= count  # fewer only where a value is rounded to zero in bfloat16
        if not bf16:
            assert int(sent.count_nonzero()) == count
            assert torch.equal(x[sent], y[sent])
        if count and bool(sent.any()) and not bool(sent.all()):
            # float64 is compared as rounded to float32.
            assert x[~sent].abs().max() <= x[sent].abs().min() * (1 + 2**-22) + 1e-44
        limits = torch.finfo(torch.bfloat16)
        if bf16 and bool(((x.abs() > limits.max) | ((x != 0) & (x.abs() < limits.smallest_normal))).any()):
            return  # such values are saturated, or rounded to zero
        scale = max(float(x.abs().max()), 1e-44)
        total = float(((x / scale) ** 2).sum())
        slack = 1e-3 if bf16 else 1e-9
        assert float((((x - y) / scale) ** 2).sum()) <= (1 - count / len(x)) * total + slack * total

    return check


def bound_sign(x: Tensor, y: Tensor) -> None:
    """±mean |x| per block, and the block's squared error is its squared length less n s²."""
    x = x.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    for block, back in zip(cut(x, 1024), cut(y, 1024), strict=True):
        mean = float(block.abs().mean())
        assert ((back.abs() - mean).abs() <= mean * 2**-18 + 1e-41).all()
        assert (back[block > 0] >= 0).all() and (back[block < 0] <= 0).all()
        scale = float(block.abs().max()) or 1.0
        assert float((((block - back) / scale) ** 2).sum()) <= float(((block / scale) ** 2).sum()) * (1 + 1e-5) + 1e-4


BOUNDS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "fp32": lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0),
    "bf16": bound_cast(torch.bfloat16),
    "fp16": bound_cast(torch.float16),
    "int8": bound_int8(0.5),
    "int8:stochastic": bound_int8(1),
    "topk:0.01": bound_sparse(0.01),
    "topk:0.3": bound_sparse(0.3),
    "topk:1": bound_sparse(1),
    "topk:0.1:values=bf16": bound_sparse(0.1, bf16=True),
    "sign": bound_sign,
}
