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


class Turn(nn.Module):
    """A complex layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 12, dtype=dtype) / 3)
        self.phase = nn.Parameter(torch.randn(12, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 9) → (batch, 12), complex."""
        return x.to(self.weight.dtype) @ self.weight * self.phase


class Waves(nn.Module):
    """A complex layer between real ones."""

    def __init__(self, dtype: torch.dtype = torch.complex64) -> None:
        super().__init__()
        self.front = nn.Linear(7, 9, dtype=dtype.to_real())
        self.turn = Turn(dtype)
        self.out = nn.Linear(24, 3, dtype=dtype.to_real())

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) → (batch, 3)."""
        hidden = self.turn(self.front(x))
        out: Tensor = self.out(torch.tanh(torch.cat((hidden.real, hidden.imag), 1)))
        return out


class Mixed(nn.Module):
    """Parameters of six dtypes, one that is empty and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(7, 16)
        self.fp16 = nn.Linear(16, 16, dtype=torch.float16)
        self.bf16 = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.fp64 = nn.Linear(16, 16, dtype=torch.float64)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.waves = nn.ModuleList([Waves(torch.complex64), Waves(torch.complex128)])
        self.head = nn.Linear(16, 7)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) → (batch, 3)."""
        hidden = self.front(x.to(self.front.weight.dtype))
        for layer in (self.fp16, self.bf16, self.fp64):
            hidden = torch.tanh(layer(hidden.to(layer.weight.dtype)))
        hidden = torch.tanh(self.head((hidden * self.scale).float()))
        first, second = self.waves
        out: Tensor = first(hidden) + second(hidden.double()).float() + self.empty.sum()
        return out


class Words(nn.Module):
    """Two embeddings whose gradients are rows, with repeated ids, and at some calls without any."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, head: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 6, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(9, 3, sparse=True, mode="sum", dtype=dtype)
        self.head = nn.Linear(6, 3, dtype=dtype) if head else None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 7) → (batch, 3): the inputs serve as ids."""
        ids = (x.float().abs() * 20).long()
        self.calls += 1
        words = self.words(ids[:, : 0 if self.calls % 5 == 3 else 4] % 40).sum(1)
        bags: Tensor = self.bags(ids[:, 4:] % 9) if self.calls % 7 else words[:, :3]
        hidden: Tensor = words[:, 3:] if self.head is None else self.head(torch.tanh(words))
        return hidden + bags


def batches(count: int, size: int = 8, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """`count` batches of (inputs (size, 7), targets (size, 3)), always the same ones."""
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(size, 7, generator=generator, dtype=dtype), torch.randn(size, 3, generator=generator, dtype=dtype))
        for _ in range(count)
    ]
