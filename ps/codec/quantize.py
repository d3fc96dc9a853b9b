"""`int8`: blocks of 256 elements, each scaled by its largest magnitude (Dettmers et al. 2022, "8-bit Optimizers via
Block-wise Quantization"), linear codes.

For a block x with a = max |x_i|, the scale s = a / 127 travels as float32 and

    q_i = round(x_i / s) in -127..127        x̂_i = s q_i

Rounding to nearest: |x_i - x̂_i| ≤ s/2 = a/254. Computed in float32, where x_i / s and s q_i are each off by at most
3 units of 2^-24, it is |x_i - x̂_i| ≤ a/254 + 2^-20 a.

`int8:stochastic` rounds at random, up with the probability of the fraction (QSGD, Alistarh et al. 2017), so that
E[x̂_i] = x_i but for 2^-17 of a step: q_i = round(x_i / s + u_i), u_i uniform in (-1/2, 1/2), and
|x_i - x̂_i| < s = a/127, plus the same 2^-20 a. Zeros stay zeros in both.

Blocks with a < 2^-100 are sent as zeros: there |x_i - x̂_i| ≤ 2^-100. A 16-bit shard's elements are rounded to its
dtype once more. float64 is saturated at float32's range.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from ps.codec.base import padded
from ps.codec.frame import CHUNK_ELEMS, FLOAT32_MAX, Body, Framed, Header
from ps.errors import WireError

BLOCK_ELEMS = 256
"""Measured from 64 to 2048: times differ by a fifth; relative error of normal (heavy-tailed, log-normal scale) values:
64: 0.6% (1.3%), 256: 0.7% (2.0%), 1024: 0.8% (3.0%); times smaller than float32: 3.77, 3.94, 3.98."""

SMALLEST = 2.0**-100
"""Blocks with no larger magnitude are sent as zeros: 1 / s stays finite and s a normal number."""

_NOISE_ELEMS = CHUNK_ELEMS


class Int8(Framed):
    """Blockwise int8; 1 byte per element and 4 per 256 of them: 3.94 times less than float32."""

    code = 3
    parameter = BLOCK_ELEMS

    def __init__(self, *, stochastic: bool = False) -> None:
        super().__init__()
        self._stochastic = stochastic

    @property
    def name(self) -> str:
        """`int8` or `int8:stochastic`; each decodes the other's bytes."""
        return "int8:stochastic" if self._stochastic else "int8"

    def body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact."""
        return padded(4 * _blocks(numel)) + numel

    def _write(self, source: Tensor, body: Tensor, seed: int) -> Body:
        numel = source.numel()
        scales, codes = _parts(body, numel)
        body[scales.nbytes : padded(scales.nbytes)].zero_()
        inverse = self._scales(source, scales)
        offsets = self._offsets(seed, numel)
        for begin in range(0, numel, CHUNK_ELEMS):
            end = min(begin + CHUNK_ELEMS, numel)
            whole = end - end % BLOCK_ELEMS
            offset = offsets[begin // CHUNK_ELEMS] if self._stochastic else 0
            if whole > begin:
                self._codes(source[begin:whole], inverse[begin // BLOCK_ELEMS :], codes[begin:whole], offset)
            if end > whole:
                self._codes(source[whole:end], inverse[whole // BLOCK_ELEMS :], codes[whole:end], offset)
        return Body(padded(4 * _blocks(numel)) + numel, numel)

    def _scales(self, source: Tensor, scales_B: Tensor) -> Tensor:
        """Write the blocks' scales; returns 1 / scale per block, 0 for blocks sent as zeros, in scratch memory."""
        whole = source.numel() // BLOCK_ELEMS
        if whole:
            _magnitudes(source[: whole * BLOCK_ELEMS].view(whole, BLOCK_ELEMS), scales_B[:whole])
        if whole < scales_B.numel():
            _magnitudes(source[whole * BLOCK_ELEMS :].view(1, -1), scales_B[whole:])
        low, high = (float(bound) for bound in torch.aminmax(scales_B))
        if not math.isfinite(high):  # a NaN anywhere makes both NaN
            raise self._refuse_nonfinite()
        scales_B.div_(127)
        scales_B.clamp_(max=largest_scale(source.dtype))
        inverse = torch.reciprocal(scales_B, out=self._scratch.take("inverse", scales_B.numel(), torch.float32))
        if low < SMALLEST:
            tiny = scales_B < SMALLEST / 127
            scales_B.masked_fill_(tiny, 0)
            inverse.masked_fill_(tiny, 0)
        return inverse

    def _codes(self, source: Tensor, inverse_B: Tensor, codes: Tensor, offset: int) -> None:
        """Quantize whole blocks, or one shorter block."""
        numel = source.numel()
        rows = max(1, numel // BLOCK_ELEMS)
        scaled = self._scratch.take("scaled", numel, torch.float32)
        torch.mul(self._float32(source).view(rows, -1), inverse_B[:rows, None], out=scaled.view(rows, -1))
        if self._stochastic:
            scaled.add_(_noise()[offset : offset + numel]).clamp_(-127, 127)
        codes.copy_(scaled.round_())

    def _offsets(self, seed: int, numel: int) -> list[int]:
        """Where in the noise each chunk begins: drawn anew for each chunk of each call."""
        if not self._stochastic:
            return []
        generator = np.random.Generator(np.random.SFC64(seed % 2**63))
        draws: list[int] = generator.integers(_NOISE_ELEMS, size=-(-numel // CHUNK_ELEMS)).tolist()
        return draws

    def _read(self, header: Header, body: Tensor, into: Tensor) -> None:
        numel = into.numel()
        if header.elems != numel or header.flags or body.numel() != padded(self.body_bytes(numel, into.dtype)):
            raise WireError(f"int8: {header.elems} elements in {body.numel()} bytes, expected {numel}")
        scales, codes = _parts(body, numel)
        low, high = (float(bound) for bound in torch.aminmax(scales))
        if not 0 <= low <= high <= largest_scale(into.dtype):
            raise WireError(
                f"int8: scales from {low} to {high}, expected finite ones from 0 on that {into.dtype} holds"
            )
        if int(codes.min()) < -127:
            raise WireError("int8: code -128, which is never sent")
        for begin in range(0, numel, CHUNK_ELEMS):
            end = min(begin + CHUNK_ELEMS, numel)
            whole = end - end % BLOCK_ELEMS
            if whole > begin:
                self._values(codes[begin:whole], scales[begin // BLOCK_ELEMS :], into[begin:whole])
            if end > whole:
                self._values(codes[whole:end], scales[whole // BLOCK_ELEMS :], into[whole:end])

    def _values(self, codes: Tensor, scales_B: Tensor, into: Tensor) -> None:
        rows = max(1, codes.numel() // BLOCK_ELEMS)
        wide = into if into.dtype is torch.float32 else self._scratch.take("scaled", into.numel(), torch.float32)
        wide.copy_(codes).view(rows, -1).mul_(scales_B[:rows, None])
        if wide is not into:
            into.copy_(wide)


@functools.cache
def _noise() -> Tensor:
    """What is added before rounding: all odd multiples of 2^-18 between -1/2 and 1/2, in a fixed shuffle, twice.

    From a random offset on, each single value is uniform. Drawing one per element took more than ten times as long
    as all the rest. 1 MB, shared and only read.
    """
    values = (np.random.Generator(np.random.SFC64(1)).permutation(_NOISE_ELEMS) + 0.5) / _NOISE_ELEMS - 0.5
    return torch.from_numpy(values.astype(np.float32)).repeat(2)


@functools.cache
def largest_scale(dtype: torch.dtype) -> float:
    """Largest s for which 127 s, rounded, is finite in `dtype`."""
    if dtype is torch.float64:
        dtype = torch.float32
    scale = np.float32(torch.finfo(dtype).max) / np.float32(127)
    with np.errstate(over="ignore"):
        return float(scale if scale * np.float32(127) <= FLOAT32_MAX else np.nextafter(scale, np.float32(0)))


def _magnitudes(source_RC: Tensor, into_R: Tensor) -> None:
    """Largest magnitude of each row. Two passes over the rows are twice as fast as one that writes |x|."""
    high, low = source_RC.amax(1), source_RC.amin(1)
    torch.maximum(high, low.neg_(), out=high)
    into_R.copy_(high.clamp_(max=FLOAT32_MAX) if high.dtype is torch.float64 and bool(high.isfinite().all()) else high)


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK_ELEMS)


def _parts(body: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Views of `body`: scales per block, code per element."""
    begin = padded(4 * _blocks(numel))
    return body[: 4 * _blocks(numel)].view(torch.float32), body[begin : begin + numel].view(torch.int8)
