"""Requests for optimizer state: read by anybody, written with initial weights or when `load` would be allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from ps.optim.spec import served
from ps.optim.state import pack, unpack
from ps.rpc.wire import Caller, ReadState, Status, WriteState
from ps.server.host import Host
from ps.types import Incarnation, Role, ShardId, Version
from tests.support.shards import SECRET, SERVER, Answered, Client, admitted, shard_map, signature, started

SHARD = ShardId(1)


def with_momentum(client: Client) -> Client:
    client.groups = (tuple((key, 0.5 if key == "momentum" else value) for key, value in client.groups[0]),)
    return client


def read(client: Client, *shards: int, caller: Caller | None = None) -> Answered:
    rows = tuple((ShardId(shard), 1) for shard in (shards or (SHARD,)))
    return client.submit(ReadState(caller=caller or client.caller, shards=rows))


def write(client: Client, payload: Tensor, shard: int = SHARD) -> Answered:
    return client.submit(WriteState(caller=client.caller, shards=((ShardId(shard), 1),)), payload)


def state(client: Client, value: float) -> Tensor:
    return pack([{"momentum_buffer": torch.full((p.numel,), value)} for p in client.plan.shards[SHARD].pieces])


def test_state_is_read_as_it_is_after_the_last_push() -> None:
    """By an observer, too; before any push there is none."""
    host, client = started()
    with_momentum(client)
    spec = client.plan.shards[SHARD]
    assert not any(unpack(read(client).payload, spec, served("SGD")))
    for sequence in range(2):
        client.push(sequence)
    host.install_members([*admitted(10), *admitted(50, role=Role.OBSERVER)])
    answer = read(client, caller=Caller(incarnation=Incarnation(50), secret=SECRET, map_epoch=2))
    assert answer.statuses == [Status.OK] and answer.reply.shards[0].version == Version(1, 2)
    for piece, entries in zip(spec.pieces, unpack(answer.payload, spec, served("SGD")), strict=True):
        assert entries["momentum_buffer"].tolist() == [1.5] * piece.numel


def test_the_next_push_goes_on_from_state_that_was_written() -> None:
    """Version and weights stay; other shards keep their own state."""
    _, client = started()
    with_momentum(client).push(0)
    assert write(client, state(client, 6.0)).statuses == [Status.OK]
    assert client.weights(client.pull().payload) == [-1.0] * 3
    pushed = client.push(1, base=Version(1, 1))
    assert client.weights(pushed.payload) == [-1.0 - 1.5, -1.0 - 4.0, -1.0 - 1.5]


def test_state_beside_initial_weights_counts_when_they_do() -> None:
    """Two workers write both; the map names the second."""
    host, model = Host(exact=True), signature(300, 300)
    host.install_members(admitted(10, 11))
    host.install_map(shard_map(model), SERVER)
    for number, value in ((10, 3.0), (11, 6.0)):
        client = Client(host, shard_map(model), number)
        early = write(client, state(client, value))
        assert early.reply.refused == "shard 1: initial weights of the same worker come before its optimizer state"
        client.init(0.0)
        assert write(client, state(client, value)).statuses == [Status.OK]
        assert read(client).statuses == [Status.PENDING]
    after = shard_map(model, epoch=2, initialised_by=11)
    host.install_map(after, SERVER)
    client = with_momentum(Client(host, after, 11))
    assert client.weights(client.push(0).payload) == [-1.0, -4.0, -1.0]


def test_written_only_when_weights_might_be() -> None:
    """Not under other workers that have made steps, and not by observers; nothing changes."""
    host, client = started(workers=(10, 11))
    with_momentum(client).push(0)
    assert "load() with 2 workers in a job that has made 1 pushes" in write(client, state(client, 9.0)).reply.refused
    host.install_members(admitted(10, role=Role.OBSERVER))
    assert write(client, state(client, 9.0)).reply.refused == "incarnation 10 is no worker, and may only read"
    host.install_members(admitted(10))
    assert client.weights(client.push(0, base=Version(1, 1)).payload)


def test_requests_that_make_no_sense_are_refused() -> None:
    """Several shards at once, shards without an optimizer, bytes that are no state."""
    _, client = started()
    assert read(client, 0, 1).reply.refused == "state is asked for or written shard by shard, the request names 2"
    bad = write(client, torch.zeros(64, dtype=torch.uint8))
    assert bad.reply.refused.startswith("optimizer state of shard 1: ")
    assert write(client, pack([{"exp_avg": torch.ones(1)}])).reply.refused.endswith("is not part of it")
    frozen, model = Host(exact=True), signature(300, frozen=[0])
    frozen.install_members(admitted(10))
    frozen.install_map(shard_map(model), SERVER)
    answer = read(Client(frozen, shard_map(model), 10), 0)
    assert answer.reply.refused == "shard 0: no optimizer group holds it, so it has no optimizer state"


def test_a_shard_that_has_moved_says_so() -> None:
    """As for every other request."""
    host, client = started()
    away = shard_map(client.map.signature, epoch=3, initialised_by=10, holders=[SERVER, 99, SERVER])
    host.install_map(away, SERVER)
    assert read(client).statuses == [Status.MOVED]
    assert write(client, state(client, 1.0)).statuses == [Status.MOVED]
