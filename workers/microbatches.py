"""Gradient accumulation: the mean over micro-batches, one of which comes with each call of `optimizer.step()`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ps.errors import ConfigError


class MicroBatches:
    """Sums gradients in memory of its own, so that `zero_grad` and clipping work per micro-batch. Not thread-safe.

    With `every` = 1 it holds nothing: gradients are what the parameters have.
    """

    def __init__(self, params: Sequence[nn.Parameter | None], every: int) -> None:
        """None stands for a parameter that the optimizer doesn't have: its gradients are neither kept nor counted.

        Raises `ConfigError` unless `every` is a whole number of at least 1.
        """
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"attach(accumulate={every!r}) must be a whole number of micro-batches, at least 1")
        self._params = params
        self._every = every
        self._sums: list[Tensor | None] = [None] * len(params)
        self._seen = 0
        self.calls = 0
        """Micro-batches since the last push, with or without a gradient."""

    @torch.no_grad()
    def add(self) -> bool:
        """Take the current gradients as one more micro-batch; whether a push is due."""
        if self._every == 1:
            return True
        grads = self._gradients()
        self.calls += 1
        self._seen += any(grad is not None for grad in grads)
        both: list[tuple[Tensor, Tensor]] = []
        for index, (mine, grad) in enumerate(zip(self._sums, grads, strict=True)):
            if grad is None:
                continue
            if mine is None:
                self._sums[index] = grad.clone()
            elif mine.is_sparse and not grad.is_sparse:  # an embedding's weight that is used elsewhere, too
                self._sums[index] = grad + mine
            else:
                both.append((mine, grad))
        if both:
            torch._foreach_add_([mine for mine, _ in both], [grad for _, grad in both])
        return self.calls >= self._every

    @torch.no_grad()
    def take(self) -> list[Tensor | None]:
        """The gradients to push, and a fresh start: the sum over the micro-batches that brought any, divided by their
        number. They may be changed only by the next `add`."""
        if self._every == 1:
            return self._gradients()
        grads, seen = self._sums, self._seen
        self.drop()
        present = [grad for grad in grads if grad is not None]
        if seen > 1 and present:
            torch._foreach_div_(present, float(seen))
        return grads

    def drop(self) -> None:
        """Forget micro-batches that no push holds."""
        self._sums = [None] * len(self._params)
        self._seen = self.calls = 0

    def _gradients(self) -> list[Tensor | None]:
        return [None if param is None else param.grad for param in self._params]
