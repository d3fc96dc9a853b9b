"""ParameterClient: hello, init, pull and push_pull of a whole model, shard by shard, in messages.

Belongs to the thread that owns the model: weights are copied into the Parameters inside these calls, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ps.errors import Fenced, PsError, Refused
from ps.rpc.wire import Hello, Init, Load, ShardReply, WriteState
from ps.sharding.spec import ShardingPlan
from ps.types import Hyper, ShardId
from workers.buffers import ModelMemory
from workers.exchange import Exchange
from workers.nonfinite import Screen
from workers.operations import BufferPush, Op, PlainOp, PullOp, PushOp, ReadStateOp, ShardState
from workers.routing import Message, Routes, frozen, merged, trained
from workers.staging import Outgoing, Staged

_STATES_AT_ONCE = 16
"""Shards whose optimizer state is in memory at once while it is written."""


class ParameterClient:
    """The weights of one model on the servers, as one worker sees them."""

    def __init__(
        self,
        plan: ShardingPlan,
        memory: ModelMemory,
        exchange: Exchange,
        *,
        message_bytes: int,
        screen: Screen | None = None,
        buffers_every: int = 1,
    ) -> None:
        """`screen` looks at gradients before they are sent; only a client that never pushes has none. Buffers that have
        changed go with every `buffers_every`-th push."""
        self._plan = plan
        self._memory = memory
        self._exchange = exchange
        self._screen = screen
        self.states = [ShardState() for _ in plan.shards]
        """For the operations, as are `routes` and `take`."""
        self._trained = trained(plan)
        self._merged = merged(plan)
        self._frozen = frozen(plan)
        self._buffers_every = buffers_every
        self._without_buffers = [0, 0]
        """Pushes since buffers were sent last, and samples in them."""
        self._message_bytes = message_bytes
        self._outs: list[Staged] = []
        self._outs_epoch = -1
        self._buffer_outs: dict[tuple[ShardId, ...], Outgoing] = {}
        self._bitmaps: tuple[tuple[bool, ...], list[bytes]] = ((), [])
        self._sequence = 0
        self._loads = 0
        self._broken: BaseException | None = None

    @property
    def steps(self) -> int:
        """Pushes of this worker that are applied on every shard."""
        return self._sequence

    @property
    def global_step(self) -> int:
        """Pushes by all workers that the weights in the model hold, counted on the first trained shard."""
        first = self.states[self._trained[0]].version if self._trained else None
        return first.counter if first is not None else 0

    @property
    def foreign_steps(self) -> int:
        """Those of them that are not this worker's own."""
        return max(0, self.global_step - self._sequence - self._loads)

    @property
    def routes(self) -> Routes:
        """See `operations.View`."""
        return self._exchange.routes

    def initialise(self) -> None:
        """Write this model's weights into every shard. Only for the worker that the coordinator has chosen."""
        outs = [self._memory.outgoing(message) for message in self._messages(range(len(self._plan.shards)))]
        for out in outs:
            self._memory.stage_weights(out)
        self._run(PlainOp(self, "initial weights", Init), [(out.message, out.payload) for out in outs])

    def hello(self) -> None:
        """Learn which push number the servers expect next. Raises `Refused` when they disagree."""
        messages = self._messages((*self._trained, *self._merged))
        self._run(PlainOp(self, "hello", Hello), [(message, None) for message in messages])
        expected = {self.states[shard].next_sequence for shard in self._trained} or {0}
        if len(expected) > 1:
            raise Refused(f"servers expect different push numbers from this worker: {sorted(expected)}; start it again")
        self._sequence = expected.pop()

    def pull(self, *, force: bool = False, frozen_too: bool = False) -> None:
        """Take the newest weights and buffers; with `force` also of shards that have no newer ones.

        `frozen_too`: also parameters that no group holds, and local buffers. Changes of buffers that have not been sent
        are lost.
        """
        shards = (*self._trained, *self._merged, *(self._frozen if frozen_too else ()))
        self._memory.find_buffers()
        if force:
            for shard in shards:
                self.states[shard].version = None
        self._run(PullOp(self), [(message, None) for message in self._messages(shards)])
        self._memory.remember()
        self._memory.buffers.remember()

    def load(self, *, frozen_too: bool) -> None:
        """Write this model's weights and shared buffers to the servers, for everybody; with `frozen_too` all of it.

        Raises `Refused` when other workers stand in the way; the weights here are then the servers' again.
        """
        shards = (*self._trained, *self._merged, *(self._frozen if frozen_too else ()))
        self._memory.find_buffers()
        outs = [self._memory.outgoing(message) for message in self._messages(shards)]
        for out in outs:
            self._memory.stage_weights(out)
        try:
            self._run(PlainOp(self, "load", Load), [(out.message, out.payload) for out in outs])
        except Refused as error:
            if not isinstance(error, Fenced):
                self._broken = None
                self.pull(force=True, frozen_too=True)
            raise
        self._loads += 1
        self.pull(force=True)

    def read_state(self, take: Callable[[ShardId, Tensor], None]) -> None:
        """Give `take` the optimizer's state of each trained shard, as `ps.optim.state` packs it."""
        self._run(ReadStateOp(self, take), [(message, None) for message in self._one_by_one()])

    def write_state(self, give: Callable[[ShardId], Tensor]) -> None:
        """Write the optimizer's state of each trained shard, packed by `give`; along with `initialise`, or later.

        Raises `Refused` when other workers stand in the way.
        """
        messages = self._one_by_one()
        try:
            for begin in range(0, len(messages), _STATES_AT_ONCE):
                some = messages[begin : begin + _STATES_AT_ONCE]
                self._run(
                    PlainOp(self, "optimizer state", WriteState),
                    [(message, give(message.shards[0])) for message in some],
                )
        except Fenced:
            raise
        except Refused:
            self._broken = None
            raise

    def push_pull(self, groups: tuple[Hyper, ...], samples: int, grads: Sequence[Tensor | None]) -> None:
        """Push gradients, one per parameter, and take the new weights: one push for each trained shard.

        Blocks until every shard has applied the push and its weights are in. Raises `LocalWeightEdit` or
        `NonFiniteGradient` before anything is sent. After any later error the client is unusable: which shards
        have applied the push is then unknown.
        """
        self._check_usable()
        assert self._screen is not None
        step = self._sequence
        self._memory.check_edits(step)
        self._memory.check_rows(groups)
        outs = self._staging()
        present = self._screen.check(outs, self._memory.stage_gradients(outs, grads), step)
        operation = PushOp(self, step, samples, groups, self._present_bitmaps(present))
        operation.rows = {shard: rows for out in outs for shard, rows in out.rows.items()}
        messages = [(out.message, out.payload if operation.carries(out) else None) for out in outs]
        self._without_buffers = [self._without_buffers[0] + 1, self._without_buffers[1] + samples]
        if self._without_buffers[0] >= self._buffers_every:
            operation.buffers = self._changed_buffers()
        buffers = [(out.message, out.payload) for out in operation.buffers.outs]
        sources = [out.source for out in (*outs, *operation.buffers.outs)]
        self._run(operation, [*messages, *buffers], sources)
        self._sequence = step + 1
        self._memory.remember()
        if operation.buffers.outs:
            self._memory.buffers.remember()

    def push_buffers(self, groups: tuple[Hyper, ...]) -> None:
        """Push buffers that have changed since they were sent last, and take what the servers make of them."""
        buffers = self._changed_buffers()
        if buffers.outs:
            operation = PushOp(self, self._sequence, buffers.samples, groups, ())
            operation.buffers = buffers
            self._run(operation, [(out.message, out.payload) for out in buffers.outs])
            self._memory.buffers.remember()

    # ---- pieces of the above ----

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise PsError(
                f"an earlier call to the servers did not end well ({type(self._broken).__name__}: {self._broken}); "
                "start this worker again"
            )

    def _run(
        self,
        operation: Op,
        messages: Sequence[tuple[Message, Tensor | None]],
        sources: Sequence[Message] | None = None,
    ) -> None:
        self._check_usable()
        try:
            self._exchange.run(operation, messages, sources)
        except BaseException as error:
            self._broken = error
            raise

    def _messages(self, shards: Sequence[int]) -> list[Message]:
        return self.routes.messages([ShardId(shard) for shard in shards], self._message_bytes)

    def _changed_buffers(self) -> BufferPush:
        """What a push carries of buffers: shards in which any has changed, each with its own push number."""
        found = BufferPush(samples=self._without_buffers[1])
        self._without_buffers = [0, 0]
        if not self._merged:
            return found
        changed = self._memory.find_buffers()
        for shard in self._merged:
            if any(changed[piece.param] for piece in self._plan.shards[shard].pieces):
                found.sequences[shard] = self.states[shard].next_sequence
        for sequence in sorted(set(found.sequences.values())):
            mine = [shard for shard, number in found.sequences.items() if number == sequence]
            found.outs += [self._buffer_staging(message) for message in self._messages(mine)]
        for out in found.outs:
            self._memory.stage_weights(out)
            finite = self._memory.finite(out)
            for shard in out.message.shards:
                pieces = self._plan.shards[shard].pieces
                found.bitmaps[shard] = _bitmap([changed[piece.param] and piece.param in finite for piece in pieces])
        return found

    def _buffer_staging(self, message: Message) -> Outgoing:
        """Staging memory for a message of buffers; mostly the same messages come again."""
        out = self._buffer_outs.get(message.shards)
        if out is None:
            if len(self._buffer_outs) >= len(self._merged):
                self._buffer_outs.clear()
            out = self._buffer_outs[message.shards] = self._memory.outgoing(message)
        return out

    def _one_by_one(self) -> list[Message]:
        """A message for each trained shard."""
        return self.routes.messages(self._trained, 0)

    def _staging(self) -> list[Staged]:
        """Staging memory for all trained shards, made again only when the shard map has changed."""
        if self._outs_epoch != self.routes.epoch:
            self._outs = [self._memory.staged(message) for message in self._messages(self._trained)]
            self._outs_epoch = self.routes.epoch
        return self._outs

    def _present_bitmaps(self, present: tuple[bool, ...]) -> list[bytes]:
        """Per shard, which pieces have a gradient; kept while the same parameters have one."""
        if self._bitmaps[0] != present:
            self._bitmaps = (
                present,
                [_bitmap([present[p.param] for p in shard.pieces]) for shard in self._plan.shards],
            )
        return self._bitmaps[1]

    def take(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """See `operations.View`."""
        if not payload.numel():
            return
        newer = [reply for reply in done if self._is_newer(reply)]
        if newer:
            self._memory.take(message, payload, [reply.shard for reply in newer])
        for reply in newer:
            self.states[reply.shard].version = reply.version

    def _is_newer(self, reply: ShardReply) -> bool:
        known = self.states[reply.shard].version
        return known is None or reply.version > known


def _bitmap(flags: Sequence[bool]) -> bytes:
    bits = sum(1 << index for index, flag in enumerate(flags) if flag)
    return bits.to_bytes(-(-len(flags) // 8), "little")
