"""Placement of shards on servers: level, deterministic, few moves."""

from __future__ import annotations

import pytest

from ps.errors import ConfigError
from ps.sharding.assign import bytes_per_server, place
from ps.sharding.partition import LEVEL, make_plan
from ps.sharding.spec import NO_GROUP, ModelSignature, ParamSpec, ShardingPlan
from ps.types import Incarnation


def plan_of(*elems: int, frozen: int = 0) -> ShardingPlan:
    params = [ParamSpec(name=f"p{i}", shape=(count,), dtype="float32", group=0) for i, count in enumerate(elems)]
    if frozen:
        params.append(ParamSpec(name="frozen", shape=(frozen,), dtype="float32", group=NO_GROUP))
    return make_plan(ModelSignature(params=tuple(params), optimizer="SGD"), shard_bytes=64 << 10)


def servers(*numbers: int) -> list[Incarnation]:
    return [Incarnation(number) for number in numbers]


def moves(before: tuple[Incarnation, ...], after: tuple[Incarnation, ...]) -> int:
    return sum(a != b for a, b in zip(before, after, strict=True))


def test_order_of_servers_does_not_matter() -> None:
    """The same servers in another order give the same placement."""
    plan = plan_of(1_000_000)
    assert place(plan, servers(3, 1, 2)) == place(plan, servers(1, 2, 3))


def test_nothing_moves_without_need() -> None:
    """With the same servers a level placement stays as it is."""
    plan = plan_of(1_000_000)
    before = place(plan, servers(1, 2, 3))
    assert place(plan, servers(1, 2, 3), before) == before


def test_a_new_server_takes_only_its_share() -> None:
    """A fourth server gets a quarter of the shards, all else stays, and the result is level."""
    plan = plan_of(1_000_000)
    before = place(plan, servers(1, 2, 3))
    after = place(plan, servers(1, 2, 3, 4), before)
    assert moves(before, after) <= len(plan.shards) // 4 + 1
    assert all(new == 4 for old, new in zip(before, after, strict=True) if old != new)
    assert max(bytes_per_server(plan, after).values()) * 4 <= plan.nbytes * LEVEL + max(s.nbytes for s in plan.shards)


def test_only_shards_of_a_lost_server_move() -> None:
    """When one of four servers goes, exactly its shards get new holders, evenly."""
    plan = plan_of(16384 * 48)
    before = place(plan, servers(1, 2, 3, 4))
    after = place(plan, servers(1, 2, 3), before)
    assert [b == 4 for b in before] == [b != a for b, a in zip(before, after, strict=True)]
    assert len(set(bytes_per_server(plan, after).values())) == 1


def test_more_servers_than_shards() -> None:
    """One shard on three servers: it is held once and nothing loops."""
    plan = plan_of(10)
    before = place(plan, servers(1, 2, 3))
    assert before == (1,)
    assert place(plan, servers(1, 2, 3), before) == before


def test_trained_shards_are_level_whatever_is_frozen() -> None:
    """Frozen shards, no traffic after the start, don't displace trained ones: both kinds are level."""
    plan = plan_of(16384 * 8, frozen=16384 * 4)
    placement = place(plan, servers(1, 2, 3, 4))
    trained = [placement[shard.id] for shard in plan.shards if shard.group != NO_GROUP]
    assert {trained.count(server) for server in servers(1, 2, 3, 4)} == {2}


def test_bad_arguments_are_refused() -> None:
    """No servers, and a current placement of another plan."""
    plan = plan_of(100_000)
    with pytest.raises(ConfigError, match="no server"):
        place(plan, [])
    with pytest.raises(ConfigError, match="placement so far has 1 shards"):
        place(plan, servers(1), servers(1))
