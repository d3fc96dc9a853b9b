"""The seam: `Codec`, the codec that changes nothing, and the memory that codecs reuse.

A codec turns the flat tensor of one shard into bytes and back. Everything lives on the CPU, flat and contiguous.
Encoded shards take a multiple of 64 bytes, so that they can lie one after another in a payload.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ps.errors import WireError

ALIGN_BYTES = 64
"""Encoded shards, and the arrays within them, start at multiples of this."""

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes that codecs can encode; all others travel as they are."""

MAX_ELEMS = 2**31 - 1
"""Largest shard that a codec takes: positions in it are int32 on the wire."""


class Codec(Protocol):
    """One way to write a shard.

    Both ends make theirs from the same name. An instance keeps scratch memory (a few MB at most, grown on first
    use), so **one thread at a time** may use it; `ps.codec.select.parse` makes another. Nothing blocks. The same
    input and seed give the same bytes, on any number of threads.
    """

    @property
    def name(self) -> str:
        """What `parse` makes an equal codec from."""
        ...

    @property
    def elementwise(self) -> bool:
        """Whether each element comes back close to what it was, so that weights may be sent in it too.

        The others make sense for what is summed over many steps, under error feedback: gradients.
        """
        ...

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Most bytes that `encode` writes for such a tensor; a multiple of 64. ValueError for a dtype it can't take."""
        ...

    def encode(self, source: Tensor, into: Tensor, *, seed: int = 0) -> int:
        """Write flat `source` to the front of flat uint8 `into`; returns how many bytes, a multiple of 64.

        `into` has at least `encoded_bytes` bytes and does not overlap `source`; what is behind the returned length
        keeps no meaning. Both may be reused at once. `seed` is used by codecs that round at random: give each
        (worker, shard, push) its own. Raises `NonFiniteGradient` for inf and NaN; only `fp32` takes them.
        """
        ...

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Read flat uint8 `encoded`, exactly as long as `encode` said, into all of flat `into`.

        `into` has the numel and dtype of the tensor encoded. Raises `WireError` for bytes that can't be right, and
        has then not written to `into`. No codec but `fp32` ever gives inf or NaN.
        """
        ...


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to the next multiple of 64."""
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def check_flat(tensor: Tensor, what: str) -> None:
    """ValueError unless `tensor` is one-dimensional, contiguous and on the CPU: a fault of the caller."""
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"{what}: expected a flat contiguous CPU tensor, got {tuple(tensor.shape)} on {tensor.device}")


def check_room(into: Tensor, nbytes: int) -> None:
    """ValueError unless `into` is flat uint8 memory, aligned to 8 bytes, with room for `nbytes`."""
    check_flat(into, "into")
    if into.dtype is not torch.uint8 or into.numel() < nbytes or into.data_ptr() % 8:
        raise ValueError(f"into: expected {nbytes} aligned bytes of uint8, got {into.numel()} of {into.dtype}")


def check_arrived(encoded: Tensor) -> None:
    """`WireError` unless `encoded` is flat uint8 memory, aligned to 8 bytes, whole units of 64 bytes."""
    if encoded.dtype is not torch.uint8 or encoded.dim() != 1 or not encoded.is_contiguous():
        raise WireError(f"encoded shard: got {encoded.dtype} of {encoded.dim()} dimensions, expected flat uint8")
    if encoded.device.type != "cpu" or encoded.data_ptr() % 8 or encoded.numel() % ALIGN_BYTES:
        raise WireError(f"encoded shard: {encoded.numel()} bytes on {encoded.device} are not aligned units of 64")


class Scratch:
    """Named memory that is kept from call to call and only grows. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """`numel` elements with any content, valid until the same name and dtype is taken again."""
        kept = self._kept.get((name, dtype))
        if kept is None or kept.numel() < numel:
            kept = self._kept[name, dtype] = torch.empty(numel, dtype=dtype)
        return kept[:numel]

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return sum(tensor.nbytes for tensor in self._kept.values())


class Raw:
    """`fp32`: the shard's bytes as they are, whatever its dtype; lossless, without a header. Thread-safe."""

    @property
    def name(self) -> str:
        """Always `fp32`, also for shards of another dtype."""
        return "fp32"

    @property
    def elementwise(self) -> bool:
        """Nothing is lost."""
        return True

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Exact. A plan's shards are whole units of 64 bytes, so nothing is added to them."""
        return padded(numel * dtype.itemsize)

    def encode(self, source: Tensor, into: Tensor, *, seed: int = 0) -> int:
        """Copy; inf and NaN travel like all else."""
        check_flat(source, "source")
        nbytes = self.encoded_bytes(source.numel(), source.dtype)
        check_room(into, nbytes)
        into[: source.nbytes].view(source.dtype).copy_(source)
        into[source.nbytes : nbytes].zero_()
        return nbytes

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """Copy, if the size is right."""
        check_flat(into, "into")
        check_arrived(encoded)
        if encoded.numel() != self.encoded_bytes(into.numel(), into.dtype):
            raise WireError(f"encoded shard: got {encoded.numel()} bytes for {into.numel()} elements of {into.dtype}")
        into.copy_(encoded[: into.nbytes].view(into.dtype))


RAW = Raw()
"""Stands in wherever another codec would not shrink a shard."""
