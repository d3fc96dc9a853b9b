"""What apply threads do with a request: pushes in order and once, initial weights, and encoding of replies.

Everything here locks one slot at a time and nothing else. Whatever it decides it returns as values; the host keeps the
tables of requests and gives the answers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ps.consistency.policy import NOTHING, Closed, PushEvent, PushKey
from ps.consistency.policy import Verdict as Admission
from ps.rpc.wire import Init, Load, Push, ShardPush, Status
from ps.server.slots import MOST_INITIAL, MessageLayout, Slot, Work
from ps.store.aggregate import Contribution
from ps.store.buffers import BufferShard
from ps.store.ordering import Verdict
from ps.store.pool import Snapshot, SnapshotPool
from ps.types import Incarnation, Version

log = logging.getLogger(__name__)

_WAITING = (Admission.COLLECT, Admission.PARK)

WITH_WEIGHTS = frozenset({Status.OK, Status.DUPLICATE})
"""Statuses of a push whose answer holds weights."""


@dataclass(slots=True)
class Coded:
    """A snapshot that is being written, or shared, for a reply. Its holder ends with `pool.share` or `release`."""

    snapshot: Snapshot
    versions: list[Version | None]
    """Per shard, the version of the weights in the snapshot; None = none."""

    @classmethod
    def empty(cls, snapshot: Snapshot) -> Coded:
        """Nothing is written yet."""
        return cls(snapshot, [None] * len(snapshot.layout))

    def write(self, index: int, slot: Slot) -> None:
        """Encode one shard; call with its lock held."""
        slot.shard.write(self.snapshot.regions[index])
        self.versions[index] = slot.shard.version


@dataclass(slots=True)
class Outcome:
    """What has changed for which works."""

    decided: Counter[Work] = field(default_factory=Counter)
    """Work → shards that have their status now."""
    read: Counter[Work] = field(default_factory=Counter)
    """Work → shards that don't need its payload any more."""


class Applier:
    """Applies pushes. Thread-safe."""

    def __init__(self, admitted: Callable[[Incarnation], bool]) -> None:
        """`admitted` is asked with a slot's lock held, and must take no lock."""
        self._admitted = admitted

    def push(self, work: Work, coded: Coded | None) -> Outcome:
        """Take a push, or a poll for one, through all its shards; each that can be is also encoded into `coded`."""
        request = work.request
        assert isinstance(request, Push)
        outcome = Outcome()
        regions = work.regions()
        for index, part in enumerate(request.shards):
            slot = work.layout.slots[index]
            if slot is None or slot.epoch != part.shard_epoch:
                work.statuses[index] = Status.MOVED
                outcome.decided[work] += 1
                outcome.read[work] += 1
                continue
            with slot.lock:
                self._push_one(slot, work, index, regions[index], outcome)
                if work.statuses[index] in WITH_WEIGHTS and coded is not None:
                    coded.write(index, slot)
        return outcome

    def settle(self, slot: Slot, outcome: Outcome) -> None:
        """Do what a change of who takes part has made possible; call with the slot's lock held."""
        while (due := slot.policy.due()) is not NOTHING:
            for closed in due.rounds:
                self._close(slot, closed, outcome)
            for key in due.dropped:
                slot.shard.dropped += 1
                for push in slot.rounds.drop(key):
                    _read(push, outcome)
                _answered(slot, key, outcome)
            for key in due.answers:
                _answered(slot, key, outcome)

    def _push_one(self, slot: Slot, work: Work, index: int, region: Tensor | None, outcome: Outcome) -> None:
        """Take one shard of a push as far as it can go now, with its lock held."""
        status = self._standing(slot, work, index)
        if status is not None:
            work.statuses[index] = status
            outcome.decided[work] += 1
            outcome.read[work] += 1
            return
        request = work.request
        assert isinstance(request, Push)
        key = (work.incarnation, request.sequence)
        if key in slot.held:  # the same push waits already; this one wants its answer, and has no say otherwise
            slot.held[key].append((work, index))
            outcome.read[work] += 1
            return
        order = slot.order.offer(*key)
        slot.held[key] = [(work, index)]
        if order.verdict is Verdict.HOLD:
            return
        assert order.verdict is Verdict.APPLY, order
        self._count(slot, work, index, region, outcome)
        for sequence in order.released:
            held, at = slot.held[(work.incarnation, sequence)][0]
            self._count(slot, held, at, held.regions()[at], outcome)

    def _standing(self, slot: Slot, work: Work, index: int) -> Status | None:
        """The status of a push that changes nothing; None = it is to be taken, or waits already."""
        request = work.request
        assert isinstance(request, Push)
        if slot.gone:
            return Status.MOVED
        if not self._admitted(work.incarnation):
            # Its order has been forgotten: offering it again would start a new one.
            work.fenced = True
            return Status.MISSING
        key = (work.incarnation, request.sequence)
        if key in slot.held:
            return None
        if request.sequence < slot.order.next_sequence(work.incarnation):
            return Status.DUPLICATE
        if request.poll:
            return Status.MISSING
        return Status.BUSY if slot.order.too_far(*key) else None

    def _count(self, slot: Slot, work: Work, index: int, region: Tensor | None, outcome: Outcome) -> None:
        """A push is next in its worker's order: it counts as the policy says. It is in `slot.held`."""
        shard, request = slot.shard, work.request
        assert isinstance(request, Push)
        part = request.shards[index]
        staleness = shard.staleness_of(work.incarnation, part.base)
        event = PushEvent(part.shard, work.incarnation, request.sequence, staleness)
        decision = slot.policy.decide(event)
        match decision.verdict:
            case Admission.COLLECT:
                self._collect(slot, work, index, region, decision.round, event, outcome)
            case Admission.REFUSE:
                work.failure = work.failure or f"shard {part.shard}: {decision.reason}"
                outcome.read[work] += 1
            case Admission.DROP:
                shard.dropped += 1
                outcome.read[work] += 1
            case _:
                self._apply(slot, work, request, part, region, staleness)
                outcome.read[work] += 1
        if decision.verdict not in _WAITING:
            _answered(slot, (work.incarnation, request.sequence), outcome)
        self.settle(slot, outcome)

    def _apply(
        self, slot: Slot, work: Work, request: Push, part: ShardPush, region: Tensor | None, staleness: int | None
    ) -> None:
        shard = slot.shard
        try:
            if isinstance(shard, BufferShard):
                shard.merge(work.incarnation, region, part.present, part.base, request.samples)
                return
            hyper = request.groups[shard.spec.group]
            shard.apply(work.incarnation, region, part.present, hyper, staleness, part.rows)
        except Exception as error:
            # The push counts as seen; how much of it was applied is unknown, so the worker must hear of it.
            who = f"push {request.sequence} of incarnation {work.incarnation}"
            log.exception("%s to shard %d failed", who, part.shard)
            work.failure = f"shard {part.shard} could not apply the push: {error}"

    def _collect(
        self,
        slot: Slot,
        work: Work,
        index: int,
        region: Tensor | None,
        round_number: int,
        event: PushEvent,
        outcome: Outcome,
    ) -> None:
        request = work.request
        assert isinstance(request, Push)
        part, shard = request.shards[index], slot.shard
        push = Contribution(
            key=(event.incarnation, event.sequence),
            gradient=shard.gradient(region, part.rows),
            present=part.present,
            hyper=request.groups[shard.spec.group],
            staleness=event.staleness,
            owner=work,
        )
        for absorbed in slot.rounds.add(round_number, push):
            _read(absorbed, outcome)

    def _close(self, slot: Slot, closed: Closed, outcome: Outcome) -> None:
        """Apply a round; everybody who waits for it has his answer."""
        mean, kept = slot.rounds.close(closed.round, closed.pushes)
        failure = ""
        try:
            slot.shard.apply_round(mean.gradient, mean.present, mean.hyper, mean.staleness)
        except Exception as error:
            log.exception("round %d of shard %d failed", closed.round, slot.shard.spec.id)
            failure = f"shard {slot.shard.spec.id} could not apply the round: {error}"
        slot.shard.shrunk += closed.shrunk
        for push in kept:
            _read(push, outcome)
        for key in closed.pushes:
            _answered(slot, key, outcome, failure)

    def initial(self, work: Work, chosen: Incarnation | None) -> Outcome:
        """Keep initial weights until the map names whose count; `chosen` is whom it names, None = nobody yet."""
        request = work.request
        assert isinstance(request, Init)
        regions = work.regions()
        for index, (_, epoch) in enumerate(request.shards):
            slot, region = work.layout.slots[index], regions[index]
            status = Status.MOVED
            if slot is not None and slot.epoch == epoch and region is not None:
                with slot.lock:
                    status = self._initial_one(slot, work.incarnation, region, chosen)
            work.statuses[index] = status
        return Outcome(decided=Counter({work: len(request.shards)}))

    def load(self, work: Work) -> Outcome:
        """Replace weights; a new version of each shard. The request has been checked."""
        request = work.request
        assert isinstance(request, Load) and work.payload is not None
        regions = work.layout.regions(work.payload)
        for index, (_, epoch) in enumerate(request.shards):
            slot, region = work.layout.slots[index], regions[index]
            status = Status.MOVED
            if slot is not None and slot.epoch == epoch and region is not None:
                with slot.lock:
                    if not slot.gone and self._admitted(work.incarnation):
                        slot.shard.replace(region)
                        status = Status.OK
            work.statuses[index] = status
        return Outcome(decided=Counter({work: len(request.shards)}))

    def _initial_one(self, slot: Slot, caller: Incarnation, region: Tensor, chosen: Incarnation | None) -> Status:
        if slot.gone:
            return Status.MOVED
        if slot.shard.initialised or not self._admitted(caller):
            return Status.OK
        if chosen is None:
            if caller not in slot.initial and len(slot.initial) >= MOST_INITIAL:
                return Status.BUSY
            slot.initial[caller] = region.clone()
        elif chosen == caller:
            slot.shard.load(region)
        return Status.OK


def _answered(slot: Slot, key: PushKey, outcome: Outcome, failure: str = "") -> None:
    """Everybody who waits for a push has his answer; nobody does when its worker was evicted."""
    waiting = slot.held.pop(key, [])
    for work, index in waiting:
        work.failure = work.failure or failure or waiting[0][0].failure
        work.statuses[index] = Status.OK
        outcome.decided[work] += 1


def _read(push: Contribution, outcome: Outcome) -> None:
    assert isinstance(push.owner, Work)
    outcome.read[push.owner] += 1


def encode(pool: SnapshotPool, layout: MessageLayout, wanted: Sequence[bool]) -> Coded | None:
    """A snapshot with the newest weights of the shards `wanted`; None when every buffer is on the wire.

    Shared with other replies if one with exactly these versions exists. At least one shard must be wanted, and those
    that are must have weights.
    """
    slots = layout.slots
    if all(wanted):
        versions = tuple(slot.shard.version for slot in slots if slot is not None)
        if (found := pool.find(layout.ids, versions)) is not None:
            return Coded(found, list(versions))
    snapshot = pool.take(layout.form())
    if snapshot is None:
        return None
    coded = Coded.empty(snapshot)
    fill(pool, coded, layout, wanted)
    return coded


def fill(pool: SnapshotPool, coded: Coded, layout: MessageLayout, wanted: Sequence[bool]) -> None:
    """Write the shards that are wanted and not in `coded` yet: other requests have decided them meanwhile."""
    for index, slot in enumerate(layout.slots):
        if wanted[index] and slot is not None and coded.versions[index] is None:
            with slot.lock:
                coded.write(index, slot)
    publish(pool, coded)


def publish(pool: SnapshotPool, coded: Coded) -> None:
    """Let other replies share a snapshot that holds all its shards."""
    versions = tuple(version for version in coded.versions if version is not None)
    if len(versions) == len(coded.versions):
        pool.publish(coded.snapshot, versions)
