"""The model of every driver: tensors of equal size, zeros at the start, with gradients of ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tensors(nn.Module):
    """`tensors` vectors of `numel` float32 elements."""

    def __init__(self, numel: int, tensors: int) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(numel)) for _ in range(tensors)])

    def set_gradients(self) -> None:
        """Constant gradients, made once."""
        for value in self.values:
            value.grad = torch.ones_like(value)

    @torch.no_grad()
    def edges(self) -> list[float]:
        """Smallest and largest weight of all."""
        lows = [value.min() for value in self.values]
        highs = [value.max() for value in self.values]
        return [float(min(lows)), float(max(highs))]


def edges(values: list[Tensor]) -> list[float]:
    """Smallest and largest element of all."""
    return [float(min(value.min() for value in values)), float(max(value.max() for value in values))]
