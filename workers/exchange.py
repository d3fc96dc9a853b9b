"""Carries a set of messages to the servers and brings each shard to an answer, whatever happens on the way.

Several messages are under way at once, within bounds per server. A shard that is pending is polled, a busy one is
sent again later, a moved one is sent to its new holder, a lost connection is opened again under a fresh alias:
always with the same request, so a push counts once. Everything runs on the calling thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ps.clock import Clock, Deadline
from ps.control.api import Control
from ps.errors import CallTimeout, Fenced, PeerLost, Refused, TransportError
from ps.rpc.transport import Ticket, Transport
from ps.rpc.wire import Caller, Reply, Request, ShardReply, Status
from ps.secrets import derive
from ps.types import Incarnation, ShardId
from workers.config import WorkerConfig
from workers.lifecycle import Lifecycle
from workers.routing import Message, Routes

_SLICE_S = 0.25
"""How often a wait looks up to see whether the job still runs."""

_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.5

_DONE = frozenset({Status.OK, Status.DUPLICATE, Status.UNCHANGED})


class Operation(Protocol):
    """What is asked of every shard, and what is done with the answers."""

    name: str
    """For error messages, e.g. `push of step 12`."""
    polls: bool
    """True: PENDING means accepted, and is asked for again without payload. False: not possible yet, try later."""

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        """The request for these shards."""
        ...

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """Take the answers of shards that are done; `payload` is laid out as `message` says, or empty."""
        ...


@dataclass(slots=True)
class _Job:
    """Shards that still have to be answered, and the payload they came with."""

    message: Message
    source: Message
    """Layout of `payload`; `message` holds some or all of its shards."""
    payload: Tensor | None
    poll: bool = False
    tries: int = 0
    not_before_s: float = 0.0

    def cut(self, plan_message: Message) -> Tensor | None:
        """The payload of just the shards in `plan_message`. A copy, unless that is all of them."""
        if self.payload is None or plan_message.shards == self.source.shards:
            return self.payload
        at = dict(zip(self.source.shards, self.source.offsets, strict=True))
        ends = dict(zip(self.source.shards, (*self.source.offsets[1:], self.source.nbytes), strict=True))
        return torch.cat([self.payload[at[shard] : ends[shard]] for shard in plan_message.shards])


@dataclass(slots=True)
class _Flight:
    """A job under way."""

    job: _Job
    server: Incarnation
    ticket: Ticket
    give_up_s: float
    nbytes: int


@dataclass(slots=True)
class _Run:
    """One call of `Exchange.run`."""

    operation: Operation
    queue: deque[_Job]
    flights: list[_Flight] = field(default_factory=list)
    trouble_since_s: dict[Incarnation, float] = field(default_factory=dict)
    """Server → when it stopped making progress; forgotten as soon as it does."""


class Exchange:
    """Sends messages and waits for their answers. Not thread-safe: belongs to the training thread."""

    def __init__(
        self,
        *,
        transport: Transport,
        control: Control,
        lifecycle: Lifecycle,
        routes: Routes,
        incarnation: Incarnation,
        secret: bytes,
        config: WorkerConfig,
        clock: Clock,
    ) -> None:
        self.routes = routes
        self._transport = transport
        self._control = control
        self._lifecycle = lifecycle
        self._incarnation = incarnation
        self._secret = secret
        self._config = config
        self._clock = clock
        self._connected: set[Incarnation] = set()
        self._secrets: dict[Incarnation, bytes] = {}  # one entry per server ever met, at most MAX_INCARNATION

    def run(
        self,
        operation: Operation,
        messages: Sequence[tuple[Message, Tensor | None]],
        sources: Sequence[Message] | None = None,
    ) -> None:
        """Bring every shard of every message to an answer; blocks, while signal handlers run on the main thread.

        A payload that goes out is laid out as its message says, or as its entry of `sources`.

        Raises `Fenced`, `Refused`, `JobFailed`, `CoordinatorLost`, `WorkerStopped`, or after `retry_s` without any
        progress the `TransportError` that stood in the way.
        """
        layouts = sources or [message for message, _ in messages]
        jobs = (_Job(message, at, payload) for (message, payload), at in zip(messages, layouts, strict=True))
        run = _Run(operation, deque(jobs))
        while run.queue or run.flights:
            self._lifecycle.check()
            self._launch(run)
            self._land(run)

    # ---- sending ----

    def _launch(self, run: _Run) -> None:
        """Send what may be sent now."""
        now = self._clock.now()
        for _ in range(len(run.queue)):
            job = run.queue.popleft()
            split = self.routes.by_server(job.message.shards)
            if len(split) > 1:
                run.queue.extend(self._part(job, shards) for shards in split.values())
                continue
            server = next(iter(split))
            if job.not_before_s > now or not self._room(run, server, job):
                run.queue.append(job)
                continue
            self._send(run, server, job)

    def _part(self, job: _Job, shards: Sequence[ShardId], *, poll: bool | None = None) -> _Job:
        message = Message.of(self.routes.plan, shards)
        return _Job(message, job.source, job.payload, poll=job.poll if poll is None else poll, tries=job.tries)

    def _room(self, run: _Run, server: Incarnation, job: _Job) -> bool:
        mine = [flight for flight in run.flights if flight.server == server]
        if not mine:
            return True
        flying = sum(flight.nbytes for flight in mine)
        fits = flying + self._weight(job) <= self._config.bytes_in_flight
        return fits and len(mine) < self._config.calls_in_flight

    def _weight(self, job: _Job) -> int:
        return 0 if job.poll else job.message.nbytes

    def _send(self, run: _Run, server: Incarnation, job: _Job) -> None:
        caller = Caller(incarnation=self._incarnation, secret=self._shown(server), map_epoch=self.routes.epoch)
        request = run.operation.request(caller, job.message.shards, job.poll)
        payload = None if job.poll else job.cut(job.message)
        # All bytes under way share the link, and each message goes out and may come back.
        bytes_both_ways = 2 * (job.message.nbytes + sum(flight.job.message.nbytes for flight in run.flights))
        timeout_s = self._config.call_base_s + bytes_both_ways / self._config.floor_bytes_per_s
        try:
            self._connect(server)
            ticket = self._transport.submit(server, request, payload, timeout_s=timeout_s)
        except TransportError as error:
            self._lost(run, server, [job], error)
            return
        give_up_s = self._clock.now() + timeout_s + 1.0  # the transport's own deadline comes first
        run.flights.append(_Flight(job, server, ticket, give_up_s, self._weight(job)))

    def connect(self) -> None:
        """Connect to every holder. Raises `TransportError` naming the one that can't be reached."""
        for server in self.routes.holders():
            self._connect(server)

    def _connect(self, server: Incarnation) -> None:
        if server in self._connected:
            return
        peer = self.routes.peer(server)
        self._transport.connect(
            server,
            peer.name,
            peer.address,
            self._shown(server),
            timeout_s=self._config.connect_timeout_s,
        )
        self._connected.add(server)

    def _shown(self, server: Incarnation) -> bytes:
        if server not in self._secrets:
            self._secrets[server] = derive(self._secret, server)
        return self._secrets[server]

    # ---- answers ----

    def _land(self, run: _Run) -> None:
        """Take in the answers that are there; wait a little for one when there is none."""
        ready = [flight for flight in run.flights if flight.ticket.done()]
        if not ready:
            if not run.flights:
                self._pause(run)
                return
            ready = self._wait_for(run.flights[0])
        for flight in ready:
            if flight in run.flights:
                run.flights.remove(flight)
                self._take(run, flight)

    def _pause(self, run: _Run) -> None:
        if run.queue:
            due_s = min(job.not_before_s for job in run.queue)
            self._clock.wait(self._lifecycle.news, min(_SLICE_S, due_s - self._clock.now()))

    def _wait_for(self, flight: _Flight) -> list[_Flight]:
        try:
            flight.ticket.result(Deadline.after(self._clock, _SLICE_S))
        except CallTimeout:
            if not flight.ticket.done() and self._clock.now() < flight.give_up_s:
                return []
        except PeerLost:
            pass
        return [flight]

    def _take(self, run: _Run, flight: _Flight) -> None:
        try:
            reply, payload = flight.ticket.result(Deadline.after(self._clock, 0.0))
        except TransportError as error:
            self._lost(run, flight.server, [flight.job], error)
            return
        if reply.refused:
            self._refused(flight, reply, run.operation)
        self._settle(run, flight, reply, payload)

    def _settle(self, run: _Run, flight: _Flight, reply: Reply, payload: Tensor) -> None:
        done = [shard for shard in reply.shards if shard.status in _DONE]
        if done:
            run.trouble_since_s.pop(flight.server, None)
            run.operation.settle(flight.job.message, payload, done)
        self._again(run, flight, reply, Status.PENDING, self._pending)
        self._again(run, flight, reply, Status.BUSY, self._busy)
        self._again(run, flight, reply, Status.MOVED, self._moved)
        self._again(run, flight, reply, Status.MISSING, self._missing)

    def _again(
        self,
        run: _Run,
        flight: _Flight,
        reply: Reply,
        status: Status,
        how: Callable[[_Run, _Flight, Sequence[ShardId]], None],
    ) -> None:
        shards = [shard.shard for shard in reply.shards if shard.status is status]
        if shards:
            how(run, flight, shards)

    def _pending(self, run: _Run, flight: _Flight, shards: Sequence[ShardId]) -> None:
        """A push was accepted: ask for its answer. A pull came before the initial weights: ask again later."""
        if run.operation.polls:
            run.trouble_since_s.pop(flight.server, None)
            run.queue.append(self._part(flight.job, shards, poll=True))
        else:
            self._trouble(run, flight.server, TransportError("the shards have no initial weights yet"))
            self._later(run, self._part(flight.job, shards))

    def _busy(self, run: _Run, flight: _Flight, shards: Sequence[ShardId]) -> None:
        run.trouble_since_s.pop(flight.server, None)
        self._later(run, self._part(flight.job, shards))

    def _missing(self, run: _Run, flight: _Flight, shards: Sequence[ShardId]) -> None:
        run.queue.append(self._part(flight.job, shards, poll=False))

    def _moved(self, run: _Run, flight: _Flight, shards: Sequence[ShardId]) -> None:
        self._trouble(run, flight.server, TransportError(f"it no longer holds shards {', '.join(map(str, shards))}"))
        self._refresh()
        self._later(run, self._part(flight.job, shards, poll=False))

    def _refused(self, flight: _Flight, reply: Reply, operation: Operation) -> None:
        self._lifecycle.check()  # the coordinator's word, where there is one, says more
        what = f"{self._who(flight.server)} refused the {operation.name} of {flight.job.message}: {reply.refused}"
        raise Fenced(what + "; start this worker again to rejoin") if reply.fenced else Refused(what)

    # ---- trouble ----

    def _lost(self, run: _Run, server: Incarnation, jobs: list[_Job], error: TransportError) -> None:
        """The connection is dead for ever: take back what is under way, and reconnect under a fresh alias."""
        self._connected.discard(server)
        jobs = jobs + [flight.job for flight in run.flights if flight.server == server]
        run.flights = [flight for flight in run.flights if flight.server != server]
        self._trouble(run, server, error)
        self._refresh()
        for job in jobs:
            self._later(run, job)

    def _trouble(self, run: _Run, server: Incarnation, error: TransportError) -> None:
        """Note that a server makes no progress; raise when that has lasted too long."""
        self._lifecycle.check()
        since_s = run.trouble_since_s.setdefault(server, self._clock.now())
        lasted_s = self._clock.now() - since_s
        if lasted_s >= self._config.retry_s:
            raise type(error)(
                f"gave up the {run.operation.name} after {lasted_s:.0f} s without progress at {self._who(server)}: "
                f"{error}"
            ) from error

    def _refresh(self) -> None:
        newest = self._control.shard_map()
        if newest is not None and newest.epoch > self.routes.epoch:
            self.routes.update(newest)

    def _later(self, run: _Run, job: _Job) -> None:
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**job.tries)
        job.tries = min(job.tries + 1, 16)
        job.not_before_s = self._clock.now() + pause_s
        run.queue.append(job)

    def _who(self, server: Incarnation) -> str:
        peer = self.routes.peers.get(server)
        return f"server {peer.name} (incarnation {server}, {peer.address})" if peer else f"server {server}"
