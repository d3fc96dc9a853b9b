"""Checks of requests, before they touch any state: each gives the reason to refuse, or an empty string. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from ps.errors import UnsupportedError
from ps.finite import all_finite
from ps.optim.apply import check_values
from ps.optim.spec import ServedOptimizer, check_hyper
from ps.rpc.wire import Push, ShardPush
from ps.server.slots import MessageLayout, Slot, Work
from ps.sharding.spec import NO_GROUP, ModelSignature
from ps.types import Hyper

MAX_SEQUENCE = 1 << 62
"""No worker pushes this often."""


def check_payload(payload: Tensor, layout: MessageLayout) -> str:
    """A payload holds the layout's shards, whole, as flat contiguous bytes."""
    if payload.dtype is not torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        return f"payload is {payload.dtype} of {payload.dim()} dimensions, expected flat contiguous uint8"
    if payload.numel() != layout.nbytes:
        return f"payload has {payload.numel()} bytes, its {len(layout.ids)} shards take {layout.nbytes}"
    return ""


def check_push(request: Push, payload: Tensor, layout: MessageLayout) -> str:
    """A push's numbers, bitmaps, groups and payload fit the shards. Shards held elsewhere are not looked at."""
    if not 0 <= request.sequence < MAX_SEQUENCE:
        return f"push number {request.sequence} is out of range"
    for part, slot in zip(request.shards, layout.slots, strict=True):
        if slot is not None and slot.epoch == part.shard_epoch and (reason := _check_part(request, part, slot)):
            return f"shard {part.shard}: {reason}"
    if request.poll:
        return "a poll carries no payload" if payload.numel() else ""
    if not payload.numel():
        empty = all(not any(part.present) for part in request.shards)
        return "" if empty else "the payload is missing, but pieces are marked as present"
    return check_payload(payload, layout)


def _check_part(request: Push, part: ShardPush, slot: Slot) -> str:
    spec = slot.shard.spec
    count = len(spec.pieces)
    if spec.group == NO_GROUP:
        return "no optimizer group holds it, so nothing can be pushed to it"
    if not 0 <= spec.group < len(request.groups):
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


def check_finite(work: Work, signature: ModelSignature) -> str:
    """No gradient that a push brings holds inf or NaN: it would spoil the weights, for everybody and for good.

    A safety net, since workers look before they send: 0.1 ms per 8 MB. Call where time may be spent.
    """
    request, payload = work.request, work.payload  # an eviction may take the payload away at any time
    if not isinstance(request, Push) or payload is None or not payload.numel():
        return ""
    regions = work.layout.regions(payload)
    for part, slot, region in zip(request.shards, work.layout.slots, regions, strict=True):
        if slot is None or region is None or not any(part.present):
            continue
        grads = region.view(slot.shard.dtype)
        if not all_finite(grads) and (index := _first_not_finite(grads, part, slot)) is not None:
            name = signature.params[index].name
            return (
                f"the gradient of {name} in push {request.sequence} of incarnation {work.incarnation} holds inf or "
                "NaN; none of this message was applied"
            )
    return ""


def _first_not_finite(grads: Tensor, part: ShardPush, slot: Slot) -> int | None:
    """The parameter whose gradient is at fault; None if it is only padding, or a piece that is not present."""
    for index, piece in enumerate(slot.shard.spec.pieces):
        present = part.present[index >> 3] >> (index & 7) & 1
        if present and not all_finite(grads[piece.offset : piece.offset + piece.numel]):
            return piece.param
    return None
