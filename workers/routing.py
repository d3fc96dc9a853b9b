"""Which message goes to which server: the shard map cut into messages of whole shards. Torch-free, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ps.control.api import ServerPeer, ShardMap
from ps.errors import TransportError
from ps.sharding.layout import messages, offsets
from ps.sharding.spec import NO_GROUP, ShardingPlan
from ps.types import Incarnation, ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Whole shards that travel together; the payload holds them one after the other, in this order."""

    shards: tuple[ShardId, ...]
    offsets: tuple[int, ...]
    """First byte of each shard in the payload."""
    nbytes: int

    @classmethod
    def of(cls, plan: ShardingPlan, shards: Sequence[ShardId]) -> Message:
        """The message that holds `shards`."""
        nbytes = sum(plan.shards[shard].nbytes for shard in shards)
        return cls(shards=tuple(shards), offsets=tuple(offsets(plan, shards)), nbytes=nbytes)

    def __str__(self) -> str:
        return f"shards {', '.join(map(str, self.shards))} ({self.nbytes} bytes)"


class Routes:
    """The newest known shard map, by shard. Not thread-safe: belongs to the training thread."""

    def __init__(self, plan: ShardingPlan, shard_map: ShardMap) -> None:
        self.plan = plan
        self.update(shard_map)

    def update(self, shard_map: ShardMap) -> None:
        """Take a newer map."""
        self.epoch = shard_map.epoch
        self.peers = {peer.incarnation: peer for peer in shard_map.servers}
        self._holders = shard_map.holders

    def holder(self, shard: ShardId) -> Incarnation:
        """The server that holds a shard."""
        return self._holders[shard].incarnation

    def shard_epoch(self, shard: ShardId) -> int:
        """The shard's epoch."""
        return self._holders[shard].epoch

    def holders(self) -> tuple[Incarnation, ...]:
        """Every server that holds a shard, in id order."""
        return tuple(sorted({holder.incarnation for holder in self._holders}))

    def peer(self, server: Incarnation) -> ServerPeer:
        """How to reach a server. Raises `TransportError` when the map does not say."""
        if server not in self.peers:
            raise TransportError(f"shard map {self.epoch} names server {server} as a holder but not its address")
        return self.peers[server]

    def by_server(self, shards: Sequence[ShardId]) -> dict[Incarnation, list[ShardId]]:
        """`shards` split by the server that holds them, order kept."""
        split: dict[Incarnation, list[ShardId]] = {}
        for shard in shards:
            split.setdefault(self.holder(shard), []).append(shard)
        return split

    def messages(self, shards: Sequence[ShardId], message_bytes: int) -> list[Message]:
        """`shards` cut into messages, servers taking turns so that all of them have work from the start."""
        queues = [
            [Message.of(self.plan, cut) for cut in messages(self.plan, mine, message_bytes)]
            for _, mine in sorted(self.by_server(shards).items())
        ]
        longest = max(map(len, queues), default=0)
        return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def trained(plan: ShardingPlan) -> tuple[ShardId, ...]:
    """Shards that are pushed at every step."""
    return tuple(shard.id for shard in plan.shards if shard.group != NO_GROUP)


def merged(plan: ShardingPlan) -> tuple[ShardId, ...]:
    """Shards of buffers whose values are pushed when they have changed."""
    return tuple(shard.id for shard in plan.shards if shard.merged)


def frozen(plan: ShardingPlan) -> tuple[ShardId, ...]:
    """Shards of parameters that no optimizer group holds, and of local buffers: taken once."""
    return tuple(shard.id for shard in plan.shards if shard.group == NO_GROUP and not shard.merged)
