"""Answers: who waits for which request, until when, and with which snapshot it is answered.

Accepting and answering are two things: a request is accepted when its bytes fit the bound, and answered when all its
shards are decided and a buffer is free, or as PENDING when that takes too long. Retries attach to their original.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from ps.clock import Clock
from ps.rpc.transport import Answer
from ps.rpc.wire import Pull, Push, Reply, Request, ShardReply, Status
from ps.server.apply import WITH_WEIGHTS, Coded, encode, fill
from ps.server.slots import MessageLayout, PushKey, Work
from ps.server.waiters import Waiters
from ps.store.pool import SnapshotPool
from ps.types import Incarnation, ShardId, Version

_MOST_UNSENT = 1024
"""Replies that wait for a buffer; more are told to ask again."""

_MOST_WAITING = 65536
"""Answers that wait; past it requests are busy. A worker has a few messages under way."""

_EVICTED = Reply(refused="this incarnation is not admitted: it was evicted, or never joined", fenced=True)

_CLOSING = Reply(refused="this server is shutting down")


class Accepted(Enum):
    """What became of a request that was offered."""

    YES = "yes"
    """It is to be done."""
    ATTACHED = "attached"
    """The same push is on its way already; this caller gets its answer."""
    BUSY = "busy"
    """It would exceed the bound."""


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    bytes_pushed: int = 0
    bytes_pulled: int = 0
    pulls: Counter[ShardId] = field(default_factory=Counter)


@dataclass(slots=True)
class _Given:
    """Answers to give once no lock is held."""

    answers: list[Answer]
    reply: Reply


class Answers:
    """Thread-safe. Calls answers on the thread that causes them, without any lock."""

    def __init__(self, pool: SnapshotPool, clock: Clock, queue_bytes: int) -> None:
        """`queue_bytes` bounds the payloads that are still needed by a shard."""
        self._pool = pool
        self._clock = clock
        self._queue_bytes = queue_bytes
        self._lock = threading.Lock()
        """Guards the fields below, and the works in them; never held together with another lock."""
        self._pushes: dict[PushKey, Work] = {}
        """Pushes that are not applied on all their shards, for retries to attach to."""
        self._queued_bytes = 0
        self._unready: list[Work] = []
        """Works that came before the map or the initial weights they need. Bounded by their waiters' deadlines."""
        self._unsent: list[Work] = []
        """Works that are decided and wait for a buffer."""
        self._waiters = Waiters()
        self._totals = Totals()

    # ---- in ----

    def accept(self, work: Work, answer: Answer, *, must: bool = False) -> Accepted:
        """Take a request in, or attach its caller to the same push. `must`: whatever the bound says."""
        key = work.key
        size = work.payload.numel() if work.payload is not None else 0
        with self._lock:
            known = self._pushes.get(_key(work.request, work.layout)) if isinstance(work.request, Push) else None
            if known is not None:
                self._waiters.add(self._clock.now(), known, answer)
                return Accepted.ATTACHED
            if self._full(size) and not must:
                return Accepted.BUSY
            if key is not None:
                self._pushes[key] = work
                self._totals.bytes_pushed += size
            work.queued_bytes = size
            self._queued_bytes += size
            self._waiters.add(self._clock.now(), work, answer)
        return Accepted.YES

    def park(self, work: Work, answer: Answer) -> Accepted:
        """Keep a request that can't be taken yet; `take_parked` gives it back."""
        size = work.payload.numel() if work.payload is not None else 0
        with self._lock:
            if self._full(size):
                return Accepted.BUSY
            work.parked = True
            work.queued_bytes = size
            self._queued_bytes += size
            self._unready.append(work)
            self._waiters.add(self._clock.now(), work, answer)
        return Accepted.YES

    def take_parked(self) -> list[tuple[Work, list[Answer]]]:
        """All parked requests whose time is not up, out of the tables, with their answers."""
        with self._lock:
            parked, self._unready = self._unready, []
            self._queued_bytes -= sum(work.queued_bytes for work in parked)
            return [(work, self._take(work)) for work in parked if work.answers]

    # ---- out ----

    def decided(self, work: Work, shards: int, coded: Coded | None = None) -> None:
        """`shards` more shards of a work have their status (the first pass through it counts as one, too).

        When that was the last, the work is answered: with `coded`, if it holds the newest weights, else with a
        snapshot made for it, or later when there is no buffer. `coded` is shared or released in any case.
        """
        with self._lock:
            work.undecided -= shards
            done = work.undecided == 0
            if done:
                self._retire(work)
        if not done:
            if coded is not None:
                self._pool.release(coded.snapshot)
            return
        self._answer(work, coded)

    def read(self, work: Work, shards: int) -> None:
        """`shards` more shards of a work don't need its payload (the first pass counts as one, too)."""
        with self._lock:
            work.unread -= shards
            if work.unread == 0:
                self._free(work)

    def refuse(self, work: Work, reply: Reply) -> None:
        """End a work that can't be done."""
        self.give(work, reply, no_payload())

    def give(self, work: Work, reply: Reply, payload: Tensor) -> None:
        """End a work with an answer that is made already."""
        with self._lock:
            self._retire(work)
            answers = self._take(work)
        for answer in answers:
            answer(reply, payload)

    def evict(self, gone: Collection[Incarnation]) -> None:
        """Tell whoever waits under these incarnations that they are fenced, and forget their requests."""
        with self._lock:
            works = [work for work in self._pushes.values() if work.incarnation in gone]
            works += [work for work in (*self._unready, *self._unsent) if work.incarnation in gone]
            given = self._drop(works, _EVICTED)
        _give(given)

    def close(self) -> None:
        """Refuse everything that still waits."""
        with self._lock:
            given = self._drop([*self._pushes.values(), *self._unready, *self._unsent], _CLOSING)
            late = [answer for _, answer in self._waiters.expired(float("inf"))]
        _give([*given, _Given(late, _CLOSING)])

    def fence(self, work: Work) -> None:
        """End a work of a worker that is not admitted any more."""
        self.refuse(work, _EVICTED)

    def tick(self) -> float | None:
        """Answer what has waited too long and what a buffer has come back for; returns when the next deadline is."""
        if self._unsent:
            self._send_later()
        with self._lock:
            late = self._waiters.expired(self._clock.now())
            if late and self._unready:
                self._drop([work for work in self._unready if not work.answers], _EVICTED)
            given = [_Given([answer], _reply(work, None, pending=True)) for work, answer in late]
            deadline = self._waiters.next_deadline()
        _give(given)
        return deadline

    @property
    def lacks_buffers(self) -> bool:
        """Whether a reply waits for a buffer. A moment old."""
        return bool(self._unsent)

    def totals(self) -> Totals:
        """A copy of the counters."""
        with self._lock:
            return Totals(self._totals.bytes_pushed, self._totals.bytes_pulled, self._totals.pulls.copy())

    def queued_bytes(self) -> int:
        """Payload bytes accepted and still needed by a shard."""
        with self._lock:
            return self._queued_bytes

    # ---- pieces of the above; those that say `self._lock` are called with it held ----

    def _full(self, size: int) -> bool:
        # self._lock
        too_many_bytes = size > 0 and self._queued_bytes > 0 and self._queued_bytes + size > self._queue_bytes
        return too_many_bytes or len(self._waiters) >= _MOST_WAITING

    def _take(self, work: Work) -> list[Answer]:
        # self._lock
        answers = [answer for _, answer in work.answers]
        work.answers = []
        return answers

    def _retire(self, work: Work) -> None:
        # self._lock
        key = work.key
        if key is not None and self._pushes.get(key) is work:
            del self._pushes[key]
        self._free(work)

    def _free(self, work: Work) -> None:
        # self._lock
        self._queued_bytes -= work.queued_bytes
        work.queued_bytes = 0
        work.payload = None

    def _drop(self, works: Sequence[Work], reply: Reply) -> list[_Given]:
        # self._lock
        for work in works:
            self._retire(work)
        lost = {id(work) for work in works}
        self._unready = [work for work in self._unready if id(work) not in lost]
        self._unsent = [work for work in self._unsent if id(work) not in lost]
        return [_Given(self._take(work), reply) for work in works]

    def _answer(self, work: Work, coded: Coded | None) -> None:
        if not work.answers:  # all were told that it is pending; nobody can attach to it any more
            if coded is not None:
                self._pool.release(coded.snapshot)
            return
        if work.fenced or work.failure:
            if coded is not None:
                self._pool.release(coded.snapshot)
            self.refuse(work, _EVICTED if work.fenced else Reply(refused=work.failure))
            return
        wanted = [status in WITH_WEIGHTS for status in work.statuses]
        if not any(wanted) or not isinstance(work.request, Push | Pull):
            if coded is not None:
                self._pool.release(coded.snapshot)
            self._send(work, None)
            return
        if coded is not None:
            fill(self._pool, coded, work.layout, wanted)
        elif (coded := encode(self._pool, work.layout, wanted)) is None:
            self._send_when_free(work)
            return
        self._send(work, coded)

    def _send(self, work: Work, coded: Coded | None) -> None:
        with self._lock:
            answers = self._take(work)
            if coded is not None:
                self._totals.bytes_pulled += len(answers) * work.layout.nbytes
                if isinstance(work.request, Pull):
                    self._totals.pulls.update(work.layout.ids * len(answers))
        reply = _reply(work, coded)
        if coded is None:
            for answer in answers:
                answer(reply, no_payload())
        elif not answers:
            self._pool.release(coded.snapshot)
        else:
            aliases = self._pool.share(coded.snapshot, len(answers))
            while aliases:  # each alias is let go of as soon as it is handed over
                answers.pop()(reply, aliases.pop())

    def _send_when_free(self, work: Work) -> None:
        with self._lock:
            kept = len(self._unsent) < _MOST_UNSENT
            if kept:
                self._unsent.append(work)
            answers = [] if kept else self._take(work)
        for answer in answers:
            answer(_reply(work, None, pending=True), no_payload())

    def _send_later(self) -> None:
        with self._lock:
            unsent, self._unsent = self._unsent, []
        for work in unsent:
            if work.answers:
                self._answer(work, None)


def no_payload() -> Tensor:
    """A payload of no bytes."""
    return torch.empty(0, dtype=torch.uint8)


def standing(layout: MessageLayout, statuses: Sequence[Status], incarnation: Incarnation) -> Reply:
    """A reply without weights: a status per shard, the newest versions, and the push numbers expected next."""
    return Reply(shards=_rows(layout, statuses, [None] * len(statuses), incarnation))


def busy(layout: MessageLayout, request: Request) -> Reply:
    """A reply that tells the caller to come later."""
    return standing(layout, [Status.BUSY] * len(layout.ids), request.caller.incarnation)


def _give(given: Sequence[_Given]) -> None:
    for item in given:
        for answer in item.answers:
            answer(item.reply, no_payload())


def _key(request: Push, layout: MessageLayout) -> PushKey:
    return request.caller.incarnation, request.sequence, layout.ids


def _reply(work: Work, coded: Coded | None, *, pending: bool = False) -> Reply:
    layout, incarnation = work.layout, work.incarnation
    if pending:
        # A push that was never taken in is not pending: nobody would apply it.
        untaken = isinstance(work.request, Push) and work.parked
        return standing(layout, [Status.BUSY if untaken else Status.PENDING] * len(layout.ids), incarnation)
    versions = coded.versions if coded is not None else [None] * len(layout.ids)
    statuses = [status or Status.MISSING for status in work.statuses]
    if isinstance(work.request, Pull):
        for index, (_, _, base) in enumerate(work.request.shards):
            if base is not None and versions[index] == base:
                statuses[index] = Status.UNCHANGED
    return Reply(shards=_rows(layout, statuses, versions, incarnation))


def _rows(
    layout: MessageLayout, statuses: Sequence[Status], versions: Sequence[Version | None], incarnation: Incarnation
) -> tuple[ShardReply, ...]:
    rows = []
    for shard, slot, status, version in zip(layout.ids, layout.slots, statuses, versions, strict=True):
        newest = slot.shard.version if slot is not None else Version(0, 0)
        rows.append(
            ShardReply(
                shard=shard,
                status=status,
                version=version or newest,
                next_sequence=slot.order.next_sequence(incarnation) if slot is not None else 0,
            )
        )
    return tuple(rows)
