"""The shard map cut into messages: whole shards, every shard once, servers taking turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps.control.api import Holder, ServerPeer, ShardMap
from ps.errors import TransportError
from ps.sharding.partition import make_plan
from ps.sharding.spec import NO_GROUP, ModelSignature, ParamSpec
from ps.types import Incarnation, ShardId
from workers.routing import Routes, frozen, trained

SIGNATURE = ModelSignature(
    params=(
        ParamSpec(name="w", shape=(160,), dtype="float32", group=0),
        ParamSpec(name="frozen", shape=(16,), dtype="float32", group=NO_GROUP),
    ),
    optimizer="SGD",
)
PLAN = make_plan(SIGNATURE, 64)
A, B = Incarnation(5), Incarnation(3)


def shard_map(epoch: int, first: Incarnation, others: Incarnation) -> ShardMap:
    """Shard 0 on one server, all others on another."""
    holders = [Holder(shard=shard.id, epoch=1, incarnation=others if shard.id else first) for shard in PLAN.shards]
    peers = tuple(ServerPeer(incarnation=server, name=f"s{server}", address="uv://h:1") for server in (first, others))
    return ShardMap(
        epoch=epoch, signature=SIGNATURE, shard_bytes=64, holders=tuple(holders), servers=peers, initialised_by=None
    )


def test_trained_and_frozen_shards() -> None:
    """Parameters in no group have shards of their own, which are never pushed."""
    assert len(frozen(PLAN)) == 1 and len(trained(PLAN)) == len(PLAN.shards) - 1


@pytest.mark.parametrize("message_bytes", [1, 64, 200, 1 << 20])
def test_each_shard_travels_once_and_whole(message_bytes: int) -> None:
    """Whatever the message size: no shard is missing or doubled, offsets follow one another."""
    routes = Routes(PLAN, shard_map(1, A, B))
    messages = routes.messages([shard.id for shard in PLAN.shards], message_bytes)
    assert sorted(shard for message in messages for shard in message.shards) == [shard.id for shard in PLAN.shards]
    for message in messages:
        assert len({routes.holder(shard) for shard in message.shards}) == 1
        ends = [at + PLAN.shards[shard].nbytes for shard, at in zip(message.shards, message.offsets, strict=True)]
        assert list(message.offsets) == [0, *ends[:-1]] and ends[-1] == message.nbytes


def test_servers_take_turns() -> None:
    """Every server has work from the first messages on."""
    routes = Routes(PLAN, shard_map(1, A, B))
    messages = routes.messages([shard.id for shard in PLAN.shards], 64)
    assert {routes.holder(message.shards[0]) for message in messages[:2]} == {A, B}


def test_a_newer_map_moves_shards() -> None:
    """After an update messages go to the new holders."""
    routes = Routes(PLAN, shard_map(1, A, B))
    assert routes.holders() == (B, A)
    routes.update(shard_map(2, B, B))
    assert routes.holders() == (B,) and routes.epoch == 2


def test_a_holder_without_address_is_an_error() -> None:
    """A map that names a holder and not where it is can't be used; the message says which."""
    routes = Routes(PLAN, replace(shard_map(1, A, B), servers=()))
    with pytest.raises(TransportError, match="names server 5"):
        routes.peer(routes.holder(ShardId(0)))
