"""DenseShard: weights of its own, versions, staleness, float32 masters."""

from __future__ import annotations

import torch
from torch import Tensor

from ps.optim.spec import hyper, served
from ps.sharding.partition import make_plan
from ps.store.dense import DenseShard
from ps.types import Hyper, Incarnation, Version
from tests.support.shards import signature

A, B = Incarnation(10), Incarnation(11)


def shard(dtype: str = "float32", *sizes: int) -> DenseShard:
    (spec,) = make_plan(signature(*(sizes or (5,)), dtype=dtype), 1 << 20).shards
    return DenseShard(spec, 3, served("SGD"), exact=True)


def full(of: DenseShard, value: float) -> Tensor:
    return torch.full((of.spec.numel,), value, dtype=of.dtype).view(torch.uint8)


def sgd(lr: float = 1.0) -> Hyper:
    return hyper(torch.optim.SGD([torch.zeros(1)], lr=lr).param_groups[0], served("SGD"))


def push(to: DenseShard, worker: Incarnation, base: int, value: float = 1.0, lr: float = 1.0) -> int | None:
    staleness = to.staleness_of(worker, Version(3, base))
    to.apply(worker, full(to, value), b"\x01", sgd(lr), staleness)
    return staleness


def weights(of: DenseShard) -> Tensor:
    out = torch.empty(of.spec.numel, dtype=of.dtype)
    of.write(out)
    return out


def test_initial_weights_are_copied_and_padding_is_cleared() -> None:
    """The payload may be reused at once, and what a worker left in the padding is gone."""
    one = shard()
    payload = full(one, 2.0)
    one.load(payload)
    payload.zero_()
    assert weights(one).tolist() == [2.0] * 5 + [0.0] * 11
    assert one.initialised
    assert one.version == Version(3, 0)


def test_each_push_is_one_version() -> None:
    """Weights move, the counter rises by one, also for a push without any gradient."""
    one = shard()
    one.load(full(one, 0.0))
    push(one, A, 0)
    one.apply(A, None, b"\x00", sgd(), 0)
    assert weights(one)[0].item() == -1.0
    assert one.version == Version(3, 2)
    assert one.pushes == 2


def test_staleness_counts_other_workers_only() -> None:
    """A's own pushes under way don't make A stale; B's do. A newer base forgets what it has seen."""
    one = shard()
    one.load(full(one, 0.0))
    assert push(one, A, 0) == 0
    assert push(one, A, 0) == 0  # its own first push came between
    assert push(one, B, 0) == 2
    assert push(one, A, 2) == 1
    assert push(one, A, 3) == 0
    assert one.staleness == {0: 3, 2: 1, 1: 1}


def test_staleness_across_epochs_is_not_computed() -> None:
    """Counters of another epoch say nothing; such a push is not in the histogram."""
    one = shard()
    one.load(full(one, 0.0))
    assert one.staleness_of(A, Version(2, 7)) is None
    one.apply(A, full(one, 1.0), b"\x01", sgd(), None)
    assert not one.staleness
    one.begin_epoch(4)
    assert one.version == Version(4, 0)


def test_half_precision_has_a_float32_master() -> None:
    """300 updates of 5e-4 on 1.0 move a bfloat16 weight, which bfloat16 arithmetic itself would never do."""
    one = shard("bfloat16")
    one.load(full(one, 1.0))
    for step in range(300):
        push(one, A, step, value=1.0, lr=5e-4)
    moved = weights(one)
    assert moved.dtype is torch.bfloat16
    assert abs(moved[0].item() - 0.85) < 0.01
    assert torch.tensor(1.0, dtype=torch.bfloat16) - torch.tensor(5e-4, dtype=torch.bfloat16) == 1.0


def test_forgotten_workers_leave_nothing() -> None:
    """What was remembered of a worker's pushes goes with it."""
    one = shard()
    one.load(full(one, 0.0))
    push(one, A, 0)
    one.forget(A)
    one.forget(A)
    assert one.staleness_of(A, Version(3, 0)) == 1


def test_an_exported_state_is_a_copy_from_which_another_shard_goes_on() -> None:
    """Weights as the float32 master has them, momentum, version and pushes: both make the same step then."""
    first, second = shard("bfloat16"), shard("bfloat16")
    momentum = tuple((key, 0.9 if key == "momentum" else value) for key, value in sgd(0.001))
    first.load(full(first, 1.0))
    first.apply(A, full(first, 1.0), b"\x01", momentum, 0)
    state = first.export_state()
    kept = state.weights.clone()
    second.load(full(second, 5.0))
    second.import_state(state)
    assert second.version == Version(3, 1) and second.pushes == 1
    for one in (first, second):
        one.apply(A, full(one, 1.0), b"\x01", momentum, 0)
    assert torch.equal(first.export_state().weights[:5], second.export_state().weights[:5])
    assert torch.equal(state.weights, kept) and not torch.equal(kept, first.export_state().weights)
    assert state.optimizer[0]["momentum_buffer"].tolist() == [1.0] * 5
