"""Checks of requests, before they touch any state: each gives the reason to refuse, or an empty string. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ps.control.api import Admitted
from ps.errors import UnsupportedError
from ps.finite import all_finite
from ps.optim.apply import check_values
from ps.optim.spec import ServedOptimizer, check_hyper
from ps.rpc.wire import Init, Load, Push, Reply, Request, ShardPush, WriteState
from ps.secrets import matches
from ps.server.slots import MessageLayout, Slot, Work
from ps.sharding.spec import NO_GROUP, ModelSignature, Shard
from ps.store.buffers import BufferShard
from ps.store.dense import split_rows
from ps.types import DENSE, Hyper, Role

MAX_SEQUENCE = 1 << 62
"""No worker pushes this often."""


def check_caller(request: Request, member: Admitted | None) -> Reply | None:
    """A refusal unless the caller is who it says, and may do this; `member` is what is known of its incarnation."""
    caller = request.caller
    if member is None:
        return Reply(refused="this incarnation is not admitted: it was evicted, or never joined", fenced=True)
    if not matches(caller.secret, member.secret):
        return Reply(refused=f"wrong secret for incarnation {caller.incarnation}")
    if isinstance(request, Init | Load | Push | WriteState) and member.role is not Role.WORKER:
        return Reply(refused=f"incarnation {caller.incarnation} is no worker, and may only read")
    return None


def check_payload(payload: Tensor, layout: MessageLayout, nbytes: int | None = None) -> str:
    """A payload holds the layout's shards, whole unless `nbytes` says otherwise, as flat contiguous bytes."""
    expected = layout.nbytes if nbytes is None else nbytes
    if payload.dtype is not torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        return f"payload is {payload.dtype} of {payload.dim()} dimensions, expected flat contiguous uint8"
    if payload.numel() != expected:
        return f"payload has {payload.numel()} bytes, its {len(layout.ids)} shards take {expected}"
    return ""


def check_push(request: Push, payload: Tensor, layout: MessageLayout) -> str:
    """A push's numbers, bitmaps, groups, rows and payload fit the shards. Of those held elsewhere only sizes count."""
    if not 0 <= request.sequence < MAX_SEQUENCE:
        return f"push number {request.sequence} is out of range"
    for part, spec, slot in zip(request.shards, layout.specs, layout.slots, strict=True):
        if reason := _check_rows(part, spec):
            return f"shard {part.shard}: {reason}"
        if slot is not None and slot.epoch == part.shard_epoch and (reason := _check_part(request, part, slot)):
            return f"shard {part.shard}: {reason}"
    if request.poll:
        return "a poll carries no payload" if payload.numel() else ""
    if not payload.numel():
        empty = all(part.rows == 0 or not any(part.present) for part in request.shards)
        return "" if empty else "the payload is missing, but pieces are marked as present"
    sizes = layout.push_sizes(request)
    return check_payload(payload, layout, sum(sizes)) or _check_ids(request, layout, layout.regions(payload, sizes))


def _check_rows(part: ShardPush, spec: Shard) -> str:
    """The number of rows is possible."""
    if not spec.row_elems:
        return "" if part.rows == DENSE else f"its gradients are dense, the push has {part.rows} rows of it"
    most = len(spec.rows) if any(part.present) else 0
    return "" if 0 <= part.rows <= most else f"the push has {part.rows} rows of it, expected 0 to {most}"


def _check_ids(request: Push, layout: MessageLayout, regions: Sequence[Tensor | None]) -> str:
    """Ids of rows are the shard's, ascending, none twice."""
    for part, spec, region in zip(request.shards, layout.specs, regions, strict=True):
        if part.rows <= 0 or region is None:
            continue
        ids, _ = split_rows(spec, region, part.rows)
        if not bool((ids[1:] > ids[:-1]).all()):
            return f"shard {part.shard}: row ids are not in ascending order, or one is there twice"
        first, last = int(ids[0]), int(ids[-1])
        if first < spec.rows.start or last >= spec.rows.stop:
            held = f"{spec.rows.start} to {spec.rows.stop - 1}"
            return f"shard {part.shard}: row ids go from {first} to {last}, the shard holds rows {held}"
    return ""


def _check_part(request: Push, part: ShardPush, slot: Slot) -> str:
    spec = slot.shard.spec
    count = len(spec.pieces)
    if spec.group == NO_GROUP and not spec.merged:
        return "no optimizer group holds it, so nothing can be pushed to it"
    if not spec.merged and not 0 <= spec.group < len(request.groups):
        return f"it is in group {spec.group}, the push has hyper-parameters of {len(request.groups)} groups"
    if len(part.present) != (count + 7) >> 3 or part.present[-1] >> ((count - 1) & 7) + 1:
        return f"the bitmap of {len(part.present)} bytes doesn't fit {count} pieces"
    # The version may rise meanwhile, never fall, so reading it without the lock can't refuse a good base.
    if part.base > slot.shard.version:
        return f"base {tuple(part.base)} is ahead of version {tuple(slot.shard.version)}"
    return ""


def check_groups(groups: tuple[Hyper, ...], optimizer: ServedOptimizer) -> str:
    """Hyper-parameters are complete, of the right types, and accepted by the class."""
    try:
        for index, hyper in enumerate(groups):
            where = index
            check_hyper(hyper, optimizer)
            check_values(optimizer, hyper)
    except UnsupportedError as error:
        return f"group {where}: {error}"
    return ""


def check_load(layout: MessageLayout, workers: int) -> str:
    """Weights may be replaced by the only worker, or before the first push; the rest only while nobody has them."""
    shards = [slot.shard for slot in layout.slots if slot is not None]
    if not all(shard.initialised for shard in shards):
        return "there are no initial weights yet that could be replaced"
    pushes = max((shard.merges if isinstance(shard, BufferShard) else shard.pushes for shard in shards), default=0)
    if workers > 1 and pushes:
        return (
            f"load() with {workers} workers in a job that has made {pushes} pushes would change the weights under the "
            "others; load before the first step, or with one worker"
        )
    if workers > 1 and any(shard.spec.group == NO_GROUP and not shard.spec.merged for shard in shards):
        return (
            f"load() changes parameters or buffers that nobody pushes, and {workers} workers have them already: they "
            "are transferred once. Load them with one worker, before the others join"
        )
    return ""


def check_finite(work: Work, signature: ModelSignature) -> str:
    """No gradient that a push brings holds inf or NaN: it would spoil the weights, for everybody and for good.

    A safety net, since workers look before they send: 0.1 ms per 8 MB. Call where time may be spent.
    """
    request, payload = work.request, work.payload
    if not isinstance(request, Push) or payload is None:
        return ""
    everything = work.layout.elements(payload)
    if everything is not None and all_finite(everything):  # nearly always; else look who is at fault, if anybody
        return ""
    for part, slot, region in zip(request.shards, work.layout.slots, work.regions(), strict=True):
        if slot is None or region is None or not any(part.present):
            continue
        spec = slot.shard.spec
        if spec.buffer not in ("", "average"):
            continue  # of these a value spoils nothing but itself
        grads = split_rows(spec, region, part.rows)[1] if spec.row_elems else region.view(slot.shard.dtype)
        if not all_finite(grads) and (index := _first_not_finite(grads, part, slot)) is not None:
            name = signature.params[index].name
            what = "buffer" if spec.buffer else "the gradient of"
            return (
                f"{what} {name} in push {request.sequence} of incarnation {work.incarnation} holds inf or "
                "NaN; none of this message was applied"
            )
    return ""


def _first_not_finite(grads: Tensor, part: ShardPush, slot: Slot) -> int | None:
    """The parameter whose gradient is at fault; None if it is only padding, or a piece that is not present."""
    if slot.shard.spec.row_elems:
        return slot.shard.spec.pieces[0].param
    for index, piece in enumerate(slot.shard.spec.pieces):
        present = part.present[index >> 3] >> (index & 7) & 1
        if present and not all_finite(grads[piece.offset : piece.offset + piece.numel]):
            return piece.param
    return None
