"""Tiny models and data, the same in every process for the same seed."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """Three layers whose tensors are larger than a small shard, so that they get split."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) → (batch, 3)."""
        out: Tensor = self.head(self.body(x))
        return out


class Moody(nn.Module):
    """Uses its second branch at every other call only; has a frozen and a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) → (batch, 3)."""
        hidden = self.first(x)
        if self.calls % 2:
            hidden = hidden + self.second(x)
        self.calls += 1
        out: Tensor = self.head(torch.tanh(self.frozen(hidden) * self.scale))
        return out


class Tied(nn.Module):
    """One matrix serves as encoder, as decoder, and in a module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(7, 7, bias=False)
        self.twice = nn.Linear(7, 7)
        self.decode = nn.Linear(7, 7)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) → (batch, 3)."""
        hidden = self.twice(torch.tanh(self.twice(self.encode(x))))
        out: Tensor = self.head(self.decode(hidden))
        return out


class Strided(nn.Module):
    """Parameters that are not row-major: a channels_last kernel, a transposed matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.turned = nn.Parameter((0.1 * torch.randn(9, 24)).t())
        self.out = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) → (batch, 3)."""
        image = torch.stack((x, x.flip(1)), 1)[:, :, :, None].expand(-1, -1, -1, 3)
        hidden = self.conv(image).mean(3).flatten(1)[:, :24]
        out: Tensor = self.out(torch.tanh(hidden @ self.turned))
        return out


def batches(count: int, size: int = 8, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (inputs (size, 7), targets (size, 3)), always the same ones."""
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(size, 7, generator=generator, dtype=dtype), torch.randn(size, 3, generator=generator, dtype=dtype))
        for _ in range(count)
    ]
