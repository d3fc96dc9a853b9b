"""Messages and offsets: byte arithmetic of payloads."""

from __future__ import annotations

import subprocess
import sys

from ps.sharding.layout import align_up, messages, offsets, payload_bytes, rows_bytes, values_offset
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec, ShardingPlan
from ps.types import ShardId


def plan(elems: int = 1000) -> ShardingPlan:
    params = (ParamSpec(name="p", shape=(elems,), dtype="float32", group=0),)
    return make_plan(ModelSignature(params=params, optimizer="SGD"), shard_bytes=1024)


def test_offsets_follow_the_order_asked_for() -> None:
    """Shards lie end to end in the order given; the last of this plan is 928 bytes in 960."""
    ids = [ShardId(3), ShardId(0), ShardId(1)]
    assert offsets(plan(), ids) == (0, 960, 1984)
    assert payload_bytes(plan(), ids) == 3008


def test_messages_hold_whole_shards_up_to_the_bound() -> None:
    """Two shards of 1 KiB fit in 2 KiB; order is kept, nothing is lost, none is empty."""
    ids = [ShardId(index) for index in (0, 1, 2, 3)]
    assert messages(plan(), ids, message_bytes=2048) == ((0, 1), (2, 3))
    assert messages(plan(), [], message_bytes=2048) == ()


def test_a_shard_larger_than_a_message_travels_alone() -> None:
    """The bound never splits or drops a shard."""
    ids = [ShardId(index) for index in (0, 1)]
    assert messages(plan(), ids, message_bytes=10) == ((0,), (1,))


def test_rows_take_their_ids_and_then_their_values() -> None:
    """Three rows of five floats: 24 bytes of ids in 64, 60 bytes of values in 64; none take nothing."""
    params = (ParamSpec(name="table", shape=(100, 5), dtype="float32", group=0, sparse=True),)
    (shard,) = make_plan(ModelSignature(params=params, optimizer="SGD"), shard_bytes=4096).shards
    assert values_offset(3) == 64
    assert rows_bytes(shard, 3) == 128
    assert rows_bytes(shard, 0) == 0
    assert shard.rows == range(100)


def test_rows_travel_in_messages_of_their_own() -> None:
    """Shards with rows and dense ones never share a message, whatever would fit."""
    params = tuple(
        ParamSpec(name=f"p{index}", shape=(4, 4), dtype="float32", group=0, sparse=index in (1, 2))
        for index in range(4)
    )
    plan = make_plan(ModelSignature(params=params, optimizer="SGD"), shard_bytes=4096)
    ids = [shard.id for shard in plan.shards]
    kinds = [bool(shard.row_elems) for shard in plan.shards]
    assert kinds == [False, True, True]
    assert messages(plan, ids) == ((0,), (1, 2))


def test_align_up() -> None:
    """Multiples of 64 stay, all else is rounded up."""
    assert [align_up(value) for value in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_planning_and_optimizer_choice_load_no_torch() -> None:
    """Coordinator and `psctl` plan without torch: neither package imports it, even indirectly."""
    code = "import sys, ps.sharding.assign, ps.sharding.layout, ps.optim.spec, ps.consistency.asp, ps.store.ordering\n"
    code += "sys.exit(any(name.partition('.')[0] in ('torch', 'numpy', 'grpc') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
