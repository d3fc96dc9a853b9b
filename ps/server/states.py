"""What becomes of requests for optimizer state: one shard at a time, as bytes that `ps.optim.state` knows."""

from __future__ import annotations

from torch import Tensor

from ps.errors import WireError
from ps.optim.spec import ServedOptimizer
from ps.optim.state import pack, unpack
from ps.rpc.wire import ReadState, Reply, Status, WriteState, plain
from ps.server.answers import Answers, no_payload, standing
from ps.server.checks import check_load
from ps.server.slots import MessageLayout, Slot, Work
from ps.sharding.spec import NO_GROUP


def check(request: ReadState | WriteState, layout: MessageLayout, workers: int) -> str:
    """The reason to refuse a request, or an empty string. State may be written whenever weights may."""
    if len(request.shards) != 1:
        return f"state is asked for or written shard by shard, the request names {len(request.shards)}"
    if layout.specs[0].group == NO_GROUP:
        return f"shard {layout.ids[0]}: no optimizer group holds it, so it has no optimizer state"
    (slot,) = layout.slots
    if isinstance(request, WriteState) and slot is not None:
        return check_load(layout, workers) if slot.shard.initialised else _check_order(request, slot)
    return ""


def _check_order(request: WriteState, slot: Slot) -> str:
    if request.caller.incarnation in slot.initial:
        return ""
    return f"shard {slot.shard.spec.id}: initial weights of the same worker come before its optimizer state"


def do(work: Work, optimizer: ServedOptimizer, answers: Answers) -> None:
    """Read or write, and answer. On an apply thread."""
    state: Tensor | None = None
    try:
        if isinstance(work.request, ReadState):
            status, state = read(work)
        else:
            status = write(work, optimizer)
    except WireError as error:
        answers.refuse(work, Reply(refused=plain(str(error))))
        return
    reply = standing(work.layout, [status], work.incarnation)
    answers.give(work, reply, no_payload() if state is None else state)


def read(work: Work) -> tuple[Status, Tensor | None]:
    """What becomes of the request, and the state. Holds the shard's lock only for a copy."""
    slot = _slot(work)
    if slot is None:
        return Status.MOVED, None
    with slot.lock:
        if slot.gone or not slot.shard.initialised:
            return (Status.MOVED if slot.gone else Status.PENDING), None
        pieces = slot.shard.optimizer_state()
    return Status.OK, pack(pieces)


def write(work: Work, optimizer: ServedOptimizer) -> Status:
    """Take the state in, or keep it beside initial weights that don't count yet. Raises `WireError` for bad bytes."""
    slot, payload = _slot(work), work.payload
    if slot is None or payload is None:
        return Status.MOVED
    pieces = unpack(payload, slot.shard.spec, optimizer)
    with slot.lock:
        if slot.gone:
            return Status.MOVED
        if slot.shard.initialised:
            slot.shard.set_optimizer_state(pieces)
        elif work.incarnation in slot.initial:
            slot.initial_state[work.incarnation] = pieces
    return Status.OK


def _slot(work: Work) -> Slot | None:
    request = work.request
    assert isinstance(request, ReadState | WriteState)
    (slot,), ((_, epoch),) = work.layout.slots, request.shards
    return slot if slot is not None and slot.epoch == epoch else None
