"""BufferShard: buffers of a model (BatchNorm's running statistics and the like), of which workers push values.

A worker pushes its values and the version on which they are based. If nobody else has pushed since, they are taken as
they are: with one worker the servers hold exactly what it has. Else they are one branch of several:

    average   A ← A + (x − A) n / (n + m)   n samples behind the values x, m behind what others pushed since their base
    max       A ← max(A, x)                 integers, such as `num_batches_tracked`
    latest    A ← x

so that k workers which all start at the same version come to their mean weighted by samples, and one that is late
counts for as much as it has seen. The average is convex: variances stay positive.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ps.optim.spec import ServedOptimizer
from ps.sharding.spec import Shard
from ps.store.aggregate import everything
from ps.store.dense import DenseShard
from ps.types import DENSE, Incarnation, Version

_LOG = 256
"""How many of the last pushes are remembered; on an older base what they come to counts as all there was."""


class BufferShard(DenseShard):
    """Not thread-safe: the shard's lock guards it. No consistency choice applies: nobody waits for buffers."""

    def __init__(self, spec: Shard, epoch: int, optimizer: ServedOptimizer, *, exact: bool) -> None:
        super().__init__(spec, epoch, optimizer, exact=exact)
        self.merges = 0
        """Pushes taken; `pushes` counts optimizer steps, of which there are none."""
        self._log: deque[tuple[int, Incarnation, int]] = deque(maxlen=_LOG)
        """(version, worker, samples) of the last pushes."""

    @torch.no_grad()
    def merge(
        self, incarnation: Incarnation, region: Tensor | None, present: bytes, base: Version, samples: int
    ) -> None:
        """Take one worker's values of the buffers present: a new version. None = none at all."""
        others = sum(count for at, who, count in self._log if who != incarnation and self._after(at, base))
        own = max(1, samples)
        values = self.gradient(region, DENSE)
        if values is not None and present == everything(len(self.spec.pieces)):
            self._mix(self._weights, values, own / (own + others))
        elif values is not None:
            for index, piece in enumerate(self.spec.pieces):
                if present[index >> 3] >> (index & 7) & 1:
                    stretch = slice(piece.offset, piece.offset + piece.numel)
                    self._mix(self._weights[stretch], values[stretch], own / (own + others))
        self.version = Version(self.version.epoch, self.version.counter + 1)
        self.merges += 1
        self._log.append((self.version.counter, incarnation, own))

    def _after(self, counter: int, base: Version) -> bool:
        return base.epoch != self.version.epoch or counter > base.counter

    def _mix(self, mine: Tensor, theirs: Tensor, share: float) -> None:
        if share == 1.0 or self.spec.buffer == "latest":
            mine.copy_(theirs)
        elif self.spec.buffer == "max":
            torch.maximum(mine, theirs, out=mine)
        else:
            mine.lerp_(theirs, share)

    def begin_epoch(self, epoch: int) -> None:
        """See `DenseShard.begin_epoch`."""
        super().begin_epoch(epoch)
        self._log.clear()
