"""Replacing the weights of a running job: for everybody, or not at all."""

from __future__ import annotations

from ps.rpc.wire import Status
from ps.server.host import Host
from ps.types import Version
from tests.support.shards import SERVER, Client, admitted, shard_map, signature, started


def test_the_only_worker_replaces_weights_and_keeps_optimizer_state() -> None:
    """A new version with these weights; the momentum gathered before goes on."""
    _, client = started(optimizer="SGD")
    client.groups = (tuple((key, 0.5 if key == "momentum" else value) for key, value in client.groups[0]),)
    client.push(0)
    assert client.load(7.0).statuses == [Status.OK] * 3
    answer = client.pull(base=Version(1, 1))
    assert client.weights(answer.payload) == [7.0] * 3
    assert {shard.version for shard in answer.reply.shards} == {Version(1, 2)}
    pushed = client.push(1, base=Version(1, 2))
    assert client.weights(pushed.payload) == [7.0 - 1.5] * 3
    assert [row.next_sequence for row in client.hello().reply.shards] == [2] * 3


def test_before_the_first_push_any_worker_may() -> None:
    """Also twice: a load is not a push."""
    _, client = started(workers=(10, 11))
    for value in (3.0, 4.0):
        assert client.load(value).statuses == [Status.OK] * 3
    assert client.weights(client.pull().payload) == [4.0] * 3


def test_with_other_workers_and_steps_it_is_refused() -> None:
    """It would change weights under the others; nothing is written."""
    host, client = started(workers=(10, 11))
    client.push(0)
    answer = client.load(7.0)
    assert answer.reply.refused == (
        "load() with 2 workers in a job that has made 1 pushes would change the weights under the others; load before "
        "the first step, or with one worker"
    )
    assert client.weights(client.pull().payload) == [-1.0] * 3
    host.install_members(admitted(10))
    assert client.load(7.0).statuses == [Status.OK] * 3


def test_parameters_in_no_group_are_refused_while_others_have_them() -> None:
    """They are transferred once, at attach."""
    host = Host(exact=True)
    model = signature(300, 300, frozen=[1])
    host.install_members(admitted(10, 11))
    host.install_map(shard_map(model), SERVER)
    Client(host, shard_map(model), 10).init(0.0)
    after = shard_map(model, epoch=2, initialised_by=10)
    host.install_map(after, SERVER)
    client = Client(host, after, 10)
    every = [shard.id for shard in client.plan.shards]
    assert "nobody pushes, and 2 workers have them already" in client.load(7.0, every).reply.refused
    assert client.load(7.0).statuses
    host.install_members(admitted(10))
    assert client.load(8.0, every).statuses


def test_there_must_be_weights_to_replace() -> None:
    """Before the job has initial weights it is refused."""
    host = Host(exact=True)
    model = signature(300)
    host.install_members(admitted(10))
    host.install_map(shard_map(model), SERVER)
    assert "no initial weights yet" in Client(host, shard_map(model), 10).load(1.0).reply.refused
