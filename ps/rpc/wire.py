"""Records of the data plane: requests and replies as plain tuples on the wire, checked field by field.

A payload is one flat uint8 tensor owning its storage: the shards named in the request, whole, in that order, each
`shard.nbytes` long (a multiple of 64), or empty. Of a gradient that travels as rows it holds those rows only
(`ps.sharding.layout`); optimizer state has a form of its own (`ps.optim.state`). `from_wire` accepts exactly what
`to_wire` makes and raises `WireError` for all else, before anything touches state.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from ps.errors import WireError
from ps.secrets import SECRET_BYTES
from ps.types import DENSE, MAX_INCARNATION, Hyper, HyperValue, Incarnation, ShardId, Version

WIRE_FORMAT = 1
"""First item of every record; another number is refused."""


class Status(IntEnum):
    """What became of one shard of a request."""

    OK = 1
    """Done; the payload holds the shard's weights where the request asked for them."""
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
class Load:
    """Replace the weights by others, for everybody; optimizer state stays. A new version.

    Refused while it would pull the weights away from under other workers: unless this one is the only worker, or
    nothing has been pushed to any of these shards yet.
    """

    caller: Caller
    shards: tuple[tuple[ShardId, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadState:
    """Ask for the optimizer's state of one shard; the payload of the reply is laid out as `ps.optim.state` says."""

    caller: Caller
    shards: tuple[tuple[ShardId, int], ...]
    """One."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteState:
    """Replace the optimizer's state of one shard. Before initial weights count it goes with those of this caller, which
    must have come before it; afterwards it is allowed when `Load` is."""

    caller: Caller
    shards: tuple[tuple[ShardId, int], ...]
    """One."""


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
    rows: int = DENSE
    """How many rows the gradient holds, for shards whose gradients travel as rows; 0 where it touches none."""


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


Request: TypeAlias = "Hello | Init | Load | ReadState | WriteState | Pull | Push"


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


Wire: TypeAlias = "tuple[object, ...]"
"""What travels: a tuple of ints, strings, bytes, floats, bools, None and tuples of those."""

MAX_SHARDS = 65536
"""Most shards in one record."""

MAX_INT = 2**63 - 1
"""Largest number in a record."""

MAX_BITMAP_BYTES = 1 << 20
"""Longest bitmap of present pieces."""

MAX_TEXT = 1000
"""Longest reason, in characters."""

_STATUSES = {int(status): status for status in Status}

_HELLO, _INIT, _PULL, _PUSH, _REPLY, _LOAD, _READ_STATE, _WRITE_STATE = range(1, 9)

_BY_EPOCH: dict[int, type[Hello] | type[Init] | type[Load] | type[ReadState] | type[WriteState]] = {
    _HELLO: Hello,
    _INIT: Init,
    _LOAD: Load,
    _READ_STATE: ReadState,
    _WRITE_STATE: WriteState,
}
"""Records of nothing but shards with their epochs."""

_KINDS = {record: kind for kind, record in _BY_EPOCH.items()}


def to_wire(request: Request, secret: bytes | None = None) -> Wire:
    """The tuple that stands for `request`; `secret` replaces the caller's. Thread-safe, does not block."""
    caller = request.caller
    head = (WIRE_FORMAT, caller.incarnation, caller.secret if secret is None else secret, caller.map_epoch)
    if isinstance(request, Push):
        shards = tuple([(s.shard, s.shard_epoch, *s.base, s.present, s.rows) for s in request.shards])
        return (*head, _PUSH, request.sequence, request.samples, request.groups, shards, request.poll)
    if isinstance(request, Pull):
        bases = tuple([(shard, epoch, base and tuple(base)) for shard, epoch, base in request.shards])
        return (*head, _PULL, bases)
    return (*head, _KINDS[type(request)], request.shards)


def from_wire(wire: object) -> Request:
    """The request that `wire` stands for; `WireError` for anything that `to_wire` can't have made."""
    fields = _record(wire)
    if len(fields) < 6:
        raise WireError(f"request: got {len(fields)} fields, expected at least 6")
    _, incarnation, secret, map_epoch, kind, *rest = fields
    caller = Caller(
        incarnation=Incarnation(_int(incarnation, "incarnation", MAX_INCARNATION, least=1)),
        secret=_bytes(secret, "secret", SECRET_BYTES, least=SECRET_BYTES),
        map_epoch=_int(map_epoch, "map epoch"),
    )
    if kind == _PUSH and type(kind) is int:
        return _push(caller, rest)
    if len(rest) != 1:
        raise WireError(f"request: got {len(fields)} fields, expected 6")
    rows = _rows(rest[0])
    if type(kind) is int and kind == _PULL:
        return Pull(caller=caller, shards=tuple([_pull_row(row) for row in rows]))
    if type(kind) is int and (record := _BY_EPOCH.get(kind)) is not None:
        return record(caller=caller, shards=tuple([_epoch_row(row) for row in rows]))
    raise WireError(f"request: unknown kind {_brief(kind)}")


def reply_to_wire(reply: Reply) -> Wire:
    """The tuple that stands for `reply`; its reason is made plain ASCII."""
    shards = tuple([(s.shard, int(s.status), *s.version, s.next_sequence) for s in reply.shards])
    return (WIRE_FORMAT, _REPLY, shards, plain(reply.refused), reply.fenced)


def reply_from_wire(wire: object) -> Reply:
    """The reply that `wire` stands for; `WireError` for anything that `reply_to_wire` can't have made."""
    fields = _record(wire)
    if len(fields) != 5 or type(fields[1]) is not int or fields[1] != _REPLY:
        raise WireError("reply: not a reply record")
    _, _, rows, refused, fenced = fields
    if type(refused) is not str or refused != plain(refused):
        raise WireError("reply: the reason is not plain text")
    return Reply(
        shards=tuple([_reply_row(row) for row in _rows(rows)]), refused=refused, fenced=_bool(fenced, "fenced")
    )


def plain(text: str) -> str:
    """`text` as ASCII on one line, without backslashes, at most `MAX_TEXT` characters."""
    return "".join([c if " " <= c <= "~" and c != "\\" else "?" for c in text[:MAX_TEXT].replace("\n", " ")])


def _push(caller: Caller, rest: list[object]) -> Push:
    if len(rest) != 5:
        raise WireError(f"push: got {len(rest)} fields after the kind, expected 5")
    sequence, samples, groups, rows, poll = rest
    return Push(
        caller=caller,
        sequence=_int(sequence, "sequence"),
        samples=_int(samples, "samples"),
        groups=tuple([_hyper(group) for group in _rows(groups)]),
        shards=tuple([_push_row(row) for row in _rows(rows)]),
        poll=_bool(poll, "poll"),
    )


def _push_row(row: object) -> ShardPush:
    shard, shard_epoch, base_epoch, counter, present, rows = _items(row, 6, "shard of a push")
    return ShardPush(
        shard=_shard(shard),
        shard_epoch=_int(shard_epoch, "shard epoch"),
        base=Version(_int(base_epoch, "base epoch"), _int(counter, "base counter")),
        present=_bytes(present, "present", MAX_BITMAP_BYTES),
        rows=_int(rows, "rows", least=DENSE),
    )


def _pull_row(row: object) -> tuple[ShardId, int, Version | None]:
    shard, epoch, base = _items(row, 3, "shard of a pull")
    version = None
    if base is not None:
        base_epoch, counter = _items(base, 2, "base version")
        version = Version(_int(base_epoch, "base epoch"), _int(counter, "base counter"))
    return _shard(shard), _int(epoch, "shard epoch"), version


def _epoch_row(row: object) -> tuple[ShardId, int]:
    shard, epoch = _items(row, 2, "shard")
    return _shard(shard), _int(epoch, "shard epoch")


def _reply_row(row: object) -> ShardReply:
    shard, status, epoch, counter, next_sequence = _items(row, 5, "shard of a reply")
    return ShardReply(
        shard=_shard(shard),
        status=_status(status),
        version=Version(_int(epoch, "version epoch"), _int(counter, "version counter")),
        next_sequence=_int(next_sequence, "next sequence"),
    )


def _status(value: object) -> Status:
    status = _STATUSES.get(value) if type(value) is int else None
    if status is None:
        raise WireError(f"status: got {_brief(value)}, expected one of {list(_STATUSES)}")
    return status


def _hyper(group: object) -> Hyper:
    pairs = _rows(group)
    return tuple([_hyper_pair(*_items(pair, 2, "hyper-parameter")) for pair in pairs])


def _hyper_pair(key: object, value: object) -> tuple[str, HyperValue]:
    if type(key) is not str or len(key) > MAX_TEXT:
        raise WireError(f"hyper-parameter: the key is {_brief(key)}, expected a short string")
    if value is None or type(value) is bool or (type(value) is str and len(value) <= MAX_TEXT):
        return key, value
    if type(value) is tuple and len(value) <= 64:
        return key, tuple([None if item is None else _number(item, key) for item in value])
    return key, _number(value, key)


def _number(value: object, key: str) -> float | int:
    if type(value) is float or (type(value) is int and -MAX_INT <= value <= MAX_INT):
        return value
    raise WireError(f"hyper-parameter {plain(key)}: got {_brief(value)}, expected a number")


def _record(wire: object) -> tuple[object, ...]:
    if type(wire) is not tuple or not wire:
        raise WireError(f"record: got {_brief(wire)}, expected a tuple")
    if type(wire[0]) is not int or wire[0] != WIRE_FORMAT:
        raise WireError(f"record: wire format {_brief(wire[0])}, this process speaks {WIRE_FORMAT}; upgrade one side")
    return wire


def _rows(value: object) -> tuple[object, ...]:
    if type(value) is not tuple or len(value) > MAX_SHARDS:
        raise WireError(f"record: got {_brief(value)}, expected a tuple of at most {MAX_SHARDS}")
    return value


def _items(value: object, count: int, what: str) -> tuple[object, ...]:
    if type(value) is not tuple or len(value) != count:
        raise WireError(f"{what}: got {_brief(value)}, expected a tuple of {count}")
    return value


def _shard(value: object) -> ShardId:
    return ShardId(_int(value, "shard id"))


def _int(value: object, what: str, most: int = MAX_INT, *, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise WireError(f"{what}: got {_brief(value)}, expected an integer from {least} to {most}")
    return value


def _bool(value: object, what: str) -> bool:
    if type(value) is not bool:
        raise WireError(f"{what}: got {_brief(value)}, expected a bool")
    return value


def _bytes(value: object, what: str, most: int, *, least: int = 0) -> bytes:
    if type(value) is not bytes or not least <= len(value) <= most:
        raise WireError(f"{what}: expected {least} to {most} bytes, got {type(value).__name__}")
    return value


def _brief(value: object) -> str:
    """A short safe description of something that arrived: never its whole content, never a secret."""
    if type(value) is int and abs(value) <= MAX_INT:
        return f"integer {value}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, str, bytes)) else type(value).__name__
