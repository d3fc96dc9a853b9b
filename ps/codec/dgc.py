"""Two additions to `topk` from Deep Gradient Compression (Lin et al. 2018): both pure, both optional."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Ratio kept, falling geometrically from `first` to `ratio` over the first `stages` stages (epochs, or steps):

        R_e = first · (ratio / first)^(min(e, stages) / stages)        e = 0, 1, 2, …

    With first = 0.25, ratio = 0.001 and stages = 4 these are the paper's 25%, 6.3%, 1.6%, 0.4%, 0.1%. While weights
    change fast, sparse updates are stale updates, so more is sent then.

    >>> [round(WarmUp(ratio=0.001, stages=4).at(e), 4) for e in (0, 1, 4, 9)]
    [0.25, 0.0629, 0.001, 0.001]
    """

    ratio: float
    """Kept in the end, in (0, 1]."""
    stages: int = 4
    """0 = no warm-up."""
    first: float = 0.25
    """Kept at first; where `ratio` is larger, `ratio` from the start."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or not 0 < self.first <= 1 or self.stages < 0:
            raise ValueError(f"{self}: ratio and first are fractions in (0, 1], stages at least 0")

    def at(self, stage: int) -> float:
        """The ratio of a stage, counted from 0."""
        if stage >= self.stages or self.ratio >= self.first:
            return self.ratio
        return float(self.first * (self.ratio / self.first) ** (stage / self.stages))


class MomentumCorrection:
    """Momentum on the worker, before sparsification, with factor masking.

        u_t = m u_{t-1} + g_t                   what is given to error feedback in place of g_t
        u_t[i] = 0 where element i was sent     its momentum has been passed on; going on would count it twice

    Without it, an element's momentum would start only when it is sent, long after its gradients came. The servers'
    optimizer must then have no momentum of its own. Not thread-safe. One model more of memory.
    """

    def __init__(self, momentum: float, numel: int, dtype: torch.dtype) -> None:
        if not 0 < momentum < 1:
            raise ValueError(f"momentum: got {momentum}, expected a number in (0, 1)")
        self.momentum = momentum
        self.velocity = torch.zeros(numel, dtype=dtype)
        """u, in unscaled units."""

    def add_to(self, corrected: Tensor, begin: int, end: int, scale: float) -> None:
        """Add scale · m u_{t-1} of this stretch to `corrected`, which is as long. State does not change."""
        corrected.add_(self.velocity[begin:end], alpha=scale * self.momentum)

    def commit(self, begin: int, end: int, gradient: Tensor, factor: float, sent: Tensor) -> None:
        """The step counts: move this stretch on to u_t, with g_t = factor · `gradient`; zero wherever `sent` is not."""
        velocity = self.velocity[begin:end]
        velocity.mul_(self.momentum).add_(gradient, alpha=factor)
        velocity.masked_fill_(sent != 0, 0)
