"""Optimizer state away from its optimizer: of the pieces of a shard as tensors, and as the bytes of a payload.

The bytes are a safetensors file with an entry `<piece>.<key>` for each tensor; complex ones are there as real ones with
a last dimension of 2. State of a 16-bit parameter is that of its float32 master.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ps.errors import WireError
from ps.finite import all_finite
from ps.optim.spec import ServedOptimizer, StateKey, StateKind
from ps.sharding.spec import Piece, Shard

PieceEntries: TypeAlias = "dict[str, Tensor]"
"""State of one piece: key → tensor as its `StateKind` says, in the class's order. Elements are flat, or in the piece's
shape where it has one. Empty = no state yet."""

MASTER_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Wire dtype → dtype of weights and state on the servers, where that is another one."""


def state_dtype(dtype: str) -> torch.dtype:
    """Dtype of the state of a parameter of this dtype."""
    wire: torch.dtype = getattr(torch, dtype)
    return MASTER_DTYPES.get(wire, wire)


def shape_of(key: StateKey, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Shape of an entry for a parameter or piece of this shape; None where the class keeps no such entry."""
    if key.kind in (StateKind.NUMBER, StateKind.COUNT):
        return ()
    if key.kind is StateKind.ELEMENTS:
        return shape
    if len(shape) < 2:
        return None
    return (*shape[:-1], 1) if key.kind is StateKind.ROWS else (*shape[:-2], 1, shape[-1])


def piece_shape(piece: Piece) -> tuple[int, ...]:
    """Shape in which the optimizer sees a piece."""
    return piece.shape if piece.shape is not None else (piece.numel,)


def pack(pieces: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """The state of a shard's pieces as a payload. Copies."""
    tensors = {
        f"{index}.{key}": (torch.view_as_real(value) if value.is_complex() else value).contiguous().cpu()
        for index, entries in enumerate(pieces)
        for key, value in entries.items()
    }
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def unpack(payload: Tensor, shard: Shard, optimizer: ServedOptimizer) -> tuple[PieceEntries, ...]:
    """State of each of the shard's pieces, a copy. Raises `WireError` for all but state of that shard and class."""
    try:
        tensors = load(payload.cpu().numpy().tobytes())
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise WireError(f"optimizer state of shard {shard.id}: {error}") from error
    dtype = state_dtype(shard.dtype)
    pieces = tuple(
        _take(tensors, f"{index}.", piece_shape(piece), dtype, optimizer) for index, piece in enumerate(shard.pieces)
    )
    if tensors:
        raise WireError(f"optimizer state of shard {shard.id}: {next(iter(tensors))!r} is not part of it")
    return pieces


def _take(
    tensors: dict[str, Tensor], prefix: str, shape: tuple[int, ...], dtype: torch.dtype, optimizer: ServedOptimizer
) -> PieceEntries:
    """Take the entries of one piece out of `tensors`."""
    found: PieceEntries = {}
    for key in optimizer.state:
        value = tensors.pop(prefix + key.name, None)
        expected = shape_of(key, shape)
        if value is not None and expected is not None:
            found[key.name] = _checked(prefix + key.name, value, key, expected, dtype)
        elif value is not None:
            raise WireError(f"optimizer state: {prefix}{key.name} makes no sense for shape {list(shape)}")
    missing = [key.name for key in optimizer.state if key.name not in found and not key.optional]
    if found and missing:
        raise WireError(f"optimizer state: {optimizer.name} lacks {prefix}{missing[0]}")
    return found


def _checked(name: str, value: Tensor, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_complex and key.kind not in (StateKind.NUMBER, StateKind.COUNT):
        if value.dtype is not dtype.to_real() or value.shape[-1:] != (2,):
            raise WireError(f"optimizer state: {name} is {value.dtype} {list(value.shape)}, expected pairs for {dtype}")
        value = torch.view_as_complex(value)
    wanted = {StateKind.NUMBER: torch.float32, StateKind.COUNT: torch.int64}.get(key.kind, dtype)
    if value.dtype is not wanted or tuple(value.shape) != shape:
        raise WireError(
            f"optimizer state: {name} is {value.dtype} {list(value.shape)}, expected {wanted} {list(shape)}"
        )
    if not all_finite(value):
        raise WireError(f"optimizer state: {name} holds inf or NaN")
    return value
