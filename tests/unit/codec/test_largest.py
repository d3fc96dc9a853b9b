"""Positions of the largest magnitudes against a stable sort of all elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ps.codec.largest import Largest

NUMEL = 140_000
"""More than a sample needs, and more than one chunk."""


def sorted_positions(source: Tensor, count: int) -> Tensor:
    """The specification: the first `count` by magnitude, earlier positions first among equals, without zeros."""
    order = torch.sort(source.abs(), descending=True, stable=True).indices[:count]
    return order[source[order] != 0].sort().values


def spiked(stride: int) -> Tensor:
    """Large values where a sample of regular stride would see nothing else, or nothing of them."""
    source = torch.randn(NUMEL) * 1e-3
    source[::stride] += 5
    return source


SOURCES = {
    "normal": torch.randn(NUMEL),
    "ties": torch.randint(-3, 4, (NUMEL,)).float(),
    "constant": torch.full((NUMEL,), -2.0),
    "zeros": torch.zeros(NUMEL),
    "few non-zero": torch.zeros(NUMEL).index_fill_(0, torch.arange(0, NUMEL, 7001), 1.0),
    "regular spikes": spiked(8),
    "sorted": torch.arange(NUMEL).float(),
    "half large": torch.cat([torch.randn(NUMEL // 2), torch.randn(NUMEL // 2) * 100]),
}


@pytest.mark.parametrize("count", [1, 700, 20_000])
@pytest.mark.parametrize("kind", SOURCES)
def test_same_as_a_stable_sort(kind: str, count: int) -> None:
    """Whatever the sample makes one believe, the positions are exactly those of a stable sort."""
    found = Largest(lambda chunk: chunk).positions(SOURCES[kind], count)
    assert torch.equal(torch.from_numpy(found), sorted_positions(SOURCES[kind], count))


def test_wrong_guess_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A threshold guessed far too high is replaced by the exact one."""
    monkeypatch.setattr(Largest, "_guess", lambda self, source, count: int(np.float32(3).view(np.int32)))
    found = Largest(lambda chunk: chunk).positions(SOURCES["normal"], 20_000)
    assert torch.equal(torch.from_numpy(found), sorted_positions(SOURCES["normal"], 20_000))


def test_nonfinite_values_come_first() -> None:
    """NaN and inf count as the largest, so that whoever sends what was found sees them."""
    source = torch.randn(NUMEL)
    source[[5, 70_000, 139_999]] = torch.tensor([float("nan"), float("-inf"), -float("nan")])
    assert Largest(lambda chunk: chunk).positions(source, 3).tolist() == [5, 70_000, 139_999]
