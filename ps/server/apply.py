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

from ps.consistency.policy import Policy, PushEvent
from ps.consistency.policy import Verdict as Admission
from ps.rpc.wire import Init, Load, Push, ShardPush, Status
from ps.server.slots import MOST_INITIAL, MessageLayout, Slot, Work
from ps.store.ordering import Verdict
from ps.store.pool import Snapshot, SnapshotPool
from ps.types import Incarnation, Version

log = logging.getLogger(__name__)

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
    """Which shards of which works were decided."""

    work: Work
    own: int = 0
    """Shards of the work itself."""
    others: Counter[Work] = field(default_factory=Counter)
    """Works that had been held back → shards."""


class Applier:
    """Applies pushes. Thread-safe."""

    def __init__(self, policy: Policy, admitted: Callable[[Incarnation], bool]) -> None:
        """`admitted` is asked with a slot's lock held, and must take no lock."""
        self._policy = policy
        self._admitted = admitted

    def push(self, work: Work, coded: Coded | None) -> Outcome:
        """Take a push, or a poll for one, through all its shards; each is also encoded into `coded`."""
        request = work.request
        assert isinstance(request, Push)
        outcome = Outcome(work)
        regions = work.regions()
        for index, part in enumerate(request.shards):
            slot = work.layout.slots[index]
            if slot is None or slot.epoch != part.shard_epoch:
                work.statuses[index] = Status.MOVED
                outcome.own += 1
                continue
            with slot.lock:
                status = self._push_one(slot, work, index, regions[index], outcome.others)
                if status in WITH_WEIGHTS and coded is not None:
                    coded.write(index, slot)
            if status is not None:
                work.statuses[index] = status
                outcome.own += 1
        return outcome

    def _push_one(
        self, slot: Slot, work: Work, index: int, region: Tensor | None, others: Counter[Work]
    ) -> Status | None:
        """Decide one shard of a push, with its lock held; None = held back."""
        request = work.request
        assert isinstance(request, Push)
        if slot.gone:
            return Status.MOVED
        if not self._admitted(work.incarnation):
            # Its order has been forgotten: offering it again would start a new one.
            work.fenced = True
            return Status.MISSING
        key = (work.incarnation, request.sequence)
        if request.poll:
            verdict = slot.order.look(*key)
            if verdict is Verdict.HELD:
                slot.held[key].append((work, index))
                return None
            return Status.DUPLICATE if verdict is Verdict.DUPLICATE else Status.MISSING
        order = slot.order.offer(*key)
        if order.verdict is Verdict.APPLY:
            self._apply(slot, work, request, request.shards[index], region)
            for sequence in order.released:
                self._release(slot, (work.incarnation, sequence), others)
            return Status.OK
        if order.verdict in (Verdict.HOLD, Verdict.HELD):
            slot.held.setdefault(key, []).append((work, index))
            return None
        return Status.DUPLICATE if order.verdict is Verdict.DUPLICATE else Status.BUSY

    def _release(self, slot: Slot, key: tuple[Incarnation, int], others: Counter[Work]) -> None:
        """Apply a push that was held back; everybody who waits for it has his answer."""
        waiting = slot.held.pop(key)
        first, index = waiting[0]
        request = first.request
        assert isinstance(request, Push)
        self._apply(slot, first, request, request.shards[index], first.regions()[index])
        for work, at in waiting:
            work.failure = work.failure or first.failure
            work.statuses[at] = Status.OK
            others[work] += 1

    def _apply(self, slot: Slot, work: Work, request: Push, part: ShardPush, region: Tensor | None) -> None:
        shard = slot.shard
        staleness = shard.staleness_of(work.incarnation, part.base)
        event = PushEvent(part.shard, work.incarnation, request.sequence, staleness)
        decision = self._policy.decide(event)
        if decision.verdict is Admission.DROP:
            shard.dropped += 1
            return
        try:
            hyper = request.groups[shard.spec.group]
            shard.apply(work.incarnation, region, part.present, hyper, staleness, part.rows)
        except Exception as error:
            # The push counts as seen; how much of it was applied is unknown, so the worker must hear of it.
            log.exception("push %d of incarnation %d to shard %d failed", event.sequence, event.incarnation, part.shard)
            work.failure = f"shard {part.shard} could not apply the push: {error}"

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
        return Outcome(work, own=len(request.shards))

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
        return Outcome(work, own=len(request.shards))

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
    for index, slot in enumerate(slots):
        if wanted[index] and slot is not None:
            with slot.lock:
                coded.write(index, slot)
    publish(pool, coded)
    return coded


def publish(pool: SnapshotPool, coded: Coded) -> None:
    """Let other replies share a snapshot that holds all its shards."""
    versions = tuple(version for version in coded.versions if version is not None)
    if len(versions) == len(coded.versions):
        pool.publish(coded.snapshot, versions)
