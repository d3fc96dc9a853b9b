"""What a client asks of every shard, as `workers.exchange` carries it: a request, and what is done with its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ps.rpc.wire import Caller, Hello, Init, Load, Pull, Push, ReadState, Request, ShardPush, ShardReply, WriteState
from ps.types import DENSE, Hyper, ShardId, Version
from workers.routing import Message, Routes
from workers.staging import Outgoing, Staged


@dataclass(slots=True)
class ShardState:
    """What this worker knows of one shard."""

    version: Version | None = None
    """Version of the weights in the model; None before the first pull."""
    next_sequence: int = 0
    """What the holder expects next from us."""


class View(Protocol):
    """What a client lets its operations see and do."""

    states: list[ShardState]
    """Index = shard id."""

    @property
    def routes(self) -> Routes:
        """The newest known shard map."""
        ...

    def take(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """Copy in the weights of shards that are newer than the model's."""
        ...


@dataclass(slots=True)
class BufferPush:
    """What a push carries of buffers. Their shards are pushed when they change, so each has push numbers of its own."""

    samples: int = 0
    """Behind the changes."""
    outs: list[Outgoing] = field(default_factory=list)
    bitmaps: dict[ShardId, bytes] = field(default_factory=dict)
    sequences: dict[ShardId, int] = field(default_factory=dict)


class Op:
    """Base of all operations: shards with their epochs, for the newest known map."""

    name = ""
    polls = False

    def __init__(self, view: View) -> None:
        self._view = view

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        """See `exchange.Operation`."""
        raise NotImplementedError

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """See `exchange.Operation`."""
        for reply in done:
            self._view.states[reply.shard].next_sequence = reply.next_sequence

    def _epochs(self, shards: Sequence[ShardId]) -> tuple[tuple[ShardId, int], ...]:
        return tuple((shard, self._view.routes.shard_epoch(shard)) for shard in shards)


class PlainOp(Op):
    """A request of nothing but shards, whose answers hold nothing."""

    def __init__(self, view: View, name: str, record: type[Hello | Init | Load | WriteState]) -> None:
        super().__init__(view)
        self.name = name
        self._record = record

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        """See `exchange.Operation`."""
        return self._record(caller=caller, shards=self._epochs(shards))


class ReadStateOp(Op):
    """Gives each shard's optimizer state to `take`."""

    name = "reading of optimizer state"

    def __init__(self, view: View, take: Callable[[ShardId, Tensor], None]) -> None:
        super().__init__(view)
        self._take = take

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        """See `exchange.Operation`."""
        return ReadState(caller=caller, shards=self._epochs(shards))

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """See `exchange.Operation`."""
        super().settle(message, payload, done)
        for reply in done:
            self._take(reply.shard, payload)


class PullOp(Op):
    """Takes weights that are newer than the model's."""

    name = "pull"

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        """See `exchange.Operation`."""
        states = self._view.states
        wanted = tuple((shard, epoch, states[shard].version) for shard, epoch in self._epochs(shards))
        return Pull(caller=caller, shards=wanted)

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """See `exchange.Operation`."""
        super().settle(message, payload, done)
        self._view.take(message, payload, done)


class PushOp(Op):
    """Pushes gradients, and values of buffers; takes the new weights."""

    polls = True

    def __init__(
        self,
        view: View,
        sequence: int,
        samples: int,
        groups: tuple[Hyper, ...],
        bitmaps: Sequence[bytes],
    ) -> None:
        super().__init__(view)
        self.name = f"push of step {sequence}"
        self._sequence = sequence
        self._samples = samples
        self._groups = groups
        self._bitmaps = bitmaps
        self.rows: dict[ShardId, int] = {}
        """Per shard whose gradient travels as rows, how many it has."""
        self.buffers = BufferPush()
        # A push says on which weights its gradient was computed, also when it is sent again after newer ones came.
        self._bases = [state.version for state in view.states]

    def carries(self, out: Staged) -> bool:
        """Whether any piece of the message has a gradient; if none has, it travels without payload."""
        return any(any(self._bitmaps[shard]) for shard in out.message.shards)

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        """See `exchange.Operation`."""
        of_buffers = shards[0] in self.buffers.sequences
        return Push(
            caller=caller,
            sequence=self.buffers.sequences[shards[0]] if of_buffers else self._sequence,
            samples=self.buffers.samples if of_buffers else self._samples,
            groups=self._groups,
            shards=tuple(self._shard(shard, epoch) for shard, epoch in self._epochs(shards)),
            poll=poll,
        )

    def _shard(self, shard: ShardId, epoch: int) -> ShardPush:
        base = self._bases[shard]
        assert base is not None, shard  # attach pulls before the first push
        present = self.buffers.bitmaps[shard] if shard in self.buffers.bitmaps else self._bitmaps[shard]
        rows = self.rows.get(shard, DENSE)  # of a gradient that is left out, none travel
        return ShardPush(
            shard=shard, shard_epoch=epoch, base=base, present=present, rows=rows if any(present) else min(rows, 0)
        )

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """See `exchange.Operation`."""
        super().settle(message, payload, done)
        self._view.take(message, payload, done)
