"""Host: pushes, pulls and initial weights, with all work done on the calling thread."""

from __future__ import annotations

import torch

from ps.control.api import ShardMap
from ps.rpc.wire import Status
from ps.server.host import Host
from ps.server.slots import MessageLayout
from ps.sharding.spec import NO_GROUP, ModelSignature, ParamSpec
from ps.types import Role, ShardId, Version
from tests.support.clock import FakeClock
from tests.support.shards import SERVER, Client, admitted, shard_map, signature, started

OK, DUPLICATE, UNCHANGED = Status.OK, Status.DUPLICATE, Status.UNCHANGED
PENDING, BUSY, MOVED, MISSING = Status.PENDING, Status.BUSY, Status.MOVED, Status.MISSING


def two_workers() -> tuple[Host, Client, Client]:
    host, first = started(workers=(10, 11))
    return host, first, Client(host, first.map, 11)


# ---- pushes ----


def test_a_push_is_applied_and_answered_with_the_new_weights() -> None:
    """SGD with lr 1 on gradients of 1: weights fall by 1 on every shard, versions rise, number 1 is next."""
    _, client = started()
    answer = client.push(0)
    assert answer.statuses == [OK] * 3
    assert client.weights(answer.payload) == [-1.0] * 3
    assert {row.version for row in answer.reply.shards} == {Version(1, 1)}
    assert {row.next_sequence for row in answer.reply.shards} == {1}
    assert [row.shard for row in answer.reply.shards] == client.all


def test_replies_follow_the_order_of_the_request() -> None:
    """Shards named backwards come backwards, in rows and in the payload."""
    _, client = started()
    client.push(0, shards=[2])
    answer = client.pull([2, 0])
    assert [row.shard for row in answer.reply.shards] == [2, 0]
    assert client.weights(answer.payload, [2, 0]) == [-1.0, 0.0]


def test_the_payload_of_a_reply_owns_its_storage() -> None:
    """TensorPipe sends whole storages, so nothing else may be in it."""
    _, client = started()
    payload = client.push(0).payload
    assert payload.dtype is torch.uint8
    assert payload.untyped_storage().nbytes() == payload.numel() == client.plan.nbytes


def test_a_repeated_push_counts_once() -> None:
    """A retry after the answer got lost is a duplicate, and brings the weights."""
    _, client = started()
    client.push(0)
    again = client.push(0)
    assert again.statuses == [DUPLICATE] * 3
    assert client.weights(again.payload) == [-1.0] * 3


def test_an_early_push_waits_for_its_turn() -> None:
    """Number 1 before number 0 is held; 0 lets both be answered, with weights that hold both."""
    _, client = started()
    early = client.push(1)
    assert early.waiting
    first = client.push(0)
    assert client.weights(first.payload) == client.weights(early.payload) == [-2.0] * 3
    assert early.statuses == [OK] * 3


def test_a_push_too_far_ahead_is_busy() -> None:
    """Three ahead is not accepted: to be sent again later."""
    _, client = started()
    assert client.push(3).statuses == [BUSY] * 3
    assert client.push(2).waiting


def test_a_retry_attaches_to_the_push_in_flight() -> None:
    """The same push sent again while it is held: applied once, both callers answered."""
    _, client = started()
    early = [client.push(1), client.push(1), client.push(1, poll=True)]
    client.push(0)
    assert [client.weights(answer.payload) for answer in early] == [[-2.0] * 3] * 3


def test_a_retry_cut_differently_attaches_too() -> None:
    """After a new cut into messages the same push may come shard by shard; still each counts once."""
    _, client = started()
    whole = client.push(1)
    parts = [client.push(1, shards=[shard]) for shard in client.all]
    poll = client.push(1, shards=[2, 1], poll=True)
    client.push(0)
    assert client.weights(whole.payload) == [-2.0] * 3
    assert [client.weights(p.payload, [s]) for s, p in enumerate(parts)] == [[-2.0]] * 3
    assert client.weights(poll.payload, [2, 1]) == [-2.0, -2.0]


def test_shards_of_one_push_are_decided_one_by_one() -> None:
    """A message that holds an applied and a fresh shard: a duplicate and a push, one answer."""
    _, client = started()
    client.push(0, shards=[0])
    answer = client.push(0)
    assert answer.statuses == [DUPLICATE, OK, OK]
    assert client.weights(answer.payload) == [-1.0] * 3


def test_polls_tell_what_became_of_a_push() -> None:
    """Unknown: missing. Applied: a duplicate, with the weights."""
    _, client = started()
    assert client.push(0, poll=True).statuses == [MISSING] * 3
    client.push(0)
    answer = client.push(0, poll=True)
    assert answer.statuses == [DUPLICATE] * 3
    assert client.weights(answer.payload) == [-1.0] * 3


def test_a_push_without_gradients_ticks_the_clock() -> None:
    """No payload, nothing present: versions and numbers go on, weights don't change."""
    _, client = started()
    answer = client.push(0, present=False)
    assert answer.statuses == [OK] * 3
    assert client.weights(answer.payload) == [0.0] * 3
    assert client.push(1).reply.shards[0].version == Version(1, 2)


def test_hello_tells_the_next_number_and_version() -> None:
    """Per shard and caller."""
    _, client, other = two_workers()
    client.push(0, shards=[1])
    rows = client.hello().reply.shards
    assert [(row.version.counter, row.next_sequence) for row in rows] == [(0, 0), (1, 1), (0, 0)]
    assert [row.next_sequence for row in other.hello().reply.shards] == [0, 0, 0]


def test_staleness_is_counted_per_shard_push() -> None:
    """Two pushes on the same base: the second one is one version stale on each shard."""
    host, client, other = two_workers()
    client.push(0)
    other.push(0)
    assert host.progress().staleness == {0: 3, 1: 3}


def test_progress_counts_everything() -> None:
    """Versions, pushes and pulls per shard; bytes each way. A retry's weights count again, its push doesn't."""
    host, client = started()
    size = client.plan.nbytes
    client.push(0)
    client.push(0)
    client.pull([0])
    found = host.progress()
    assert [(s.version, s.pushes, s.pulls) for s in found.shards] == [(1, 1, 1), (1, 1, 0), (1, 1, 0)]
    assert found.bytes_pushed == 2 * size
    assert found.bytes_pulled == 2 * size + client.plan.shards[0].nbytes


def test_an_unaligned_payload_is_taken() -> None:
    """Bytes that start anywhere in memory are copied before they are viewed as numbers."""
    _, client = started()
    room = torch.empty(client.plan.nbytes + 1, dtype=torch.uint8).numpy()[1:]
    payload = torch.from_numpy(room)
    payload.copy_(client.payload(1.0, client.all))
    region = MessageLayout((ShardId(0),), (None,), (payload.numel(),), payload.numel()).regions(payload)[0]
    assert region is not None
    assert region.data_ptr() % 16 == 0
    answer = client.submit(client.push_request(0, client.all), payload)
    assert client.weights(answer.payload) == [-1.0] * 3


# ---- pulls ----


def test_pull_brings_only_news() -> None:
    """Without a base, or with an older one: weights. With the newest: unchanged, and no bytes."""
    _, client = started()
    assert client.weights(client.pull().payload) == [0.0] * 3
    same = client.pull(base=Version(1, 0))
    assert same.statuses == [UNCHANGED] * 3
    assert same.payload.numel() == 0
    client.push(0, shards=[1])
    mixed = client.pull(base=Version(1, 0))
    assert mixed.statuses == [UNCHANGED, OK, UNCHANGED]
    assert client.weights(mixed.payload) == [0.0, -1.0, 0.0]


def test_an_equal_counter_of_another_epoch_is_news() -> None:
    """ "Unchanged" needs the same epoch and counter: another lineage always sends weights."""
    _, client = started()
    assert client.pull(base=Version(0, 0)).statuses == [OK] * 3


def test_pulls_of_one_version_share_a_snapshot() -> None:
    """Two replies with the same versions carry the same memory, each in a tensor of its own."""
    _, client = started()
    first, second = client.pull().payload, client.pull().payload
    assert first is not second
    assert first.data_ptr() == second.data_ptr()


def test_a_reply_never_changes_after_it_was_given() -> None:
    """While a reply is held, pushes write other buffers: nothing on the wire is torn."""
    _, client = started()
    held = [client.pull().payload, *(client.push(n).payload for n in range(6))]
    assert [client.weights(payload)[0] for payload in held] == [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0]


def test_buffers_are_reused_once_replies_are_gone() -> None:
    """A steady stream of pushes whose replies are dropped needs two buffers at most."""
    _, client = started()
    seen = {client.push(n).payload.data_ptr() for n in range(10)}
    assert len(seen) <= 2


def test_frozen_shards_are_read_and_never_pushed() -> None:
    """Parameters of no group are pulled like others; a push to them is refused."""
    host = Host(exact=True)
    model = signature(300, 300, frozen=[1])
    host.install_members(admitted(10))
    before = shard_map(model)
    host.install_map(before, SERVER)
    client = Client(host, before, 10)
    client.init(3.0)
    host.install_map(shard_map(model, epoch=2, initialised_by=10), SERVER)
    ids = [shard.id for shard in client.plan.shards]
    assert client.weights(client.pull(ids).payload, ids) == [3.0] * len(ids)
    assert "no optimizer group" in client.push(0, shards=ids).reply.refused


# ---- initial weights and maps ----


def waiting_host() -> tuple[Host, FakeClock, ShardMap, Client, Client]:
    """Two workers, a map, and no initial weights yet."""
    clock = FakeClock()
    host = Host(clock=clock)
    model = signature(300, 300)
    host.install_members(admitted(10, 11))
    the_map = shard_map(model)
    host.install_map(the_map, SERVER)
    return (
        host,
        clock,
        shard_map(model, epoch=2, initialised_by=11),
        Client(host, the_map, 10),
        Client(host, the_map, 11),
    )


def test_only_the_named_workers_initial_weights_count() -> None:
    """Two workers write; the map names the second: its weights are served, also after the first writes again."""
    host, _, named, first, second = waiting_host()
    assert first.init(1.0).statuses == [OK] * 3
    assert second.init(2.0).statuses == [OK] * 3
    assert first.pull().waiting
    host.install_map(named, SERVER)
    assert first.init(1.0).statuses == [OK] * 3
    assert first.weights(first.pull().payload) == [2.0] * 3


def test_initial_weights_may_come_after_the_map_that_names_them() -> None:
    """What the named worker writes later counts at once; what others write doesn't."""
    host, _, named, first, second = waiting_host()
    host.install_map(named, SERVER)
    first.init(1.0)
    assert first.pull().waiting
    second.init(2.0)
    assert first.weights(first.pull().payload) == [2.0] * 3


def test_a_third_initialiser_has_to_wait() -> None:
    """Two sets of initial weights are kept at most."""
    host, _, _, first, second = waiting_host()
    host.install_members(admitted(10, 11, 12))
    third = Client(host, first.map, 12)
    assert [client.init(1.0).statuses[0] for client in (first, second, third, first)] == [OK, OK, BUSY, OK]


def test_a_pull_before_the_weights_waits_for_them() -> None:
    """Parked, and answered by the map that makes them count."""
    host, _, named, first, second = waiting_host()
    pull = first.pull()
    second.init(2.0)
    assert pull.waiting
    host.install_map(named, SERVER)
    assert first.weights(pull.payload) == [2.0] * 3


def test_a_pull_waits_two_seconds_at_most() -> None:
    """Then it is pending, and is asked for again."""
    host, clock, _, first, _ = waiting_host()
    pull = first.pull()
    clock.advance(1.9)
    first.hello()
    assert pull.waiting
    clock.advance(0.2)
    first.hello()
    assert pull.statuses == [PENDING] * 3
    host.close()
    assert len(pull.replies) == 1


def test_a_push_before_the_weights_is_busy() -> None:
    """It is not accepted, so that nobody polls for it in vain."""
    _, _, _, first, _ = waiting_host()
    assert first.push(0).statuses == [BUSY] * 3
    assert first.push(0, poll=True).statuses == [MISSING] * 3


def test_a_newer_map_than_ours_is_waited_for() -> None:
    """A caller that has heard of a map waits until the host has it, too; a push that waited in vain is busy."""
    host, clock, named, first, second = waiting_host()
    second.init(2.0)
    ahead = Client(host, named, 10)
    pull = ahead.pull()
    assert pull.waiting
    push = ahead.push(0)
    clock.advance(2.1)
    first.hello()
    assert (pull.statuses, push.statuses) == ([PENDING] * 3, [BUSY] * 3)
    again = ahead.push(0)
    host.install_map(named, SERVER)
    assert again.statuses == [OK] * 3


def test_parked_payloads_count_against_the_bound() -> None:
    """Pushes that wait for a map fill the same bound as others; when their time is up there is room again."""
    clock = FakeClock()
    host, client = started(host=Host(clock=clock, queue_bytes=2000))
    ahead = Client(host, shard_map(client.map.signature, epoch=9), 10)
    parked = ahead.push(0, shards=[0])
    assert parked.waiting
    assert ahead.push(0, shards=[1]).statuses == [BUSY]
    clock.advance(2.1)
    assert client.push(0, shards=[1]).statuses == [OK]
    assert parked.statuses == [BUSY]


def test_requests_before_any_map_wait() -> None:
    """A host that has no map yet parks what comes."""
    host = Host()
    host.install_members(admitted(10))
    the_map = shard_map(signature(300, 300))
    hello = Client(host, the_map, 10).hello([0])
    assert hello.waiting
    host.install_map(the_map, SERVER)
    assert hello.statuses == [OK]


def test_an_older_map_is_ignored() -> None:
    """Maps may overtake each other; the newest stays."""
    host, client = started()
    host.install_map(shard_map(client.map.signature, epoch=1, holders=[99] * 3), SERVER)
    assert client.push(0).statuses == [OK] * 3


def test_shards_held_elsewhere_have_moved() -> None:
    """A message for two servers: ours is done, the other one's shard is named as moved."""
    host = Host()
    model = signature(300, 300)
    host.install_members(admitted(10))
    before = shard_map(model, holders=[SERVER, 2, SERVER])
    host.install_map(before, SERVER)
    client = Client(host, before, 10)
    assert client.init(0.0).statuses == [OK, MOVED, OK]
    host.install_map(shard_map(model, epoch=2, initialised_by=10, holders=[SERVER, 2, SERVER]), SERVER)
    assert client.hello().statuses == [OK, MOVED, OK]
    push = client.push(0)
    assert push.statuses == [OK, MOVED, OK]
    assert client.weights(push.payload)[::2] == [-1.0, -1.0]
    assert client.pull().statuses == [OK, MOVED, OK]
    assert client.pull([1]).statuses == [MOVED]


def test_a_shard_that_leaves_tells_those_who_wait() -> None:
    """A held push is answered as moved when the map gives its shard to another server."""
    host, client = started()
    early = client.push(1)
    host.install_map(shard_map(client.map.signature, epoch=3, initialised_by=10, holders=[SERVER, SERVER, 2]), SERVER)
    assert early.waiting  # two shards are still held back here
    assert client.push(0).statuses == [OK, OK, MOVED]
    assert early.statuses == [OK, OK, MOVED]


def test_a_new_shard_epoch_makes_old_requests_moved() -> None:
    """The epoch is part of the address: after it rises, requests of the old one go nowhere."""
    host, client = started()
    client.push(0)
    host.install_map(shard_map(client.map.signature, epoch=3, initialised_by=10, shard_epoch=2), SERVER)
    assert client.push(1).statuses == [MOVED] * 3
    assert client.hello().reply.shards[0].version == Version(2, 0)


# ---- eviction ----


def test_an_evicted_workers_held_push_is_dropped() -> None:
    """It is answered as fenced; its predecessor, arriving late, is refused; no weight moves."""
    host, client, other = two_workers()
    early = client.push(1)
    host.install_members(admitted(11))
    assert early.reply.fenced
    late = client.push(0)
    assert late.reply.fenced
    assert other.weights(other.pull().payload) == [0.0] * 3


def test_an_evicted_workers_parked_pull_is_answered() -> None:
    """As fenced, at once."""
    host, _, _, first, _ = waiting_host()
    pull = first.pull()
    host.install_members(admitted(11))
    assert pull.reply.fenced


def test_members_come_and_go_without_disturbing_others() -> None:
    """Numbers of those who stay are kept."""
    host, client, other = two_workers()
    client.push(0)
    other.push(0)
    host.install_members(admitted(11, 12))
    assert other.push(1).statuses == [OK] * 3
    newcomer = Client(host, client.map, 12)
    assert newcomer.push(0).statuses == [OK] * 3


def test_observers_only_read() -> None:
    """They may pull, and neither push nor initialise."""
    host, client = started()
    host.install_members([*admitted(10), *admitted(20, role=Role.OBSERVER)])
    observer = Client(host, client.map, 20)
    assert observer.pull().statuses == [OK] * 3
    assert "may only read" in observer.push(0).reply.refused
    assert "may only read" in observer.init(0.0).reply.refused


def test_closing_refuses_what_comes_and_what_waits() -> None:
    """Exactly one answer each; closing twice is fine."""
    host, client = started()
    held = client.push(1)
    host.close()
    host.close()
    assert "shutting down" in held.reply.refused
    assert "shutting down" in client.pull().reply.refused


def test_a_host_without_shards_has_no_progress() -> None:
    """Heartbeats work from the first moment."""
    assert Host().progress().shards == ()


def test_buffers_are_pushed_by_value_and_their_shards_have_push_numbers_of_their_own() -> None:
    """No optimizer, no group; taken as they are, and averaged over branches; constants are never pushed."""
    params = (
        ParamSpec(name="weight", shape=(300,), dtype="float32", group=0),
        ParamSpec(name="mean", shape=(10,), dtype="float32", group=NO_GROUP, buffer="average"),
        ParamSpec(name="mask", shape=(10,), dtype="bool", group=NO_GROUP, buffer="local"),
    )
    host, model = Host(exact=True), ModelSignature(params=params, optimizer="SGD")
    host.install_members(admitted(10, 11))
    host.install_map(shard_map(model, shard_bytes=2048), SERVER)
    Client(host, shard_map(model, shard_bytes=2048), 10).init(0.0)
    after = shard_map(model, shard_bytes=2048, epoch=2, initialised_by=10)
    host.install_map(after, SERVER)
    first, second = Client(host, after, 10), Client(host, after, 11)
    assert first.weights(first.push(0, 2.0).payload) == [-2.0]
    assert first.weights(first.push(0, 2.0, [1]).payload, [1]) == [2.0]
    assert second.weights(second.push(0, 4.0, [1]).payload, [1]) == [3.0]
    assert first.push(2, 4.0, [1]).waiting
    assert [shard.pushes for shard in host.progress().shards] == [1, 0, 0]
    refused = first.push(0, 1.0, [2]).reply.refused
    assert refused == "shard 2: no optimizer group holds it, so nothing can be pushed to it"
    refused = second.push(1, float("nan"), [1], base=Version(1, 2)).reply.refused
    assert refused.startswith("buffer mean in push 1 of incarnation 11 holds inf or NaN")
