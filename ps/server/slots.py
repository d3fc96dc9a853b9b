"""Slots: the shards that a server holds, each with its lock; layouts of messages; requests on their way through."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ps.consistency.asp import Asp
from ps.consistency.policy import Policy
from ps.optim.state import PieceEntries
from ps.rpc.transport import Answer
from ps.rpc.wire import Push, Request, Status
from ps.sharding.layout import rows_bytes
from ps.sharding.spec import Shard, ShardingPlan
from ps.store.aggregate import Aggregate
from ps.store.dense import DenseShard
from ps.store.ordering import PushOrder
from ps.store.pool import Form
from ps.types import Incarnation, ShardId

MOST_INITIAL = 2
"""Workers whose initial weights are kept side by side; one is chosen by the coordinator, or a second if it dies."""

_VIEW_ALIGN = 16
"""Bytes viewed as the largest dtype must start at a multiple of this."""

_MOST_LAYOUTS = 1024
"""Layouts remembered; all are forgotten when there are more, and made again as they are asked for."""


@dataclass(slots=True, eq=False)
class Slot:
    """One shard that this server holds, or held."""

    epoch: int
    """The shard's epoch; another one in a request means MOVED."""
    shard: DenseShard
    policy: Policy = field(default_factory=Asp)
    rounds: Aggregate = field(init=False)
    ordered: bool = False
    """Sums of rounds have the same bits whoever comes first."""
    order: PushOrder = field(default_factory=PushOrder)
    held: dict[tuple[Incarnation, int], list[tuple[Work, int]]] = field(default_factory=dict)
    """Pushes whose answers wait: (worker, number) → works that wait, with the shard's index in each. Those that `order`
    holds back are still to be applied (the first work has the payload), the others wait as `policy` says."""
    initial: dict[Incarnation, Tensor] = field(default_factory=dict)
    """Initial weights as written by workers, until the map names the one that counts; at most `MOST_INITIAL`."""
    initial_state: dict[Incarnation, tuple[PieceEntries, ...]] = field(default_factory=dict)
    """Optimizer state that goes with some of `initial`."""
    gone: bool = False
    """No longer held; set once."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards all of the above, and the weights. Never held together with another lock, nor across an answer. The
    methods below are called with it held."""

    def __post_init__(self) -> None:
        self.rounds = Aggregate(self.shard.spec, ordered=self.ordered)

    def forget(self, incarnation: Incarnation) -> None:
        """Drop all that is kept of a worker that is not admitted any more, but for what it gave to open rounds."""
        self.order.forget(incarnation)
        for key in [key for key in self.held if key[0] == incarnation]:
            del self.held[key]
        self.initial.pop(incarnation, None)
        self.initial_state.pop(incarnation, None)
        self.shard.forget(incarnation)

    def renew(self, epoch: int, chosen: Incarnation | None) -> None:
        """Follow a new map: the shard's epoch, and whose initial weights count (None = not known yet)."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.shard.begin_epoch(epoch)
        if chosen is not None and not self.shard.initialised:
            if (region := self.initial.get(chosen)) is not None:
                self.shard.load(region)
            if (state := self.initial_state.get(chosen)) is not None and self.shard.initialised:
                self.shard.set_optimizer_state(state)
            self.initial.clear()
            self.initial_state.clear()

    def let_go(self) -> Counter[Work]:
        """Another server holds the shard now. Returns the works that waited here, with how often."""
        self.gone = True
        others: Counter[Work] = Counter()
        for waiting in self.held.values():
            for work, index in waiting:
                work.statuses[index] = Status.MOVED
                others[work] += 1
        self.held.clear()
        self.rounds.clear()
        return others


@dataclass(frozen=True, slots=True, eq=False)
class MessageLayout:
    """Shards of a message, in order, with what is held of them."""

    ids: tuple[ShardId, ...]
    slots: tuple[Slot | None, ...]
    """None = held by another server."""
    sizes_bytes: tuple[int, ...]
    nbytes: int
    specs: tuple[Shard, ...] = ()
    """Index as in `ids`; empty while the map is not known."""
    dtype: torch.dtype | None = None
    """Of all elements of a payload; None if shards differ, or bring rows."""

    def push_sizes(self, request: Push) -> tuple[int, ...]:
        """Bytes of each shard in the payload of a push: those whose gradients are rows take what their rows take."""
        if not any(spec.row_elems for spec in self.specs):
            return self.sizes_bytes
        return tuple(
            rows_bytes(spec, part.rows) if spec.row_elems else spec.nbytes
            for spec, part in zip(self.specs, request.shards, strict=True)
        )

    def held(self, epochs: Sequence[tuple[ShardId, int]]) -> list[bool]:
        """Whether each shard is held here at the epoch that the request names."""
        return [slot is not None and slot.epoch == epoch for slot, (_, epoch) in zip(self.slots, epochs, strict=True)]

    def form(self) -> Form:
        """What reply buffers for this message look like."""
        held = [slot for slot in self.slots if slot is not None]
        dtypes = tuple(slot.shard.dtype if slot else torch.uint8 for slot in self.slots)
        return Form(self.ids, self.sizes_bytes, dtypes, held[0].shard.device)

    def regions(self, payload: Tensor, sizes_bytes: Sequence[int] | None = None) -> Sequence[Tensor | None]:
        """Bytes of each shard in a payload of this layout, or of these sizes; None for each when it is empty."""
        if not payload.numel():
            return (None,) * len(self.ids)
        if payload.data_ptr() % _VIEW_ALIGN:
            payload = payload.clone()
        return payload.split_with_sizes(list(self.sizes_bytes if sizes_bytes is None else sizes_bytes))

    def elements(self, payload: Tensor) -> Tensor | None:
        """The whole of a payload as one flat tensor, where that can be."""
        return None if self.dtype is None or payload.data_ptr() % _VIEW_ALIGN else payload.view(self.dtype)


PushKey = tuple[Incarnation, int, tuple[int, ...]]
"""Worker, push number, shards: what a retry has in common with its original."""


@dataclass(slots=True, eq=False)
class Work:
    """One accepted request. Fields are guarded by the host's lock unless they say otherwise."""

    request: Request
    payload: Tensor | None
    """Dropped when all shards have taken their part. Only read by whoever decides a shard."""
    layout: MessageLayout
    answers: list[tuple[float, Answer]] = field(default_factory=list)
    """(deadline, who waits): the caller, and retries of the same push. Taken out by whoever answers, so that each is
    called once."""
    statuses: list[Status | None] = field(init=False)
    """Per shard; None = undecided. Each is written once, under its slot's lock."""
    undecided: int = field(init=False)
    """Shards without a status, plus one while the request is being gone through for the first time."""
    unread: int = field(init=False)
    """Shards that may still need the payload, plus one as above."""
    queued_bytes: int = 0
    """What it takes of the host's bound; 0 when given back."""
    parked: bool = False
    """It waits for a map or for initial weights, and has not been taken in."""
    failure: str = ""
    """Why it can't be answered properly; written under a slot's lock or before it is shared."""
    fenced: bool = False
    """The worker was evicted meanwhile."""

    def __post_init__(self) -> None:
        self.statuses = [None] * len(self.layout.ids)
        self.undecided = self.unread = len(self.layout.ids) + 1

    def regions(self) -> Sequence[Tensor | None]:
        """Bytes of each shard in the payload; None for each when there is none."""
        payload = self.payload  # an eviction may take it away at any time
        if payload is None:
            return (None,) * len(self.layout.ids)
        sizes = self.layout.push_sizes(self.request) if isinstance(self.request, Push) else None
        return self.layout.regions(payload, sizes)

    @property
    def incarnation(self) -> Incarnation:
        """Who asked."""
        return self.request.caller.incarnation

    @property
    def key(self) -> PushKey | None:
        """Under which a retry finds it; None for all but pushes with payload."""
        request = self.request
        if not isinstance(request, Push) or request.poll:
            return None
        return request.caller.incarnation, request.sequence, self.layout.ids


def shard_ids(request: Request) -> tuple[ShardId, ...]:
    """Shards that a request names, in its order."""
    if isinstance(request, Push):
        return tuple([part.shard for part in request.shards])
    return tuple([row[0] for row in request.shards])


class Layouts:
    """Layouts of the messages that were asked for under one shard map. Thread-safe."""

    def __init__(self, plan: ShardingPlan, slots: Mapping[ShardId, Slot]) -> None:
        self._plan = plan
        self._slots = slots
        self._known: dict[tuple[ShardId, ...], MessageLayout] = {}

    def get(self, ids: tuple[ShardId, ...]) -> MessageLayout | str:
        """The layout of a message that names these shards, or what is wrong with it."""
        found = self._known.get(ids)
        return found if found is not None else self._make(ids)

    def _make(self, ids: tuple[ShardId, ...]) -> MessageLayout | str:
        count = len(self._plan.shards)
        if not ids or len(set(ids)) != len(ids):
            return "the request names no shard" if not ids else "the request names a shard twice"
        if max(ids) >= count or min(ids) < 0:
            return f"the request names shard {max(ids)}; the plan has {count}"
        specs = tuple(self._plan.shards[shard] for shard in ids)
        sizes = tuple(spec.nbytes for spec in specs)
        slots = tuple(self._slots.get(shard) for shard in ids)
        layout = MessageLayout(ids, slots, sizes, sum(sizes), specs, _common_dtype(specs))
        if len(self._known) >= _MOST_LAYOUTS:
            self._known.clear()
        self._known[ids] = layout
        return layout


def _common_dtype(specs: Sequence[Shard]) -> torch.dtype | None:
    names = {spec.dtype for spec in specs}
    if len(names) > 1 or any(spec.row_elems for spec in specs):
        return None
    dtype: torch.dtype = getattr(torch, names.pop())
    return dtype
