"""`topk:R`: the fraction R of the elements that are largest in magnitude, with their positions; the others are zero.

Exactly k = min(max(1, round(R n)), number of non-zero elements) elements travel. No element left out is larger in
magnitude than one sent, ties go to the first (float64 is compared, also with zero, as rounded to float32), and

    Σ (x_i - x̂_i)² ≤ (1 - k/n) Σ x_i²

(sparsification: Aji and Heafield 2017; Deep Gradient Compression, Lin et al. 2018, whose momentum correction and
warm-up of R are in `ps.codec.dgc`). Elements sent are exact, or rounded as in `bf16` with `topk:R:values=bf16`.

Positions travel as differences (first: position + 1), in 16 bits where all fit, else in 32: 6 bytes per element sent
for float32 values and 4 for bfloat16, so that R = 0.01 sends 66 or 100 times less than float32.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ps.codec.base import padded
from ps.codec.cast import saturating_copy
from ps.codec.frame import Body, Framed, Header
from ps.codec.largest import Largest, Positions
from ps.errors import WireError

Steps = NDArray[np.uint32] | NDArray[np.uint16]
"""Differences of positions."""

_WIDE = 1
"""Flag: differences take 32 bits."""


class TopK(Framed):
    """Keeps a fraction. Decodes what any ratio encoded, so that R may change from push to push."""

    code = 5
    elementwise = False

    def __init__(self, ratio: float, *, bf16_values: bool = False) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio: got {ratio}, expected a fraction in (0, 1]")
        self.ratio = ratio
        """Fraction of the elements kept; may be set between two calls."""
        self._bf16 = bf16_values
        self.parameter = int(bf16_values)
        self._largest = Largest(self._float32)

    @property
    def name(self) -> str:
        """`topk:R`, with `:values=bf16` where they are."""
        return f"topk:{self.ratio!r}" + (":values=bf16" if self._bf16 else "")

    def body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """What wide differences of all k elements take: the most."""
        return self._sizes(self._count(numel), dtype, wide=True)[1]

    def _count(self, numel: int) -> int:
        return min(numel, max(1, round(self.ratio * numel)))

    def _sizes(self, count: int, dtype: torch.dtype, *, wide: bool) -> tuple[int, int]:
        """Where the differences begin, and bytes of the body."""
        begin = padded(count * (2 if self._bf16 else dtype.itemsize))
        return begin, begin + count * (4 if wide else 2)

    def _write(self, source: Tensor, body: Tensor, seed: int) -> Body:
        at = self._largest.positions(source, self._count(source.numel()))
        values = source[torch.from_numpy(at)]
        steps = np.diff(at, prepend=-1)
        wide = bool(len(steps)) and int(steps.max()) >= 1 << 16
        begin, end = self._sizes(len(at), source.dtype, wide=wide)
        if len(at):
            room = body[: values.numel() * self._value_dtype(source.dtype).itemsize]
            body[room.numel() : begin].zero_()
            room = room.view(self._value_dtype(source.dtype))
            # inf and NaN are larger than all else, so they are among these.
            if not saturating_copy(values, room, torch.finfo(room.dtype).max):
                raise self._refuse_nonfinite()
            body[begin:end].numpy().view(np.uint32 if wide else np.uint16)[:] = steps
        return Body(end, len(at), _WIDE if wide else 0)

    def _value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self._bf16 else dtype

    def _read(self, header: Header, body: Tensor, into: Tensor) -> None:
        count = header.elems
        if header.flags not in (0, _WIDE) or count > into.numel():
            raise WireError(f"topk: flags {header.flags}, {count} elements of {into.numel()}")
        begin, end = self._sizes(count, into.dtype, wide=bool(header.flags))
        if body.numel() != padded(end):
            raise WireError(f"topk: got {body.numel()} bytes for {count} elements, expected {padded(end)}")
        dtype = self._value_dtype(into.dtype)
        values = body[: count * dtype.itemsize].view(dtype)
        if not bool(values.isfinite().all()):
            raise WireError("topk: a value is inf or NaN")
        raw: NDArray[np.uint8] = body[begin:end].numpy()
        steps: Steps = raw.view(np.uint32) if header.flags else raw.view(np.uint16)
        at = torch.from_numpy(_positions(steps, into.numel()))
        into.zero_()
        into.scatter_(0, at, _fitting(values, into.dtype))


def _positions(steps: Steps, numel: int) -> Positions:
    """Ascending positions below `numel`; `WireError` where the differences give others."""
    at: Positions = np.cumsum(steps, dtype=np.int64)
    if len(at) and (not steps.all() or at[-1] > numel):
        raise WireError(f"topk: positions do not ascend, or go up to {at[-1] - 1} in {numel} elements")
    at -= 1
    return at


def _fitting(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in the shard's dtype; saturated where it is narrower than theirs."""
    if values.dtype is dtype or not len(values):
        return values.to(dtype)
    fitting = torch.empty(values.numel(), dtype=dtype)
    saturating_copy(values, fitting, torch.finfo(dtype).max)
    return fitting
