"""`bf16` and `fp16`: each element rounded to 16 bits.

With the unit roundoff u (2^-9 for bfloat16, 2^-11 for float16), the smallest normal number n and the largest one M of
the 16-bit type, rounding to nearest gives for |x| ≤ M

    |x - x̂| ≤ max(u |x|, u n)

where u n is half the spacing of subnormal numbers. Finite |x| > M is **saturated** to ±M, never made inf: scaling a
whole shard for one element would cost all others their precision; under error feedback the rest follows in later
pushes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ps.codec.frame import Body, Framed, Header
from ps.errors import WireError


class Cast(Framed):
    """Rounds to nearest, ties to even, in `wire` dtype; 2 bytes per element."""

    def __init__(self, wire: torch.dtype) -> None:
        super().__init__()
        self._wire = wire
        self._largest: float = torch.finfo(wire).max
        self.code = {torch.bfloat16: 1, torch.float16: 2}[wire]

    @property
    def name(self) -> str:
        """`bf16` or `fp16`."""
        return "bf16" if self._wire is torch.bfloat16 else "fp16"

    def body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact."""
        return 2 * numel

    def _write(self, source: Tensor, body: Tensor, seed: int) -> Body:
        numel = source.numel()
        if not saturating_copy(source, body[: 2 * numel].view(self._wire), self._largest):
            raise self._refuse_nonfinite()
        return Body(2 * numel, numel)

    def _read(self, header: Header, body: Tensor, into: Tensor) -> None:
        numel = into.numel()
        if header.elems != numel or header.flags or body.numel() < 2 * numel:
            raise WireError(f"{self.name}: {header.elems} elements in {body.numel()} bytes, expected {numel}")
        values = body[: 2 * numel].view(self._wire)
        if not saturating_copy(values, into, torch.finfo(into.dtype).max):
            raise WireError(f"{self.name}: a value is inf or NaN")


def saturating_copy(source: Tensor, into: Tensor, largest: float) -> bool:
    """Copy and convert; what is beyond ±`largest` becomes that. False, and nothing copied, if any is inf or NaN.

    Neither tensor is empty. Nothing is allocated unless something is saturated.
    """
    low, high = (float(bound) for bound in torch.aminmax(source))
    if not -math.inf < low <= high < math.inf:  # a NaN anywhere makes both NaN
        return False
    if -largest <= low and high <= largest:
        into.copy_(source)
    else:
        wide = source.float() if source.dtype.itemsize == 2 else source  # in 16 bits the limit itself might round up
        into.copy_(wide.clamp(-largest, largest))
    return True
