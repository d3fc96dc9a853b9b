"""From shards to servers: level in bytes, and with the fewest moves when servers come and go. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ps.errors import ConfigError
from ps.sharding.partition import LEVEL
from ps.sharding.spec import NO_GROUP, Shard, ShardingPlan
from ps.types import Incarnation, ShardId


@dataclass(slots=True)
class _Loads:
    """Bytes and shards per server while a placement is made."""

    servers: tuple[Incarnation, ...]
    """Order decides ties."""
    nbytes: dict[Incarnation, int] = field(init=False)
    shards: dict[Incarnation, list[Shard]] = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = dict.fromkeys(self.servers, 0)
        self.shards = {server: [] for server in self.servers}

    def add(self, server: Incarnation, shard: Shard) -> None:
        self.nbytes[server] += shard.nbytes
        self.shards[server].append(shard)

    def move(self, shard: Shard, source: Incarnation, target: Incarnation) -> None:
        self.shards[source].remove(shard)
        self.nbytes[source] -= shard.nbytes
        self.add(target, shard)

    def least(self) -> Incarnation:
        return min(self.servers, key=self.nbytes.__getitem__)

    def most(self) -> Incarnation:
        return max(self.servers, key=self.nbytes.__getitem__)


def place(
    plan: ShardingPlan, servers: Sequence[Incarnation], current: Sequence[Incarnation] | None = None
) -> tuple[Incarnation, ...]:
    """Holder of each shard; index = shard id. Deterministic; `servers` may come in any order.

    Shards go, largest first, each to the least loaded server. With `current` (the holder of each shard so far) only
    shards of servers that are gone are placed so, and all others stay. Then shards are moved while the largest load
    exceeds `LEVEL` times the mean and a move makes it smaller: asking again moves nothing.

    Raises `ConfigError` without servers, or when `current` has not one entry per shard.
    """
    if not servers:
        raise ConfigError("no server to place shards on")
    if current is not None and len(current) != len(plan.shards):
        raise ConfigError(f"the placement so far has {len(current)} shards, the plan has {len(plan.shards)}")
    loads = _Loads(tuple(sorted(set(servers))))
    known = frozenset(loads.servers)
    homeless: list[Shard] = []
    for shard in plan.shards:
        if current is not None and current[shard.id] in known:
            loads.add(current[shard.id], shard)
        else:
            homeless.append(shard)
    for shard in sorted(homeless, key=_placing_order):
        loads.add(loads.least(), shard)
    _level(loads, len(plan.shards))
    return _holders(loads, len(plan.shards))


def bytes_per_server(plan: ShardingPlan, placement: Sequence[Incarnation]) -> dict[Incarnation, int]:
    """Bytes that each server of `placement` holds, by ascending incarnation."""
    total: dict[Incarnation, int] = dict.fromkeys(sorted(set(placement)), 0)
    for shard in plan.shards:
        total[placement[shard.id]] += shard.nbytes
    return total


def _placing_order(shard: Shard) -> tuple[bool, int, ShardId]:
    """Trained shards first, so that they are level among themselves: frozen ones are no traffic after the start."""
    return shard.group == NO_GROUP, -shard.nbytes, shard.id


def _level(loads: _Loads, most_moves: int) -> None:
    """Move shards from the most to the least loaded server while that is needed and helps."""
    mean = sum(loads.nbytes.values()) / len(loads.servers)
    for _ in range(most_moves):
        source, target = loads.most(), loads.least()
        if loads.nbytes[source] <= LEVEL * mean:
            return
        gap = loads.nbytes[source] - loads.nbytes[target]
        # The larger of the two ends must come down: a shard as large as the gap would only swap the roles.
        fitting = [shard for shard in loads.shards[source] if 0 < shard.nbytes < gap]
        if not fitting:
            return
        wanted = min(loads.nbytes[source] - mean, mean - loads.nbytes[target])
        loads.move(min(fitting, key=lambda s: (abs(s.nbytes - wanted), s.id)), source, target)


def _holders(loads: _Loads, count: int) -> tuple[Incarnation, ...]:
    found: list[Incarnation | None] = [None] * count
    for server, shards in loads.shards.items():
        for shard in shards:
            found[shard.id] = server
    return tuple(holder for holder in found if holder is not None)
