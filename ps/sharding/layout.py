"""Byte arithmetic of payloads: where each shard lies, and which shards travel together in one message.

Weights and dense gradients of a shard take `shard.nbytes`. A gradient of n rows takes n int64 row ids (numbers of the
parameter's rows, ascending), padded to `ALIGN_BYTES`, and after them n rows of values, padded likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps.sharding.spec import ALIGN_BYTES, DTYPE_BYTES, Shard, ShardingPlan
from ps.types import ShardId

MESSAGE_BYTES = 8 << 20
"""Target size of one message: far below 32 MiB, from where on glibc maps and unmaps every block."""

ROW_ID_BYTES = 8
"""A row's number, int64."""


def align_up(count_bytes: int) -> int:
    """The smallest multiple of `ALIGN_BYTES` that is not below `count_bytes`."""
    return -(-count_bytes // ALIGN_BYTES) * ALIGN_BYTES


def offsets(plan: ShardingPlan, shards: Sequence[ShardId]) -> tuple[int, ...]:
    """Byte offset of each of `shards` in a payload that holds them in this order.

    Offsets are multiples of `ALIGN_BYTES`. The payload's size is `payload_bytes`.
    """
    found: list[int] = []
    at = 0
    for shard in shards:
        found.append(at)
        at += plan.shards[shard].nbytes
    return tuple(found)


def payload_bytes(plan: ShardingPlan, shards: Sequence[ShardId]) -> int:
    """Bytes of a payload that holds `shards`."""
    return sum(plan.shards[shard].nbytes for shard in shards)


def values_offset(rows: int) -> int:
    """First byte of the values in a gradient of `rows` rows."""
    return align_up(rows * ROW_ID_BYTES)


def rows_bytes(shard: Shard, rows: int) -> int:
    """Bytes that a gradient of `rows` rows takes; 0 for none."""
    return values_offset(rows) + align_up(rows * shard.row_elems * DTYPE_BYTES[shard.dtype])


def messages(
    plan: ShardingPlan, shards: Sequence[ShardId], message_bytes: int = MESSAGE_BYTES
) -> tuple[tuple[ShardId, ...], ...]:
    """Cut `shards` (of one server, in this order) into runs of whole shards of at most `message_bytes` each.

    A shard that is larger by itself gets a message of its own. Shards whose gradients travel as rows don't share
    messages with others. No message is empty.
    """
    cut: list[tuple[ShardId, ...]] = []
    run: list[ShardId] = []
    run_bytes = 0
    for shard in shards:
        size = plan.shards[shard].nbytes
        other = bool(run) and bool(plan.shards[run[-1]].row_elems) != bool(plan.shards[shard].row_elems)
        if run and (other or run_bytes + size > message_bytes):
            cut.append(tuple(run))
            run, run_bytes = [], 0
        run.append(shard)
        run_bytes += size
    if run:
        cut.append(tuple(run))
    return tuple(cut)
