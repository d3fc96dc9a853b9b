"""What a server tells the coordinator about its shards, and how it reads the coordinator's list of members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ps.consistency.policy import Seat
from ps.control.api import Admitted, ServerProgress, ShardProgress
from ps.server.answers import Totals
from ps.server.slots import Slot
from ps.sharding.spec import NO_GROUP, ShardingPlan
from ps.types import Role, ShardId


def seats(admitted: Iterable[Admitted]) -> list[Seat]:
    """The workers, with their parts in clocks and rounds."""
    return [Seat(member.incarnation, member.part, member.clock) for member in admitted if member.role is Role.WORKER]


def appoint(plan: ShardingPlan, slots: Mapping[ShardId, Slot]) -> Slot | None:
    """Let one shard decide for all, where one has to: the first trained one of the plan. None when it isn't here."""
    first = next((shard.id for shard in plan.shards if shard.group != NO_GROUP), None)
    slot = slots.get(first) if first is not None else None
    if slot is None or not slot.policy.keeps_all:
        return None
    slot.policy.appoint()
    return slot


def entries(slots: Iterable[Slot]) -> tuple[int, ...]:
    """At which clocks a newcomer counts for the time being: the lowest and the highest of all shards."""
    found = [entry for slot in slots if (entry := slot.policy.pace().entry) is not None]
    return (min(found), max(found)) if found else ()


def progress(slots: Mapping[ShardId, Slot], totals: Totals) -> ServerProgress:
    """Counters for the heartbeat. Waits for no more than one push to one shard at a time."""
    staleness: Counter[int] = Counter()
    shards: list[ShardProgress] = []
    dropped = shrunk = spread = 0
    for shard, slot in slots.items():
        with slot.lock:
            staleness.update(slot.shard.staleness)
            version, pushes = slot.shard.version, slot.shard.pushes
            dropped, shrunk = max(dropped, slot.shard.dropped), max(shrunk, slot.shard.shrunk)
            spread = max(spread, slot.policy.pace().spread)
        shards.append(
            ShardProgress(
                shard=shard,
                epoch=version.epoch,
                version=version.counter,
                pushes=pushes,
                pulls=totals.pulls[shard],
            )
        )
    return ServerProgress(
        shards=tuple(shards),
        bytes_pushed=totals.bytes_pushed,
        bytes_pulled=totals.bytes_pulled,
        staleness=dict(staleness),
        dropped=dropped,
        shrunk=shrunk,
        spread=spread,
    )
