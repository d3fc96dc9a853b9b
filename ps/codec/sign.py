"""`sign`: one bit per element and one scale per block of 1024 (1-bit SGD, Seide et al. 2014; scaled as in EF-SGD,
Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").

For a block x of n elements, s = (1/n) Σ |x_i| travels as float32 and

    x̂_i = s where x_i ≥ 0, -s where x_i < 0        Σ (x_i - x̂_i)² = Σ x_i² - n s² ≤ Σ x_i²

so that it is a contraction, with equality only for x = 0 (where x̂ = 0 too, exactly): what error feedback needs. In
float32, s is off by at most 2^-20 s, and below 2^-126 by another 2^-140. A zero comes back as ±s: elements that take
no part must be left out by the receiver. float64 is saturated at float32's range.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ps.codec.base import padded
from ps.codec.frame import CHUNK_ELEMS, FLOAT32_MAX, Body, Framed, Header
from ps.errors import WireError

BLOCK_ELEMS = 1024
"""1.03 bits per element; the sum of each row is at full speed from here on."""

_SIGNS = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)
"""Byte → its 8 signs as float32, the least significant bit first."""


class Sign(Framed):
    """1 bit per element and 4 bytes per 1024 of them: 31 times less than float32."""

    code = 4
    parameter = BLOCK_ELEMS
    elementwise = False

    @property
    def name(self) -> str:
        """Always `sign`."""
        return "sign"

    def body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact."""
        return padded(4 * _blocks(numel)) + -(-numel // 8)

    def _write(self, source: Tensor, body: Tensor, seed: int) -> Body:
        numel = source.numel()
        scales, bits = _parts(body, numel)
        body[scales.nbytes : padded(scales.nbytes)].zero_()
        for begin in range(0, numel, CHUNK_ELEMS):
            chunk = self._float32(source[begin : begin + CHUNK_ELEMS])
            self._means(chunk, scales[begin // BLOCK_ELEMS :])
            signs = self._scratch.take("signs", chunk.numel(), torch.bool).numpy()
            packed = np.packbits(np.signbit(chunk.numpy(), out=signs), bitorder="little")
            bits[begin // 8 : begin // 8 + len(packed)] = packed
        if not math.isfinite(float(scales.sum(dtype=torch.float64))):
            raise self._refuse_nonfinite()
        scales.clamp_(max=min(FLOAT32_MAX, torch.finfo(source.dtype).max))  # a mean of largest values may round up
        return Body(self.body_bytes(numel, source.dtype), numel)

    def _means(self, chunk: Tensor, scales_B: Tensor) -> None:
        """Mean magnitude of each block of the chunk."""
        magnitudes = torch.abs(chunk, out=self._scratch.take("magnitudes", chunk.numel(), torch.float32))
        rows, rest = divmod(chunk.numel(), BLOCK_ELEMS)
        blocks = [magnitudes[: rows * BLOCK_ELEMS].view(rows, BLOCK_ELEMS)] if rows else []
        blocks += [magnitudes[rows * BLOCK_ELEMS :].view(1, rest)] if rest else []
        at = 0
        for block in blocks:
            means = block.sum(1).div_(block.shape[1])
            if not bool(means.isfinite().all()):  # the sum of huge values overflows, their mean does not
                means = block.to(torch.float64).mean(1).to(torch.float32)
            scales_B[at : at + len(block)] = means
            at += len(block)

    def _read(self, header: Header, body: Tensor, into: Tensor) -> None:
        numel = into.numel()
        if header.elems != numel or header.flags or body.numel() != padded(self.body_bytes(numel, into.dtype)):
            raise WireError(f"sign: {header.elems} elements in {body.numel()} bytes, expected {numel}")
        scales, bits = _parts(body, numel)
        low, high = (float(bound) for bound in torch.aminmax(scales))
        if not 0 <= low <= high <= min(FLOAT32_MAX, torch.finfo(into.dtype).max):
            raise WireError(
                f"sign: scales from {low} to {high}, expected finite ones from 0 on that {into.dtype} holds"
            )
        if numel % 8 and bits[-1] >> numel % 8:
            raise WireError("sign: bits behind the last element are set")
        for begin in range(0, numel, CHUNK_ELEMS):
            chunk = into[begin : begin + CHUNK_ELEMS]
            packed = bits[begin // 8 : begin // 8 + -(-chunk.numel() // 8)]
            self._values(packed, scales[begin // BLOCK_ELEMS :], chunk)

    def _values(self, packed: NDArray[np.uint8], scales_B: Tensor, into: Tensor) -> None:
        numel = into.numel()
        rows, rest = divmod(numel, BLOCK_ELEMS)
        wide = self._scratch.take("magnitudes", 8 * len(packed), torch.float32)
        if into.dtype is torch.float32 and numel % 8 == 0:
            wide = into
        # mode="clip" skips a check per index (a byte is always in range) and writes straight to `out`.
        _SIGNS.take(packed, axis=0, out=wide.numpy().reshape(-1, 8), mode="clip")
        if rows:
            wide[: rows * BLOCK_ELEMS].view(rows, BLOCK_ELEMS).mul_(scales_B[:rows, None])
        if rest:
            wide[rows * BLOCK_ELEMS :].mul_(scales_B[rows])
        if wide is not into:
            into.copy_(wide[:numel])


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK_ELEMS)


def _parts(body: Tensor, numel: int) -> tuple[Tensor, NDArray[np.uint8]]:
    """Views of `body`: scales per block, and the bits."""
    begin = padded(4 * _blocks(numel))
    bits: NDArray[np.uint8] = body[begin : begin + -(-numel // 8)].numpy()
    return body[: 4 * _blocks(numel)].view(torch.float32), bits
