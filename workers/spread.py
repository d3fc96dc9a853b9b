"""Between the ranks of a process group: rank 0's tensors to all, and whether all have the same gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from ps.errors import GroupLost

_MESSAGE_BYTES = 32 << 20
"""Tensors go together up to about this size. So much memory is kept, or what the biggest tensor takes."""
_ALIGN_BYTES = 16  # of the biggest dtype, complex128

_SAMPLED_PARAMS = 16
_SAMPLED_ELEMS = 8


class Spread:
    """Copies tensors of rank 0 to the other ranks. Not thread-safe: for the thread that owns the model."""

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        """`group` is for tensors in main memory; those on devices go over the default group's backend."""
        self._groups: dict[str, distributed.ProcessGroup | None] = {"cpu": group}
        self._buffers: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor], *, leads: bool) -> None:
        """Give all ranks, which all call this, the values that rank 0 has. Raises `GroupLost` when one of them is gone.

        Blocks until they are there. Tensors are written through, so that their version counters move; not rank 0's.
        """
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            for bucket in _buckets([tensor for tensor in tensors if tensor.device == device and tensor.numel()]):
                self._send(bucket, device, leads=leads)

    def _send(self, tensors: Sequence[Tensor], device: torch.device, *, leads: bool) -> None:
        nbytes = sum(map(_padded_bytes, tensors))
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < nbytes:
            buffer = self._buffers[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        views, at = [], 0
        for tensor in tensors:
            views.append(buffer[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += _padded_bytes(tensor)
        if leads:
            torch._foreach_copy_(views, list(tensors))
        try:
            distributed.broadcast(buffer[:nbytes], src=0, group=self._group(device))
        except RuntimeError as error:  # what all backends raise
            raise GroupLost(f"the process group broke while new weights were on their way: {error}") from error
        if not leads:
            torch._foreach_copy_(list(tensors), views)

    def _group(self, device: torch.device) -> distributed.ProcessGroup | None:
        if device.type not in self._groups:
            group = distributed.new_group()
            self._groups[device.type] = group if isinstance(group, distributed.ProcessGroup) else None
        return self._groups[device.type]


def _padded_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    found: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        nbytes = _padded_bytes(tensor)
        if nbytes > room:
            found.append([])
            room = max(nbytes, _MESSAGE_BYTES)
        found[-1].append(tensor)
        room -= nbytes
    return found


@torch.no_grad()
def sample_gradients(params: Sequence[Tensor], turn: int) -> tuple[float, ...]:
    """A few elements of a few gradients, other ones at each `turn`: 0 for those that are sparse or not there."""
    picked = [params[(turn * _SAMPLED_PARAMS + index) % len(params)] for index in range(_SAMPLED_PARAMS)]
    parts = [_elements(param.grad, turn) for param in picked]
    devices = {part.device for part in parts}
    if len(devices) > 1:
        parts = [part.cpu() for part in parts]
    return tuple(torch.cat(parts).tolist())


def _elements(grad: Tensor | None, turn: int) -> Tensor:
    if grad is None or grad.layout is not torch.strided or not grad.numel():
        return torch.zeros(_SAMPLED_ELEMS)
    begin, step = turn % grad.numel(), max(1, grad.numel() // _SAMPLED_ELEMS)
    positions = [(begin + index * step) % grad.numel() for index in range(_SAMPLED_ELEMS)]
    if grad.is_contiguous():
        found = grad.view(-1)[positions]
    else:
        found = torch.stack([grad[_index(position, grad.shape)] for position in positions])
    return (found.abs() if found.is_complex() else found).float()


def _index(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        position, rest = divmod(position, size)
        index.append(rest)
    return tuple(reversed(index))


def alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two ranks' samples are of the same gradients, give or take what their machines round differently."""
    a, b = torch.tensor(one), torch.tensor(other)
    finite = a[a.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, atol=1e-6 * scale, equal_nan=True)
