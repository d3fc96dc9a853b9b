"""Host: the `ShardHost` of a server. Checks requests, hands them to the apply threads, follows the coordinator's news.

A handler thread only checks a request and queues it. Locks: each slot's guards one shard, `Answers` and the pool have
one each. No two of them are ever held together, and none while an answer is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ps.clock import Clock, MonotonicClock
from ps.consistency.asp import Asp
from ps.consistency.policy import Policy, Ruling
from ps.control.api import Admitted, ServerProgress, ShardMap
from ps.optim.apply import warm_up
from ps.optim.spec import ServedOptimizer, served
from ps.rpc.transport import Answer
from ps.rpc.wire import Hello, Init, Load, Pull, Push, ReadState, Reply, Request, Status, WriteState
from ps.server import states, telling
from ps.server.answers import Accepted, Answers, busy, no_payload, standing
from ps.server.apply import Applier, Coded, Outcome, publish
from ps.server.checks import check_caller, check_finite, check_groups, check_load, check_payload, check_push
from ps.server.slots import Layouts, MessageLayout, Slot, Work, shard_ids
from ps.server.threads import ApplyThreads, Ticker
from ps.sharding.partition import make_plan
from ps.store.buffers import BufferShard
from ps.store.dense import DenseShard
from ps.store.pool import SnapshotPool
from ps.types import Hyper, Incarnation, ShardId

log = logging.getLogger(__name__)

_CLOSE_S = 10.0
"""How long `close` waits for each thread."""

_BUFFER_POLL_S = 0.002
"""How often a reply that lacks a buffer looks whether one is back. The transport can't tell: its finalizers run on a
thread where nothing may be done but note it down."""

_IDLE_S = 1.0
"""How often the ticker looks when nothing waits."""

_UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True)
class _Installed:
    """Everything that comes with one shard map."""

    shard_map: ShardMap
    optimizer: ServedOptimizer
    slots: dict[ShardId, Slot]
    layouts: Layouts


class Host:
    """Shards of one server. Thread-safe, but for `install_members` and `install_map`: one thread at a time."""

    def __init__(
        self,
        *,
        exact: bool = False,
        policy: Callable[[], Policy] = Asp,
        clock: Clock | None = None,
        apply_threads: int = 0,
        snapshots: int = 3,
        queue_bytes: int = 1 << 30,
        on_rulings: Callable[[tuple[Ruling, ...]], None] | None = None,
    ) -> None:
        """`exact`: kernels on which splitting a tensor changes no bit, and sums in a fixed order. `policy`: makes the
        consistency choice of each shard. `on_rulings` hears what a shard here decides for those of all servers; it is
        called on the threads that apply pushes, without locks, and must be quick.

        With `apply_threads` = 0 work is done on the thread that submits it, there is no ticker (each request looks
        after deadlines), and reply buffers are not bounded by `snapshots`: for use within one process.
        """
        self._exact = exact
        self._policy = policy
        self._on_rulings = on_rulings
        self._decider: Slot | None = None
        """The shard that decides for all others, where one has to and it is here."""
        self._admitted: dict[Incarnation, Admitted] = {}
        """Replaced as a whole, so that it may be read without a lock; `_installed` likewise."""
        self._installed: _Installed | None = None
        self._good_groups: tuple[Hyper, ...] = ()
        """Hyper-parameters that were checked last; mostly the next push has the same."""
        self._closed = False
        self._pool = SnapshotPool(snapshots if apply_threads else _UNBOUNDED)
        self._clock = clock or MonotonicClock()
        self._answers = Answers(self._pool, self._clock, queue_bytes)
        self._applier = Applier(lambda incarnation: incarnation in self._admitted)
        warm_up()
        self._threads = ApplyThreads(apply_threads, self._run)
        self._ticker = Ticker(self._clock, self.tick) if apply_threads else None

    # ---- the coordinator's news ----

    def install_members(self, admitted: Sequence[Admitted]) -> None:
        """Exactly these may call from now on; what waits for others is answered as fenced, their pushes are dropped.

        In force when this returns. Rounds that waited for somebody who is gone are applied meanwhile, one at most per
        shard; else it blocks for as long as a shard applies one push.
        """
        before = self._admitted
        self._admitted = {member.incarnation: member for member in admitted}
        gone = sorted(before.keys() - self._admitted.keys())
        seats = telling.seats(admitted)
        outcome = Outcome()
        for slot in self._slots().values():
            with slot.lock:
                for incarnation in gone:
                    slot.forget(incarnation)
                slot.policy.set_live(seats)
                self._applier.settle(slot, outcome)
        if gone:
            self._answers.evict(frozenset(gone))
            log.info("incarnations no longer admitted: %s", ", ".join(map(str, gone)))
        self._tell(outcome)
        self._pass_on()

    def install_rulings(self, rulings: Sequence[Ruling]) -> None:
        """Follow what a shard of another server has decided. Rounds that waited for it are applied meanwhile."""
        outcome = Outcome()
        for slot in self._slots().values():
            if slot is not self._decider:
                with slot.lock:
                    slot.policy.follow(rulings)
                    self._applier.settle(slot, outcome)
        self._tell(outcome)

    def _pass_on(self) -> None:
        """Let all other shards follow what the one that decides has decided."""
        if self._decider is None:
            return
        with self._decider.lock:
            rulings = self._decider.policy.rulings()
        if rulings:
            self.install_rulings(rulings)
            if self._on_rulings is not None:
                self._on_rulings(rulings)

    def entries(self) -> tuple[int, ...]:
        """At which clocks a newcomer counts here for the time being: the lowest and the highest of all shards."""
        return telling.entries(self._slots().values())

    def install_map(self, shard_map: ShardMap, me: Incarnation) -> None:
        """Hold what the map gives to `me`, with the initial weights of whom it names; an older map is ignored.

        In force when this returns.
        """
        old = self._installed
        if old is not None and shard_map.epoch <= old.shard_map.epoch:
            return
        optimizer = served(shard_map.signature.optimizer)
        plan = make_plan(shard_map.signature, shard_map.shard_bytes)
        slots: dict[ShardId, Slot] = {}
        for holder in shard_map.holders:
            if holder.incarnation != me:
                continue
            slot = self._slots().get(holder.shard)
            if slot is None:
                spec = plan.shards[holder.shard]
                kind, policy = (BufferShard, Asp) if spec.buffer else (DenseShard, self._policy)
                weights = kind(spec, holder.epoch, optimizer, exact=self._exact)
                chosen = policy()
                slot = Slot(holder.epoch, weights, chosen, self._exact or chosen.keeps_all)
                slot.policy.set_live(telling.seats(self._admitted.values()))
            slots[holder.shard] = slot
            with slot.lock:
                slot.renew(holder.epoch, shard_map.initialised_by)
        self._decider = telling.appoint(plan, slots)
        self._installed = _Installed(shard_map, optimizer, slots, Layouts(plan, slots))
        for shard, slot in (old.slots if old is not None else {}).items():
            if shard not in slots:
                self._let_go(slot)
        log.info(
            "shard map %d: %d of %d shards are here, %d bytes; initial weights are %s",
            shard_map.epoch,
            len(slots),
            len(plan.shards),
            sum(plan.shards[shard].nbytes for shard in slots),
            "not chosen yet" if shard_map.initialised_by is None else f"those of {shard_map.initialised_by}",
        )
        for work, answers in self._answers.take_parked():
            for answer in answers:
                self._admit(work.request, work.payload, answer)

    def _slots(self) -> dict[ShardId, Slot]:
        return self._installed.slots if self._installed is not None else {}

    def _let_go(self, slot: Slot) -> None:
        """Another server holds this shard now: what waits for it is told so."""
        with slot.lock:
            waiting = slot.let_go()
        for work, shards in waiting.items():
            self._answers.decided(work, shards)

    # ---- requests ----

    def submit(self, request: Request, payload: Tensor, answer: Answer) -> None:
        """See `ShardHost.submit`."""
        if self._ticker is None:
            self._answers.tick()
        self._admit(request, payload, answer)

    def _admit(self, request: Request, payload: Tensor | None, answer: Answer) -> None:
        """Check a request and see that it is done, now or once what it needs is there."""
        done = self._check_caller(request) or self._route(request, payload, answer)
        if done is not None:
            answer(done, no_payload())

    def _check_caller(self, request: Request) -> Reply | None:
        if self._closed:
            return Reply(refused="this server is shutting down")
        return check_caller(request, self._admitted.get(request.caller.incarnation))

    def _route(self, request: Request, payload: Tensor | None, answer: Answer) -> Reply | None:
        """A reply that can be given at once; None when the answer comes later."""
        installed = self._installed
        data = no_payload() if payload is None else payload
        if installed is None or request.caller.map_epoch > installed.shard_map.epoch:
            return self._park(request, data, answer)
        layout = installed.layouts.get(shard_ids(request))
        if isinstance(layout, str):
            return Reply(refused=layout)
        if isinstance(request, Hello):
            statuses = [Status.OK if held else Status.MOVED for held in layout.held(request.shards)]
            return standing(layout, statuses, request.caller.incarnation)
        if isinstance(request, Pull):
            return self._pull(request, data, layout, answer)
        if not isinstance(request, Push):
            return self._write(request, data, layout, answer)
        return self._push(request, data, layout, installed.optimizer, answer)

    def _park(self, request: Request, payload: Tensor, answer: Answer) -> Reply | None:
        """It needs a newer map than ours, or initial weights: keep it until they come."""
        ids = shard_ids(request)
        nothing = MessageLayout(ids, (None,) * len(ids), (0,) * len(ids), 0)
        accepted = self._answers.park(Work(request, payload, nothing), answer)
        return busy(nothing, request) if accepted is Accepted.BUSY else None

    def _pull(self, request: Pull, payload: Tensor, layout: MessageLayout, answer: Answer) -> Reply | None:
        held = layout.held([(shard, epoch) for shard, epoch, _ in request.shards])
        versions = [
            slot.shard.version if slot is not None and slot.shard.initialised else None for slot in layout.slots
        ]
        if any(here and version is None for here, version in zip(held, versions, strict=True)):
            return self._park(request, payload, answer)
        statuses = [
            Status.MOVED if not here else Status.UNCHANGED if base == version else Status.OK
            for here, version, (_, _, base) in zip(held, versions, request.shards, strict=True)
        ]
        if Status.OK not in statuses:
            return standing(layout, statuses, request.caller.incarnation)
        work = Work(request, None, layout)
        work.statuses[:] = [Status.MOVED if not here else Status.OK for here in held]
        return self._take_in(work, answer)

    def _write(
        self, request: Init | Load | ReadState | WriteState, payload: Tensor, layout: MessageLayout, answer: Answer
    ) -> Reply | None:
        if isinstance(request, ReadState | WriteState):
            reason = states.check(request, layout, len(telling.seats(self._admitted.values())))
        else:
            reason = check_payload(payload, layout)
        if not reason and isinstance(request, Load):
            reason = check_load(layout, len(telling.seats(self._admitted.values())))
        if reason:
            return Reply(refused=reason)
        return self._take_in(Work(request, payload, layout), answer)

    def _push(
        self, request: Push, payload: Tensor, layout: MessageLayout, optimizer: ServedOptimizer, answer: Answer
    ) -> Reply | None:
        reason = check_push(request, payload, layout)
        if not reason and request.groups != self._good_groups:
            reason = check_groups(request.groups, optimizer)
        if reason:
            return Reply(refused=reason)
        self._good_groups = request.groups
        if not all(slot.shard.initialised for slot in layout.slots if slot is not None):
            status = Status.MISSING if request.poll else Status.BUSY
            statuses = [
                status if held else Status.MOVED
                for held in layout.held([(part.shard, part.shard_epoch) for part in request.shards])
            ]
            return standing(layout, statuses, request.caller.incarnation)
        return self._take_in(Work(request, payload, layout), answer)

    def _take_in(self, work: Work, answer: Answer) -> Reply | None:
        # What others are held back for must never be told to come later, or the bound would fill with those others.
        must = any(
            slot.order.holds(work.incarnation) or slot.policy.must_take(work.incarnation)
            for slot in work.layout.slots
            if slot is not None
        )
        accepted = self._answers.accept(work, answer, must=must)
        if accepted is Accepted.BUSY:
            return busy(work.layout, work.request)
        if accepted is Accepted.YES:
            self._threads.put(work)
        return None

    # ---- on the apply threads ----

    def _run(self, work: Work) -> None:
        """Do one request; never raises."""
        try:
            self._do(work)
        except Exception as error:
            log.exception("a request of incarnation %d failed", work.incarnation)
            self._answers.refuse(work, Reply(refused=f"internal error: {error}"))
        if self._answers.lacks_buffers:
            self._wake()

    def _do(self, work: Work) -> None:
        if work.incarnation not in self._admitted:
            self._answers.fence(work)
            return
        if isinstance(work.request, Pull):
            self._answers.decided(work, work.undecided)
            return
        if isinstance(work.request, Load):
            self._tell(self._applier.load(work), work)
            return
        if isinstance(work.request, Init):
            installed = self._installed
            assert installed is not None
            outcome = self._applier.initial(work, installed.shard_map.initialised_by)
            self._tell(outcome, work)
            return
        if isinstance(work.request, ReadState | WriteState):
            assert self._installed is not None
            states.do(work, self._installed.optimizer, self._answers)
            return
        if reason := self._poison(work):
            log.error("%s", reason)
            self._answers.refuse(work, Reply(refused=reason))
            return
        snapshot = self._pool.take(work.layout.form()) if work.answers else None
        coded = Coded.empty(snapshot) if snapshot is not None else None
        outcome = self._applier.push(work, coded)
        if coded is not None:
            publish(self._pool, coded)
        self._tell(outcome, work, coded)
        self._pass_on()

    def _tell(self, outcome: Outcome, work: Work | None = None, coded: Coded | None = None) -> None:
        """Answer what an outcome decides. `work` is the one that was gone through for the first time."""
        if work is not None:
            outcome.read[work] += 1
        for other, shards in outcome.read.items():
            self._answers.read(other, shards)
        for other, shards in outcome.decided.items():
            if other is not work:
                self._answers.decided(other, shards)
        if work is not None:
            self._answers.decided(work, outcome.decided[work] + 1, coded)
        if self._answers.lacks_buffers:
            self._wake()

    def _poison(self, work: Work) -> str:
        installed = self._installed
        assert installed is not None
        return check_finite(work, installed.shard_map.signature)

    def _wake(self) -> None:
        if self._ticker is not None:
            self._ticker.wake()

    def tick(self) -> float:
        """Answer what is due; seconds until there may be more. With threads of its own the host does so by itself."""
        deadline = self._answers.tick()
        if self._answers.lacks_buffers:
            return _BUFFER_POLL_S
        return _IDLE_S if deadline is None else min(_IDLE_S, max(0.0, deadline - self._clock.now()))

    # ---- the rest ----

    def progress(self) -> ServerProgress:
        """Counters for the heartbeat. Waits for no more than one push to one shard at a time."""
        return telling.progress(self._slots(), self._answers.totals())

    def close(self) -> None:
        """Refuse what comes, finish what is queued, refuse what still waits, end the threads. Idempotent, bounded."""
        self._closed = True
        self._threads.close(_CLOSE_S)
        if self._ticker is not None:
            self._ticker.close(_CLOSE_S)
        self._answers.close()
        self._pool.clear()
