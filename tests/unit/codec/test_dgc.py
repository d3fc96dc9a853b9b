"""Warm-up of the ratio, and momentum correction, against their equations."""

from __future__ import annotations

import pytest
import torch

from ps.codec.dgc import MomentumCorrection, WarmUp


def test_warm_up_of_the_paper() -> None:
    """Over four epochs down to 0.1%: 25%, 6.25%, 1.56%, 0.4%, 0.1%, as Lin et al. give them."""
    schedule = WarmUp(ratio=0.001, stages=4)
    assert [schedule.at(stage) for stage in range(6)] == pytest.approx(
        [0.25, 0.0625, 0.0156, 0.004, 0.001, 0.001], rel=0.02
    )


def test_warm_up_never_sends_less_than_asked() -> None:
    """A ratio above the first one, or no stages, is the ratio from the start."""
    assert WarmUp(ratio=0.5).at(0) == 0.5
    assert WarmUp(ratio=0.01, stages=0).at(0) == 0.01
    for bad in (0.0, 1.5):
        with pytest.raises(ValueError, match="fractions"):
            WarmUp(ratio=bad)


def test_momentum_is_masked_where_it_was_sent() -> None:
    """u = m u + g everywhere, and then 0 where something was sent; before the commit nothing changes."""
    correction = MomentumCorrection(0.5, 3, torch.float32)
    gradient = torch.tensor([1.0, 2.0, 3.0])
    correction.commit(0, 3, gradient, 1.0, torch.tensor([0.0, 9.0, 0.0]))
    assert correction.velocity.tolist() == [1, 0, 3]
    corrected = torch.zeros(3)
    correction.add_to(corrected, 0, 3, 2.0)
    assert corrected.tolist() == [1, 0, 3]
    assert correction.velocity.tolist() == [1, 0, 3]
    correction.commit(1, 3, gradient[1:], 0.5, torch.tensor([0.0, 4.0]))
    assert correction.velocity.tolist() == [1, 1, 0]


@pytest.mark.parametrize("momentum", [0.0, 1.0, -0.1, float("nan")])
def test_momentum_is_a_fraction(momentum: float) -> None:
    """Without momentum there is nothing to correct; with 1 it would never end."""
    with pytest.raises(ValueError, match="momentum"):
        MomentumCorrection(momentum, 3, torch.float32)
