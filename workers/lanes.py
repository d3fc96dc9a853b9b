"""Copies between the memory of a model's devices and the host memory that is sent, one lane for each device.

On a GPU they run on a stream of their own: the compute stream waits, on the GPU, for nothing but what it must not
overtake, and the host waits only for gradients that it is about to send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(to, from): as `copy_` takes them."""


class Lane(Protocol):
    """One device's copies. For the thread that owns the model."""

    flat: torch.device | None
    """Where gathered tensors are laid side by side before they move to the host as one; None = at once in the host's
    memory."""
    pinned: bool
    """Whether the host memory should be pinned."""

    def gather(self, pairs: Pairs, moves: Pairs) -> None:
        """Copy tensors of the device, then move what was gathered to the host. The sources may be changed at once by
        whatever is queued on the device from now on; the host may read once `ready` is back."""
        ...

    def ready(self) -> None:
        """Wait until everything gathered is in host memory."""
        ...

    def bring(self, payload: Tensor) -> Tensor:
        """What has arrived in host memory, for `scatter` to copy from; `payload` may be let go of at once."""
        ...

    def scatter(self, pairs: Pairs) -> None:
        """Copy into tensors of the device. Work queued from now on sees them changed; earlier work does not."""
        ...


class HostLane:
    """For the CPU, and for devices without a lane of their own: plain copies, over when they return."""

    flat: torch.device | None = None
    pinned = False

    def gather(self, pairs: Pairs, moves: Pairs) -> None:
        """See `Lane`."""
        copy(pairs)
        copy(moves)

    def ready(self) -> None:
        """See `Lane`."""

    def bring(self, payload: Tensor) -> Tensor:
        """See `Lane`."""
        return payload

    def scatter(self, pairs: Pairs) -> None:
        """See `Lane`."""
        copy(pairs)


class CudaLane:
    """For one GPU: a side stream and pinned host memory.

    Gradients need no `record_stream`: whatever is queued on the compute stream after `gather`, and could reuse their
    memory, waits for the copies. Pinned memory that `bring` makes comes from torch's caching host allocator, which
    keeps it until the copy out of it is done.
    """

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self.flat: torch.device | None = device
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def gather(self, pairs: Pairs, moves: Pairs) -> None:
        """See `Lane`. The compute stream waits for the copies, the host does not."""
        if not pairs:
            return
        with self._side():
            copy(pairs)
            for host, flat in moves:
                host.copy_(flat, non_blocking=True)
            self._gathered.record(self._stream)

    def ready(self) -> None:
        """See `Lane`. Blocks the host, not the GPU."""
        self._gathered.synchronize()

    def bring(self, payload: Tensor) -> Tensor:
        """See `Lane`."""
        with self._side():
            return payload.pin_memory().to(self._device, non_blocking=True)

    def scatter(self, pairs: Pairs) -> None:
        """See `Lane`."""
        with self._side():
            copy(pairs)

    def _side(self) -> _Side:
        return _Side(self._device, self._stream)


class _Side:
    """Within: on the side stream, after all that is queued; the compute stream goes on after it."""

    def __init__(self, device: torch.device, side: torch.cuda.Stream) -> None:
        self._compute = torch.cuda.current_stream(device)
        self._side = side
        self._inside = torch.cuda.stream(side)

    def __enter__(self) -> None:
        self._side.wait_stream(self._compute)
        self._inside.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        self._inside.__exit__(*error)
        self._compute.wait_stream(self._side)


def lane_for(device: torch.device) -> Lane:
    """A new lane for a device."""
    return CudaLane(device) if device.type == "cuda" else HostLane()


def copy(pairs: Pairs) -> None:
    """All copies with one call."""
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])
