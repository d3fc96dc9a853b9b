"""What is sharded and how: parameter specifications, pieces, shards and the plan."""

from __future__ import annotations

from dataclasses import dataclass

from ps.types import ShardId

ALIGN_BYTES = 64
"""Pieces start at multiples of this in the wire layout: unaligned views change the bits of some kernels."""

NO_GROUP = -1
"""Group of parameters that no optimizer group holds, and of buffers: no gradient is ever pushed to them."""

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Parameter dtypes that can be sharded, by their torch name, with bytes per element."""

BUFFER_DTYPE_BYTES = {**DTYPE_BYTES, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
"""Those of buffers."""

LOCAL = "local"
"""Policy of buffers that are transferred once, and then belong to each worker."""

MERGED = ("average", "latest", "max")
"""Policies of buffers whose values are pushed, and merged by the servers (`ps.store.buffers`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter or persistent buffer of the model, by its name in the plain model's `state_dict()`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """A key of `DTYPE_BYTES`, of `BUFFER_DTYPE_BYTES` for buffers."""
    group: int
    """Index of the optimizer's param group, or `NO_GROUP`."""
    sparse: bool = False
    """Whether its gradients come and travel as rows: ids along the first dimension, and a row of values for each."""
    buffer: str = ""
    """For a buffer its policy: `LOCAL`, or one of `MERGED`. Empty for parameters."""

    @property
    def numel(self) -> int:
        """Elements; 1 for a 0-dim parameter."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def row_elems(self) -> int:
        """Elements of one row: what belongs to one index of the first dimension. 1 for a 0-dim parameter."""
        return self.numel // self.shape[0] if self.shape and self.shape[0] else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignature:
    """All that a plan depends on, and all that the workers of one job must agree on."""

    params: tuple[ParamSpec, ...]
    """In `named_parameters()` order, tied parameters once; after them the buffers, in `named_buffers()` order."""
    optimizer: str
    """Class name in torch.optim, e.g. `AdamW`."""
    whole_tensors: bool = False
    """True where the optimizer needs whole tensors: pieces are then never split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of one parameter inside a shard. `begin`/`end` are half-open element indices."""

    param: int
    """Index into `ModelSignature.params`."""
    begin: int
    """First element of the flattened (row-major) parameter."""
    end: int
    offset: int
    """First element within the shard's flat tensor; a multiple of `ALIGN_BYTES`."""
    shape: tuple[int, ...] | None = None
    """Shape in which the optimizer sees the piece, where that matters: the parameter's own with `whole_tensors`, whole
    rows of a sparse one. None: element-wise, so pieces may be split anywhere and run together."""

    @property
    def numel(self) -> int:
        """Elements in the piece."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A contiguous range of the flat space of parameters of one dtype and group, or buffers of one dtype and policy."""

    id: ShardId
    dtype: str
    group: int
    pieces: tuple[Piece, ...]
    """Ordered by offset, not overlapping; gaps between them are padding (zeros)."""
    numel: int
    """Elements of the flat tensor, padding included; its bytes are a multiple of `ALIGN_BYTES`."""
    row_elems: int = 0
    """Elements of a row, in shards whose gradients travel as rows: they hold one piece of whole rows. 0 = dense."""
    buffer: str = ""
    """Policy of the buffers that it holds; empty if it holds parameters."""

    @property
    def merged(self) -> bool:
        """Whether it holds buffers whose values are pushed."""
        return self.buffer in MERGED

    @property
    def nbytes(self) -> int:
        """Bytes of the flat tensor, which is also what the shard takes in a message."""
        return self.numel * BUFFER_DTYPE_BYTES[self.dtype]

    @property
    def rows(self) -> range:
        """Rows of the parameter that the shard holds; empty for dense shards."""
        if not self.row_elems:
            return range(0)
        piece = self.pieces[0]
        return range(piece.begin // self.row_elems, piece.end // self.row_elems)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """Shards of a model: a pure function of its signature and the shard size, not of the servers."""

    signature: ModelSignature
    shard_bytes: int
    shards: tuple[Shard, ...]
    """Index = shard id. Every parameter element lies in exactly one piece of one shard."""
    digest: str
    """Hex digest of signature, shard size and layout; equal digests mean interchangeable plans."""

    @property
    def nbytes(self) -> int:
        """Sum over shards."""
        return sum(shard.nbytes for shard in self.shards)
