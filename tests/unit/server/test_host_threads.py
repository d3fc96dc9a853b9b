"""Host with its own threads: nothing blocks a caller, bounds hold, deadlines are kept, everything ends."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from ps.consistency.asp import Asp
from ps.consistency.policy import Decision, PushEvent, Verdict
from ps.rpc.wire import Init, Status
from ps.server.host import Host
from ps.types import Incarnation
from tests.support.clock import FakeClock
from tests.support.shards import Answered, Client, admitted, shard_map, signature

SERVER = Incarnation(1)


class Gate(Asp):
    """A consistency choice that stops every push until it is opened: an apply thread is then at a known point."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)

    def decide(self, event: PushEvent) -> Decision:
        """Wait for `open`."""
        self.entered.release()
        assert self.open.wait(30)
        return Decision(Verdict.ADMIT, "the gate is open")


class Choosy(Asp):
    """Drops every push with an odd number, raises on number 4."""

    def decide(self, event: PushEvent) -> Decision:
        """By number."""
        if event.sequence == 4:
            raise RuntimeError("four")
        return Decision(Verdict.DROP if event.sequence % 2 else Verdict.ADMIT, "parity")


class Waiting(Answered):
    """An answer that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def __call__(self, reply: object, payload: object) -> None:
        super().__call__(reply, payload)  # type: ignore[arg-type]
        self.came.set()


def push(client: Client, sequence: int, shards: Sequence[int] | None = None, *, poll: bool = False) -> Waiting:
    ids = list(shards if shards is not None else client.all)
    waiting = Waiting()
    payload = client.payload(1.0, ids)
    client.host.submit(client.push_request(sequence, ids, poll=poll), payload[:0] if poll else payload, waiting)
    return waiting


def pull(client: Client) -> Waiting:
    waiting = Waiting()
    client.host.submit(client.pull_request(), client.payload(0.0, [0])[:0], waiting)
    return waiting


def done(waiting: Waiting) -> Waiting:
    assert waiting.came.wait(30)
    return waiting


@contextmanager
def running(host: Host, *workers: int) -> Iterator[Client]:
    """A model on a host with threads; the host is closed at the end."""
    try:
        model = signature(300, 300)
        host.install_members(admitted(*(workers or (10,))))
        host.install_map(shard_map(model), SERVER)
        client = Client(host, shard_map(model), 10)
        first = Waiting()
        ids = [shard.id for shard in client.plan.shards]
        host.submit(Init(caller=client.caller, shards=tuple((i, 1) for i in ids)), client.payload(0.0, ids), first)
        done(first)
        host.install_map(shard_map(model, epoch=2, initialised_by=10), SERVER)
        yield client
    finally:
        host.close()


def eventually(condition: Callable[[], bool], clock: FakeClock | None = None) -> None:
    """Wait for other threads to get there; on a fake clock, time passes meanwhile."""
    event = threading.Event()
    for _ in range(3000):
        if condition():
            return
        if clock is not None:
            clock.advance(0.05)
        event.wait(0.01)
    raise AssertionError("it never happened")


def test_a_caller_never_waits_for_an_apply() -> None:
    """With the only apply thread stopped inside a push, submitting, saying hello and asking for progress go on."""
    gate = Gate()
    with running(Host(policy=lambda: gate, apply_threads=1)) as client:
        first = push(client, 0, [0])
        assert gate.entered.acquire(timeout=30)
        second = push(client, 0, [1])
        assert client.hello([1, 2]).statuses == [Status.OK, Status.OK]
        assert first.waiting
        assert second.waiting
        gate.open.set()
        assert done(first).statuses == done(second).statuses == [Status.OK]


def test_a_retry_during_the_apply_attaches() -> None:
    """The same push again while its original is being applied: one application, two answers."""
    gate = Gate()
    with running(Host(policy=lambda: gate, apply_threads=2)) as client:
        original = push(client, 0)
        assert gate.entered.acquire(timeout=30)
        retry = push(client, 0)
        poll = push(client, 0, poll=True)
        gate.open.set()
        for answer in (original, retry, poll):
            assert done(answer).statuses == [Status.OK] * 3
            assert client.weights(answer.payload) == [-1.0] * 3
        assert {shard.pushes for shard in client.host.progress().shards} == {1}


def test_a_slow_apply_is_pending_after_two_seconds() -> None:
    """The ticker says so without the apply thread; a poll then gets the answer, once."""
    gate, clock = Gate(), FakeClock()
    with running(Host(policy=lambda: gate, apply_threads=1, clock=clock)) as client:
        slow = push(client, 0)
        assert gate.entered.acquire(timeout=30)
        clock.advance(1.0)
        assert slow.waiting
        clock.advance(1.1)
        assert done(slow).statuses == [Status.PENDING] * 3
        assert slow.payload.numel() == 0
        poll = push(client, 0, poll=True)
        gate.open.set()
        assert done(poll).statuses == [Status.OK] * 3
        assert len(slow.replies) == 1


def test_payload_bytes_are_bounded() -> None:
    """Past the bound pushes are busy, and nothing of them is kept; once applied, there is room again."""
    gate = Gate()
    with running(Host(policy=lambda: gate, apply_threads=1, queue_bytes=1500), 10, 11) as client:
        other = Client(client.host, client.map, 11)
        first = push(client, 0, [0])
        assert gate.entered.acquire(timeout=30)
        assert done(push(other, 0, [0])).statuses == [Status.BUSY]
        gate.open.set()
        done(first)
        assert done(push(other, 0, [0])).statuses == [Status.OK]


def test_the_bound_never_refuses_what_others_wait_for() -> None:
    """A held push fills the bound; its predecessor is taken in all the same, or both would wait for ever."""
    with running(Host(apply_threads=1, queue_bytes=1024)) as client:
        early = push(client, 1, [0])
        done(pull(client))  # the one thread has gone through the push by now
        assert done(push(client, 0, [0])).statuses == [Status.OK]
        assert done(early).statuses == [Status.OK]


def test_a_reply_waits_for_a_buffer_and_the_apply_does_not() -> None:
    """With the one buffer on the wire the next push is applied at once and answered when the buffer is back."""
    with running(Host(apply_threads=1, snapshots=1)) as client:
        held = done(push(client, 0))
        late = push(client, 1)
        eventually(lambda: {shard.version for shard in client.host.progress().shards} == {2})
        assert late.waiting
        assert client.weights(held.payload) == [-1.0] * 3
        held.replies.clear()
        assert client.weights(done(late).payload) == [-2.0] * 3


def test_a_reply_without_a_buffer_is_pending_in_the_end() -> None:
    """A receiver that never lets go doesn't keep others waiting for ever: they are told to ask again."""
    clock = FakeClock()
    with running(Host(apply_threads=1, snapshots=1, clock=clock)) as client:
        held = done(push(client, 0))
        late = push(client, 1)
        eventually(lambda: not late.waiting, clock)
        assert late.statuses == [Status.PENDING] * 3
        held.replies.clear()
        poll = push(client, 1, poll=True)
        eventually(lambda: not poll.waiting, clock)
        assert poll.statuses == [Status.DUPLICATE] * 3
        assert client.weights(poll.payload) == [-2.0] * 3


def test_dropped_pushes_are_answered_and_not_applied() -> None:
    """What the consistency choice leaves out counts as seen: the next number goes on, weights and versions don't."""
    with running(Host(policy=Choosy, apply_threads=1)) as client:
        weights = [client.weights(done(push(client, n)).payload)[0] for n in range(4)]
        assert weights == [-1.0, -1.0, -2.0, -2.0]


def test_a_failing_apply_is_reported_to_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    """An error inside the server refuses the request, with the reason, and the threads live on."""
    with running(Host(policy=Choosy, apply_threads=1)) as client:
        for number in range(4):
            done(push(client, number))
        assert "internal error: four" in done(push(client, 4)).reply.refused
        assert "failed" in caplog.text
        assert done(push(client, 5, [0])).statuses == [Status.OK]


def test_an_eviction_in_the_middle_of_a_push_stops_it() -> None:
    """A worker is evicted while its push is being applied to the first shard: the other two never see it."""
    gate = Gate()
    with running(Host(policy=lambda: gate, apply_threads=1), 10, 11) as client:
        torn = push(client, 0)
        assert gate.entered.acquire(timeout=30)
        evict = threading.Thread(target=client.host.install_members, args=(admitted(11),), name="evict")
        evict.start()  # waits for the shard that is being applied
        eventually(lambda: client.hello([1]).reply.fenced)
        gate.open.set()
        evict.join(30)
        assert done(torn).reply.fenced
        other = Client(client.host, client.map, 11)
        assert done(push(other, 0)).statuses == [Status.OK] * 3
        assert sorted(shard.pushes for shard in client.host.progress().shards) == [1, 1, 2]


def test_close_answers_everything_and_ends_the_threads() -> None:
    """Held and parked requests get one refusing answer; no thread of the host is left."""
    with running(Host(apply_threads=2)) as client:
        held = push(client, 2)
    assert "shutting down" in done(held).reply.refused
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ps-")]


def test_many_workers_at_once_lose_nothing() -> None:
    """8 threads push 50 times each to the same shards: exactly 400 versions, weights exactly -400."""
    workers = list(range(10, 18))
    with running(Host(apply_threads=2, exact=True), *workers) as client:
        statuses: Counter[Status] = Counter()

        def train(worker: int) -> None:
            mine = Client(client.host, client.map, worker)
            for number in range(50):
                statuses.update(done(push(mine, number)).statuses)

        threads = [threading.Thread(target=train, args=(w,), name=f"worker-{w}") for w in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert statuses == {Status.OK: 1200}
        assert client.weights(done(pull(client)).payload) == [-400.0] * 3
        progress = client.host.progress()
        assert {shard.version for shard in progress.shards} == {400}
        assert sum(progress.staleness.values()) == 1200
