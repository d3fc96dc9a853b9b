"""Records of the data plane: requests and replies as plain tuples on the wire, checked field by field.

A payload is one flat uint8 tensor owning its storage: the shards named in the request, whole, in that order, each
`shard.nbytes` long (a multiple of 64), or empty. `from_wire` accepts exactly what `to_wire` makes and raises
`WireError` for all else, before anything touches state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from ps.types import Hyper, Incarnation, ShardId, Version

WIRE_FORMAT = 1
"""First item of every record; another number is refused."""


class Status(IntEnum):
    """What became of one shard of a request."""

    OK = 1
    """HELLO, INIT, PULL, PUSH: done; the payload holds the shard's weights where the request asked for them."""
    DUPLICATE = 2
    """PUSH: that sequence number was applied before; answered like OK."""
    UNCHANGED = 3
    """PULL: the caller's base is the newest version."""
    PENDING = 4
    """PUSH: accepted, not applied yet: ask again with `poll`. PULL: not initialised yet."""
    BUSY = 5
    """Not accepted, a bound is reached: send again later."""
    MOVED = 6
    """This server does not hold the shard at that epoch: fetch the map, send there."""
    MISSING = 7
    """PUSH with `poll`: no such push is known: send it with its payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls. Checked before anything else."""

    incarnation: Incarnation
    secret: bytes
    """16 bytes; compared in constant time; never printed."""
    map_epoch: int
    """Newest shard-map epoch the caller knows."""

    def __repr__(self) -> str:
        return f"Caller({self.incarnation}, map_epoch={self.map_epoch})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Ask for the state of shards: version, and the next sequence number expected from this caller."""

    caller: Caller
    shards: tuple[tuple[ShardId, int], ...]
    """(shard, shard epoch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """Write initial weights. Counts only once the coordinator has named this caller in the map."""

    caller: Caller
    shards: tuple[tuple[ShardId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """Ask for weights newer than `base`."""

    caller: Caller
    shards: tuple[tuple[ShardId, int, Version | None], ...]
    """(shard, shard epoch, version the caller has or None)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPush:
    """One shard of a push."""

    shard: ShardId
    shard_epoch: int
    base: Version
    """Version of the weights on which the gradient was computed."""
    present: bytes
    """Bitmap over the shard's pieces, least significant bit first: 1 = has a gradient this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """push_pull: apply gradients, answer with the new weights. Each (shard, caller, sequence) counts once, in order."""

    caller: Caller
    sequence: int
    """The caller's push number, from 0, the same for all shards of a step."""
    samples: int
    groups: tuple[Hyper, ...]
    """Index = param group."""
    shards: tuple[ShardPush, ...]
    poll: bool = False
    """True: no payload; asks what became of a push that was answered PENDING."""


Request: TypeAlias = "Hello | Init | Pull | Push"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardReply:
    """What became of one shard."""

    shard: ShardId
    status: Status
    version: Version
    """Version of the weights in the payload, or the shard's newest."""
    next_sequence: int
    """Next push number expected from this caller for this shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to any request. `refused` set: nothing was done, `shards` is empty, asking again will not help."""

    shards: tuple[ShardReply, ...] = ()
    """In the request's order."""
    refused: str = ""
    """ASCII, no backslash: why."""
    fenced: bool = False
    """With `refused`: the caller's incarnation is not (or no longer) admitted."""
