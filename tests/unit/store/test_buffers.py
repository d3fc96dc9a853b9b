"""BufferShard: values that workers push are merged, and those of one worker alone are kept as they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ps.optim.spec import served
from ps.sharding.partition import make_plan
from ps.sharding.spec import NO_GROUP, ModelSignature, ParamSpec
from ps.store.buffers import BufferShard
from ps.types import Incarnation, Version

A, B, C = Incarnation(10), Incarnation(11), Incarnation(12)


def shard(policy: str = "average", dtype: str = "float32", *sizes: int) -> BufferShard:
    """All zero, in epoch 3."""
    params = tuple(
        ParamSpec(name=f"b{i}", shape=(n,), dtype=dtype, group=NO_GROUP, buffer=policy)
        for i, n in enumerate(sizes or (5,))
    )
    (spec,) = make_plan(ModelSignature(params=params, optimizer="SGD"), 1 << 20).shards
    made = BufferShard(spec, 3, served("SGD"), exact=True)
    made.load(torch.zeros(spec.nbytes, dtype=torch.uint8))
    return made


def push(
    to: BufferShard, worker: Incarnation, value: float, *, base: int, samples: int = 1, present: bytes = b"\x01"
) -> None:
    region = torch.full((to.spec.numel,), value, dtype=to.dtype).view(torch.uint8)
    to.merge(worker, region, present, Version(3, base), samples)


def value(of: BufferShard, index: int = 0) -> float:
    out = torch.empty(of.spec.numel, dtype=of.dtype)
    of.write(out)
    return float(out[index])


@pytest.mark.parametrize("policy", ["average", "max", "latest"])
def test_the_values_of_one_worker_are_kept_as_they_are(policy: str) -> None:
    """Whatever the policy, also when they fall: nothing that one process would have is changed by a bit."""
    one = shard(policy)
    for base, number in enumerate([0.1, 0.3, 1 / 3, -5.0]):
        push(one, A, number, base=base, samples=7 + base)
        assert value(one) == torch.tensor(number).item()
    assert one.version == Version(3, 4) and one.merges == 4 and one.pushes == 0


def test_branches_from_one_version_come_to_their_mean_by_samples() -> None:
    """Three workers start at version 0, with 1, 2 and 5 samples."""
    one = shard()
    push(one, A, 8.0, base=0, samples=1)
    push(one, B, 16.0, base=0, samples=2)
    push(one, C, 32.0, base=0, samples=5)
    assert value(one) == pytest.approx((8 + 2 * 16 + 5 * 32) / 8)


def test_a_late_worker_counts_for_what_it_has_seen() -> None:
    """Twenty pushes of A since B's base: B has one part in 21, and A's next push, made without B's, one in two."""
    one = shard()
    for base in range(20):
        push(one, A, 1.0, base=base)
    push(one, B, 22.0, base=0)
    assert value(one) == pytest.approx(2.0)
    push(one, A, 1.0, base=20)
    assert value(one) == pytest.approx(1.5)
    push(one, A, 7.0, base=22)
    assert value(one) == 7.0


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.floats(0.5, 4.0), st.integers(0, 3)), max_size=30))
def test_an_average_stays_between_the_values_that_went_in(pushes: list[tuple[Incarnation, float, int]]) -> None:
    """Variances can't become negative, whatever the order and the bases."""
    one = shard()
    push(one, A, 1.0, base=0)
    for worker, number, age in pushes:
        push(one, worker, number, base=max(0, one.version.counter - age))
        assert 0.4999 <= value(one) <= 4.0001


def test_integers_take_the_maximum_and_latest_the_last() -> None:
    """Counters of two workers; 0-dim int64 as BatchNorm has them."""
    counter, last = shard("max", "int64"), shard("latest")
    for one in (counter, last):
        push(one, A, 9, base=0)
        push(one, B, 4, base=0)
    assert value(counter) == 9 and value(last) == 4


def test_only_the_buffers_that_are_present_change() -> None:
    """The bitmap leaves the second one alone."""
    one = shard("latest", "float32", 16, 16)
    push(one, A, 3.0, base=0, present=b"\x01")
    assert value(one, 0) == 3.0 and value(one, 16) == 0.0


def test_a_base_of_another_epoch_is_a_branch_from_all_that_is_remembered() -> None:
    """Nothing is known of what such a worker has seen; a new epoch forgets its pushes."""
    one = shard()
    push(one, A, 4.0, base=0)
    one.merge(B, torch.zeros(one.spec.nbytes, dtype=torch.uint8), b"\x01", Version(2, 1), 1)
    assert value(one) == pytest.approx(2.0)
    one.begin_epoch(4)
    push(one, C, 1.0, base=9)
    assert value(one) == 1.0


def test_half_precision_averages_in_float32() -> None:
    """Small steps of bfloat16 buffers add up; one worker's values come back bit by bit."""
    one = shard("average", "bfloat16")
    push(one, A, 1.0, base=0)
    for _ in range(3):
        push(one, B, 1.0078125, base=0, samples=1)  # the next bfloat16
        push(one, A, 1.0, base=0)
    assert one.export_state().weights.dtype is torch.float32
    assert 1.0 < float(one.export_state().weights[0]) < 1.0078125
