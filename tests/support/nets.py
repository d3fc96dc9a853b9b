"""Small models of the kinds that people train, for golden cases; (batch, 7) → (batch, 3) each."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.models import Mlp, batches


class Branching(nn.Module):
    """The data decide which branch is taken, and how often; one branch is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 9)
        self.branches = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.leave = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Up to four rounds through the first or the second branch."""
        hidden = torch.tanh(self.enter(x))
        for _ in range(1 + int(x[0, 0].abs() * 2) % 4):
            hidden = torch.tanh(self.branches[int(hidden.sum() > 0)](hidden))
        return cast(Tensor, self.leave(hidden))


class Normed(nn.Module):
    """Buffers of all kinds: running statistics, also of a layer that is frozen, counters, constants, an average of its
    own that is replaced in forward, and one that is not persistent and changes its shape."""

    mean: Tensor
    mask: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 40, bias=False), nn.BatchNorm1d(40), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(40, 9, bias=False), nn.BatchNorm1d(9, momentum=None, affine=False))
        self.frozen = nn.BatchNorm1d(9).requires_grad_(False)
        self.out = nn.Linear(9, 3)
        self.register_buffer("mean", torch.zeros(9, dtype=torch.float64))
        self.register_buffer("mask", torch.arange(9) % 4 != 0)
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("last", torch.empty(0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        """Each layer once."""
        self.frozen.eval()
        hidden = self.frozen(self.second(self.first(x))) * self.mask
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0).double()
            self.seen += len(x)
            self.last = hidden.detach()[: int(self.seen) % 5]
        return cast(Tensor, self.out(torch.tanh(hidden - self.mean.float())))


class Parametrized(nn.Module):
    """Weights that are computed from other parameters: three parametrizations and an old-style pre-hook."""

    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(7, 12))
        self.spectral = parametrizations.spectral_norm(nn.Linear(12, 12))
        self.turned = parametrizations.orthogonal(nn.Linear(12, 12))
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        """One after the other."""
        hidden = torch.tanh(self.spectral(torch.tanh(self.normed(x))))
        return cast(Tensor, self.out(torch.tanh(self.turned(hidden))))


class Attentive(nn.Module):
    """A stock transformer layer, which uses its children's weights without calling them, and an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(1, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.1, batch_first=True)
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Each of the seven numbers is a token."""
        states, _ = self.lstm(self.layer(self.enter(x.unsqueeze(2))))
        return cast(Tensor, self.out(states[:, -1]))


class Checkpointed(nn.Module):
    """Recomputes both halves of its forward in backward, by either variant."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Reentrant needs an input that requires a gradient."""
        hidden = checkpoint(self.first, x.clone().requires_grad_(), use_reentrant=True)
        return cast(Tensor, self.out(checkpoint(self.second, hidden, use_reentrant=False)))


def lazy() -> nn.Module:
    """Lazy layers after the dry run that gives them their shapes."""
    model = nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(3))
    model(batches(1)[0][0])
    return model


def parallel() -> nn.Module:
    """Wrapped in DataParallel."""
    return nn.DataParallel(Mlp())


def compiled() -> nn.Module:
    """Compiled before it is attached."""
    return cast(nn.Module, torch.compile(Mlp(), backend="eager"))
