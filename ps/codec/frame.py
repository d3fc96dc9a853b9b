"""What all encoded shards but raw ones have in common: a header of 64 bytes, and its checks.

The header says which codec wrote the body, for which tensor, and how long it is; the receiver expects all of it.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ps.codec.base import FLOATS, MAX_ELEMS, Scratch, check_arrived, check_flat, check_room, padded
from ps.errors import NonFiniteGradient, WireError

HEADER_BYTES = 64

FRAME_FORMAT = 1
"""First byte of every header; another number is refused."""

CHUNK_ELEMS = 1 << 17
"""Elements worked on at a time: 512 KB of float32 scratch stays in the second-level cache. A multiple of all blocks."""

FLOAT32_MAX = torch.finfo(torch.float32).max

_FIELDS = struct.Struct("<BBBBIQQQ32x")
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(FLOATS, start=1)}


class Header(NamedTuple):
    """First 64 bytes of an encoded shard, little-endian."""

    format: int
    codec: int
    dtype: int
    """1 float64, 2 float32, 3 float16, 4 bfloat16: of the tensor that was encoded."""
    flags: int
    """The codec's own."""
    parameter: int
    """The codec's own: what both ends must agree on, such as a block's elements."""
    numel: int
    nbytes: int
    """Of the whole encoded shard, this header and padding included."""
    elems: int
    """Elements that the body holds; fewer than `numel` for a sparse codec."""

    @classmethod
    def read(cls, encoded: Tensor) -> Header:
        """The header of the encoded shard at the front of `encoded`, which may be longer than that; `WireError`."""
        check_arrived(encoded)
        if encoded.numel() < HEADER_BYTES:
            raise WireError(f"encoded shard: got {encoded.numel()} bytes, a header takes {HEADER_BYTES}")
        raw = encoded[:HEADER_BYTES].numpy().tobytes()
        header = cls(*_FIELDS.unpack(raw))
        if header.format != FRAME_FORMAT:
            raise WireError(f"encoded shard: format {header.format}, this process reads {FRAME_FORMAT}")
        if any(raw[_FIELDS.size - 32 :]):
            raise WireError("encoded shard: bytes of the header that should be zero are not")
        if not HEADER_BYTES <= header.nbytes <= encoded.numel() or header.nbytes % HEADER_BYTES:
            raise WireError(f"encoded shard: it says {header.nbytes} bytes, {encoded.numel()} are there")
        return header

    def write(self, into: Tensor) -> None:
        """Write it to the front of `into`."""
        into.numpy()[:HEADER_BYTES] = np.frombuffer(_FIELDS.pack(*self), dtype=np.uint8)


class Body(NamedTuple):
    """What a codec has written behind the header."""

    nbytes: int
    elems: int
    flags: int = 0


class Framed(ABC):
    """A codec with a header. Subclasses write and read what is behind it."""

    code: int
    """Number of the codec in the header; never given to another."""
    parameter: int = 0
    """See `Header.parameter`."""
    elementwise: bool = True

    def __init__(self) -> None:
        self._scratch = Scratch()

    @property
    @abstractmethod
    def name(self) -> str:
        """See `Codec.name`."""

    @abstractmethod
    def body_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Most bytes that `_write` takes."""

    @abstractmethod
    def _write(self, source: Tensor, body: Tensor, seed: int) -> Body:
        """Encode a non-empty tensor of float dtype into `body`, which has room."""

    @abstractmethod
    def _read(self, header: Header, body: Tensor, into: Tensor) -> None:
        """Check all of `body`, then decode it. `header` is right in all that does not depend on the codec."""

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See `Codec.encoded_bytes`."""
        if dtype not in FLOATS or not 1 <= numel <= MAX_ELEMS:
            raise ValueError(
                f"{self.name} encodes 1 to {MAX_ELEMS} floats, got {numel} of {dtype}; send them as they are"
            )
        return HEADER_BYTES + padded(self.body_bytes(numel, dtype))

    def encode(self, source: Tensor, into: Tensor, *, seed: int = 0) -> int:
        """See `Codec.encode`."""
        check_flat(source, "source")
        check_room(into, self.encoded_bytes(source.numel(), source.dtype))
        body = self._write(source.detach(), into[HEADER_BYTES:], seed)
        end = HEADER_BYTES + padded(body.nbytes)
        into[HEADER_BYTES + body.nbytes : end].zero_()
        dtype = _DTYPE_CODES[source.dtype]
        head = Header(FRAME_FORMAT, self.code, dtype, body.flags, self.parameter, source.numel(), end, body.elems)
        head.write(into)
        return end

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """See `Codec.decode`."""
        check_flat(into, "into")
        self.encoded_bytes(into.numel(), into.dtype)  # refuses what can't be encoded
        header = Header.read(encoded)
        expected = (self.code, _DTYPE_CODES[into.dtype], self.parameter, into.numel(), encoded.numel())
        got = (header.codec, header.dtype, header.parameter, header.numel, header.nbytes)
        if got != expected:
            raise WireError(
                f"encoded shard: (codec, dtype, parameter, elements, bytes) is {got}, {self.name} expects {expected}"
            )
        self._read(header, encoded[HEADER_BYTES:], into.detach())

    def _float32(self, chunk: Tensor) -> Tensor:
        """`chunk` itself, or as float32 in scratch memory; float64 is checked, and saturated at float32's range."""
        if chunk.dtype is torch.float32:
            return chunk
        if chunk.dtype is torch.float64:
            if not bool(chunk.isfinite().all()):
                raise self._refuse_nonfinite()
            chunk = chunk.clamp(-FLOAT32_MAX, FLOAT32_MAX)
        return self._scratch.take("float32", chunk.numel(), torch.float32).copy_(chunk)

    def _refuse_nonfinite(self) -> NonFiniteGradient:
        return NonFiniteGradient(f"a tensor to be encoded as {self.name} holds inf or NaN, which it can't represent")
