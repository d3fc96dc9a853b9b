"""Payloads: flat uint8 CPU tensors that own exactly their storage.

TensorPipe sends the whole storage behind a tensor. A plain slice of a larger buffer would drag all of it along, so a
slice is made over the same memory but with a storage of its own (`over`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ps.errors import WireError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def empty() -> Tensor:
    """A payload of no bytes."""
    return torch.empty(0, dtype=torch.uint8)


def over(buffer: NDArray[np.uint8] | Tensor, begin: int = 0, end: int | None = None) -> Tensor:
    """Bytes [begin, end) of a flat uint8 `buffer` as a payload, without a copy.

    The result shares the buffer's memory and keeps it alive; its storage is just those bytes. A tensor given must be
    a flat contiguous CPU tensor.
    """
    flat = buffer.numpy() if isinstance(buffer, Tensor) else buffer
    if flat.dtype != np.uint8 or flat.ndim != 1 or not flat.flags.c_contiguous:
        raise ValueError(f"payload over {flat.dtype} of shape {flat.shape}: expected a flat contiguous uint8 buffer")
    stop = len(flat) if end is None else end
    if not 0 <= begin <= stop <= len(flat):
        raise ValueError(f"payload over [{begin}, {stop}) of {len(flat)} bytes")
    return check(torch.from_numpy(flat[begin:stop]))


def check(payload: object, *, any_device: bool = False) -> Tensor:
    """`payload` if it can be one; `WireError` naming what is wrong otherwise. Costs microseconds, reads no data.

    `any_device`: within one process a payload may live on any device, on the wire only on the CPU.
    """
    if type(payload) is not Tensor:
        raise WireError(f"payload: got {type(payload).__name__}, expected a plain tensor")
    if payload.dtype is not torch.uint8 or payload.dim() != 1:
        raise WireError(f"payload: got {payload.dtype} of {payload.dim()} dimensions, expected flat uint8")
    if not any_device and payload.device.type != "cpu":
        raise WireError(f"payload: got a tensor on {payload.device}, only CPU tensors travel")
    held = payload.untyped_storage().nbytes()
    if held != payload.numel() or not payload.is_contiguous():
        raise WireError(f"payload: {payload.numel()} bytes in a storage of {held}; it must own exactly its storage")
    return payload
