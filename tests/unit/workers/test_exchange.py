"""Messages and their answers: whatever servers and network do, each shard is brought to an answer, or an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from ps.clock import Deadline
from ps.control.api import Control, Holder, ServerPeer, ShardMap
from ps.errors import CallTimeout, Fenced, JobFailed, PeerLost, Refused, TransportError
from ps.rpc.transport import Transport
from ps.rpc.wire import Caller, Pull, Push, Reply, Request, ShardPush, ShardReply, Status
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec
from ps.types import Incarnation, JobState, ShardId, Version
from workers.config import WorkerConfig
from workers.exchange import Exchange
from workers.lifecycle import Lifecycle
from workers.routing import Message, Routes

SHARDS = tuple(ShardId(n) for n in range(4))
CONFIG = WorkerConfig(call_base_s=5.0, retry_s=30.0)
ONE, TWO = Incarnation(1), Incarnation(2)


def shard_map(holders: Sequence[Incarnation], epoch: int = 1) -> ShardMap:
    """Four shards of 64 bytes."""
    params = (ParamSpec(name="w", shape=(64,), dtype="float32", group=0),)
    return ShardMap(
        epoch=epoch,
        signature=ModelSignature(params=params, optimizer="SGD"),
        shard_bytes=64,
        holders=tuple(Holder(shard=shard, epoch=1, incarnation=who) for shard, who in enumerate(holders)),  # type: ignore[arg-type]
        servers=tuple(
            ServerPeer(incarnation=n, name=f"server-{n}", address=f"uv://h:{n}") for n in sorted(set(holders))
        ),
        initialised_by=None,
    )


class FakeClock:
    """Waiting is what makes time pass."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.time_s += max(timeout_s, 1e-3)
        return event.is_set()


@dataclass
class Call:
    """A request as the server saw it."""

    server: Incarnation
    request: Request
    payload: bytes

    @property
    def shards(self) -> list[int]:
        return [part.shard if isinstance(part, ShardPush) else part[0] for part in self.request.shards]

    @property
    def poll(self) -> bool:
        return isinstance(self.request, Push) and self.request.poll


Script = Callable[[Call, int], "Reply | TransportError | None"]
"""Answer to the n-th call; None: never answered."""


@dataclass
class Ticket:
    """Answered at once, or when waited for, or never."""

    clock: FakeClock
    answer: Reply | TransportError | None
    open: bool

    def done(self) -> bool:
        return self.answer is not None and not self.open

    def result(self, deadline: Deadline) -> tuple[Reply, Tensor]:
        self.open = False
        if self.answer is None:
            self.clock.time_s = max(self.clock.time_s, deadline.at_s)
            raise CallTimeout("silence")
        if isinstance(self.answer, TransportError):
            raise self.answer
        return self.answer, torch.empty(0, dtype=torch.uint8)


@dataclass
class Network:
    """A transport whose answers are scripted; notes connections and calls."""

    clock: FakeClock
    script: Script
    calls: list[Call] = field(default_factory=list)
    connected: list[Incarnation] = field(default_factory=list)
    unreachable: set[Incarnation] = field(default_factory=set)
    lazy: bool = False
    """Answers come only when waited for."""
    most_open: int = 0
    tickets: list[Ticket] = field(default_factory=list)

    def connect(self, server: Incarnation, name: str, address: str, secret: bytes, *, timeout_s: float) -> None:
        if server in self.unreachable:
            raise PeerLost("no route")
        self.connected.append(server)

    def submit(self, server: Incarnation, request: Request, payload: Tensor | None, *, timeout_s: float) -> Ticket:
        call = Call(server, request, b"" if payload is None else bytes(payload.tolist()))
        self.calls.append(call)
        self.tickets.append(Ticket(self.clock, self.script(call, len(self.calls) - 1), self.lazy))
        self.most_open = max(self.most_open, sum(ticket.open for ticket in self.tickets))
        return self.tickets[-1]


@dataclass
class Maps:
    """A control line that knows only the newest map."""

    newest: ShardMap

    def shard_map(self) -> ShardMap:
        return self.newest


@dataclass
class PushAll:
    """A push; notes which shards were settled."""

    name: str = "push of step 3"
    polls: bool = True
    settled: list[int] = field(default_factory=list)

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        base = Version(1, 0)
        parts = tuple(ShardPush(shard=shard, shard_epoch=1, base=base, present=b"\1") for shard in shards)
        return Push(caller=caller, sequence=3, samples=1, groups=(), shards=parts, poll=poll)

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        self.settled += [reply.shard for reply in done]


class PullAll(PushAll):
    """A pull: PENDING means not possible yet."""

    def __init__(self) -> None:
        super().__init__(name="pull", polls=False)

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        return Pull(caller=caller, shards=tuple((shard, 1, None) for shard in shards))


@dataclass
class Bench:
    """An exchange over a scripted network."""

    script: Script
    holders: Sequence[Incarnation] = (ONE, ONE, TWO, TWO)
    config: WorkerConfig = CONFIG

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.network = Network(self.clock, self.script)
        self.maps = Maps(shard_map(self.holders))
        self.lifecycle = Lifecycle()
        plan = make_plan(self.maps.newest.signature, 64)
        self.exchange = Exchange(
            transport=cast(Transport, self.network),
            control=cast(Control, self.maps),
            lifecycle=self.lifecycle,
            routes=Routes(plan, self.maps.newest),
            incarnation=Incarnation(9),
            secret=b"s" * 16,
            config=self.config,
            clock=self.clock,
        )

    def run(self, operation: PushAll | None = None, message_bytes: int = 128) -> PushAll:
        operation = operation or PushAll()
        messages = self.exchange.routes.messages(SHARDS, message_bytes)
        self.exchange.run(operation, [(message, payload(message)) for message in messages])
        return operation


def payload(message: Message) -> Tensor:
    """Bytes that tell which shard they are of."""
    return torch.cat([torch.full((64,), shard, dtype=torch.uint8) for shard in message.shards])


def answer(call: Call, *statuses: Status) -> Reply:
    """One status for all shards, or one each."""
    each = statuses if len(statuses) > 1 else statuses * len(call.shards)
    shards = [
        ShardReply(shard=ShardId(shard), status=status, version=Version(1, 1), next_sequence=4)
        for shard, status in zip(call.shards, each, strict=True)
    ]
    return Reply(shards=tuple(shards))


def test_all_shards_are_sent_whole_and_settled_once() -> None:
    """One message per server, connected on first use, payload of exactly its shards."""
    bench = Bench(lambda call, n: answer(call, Status.OK))
    assert sorted(bench.run().settled) == [0, 1, 2, 3]
    assert [(call.server, call.shards) for call in bench.network.calls] == [(ONE, [0, 1]), (TWO, [2, 3])]
    assert bench.network.calls[0].payload == b"\0" * 64 + b"\1" * 64
    assert bench.network.connected == [ONE, TWO]


def test_mixed_answers_send_again_only_what_is_needed() -> None:
    """PENDING is polled without payload, BUSY is sent again with just its own bytes; nothing is settled twice."""

    def script(call: Call, n: int) -> Reply:
        return answer(call, Status.PENDING, Status.BUSY) if n == 0 else answer(call, Status.OK)

    bench = Bench(script)
    assert sorted(bench.run().settled) == [0, 1, 2, 3]
    again = sorted((call.shards, call.poll, call.payload) for call in bench.network.calls[2:])
    assert again == [([0], True, b""), ([1], False, b"\1" * 64)]


def test_missing_after_pending_brings_the_payload_back() -> None:
    """A server that lost a push which it had accepted gets it once more, whole."""
    statuses = [Status.PENDING, Status.OK, Status.MISSING, Status.DUPLICATE]
    bench = Bench(lambda call, n: answer(call, statuses[n]))
    assert sorted(bench.run().settled) == [0, 1, 2, 3]
    assert [(call.poll, len(call.payload)) for call in bench.network.calls] == [
        (False, 128), (False, 128), (True, 0), (False, 128),
    ]  # fmt: skip


def test_moved_shards_go_to_their_new_holder() -> None:
    """MOVED fetches the map; the shards of one message may end on different servers."""

    def script(call: Call, n: int) -> Reply:
        if n == 0:
            bench.maps.newest = shard_map((ONE, TWO, TWO, TWO), epoch=2)
            return answer(call, Status.OK, Status.MOVED)
        return answer(call, Status.OK)

    bench = Bench(script)
    assert sorted(bench.run().settled) == [0, 1, 2, 3]
    last = bench.network.calls[-1]
    assert (last.server, last.shards, last.payload) == (TWO, [1], b"\1" * 64)
    assert last.request.caller.map_epoch == 2


def test_a_lost_connection_is_opened_again_and_the_same_push_sent_again() -> None:
    """PeerLost means a fresh connection; the sequence number stays, so the server counts the push once."""
    bench = Bench(lambda call, n: PeerLost("eof") if n == 0 else answer(call, Status.OK))
    assert sorted(bench.run().settled) == [0, 1, 2, 3]
    assert bench.network.connected.count(ONE) == 2
    first, again = bench.network.calls[0], bench.network.calls[-1]
    assert (again.shards, again.payload) == (first.shards, first.payload)
    assert isinstance(again.request, Push) and again.request.sequence == 3


def test_silence_ends_with_the_calls_own_deadline() -> None:
    """No answer within base + bytes / floor is a lost connection too: connect again, send again."""
    bench = Bench(lambda call, n: None if n == 0 else answer(call, Status.OK))
    assert sorted(bench.run().settled) == [0, 1, 2, 3]
    assert bench.network.connected.count(ONE) == 2 and 5.0 <= bench.clock.time_s < 10.0


def test_trouble_is_bounded_and_names_the_server() -> None:
    """Nothing but broken connections for `retry_s` is the error that stands in the way."""
    bench = Bench(lambda call, n: PeerLost("eof") if call.server == TWO else answer(call, Status.OK))
    with pytest.raises(PeerLost, match=r"gave up the push of step 3 after 3\d s .* server server-2 .*: eof"):
        bench.run()
    assert 30 <= bench.clock.time_s < 40


def test_a_server_that_can_not_be_connected_is_trouble_too() -> None:
    """The first connection is retried like any other."""
    bench = Bench(lambda call, n: answer(call, Status.OK))
    bench.network.unreachable.add(TWO)
    with pytest.raises(PeerLost, match="no route"):
        bench.run()


def test_polling_has_no_bound_while_the_server_answers() -> None:
    """PENDING is progress: a push that waits for others (bounded staleness) is asked for until it is applied."""

    def script(call: Call, n: int) -> Reply:
        bench.clock.time_s += 2.0
        return answer(call, Status.PENDING if n < 50 else Status.OK)

    bench = Bench(script)
    assert sorted(bench.run().settled) == [0, 1, 2, 3]
    assert bench.clock.time_s > 3 * bench.config.retry_s


def test_a_pull_that_is_pending_waits_and_asks_again() -> None:
    """Initial weights that are not there yet: ask again later, within the bound."""
    bench = Bench(lambda call, n: answer(call, Status.PENDING if n < 6 else Status.OK))
    assert sorted(bench.run(PullAll()).settled) == [0, 1, 2, 3]
    bench = Bench(lambda call, n: answer(call, Status.PENDING))
    with pytest.raises(TransportError, match="no initial weights"):
        bench.run(PullAll())


@pytest.mark.parametrize(("fenced", "error"), [(False, Refused), (True, Fenced)])
def test_a_refusal_is_final(fenced: bool, error: type[Exception]) -> None:
    """Refused is not tried again; it names server, operation, shards and reason."""
    bench = Bench(lambda call, n: Reply(refused="wrong secret", fenced=fenced))
    with pytest.raises(error, match=r"server-1 .* refused the push of step 3 of shards 0, 1 .*: wrong secret"):
        bench.run()
    assert len(bench.network.calls) == 2


def test_the_end_of_the_job_cuts_waits_short() -> None:
    """A worker that waits for a dead server hears from the coordinator that the job has failed."""

    def script(call: Call, n: int) -> None:
        bench.lifecycle.on_job(JobState.FAILED, "server-1 is gone", False)

    bench = Bench(script, config=WorkerConfig(call_base_s=500.0))
    with pytest.raises(JobFailed, match="server-1 is gone"):
        bench.run()
    assert bench.clock.time_s < 2.0


@pytest.mark.parametrize(("bound", "most"), [(9, 2), (1, 1), (0.5, 1)])
def test_calls_and_bytes_in_flight_are_bounded_per_server(bound: float, most: int) -> None:
    """Never more under way to one server than the settings say; one message always may be."""
    config = replace(WorkerConfig(), calls_in_flight=2, bytes_in_flight=int(64 * bound))
    bench = Bench(lambda call, n: answer(call, Status.OK), holders=(ONE,) * 4, config=config)
    bench.network.lazy = True
    bench.run(message_bytes=64)
    assert bench.network.most_open == most
