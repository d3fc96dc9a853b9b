"""Host with bsp, backup workers and ssp: what is parked, what it is answered with, and that nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from ps.consistency.backup import Backup
from ps.consistency.bsp import Bsp
from ps.consistency.policy import Decision, Policy, PushEvent
from ps.consistency.ssp import Ssp
from ps.control.api import Admitted
from ps.optim.spec import hyper, served
from ps.rpc.wire import Status
from ps.server.host import Host
from ps.types import Incarnation, Part, Role, Version
from tests.support.clock import FakeClock
from tests.support.shards import SECRET, Client, admitted, started
from tests.unit.server.test_host_threads import done, push, running

OK, PENDING, BUSY = Status.OK, Status.PENDING, Status.BUSY


def cluster(
    policy: Callable[[], Policy], *workers: int, exact: bool = True, queue_bytes: int = 1 << 30
) -> tuple[Host, FakeClock, list[Client]]:
    """A host with three shards of weights 0, and its workers' clients; SGD with lr 1."""
    clock = FakeClock()
    host = Host(exact=exact, policy=policy, clock=clock, queue_bytes=queue_bytes)
    _, first = started(workers=workers, host=host)
    return host, clock, [first, *(Client(host, first.map, worker) for worker in workers[1:])]


def seats(**parts: Part) -> list[Admitted]:
    """Workers `w10=Part.IN` and so on."""
    return [
        Admitted(incarnation=Incarnation(int(name[1:])), role=Role.WORKER, secret=SECRET, part=part)
        for name, part in parts.items()
    ]


@pytest.mark.parametrize("exact", [True, False])
def test_a_round_is_one_step_with_the_mean(exact: bool) -> None:
    """All are answered by the last one's push, with the same weights and version."""
    _, _, (a, b, c) = cluster(Bsp, 10, 11, 12, exact=exact)
    for number in range(3):
        answers = [b.push(number, 1.0), c.push(number, 3.0)]
        assert all(answer.waiting for answer in answers)
        answers.append(a.push(number, 5.0))
        for answer in answers:
            assert answer.statuses == [OK] * 3
            assert a.weights(answer.payload) == [-3.0 * (number + 1)] * 3
            assert {row.version for row in answer.reply.shards} == {Version(1, number + 1)}


def test_the_lowest_numbered_contributor_says_the_hyper_parameters() -> None:
    """Whoever pushes first or last."""
    _, _, (a, b) = cluster(Bsp, 10, 11)
    group = torch.optim.SGD([torch.zeros(1)], lr=0.5).param_groups[0]
    b.groups = (hyper(group, served("SGD")),)
    a.push(0)
    assert b.weights(b.push(0).payload) == [-1.0] * 3


def test_a_parked_push_is_pending_and_polled() -> None:
    """After 2 s; polls and retries wait too, and all get the round's weights. It counts once."""
    host, clock, (a, b) = cluster(Bsp, 10, 11)
    first = a.push(0)
    clock.advance(2.0)
    host.tick()
    assert first.statuses == [PENDING] * 3
    waiting = [a.push(0, poll=True), a.push(0), a.push(0, shards=[1])]
    assert all(answer.waiting for answer in waiting)
    b.push(0, 3.0)
    assert [a.weights(answer.payload) for answer in waiting[:2]] == [[-2.0] * 3] * 2
    assert a.weights(waiting[2].payload, [1]) == [-2.0]
    assert [shard.pushes for shard in host.progress().shards] == [2] * 3


def test_a_death_closes_the_round_and_counts() -> None:
    """On the shards that have its push it is part of the mean, on the others it is not; both at once."""
    host, _, (a, b, c) = cluster(Bsp, 10, 11, 12)
    answers = [a.push(0, 1.0), b.push(0, 2.0)]
    c.push(0, 6.0, shards=[0])
    host.install_members(admitted(10, 11))
    for answer in answers:
        assert a.weights(answer.payload) == [-3.0, -1.5, -1.5]
    assert host.progress().shrunk == 1
    a.push(1)
    assert b.weights(b.push(1).payload) == [-4.0, -2.5, -2.5]


def test_who_steps_aside_holds_up_nobody_and_may_not_push() -> None:
    """It can pull; a push of it is refused with the reason."""
    host, _, (a, b) = cluster(Bsp, 10, 11)
    pushed = a.push(0)
    assert pushed.waiting
    host.install_members(seats(w10=Part.IN, w11=Part.OUT))
    assert a.weights(pushed.payload) == b.weights(b.pull().payload) == [-1.0] * 3
    assert "takes no part in rounds" in b.push(0).reply.refused


def test_a_newcomer_holds_the_next_round_until_its_first_is_agreed() -> None:
    """And the host says where it counts, for the coordinator to choose."""
    host, _, (a, b) = cluster(Bsp, 10, 11)
    host.install_members(seats(w10=Part.IN, w11=Part.OUT))
    a.push(0)
    assert host.entries() == (1, 1)
    host.install_members(seats(w10=Part.IN, w11=Part.ENTERING))
    held = a.push(1)
    assert held.waiting
    joined = [
        Admitted(incarnation=Incarnation(10), role=Role.WORKER, secret=SECRET),
        Admitted(incarnation=Incarnation(11), role=Role.WORKER, secret=SECRET, clock=2),
    ]
    host.install_members(joined)
    assert a.weights(held.payload) == [-2.0] * 3
    both = [a.push(2, 1.0), b.push(0, 3.0)]
    assert [a.weights(answer.payload) for answer in both] == [[-4.0] * 3] * 2


@pytest.mark.parametrize("policy", [Bsp, partial(Ssp, 0)])
@pytest.mark.parametrize("exact", [True, False])
def test_opposite_orders_and_a_budget_of_two_messages_do_not_deadlock(
    policy: Callable[[], Policy], exact: bool
) -> None:
    """Two workers send shards in opposite orders, two messages at a time, to a server with room for two payloads: with
    credits that end only with the round both would wait for the other's third message for ever."""
    host, clock, (a, b) = cluster(policy, 10, 11, exact=exact, queue_bytes=2 * 1024)
    sizes = [a.plan.shards[shard].nbytes for shard in a.all]
    assert max(sizes) * 3 > 2 * 1024
    done = {10: set[int](), 11: set[int]()}
    orders = {10: [0, 1, 2], 11: [2, 1, 0]}
    for _ in range(20):
        for client in (a, b):
            worker = int(client.caller.incarnation)
            window = [shard for shard in orders[worker] if shard not in done[worker]][:2]
            asked = [(shard, client.push(0, shards=[shard])) for shard in window]
            clock.advance(2.0)
            host.tick()
            for shard, answer in asked:
                if answer.statuses != [BUSY]:  # accepted: its credit is free, its answer is polled for
                    done[worker].add(shard)
    assert done == {10: {0, 1, 2}, 11: {0, 1, 2}}
    assert [shard.pushes for shard in host.progress().shards] == [2] * 3
    for client in (a, b):
        assert client.weights(client.push(0, poll=True).payload) == [-1.0 if policy is Bsp else -2.0] * 3


@pytest.mark.parametrize("policy", [Bsp, partial(Ssp, 0), partial(Backup, 0)])
def test_the_slowest_is_never_busy(policy: Callable[[], Policy]) -> None:
    """Payloads of the fast ones fill the bound and wait for it: its push is taken whatever the bound says."""
    _, _, clients = cluster(policy, 10, 11, 12, queue_bytes=1024)
    *fast, slow = clients
    parked = [client.push(0, shards=[0]) for client in fast]
    assert all(answer.waiting for answer in parked)
    assert slow.push(0, shards=[0]).statuses == [OK]
    assert [answer.statuses for answer in parked] == [[OK], [OK]]


def test_running_sums_give_their_bytes_back_at_once() -> None:
    """With sums as they come, a round of many workers takes room for one payload; in order it takes all."""
    for exact, held in ((False, 0), (True, 3)):
        host, _, clients = cluster(Bsp, 10, 11, 12, 13, exact=exact)
        nbytes = sum(clients[0].plan.shards[shard].nbytes for shard in clients[0].all)
        for client in clients[:3]:
            client.push(0)
        assert host._answers.queued_bytes() == held * nbytes
        clients[3].push(0)
        assert host._answers.queued_bytes() == 0


def test_backup_drops_exactly_the_slowest_on_all_shards() -> None:
    """It is answered with the newest weights and takes part in the next round; shards agree though orders differ."""
    host, _, (a, b, c) = cluster(partial(Backup, 1), 10, 11, 12)
    late = c.push(0, 100.0, shards=[1, 2])
    first = [a.push(0, 1.0), b.push(0, 3.0)]
    assert [a.weights(answer.payload) for answer in first] == [[-2.0] * 3] * 2
    assert late.waiting
    rest = c.push(0, 100.0, shards=[0])
    assert (c.weights(rest.payload, [0]), c.weights(late.payload, [1, 2])) == ([-2.0], [-2.0, -2.0])
    assert host.progress().dropped == 1
    a.base = c.base = Version(1, 1)
    c.push(1, 5.0)
    assert a.weights(a.push(1, 1.0).payload) == [-5.0] * 3


def test_ssp_applies_at_once_and_answers_within_the_bound() -> None:
    """The fast worker's push is seen by the slow one before the fast one has its answer."""
    _, _, (a, b) = cluster(partial(Ssp, 1), 10, 11)
    assert a.push(0).statuses == [OK] * 3
    parked = a.push(1)
    assert parked.waiting
    assert b.weights(b.pull().payload) == [-2.0] * 3
    assert b.weights(b.push(0).payload) == [-3.0] * 3
    assert a.weights(parked.payload) == [-3.0] * 3


def test_one_worker_never_waits() -> None:
    """With any choice."""
    choices: Sequence[Callable[[], Policy]] = (Bsp, partial(Ssp, 0), partial(Backup, 1))
    for policy in choices:
        _, _, (a,) = cluster(policy, 10)
        for number in range(3):
            assert a.weights(a.push(number, base=Version(1, number)).payload) == [-1.0 - number] * 3


def test_what_a_round_waits_for_is_dropped_with_its_worker() -> None:
    """A dead worker's parked push is answered as fenced; what it gave to the round stays in it."""
    host, _, (a, b) = cluster(Bsp, 10, 11)
    parked = a.push(0)
    host.install_members(admitted(11))
    assert parked.reply.fenced
    assert all(not slot.held for slot in host._slots().values())
    assert b.weights(b.push(0, 3.0).payload) == [-2.0] * 3
    assert [shard.pushes for shard in host.progress().shards] == [2] * 3


class Stopped(Bsp):
    """bsp that stops the first worker's push to shard 1 until it is let go: its thread is then at a known point."""

    entered = threading.Event()
    go = threading.Event()

    def decide(self, event: PushEvent) -> Decision:
        if event.shard == 1 and event.incarnation == 10:
            self.entered.set()
            assert self.go.wait(30)
        return super().decide(event)


def test_shards_closed_by_different_requests_make_one_answer() -> None:
    """The second worker closes the round of shard 0 while the first one's message is still being gone through, which
    then closes the others: its answer has the new weights of all three."""
    host = Host(exact=True, policy=Stopped, apply_threads=2)
    try:
        with running(host, 10, 11) as a:
            b = Client(host, a.map, 11)
            rest = push(b, 0, [1, 2])
            whole = push(a, 0)
            assert Stopped.entered.wait(30)
            assert done(push(b, 0, [0])).statuses == [OK]
            Stopped.go.set()
            assert a.weights(done(whole).payload) == [-1.0] * 3
            assert b.weights(done(rest).payload, [1, 2]) == [-1.0] * 2
    finally:
        Stopped.go.set()
