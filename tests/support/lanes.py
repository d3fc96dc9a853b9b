"""A lane that does on the CPU what a GPU's does: gathers flat first, brings replies over before it copies them."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.lanes import HostLane, Pairs


class FlatLane(HostLane):
    """Counts what it moves."""

    flat = torch.device("cpu")

    def __init__(self) -> None:
        self.moved: list[int] = []
        self.brought = 0
        self.scattered = 0

    def gather(self, pairs: Pairs, moves: Pairs) -> None:
        """See `Lane`."""
        super().gather(pairs, moves)
        self.moved += [host.numel() for host, _ in moves]

    def bring(self, payload: Tensor) -> Tensor:
        """See `Lane`."""
        self.brought += 1
        return payload.clone()

    def scatter(self, pairs: Pairs) -> None:
        """See `Lane`."""
        super().scatter(pairs)
        self.scattered += len(pairs)
