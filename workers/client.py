"""ParameterClient: hello, init, pull and push_pull of a whole model, shard by shard, in messages.

Belongs to the thread that owns the model: weights are copied into the Parameters inside these calls, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ps.errors import Fenced, PsError, Refused
from ps.rpc.wire import Caller, Hello, Init, Load, Pull, Push, Request, ShardPush, ShardReply
from ps.sharding.spec import ShardingPlan
from ps.types import DENSE, Hyper, ShardId, Version
from workers.buffers import ModelMemory
from workers.exchange import Exchange
from workers.nonfinite import Screen
from workers.routing import Message, Routes, frozen, trained
from workers.staging import Staged


@dataclass(slots=True)
class _ShardState:
    """What this worker knows of one shard."""

    version: Version | None = None
    """Version of the weights in the model; None before the first pull."""
    next_sequence: int = 0
    """What the holder expects next from us."""


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
    ) -> None:
        """`screen` looks at gradients before they are sent; only a client that never pushes has none."""
        self._plan = plan
        self._memory = memory
        self._exchange = exchange
        self._screen = screen
        self._states = [_ShardState() for _ in plan.shards]
        self._trained = trained(plan)
        self._frozen = frozen(plan)
        self._message_bytes = message_bytes
        self._outs: list[Staged] = []
        self._outs_epoch = -1
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
        first = self._states[self._trained[0]].version if self._trained else None
        return first.counter if first is not None else 0

    @property
    def foreign_steps(self) -> int:
        """Those of them that are not this worker's own."""
        return max(0, self.global_step - self._sequence - self._loads)

    @property
    def _routes(self) -> Routes:
        return self._exchange.routes

    def initialise(self) -> None:
        """Write this model's weights into every shard. Only for the worker that the coordinator has chosen."""
        outs = [self._memory.outgoing(message) for message in self._messages(range(len(self._plan.shards)))]
        for out in outs:
            self._memory.stage_weights(out)
        self._run(_InitOp(self), [(out.message, out.payload) for out in outs])

    def hello(self) -> None:
        """Learn which push number the servers expect next. Raises `Refused` when they disagree."""
        self._run(_HelloOp(self), [(message, None) for message in self._messages(self._trained)])
        expected = {self._states[shard].next_sequence for shard in self._trained} or {0}
        if len(expected) > 1:
            raise Refused(f"servers expect different push numbers from this worker: {sorted(expected)}; start it again")
        self._sequence = expected.pop()

    def pull(self, *, force: bool = False, frozen_too: bool = False) -> None:
        """Take the newest weights of the trained shards; with `force` also of shards that have no newer ones."""
        shards = (*self._trained, *self._frozen) if frozen_too else self._trained
        if force:
            for shard in shards:
                self._states[shard].version = None
        self._run(_PullOp(self), [(message, None) for message in self._messages(shards)])
        self._memory.remember()

    def load(self, *, frozen_too: bool) -> None:
        """Write this model's weights into every trained shard, for everybody; with `frozen_too` into all.

        Raises `Refused` when other workers stand in the way; the weights here are then the servers' again.
        """
        shards = (*self._trained, *self._frozen) if frozen_too else self._trained
        outs = [self._memory.outgoing(message) for message in self._messages(shards)]
        for out in outs:
            self._memory.stage_weights(out)
        try:
            self._run(_LoadOp(self), [(out.message, out.payload) for out in outs])
        except Refused as error:
            if not isinstance(error, Fenced):
                self._broken = None
                self.pull(force=True, frozen_too=True)
            raise
        self._loads += 1
        self.pull(force=True)

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
        operation = _PushOp(self, step, samples, groups, self._present_bitmaps(present))
        operation.rows = {shard: rows for out in outs for shard, rows in out.rows.items()}
        messages = [(out.message, out.payload if operation.carries(out) else None) for out in outs]
        self._run(operation, messages, [out.source for out in outs])
        self._sequence = step + 1
        self._memory.remember()

    # ---- pieces of the above ----

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise PsError(
                f"an earlier call to the servers did not end well ({type(self._broken).__name__}: {self._broken}); "
                "start this worker again"
            )

    def _run(
        self,
        operation: _Op,
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
        return self._routes.messages([ShardId(shard) for shard in shards], self._message_bytes)

    def _staging(self) -> list[Staged]:
        """Staging memory for all trained shards, made again only when the shard map has changed."""
        if self._outs_epoch != self._routes.epoch:
            self._outs = [self._memory.staged(message) for message in self._messages(self._trained)]
            self._outs_epoch = self._routes.epoch
        return self._outs

    def _present_bitmaps(self, present: tuple[bool, ...]) -> list[bytes]:
        """Per shard, which pieces have a gradient; kept while the same parameters have one."""
        if self._bitmaps[0] != present:
            self._bitmaps = (
                present,
                [_bitmap([present[p.param] for p in shard.pieces]) for shard in self._plan.shards],
            )
        return self._bitmaps[1]

    def _take(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """Copy in the weights of shards that are newer than the model's."""
        if not payload.numel():
            return
        newer = [reply for reply in done if self._is_newer(reply)]
        if newer:
            self._memory.take(message, payload, [reply.shard for reply in newer])
        for reply in newer:
            self._states[reply.shard].version = reply.version

    def _is_newer(self, reply: ShardReply) -> bool:
        known = self._states[reply.shard].version
        return known is None or reply.version > known


class _Op:
    """Base of the four operations: shards with their epochs, for the newest known map."""

    name = ""
    polls = False

    def __init__(self, client: ParameterClient) -> None:
        self._client = client

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        """See `exchange.Operation`."""
        raise NotImplementedError

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        """See `exchange.Operation`."""
        for reply in done:
            self._client._states[reply.shard].next_sequence = reply.next_sequence

    def _epochs(self, shards: Sequence[ShardId]) -> tuple[tuple[ShardId, int], ...]:
        return tuple((shard, self._client._routes.shard_epoch(shard)) for shard in shards)


class _InitOp(_Op):
    name = "initial weights"

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        return Init(caller=caller, shards=self._epochs(shards))


class _LoadOp(_Op):
    name = "load"

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        return Load(caller=caller, shards=self._epochs(shards))


class _HelloOp(_Op):
    name = "hello"

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        return Hello(caller=caller, shards=self._epochs(shards))


class _PullOp(_Op):
    name = "pull"

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        states = self._client._states
        wanted = tuple((shard, epoch, states[shard].version) for shard, epoch in self._epochs(shards))
        return Pull(caller=caller, shards=wanted)

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        super().settle(message, payload, done)
        self._client._take(message, payload, done)


class _PushOp(_Op):
    polls = True

    def __init__(
        self,
        client: ParameterClient,
        sequence: int,
        samples: int,
        groups: tuple[Hyper, ...],
        bitmaps: Sequence[bytes],
    ) -> None:
        super().__init__(client)
        self.name = f"push of step {sequence}"
        self._sequence = sequence
        self._samples = samples
        self._groups = groups
        self._bitmaps = bitmaps
        self.rows: dict[ShardId, int] = {}
        """Per shard whose gradient travels as rows, how many it has."""
        # A push says on which weights its gradient was computed, also when it is sent again after newer ones came.
        self._bases = [state.version for state in client._states]

    def carries(self, out: Staged) -> bool:
        """Whether any piece of the message has a gradient; if none has, it travels without payload."""
        return any(any(self._bitmaps[shard]) for shard in out.message.shards)

    def request(self, caller: Caller, shards: Sequence[ShardId], poll: bool) -> Request:
        return Push(
            caller=caller,
            sequence=self._sequence,
            samples=self._samples,
            groups=self._groups,
            shards=tuple(self._shard(shard, epoch) for shard, epoch in self._epochs(shards)),
            poll=poll,
        )

    def _shard(self, shard: ShardId, epoch: int) -> ShardPush:
        base = self._bases[shard]
        assert base is not None, shard  # attach pulls before the first push
        present = self._bitmaps[shard]
        rows = self.rows.get(shard, DENSE)  # of a gradient that is left out, none travel
        return ShardPush(
            shard=shard, shard_epoch=epoch, base=base, present=present, rows=rows if any(present) else min(rows, 0)
        )

    def settle(self, message: Message, payload: Tensor, done: Sequence[ShardReply]) -> None:
        super().settle(message, payload, done)
        self._client._take(message, payload, done)


def _bitmap(flags: Sequence[bool]) -> bytes:
    bits = sum(1 << index for index, flag in enumerate(flags) if flag)
    return bits.to_bytes(-(-len(flags) // 8), "little")
