"""What `psctl status` and `psctl plan` print: JSON records and tables. Torch-free."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ps.types import JobState, MemberState, Role
from ps.v1 import coordinator_pb2 as pb
from ps.v1 import types_pb2

if TYPE_CHECKING:
    from ps.planning import Layout

Record: TypeAlias = "dict[str, object]"
"""Something that JSON can hold."""


def status_record(reply: pb.StatusReply) -> Record:
    """`psctl status --json`; the names are a promise to scripts."""
    settings = reply.settings
    return {
        "job": _word(types_pb2.JobState.Name(reply.state), JobState),
        "reason": reply.reason,
        "generation": reply.generation,
        "map_epoch": reply.map_epoch,
        "settings": {"consistency": settings.consistency, "exact": settings.exact},
        "members": [_member(member) for member in reply.members],
        "shards": [_shard(shard) for shard in reply.shards],
        "progress": _progress(reply.progress),
    }


def staleness_record(histogram: Mapping[int, int]) -> Record:
    """Mean, maximum and the histogram itself: {staleness in versions: pushes}."""
    count = sum(histogram.values())
    total = sum(value * times for value, times in histogram.items())
    return {
        "mean": total / count if count else 0.0,
        "max": max(histogram, default=0),
        "histogram": {str(value): histogram[value] for value in sorted(histogram)},
    }


def print_json(record: Record) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(record, indent=2) + "\n")
    sys.stdout.flush()


def print_status(reply: pb.StatusReply) -> None:
    """Tables on stdout."""
    console = Console(highlight=False)
    record = status_record(reply)
    consistency = reply.settings.consistency
    if consistency != "asp":
        consistency += f", clock spread {reply.progress.spread}"
    console.print(
        f"job [bold]{record['job']}[/] {reply.reason} · {consistency} · map epoch {reply.map_epoch}", soft_wrap=True
    )
    console.print(_progress_line(reply.progress), soft_wrap=True)
    _print_whole(console, _members_table(reply))
    if reply.shards:
        _print_whole(console, _shards_table(reply))


def plan_record(layout: Layout) -> Record:
    """`psctl plan --json`."""
    plan = layout.plan
    return {
        "params": len(plan.signature.params),
        "bytes": plan.nbytes,
        "shard_bytes": plan.shard_bytes,
        "digest": plan.digest,
        "imbalance": layout.imbalance,
        "servers": [
            {"server": number, "shards": layout.placement.count(number), "bytes": nbytes}
            for number, nbytes in enumerate(layout.server_bytes)
        ],
        "shards": [
            {"id": shard.id, "bytes": shard.nbytes, "dtype": shard.dtype, "group": shard.group, "server": server}
            for shard, server in zip(plan.shards, layout.placement, strict=True)
        ],
    }


def print_plan(layout: Layout) -> None:
    """A line about the model and a table of servers on stdout."""
    console = Console(highlight=False)
    plan = layout.plan
    console.print(
        f"{len(plan.signature.params)} parameters, {size(plan.nbytes)} in {len(plan.shards)} shards of about "
        f"{size(plan.shard_bytes)}; fullest server / mean = {layout.imbalance:.3f}",
        soft_wrap=True,
    )
    table = Table("server", "shards", "bytes", "share", box=SIMPLE_HEAD, pad_edge=False)
    for number, nbytes in enumerate(layout.server_bytes):
        share = nbytes / plan.nbytes if plan.nbytes else 0.0
        table.add_row(str(number), str(layout.placement.count(number)), size(nbytes), f"{share:.1%}")
    console.print(table)


def size(nbytes: int) -> str:
    """Bytes for people, in powers of 1024."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _word(name: str, kind: type[JobState | MemberState | Role]) -> str:
    """`JOB_STATE_RUNNING` → `running`."""
    word = name.lower()
    return next((state.value for state in kind if word.endswith(state.value)), "unknown")


def _member(member: pb.MemberStatus) -> Record:
    return {
        "role": _word(types_pb2.Role.Name(member.role), Role),
        "name": member.name,
        "incarnation": member.incarnation,
        "pid": member.pid,
        "host": member.host,
        "address": member.address,
        "state": _word(types_pb2.MemberState.Name(member.state), MemberState),
        "heartbeat_age_s": round(member.heartbeat_age_s, 3),
        "reason": member.reason,
        "steps": member.steps,
        "samples": member.samples,
    }


def _shard(shard: pb.ShardStatus) -> Record:
    return {
        "id": shard.shard,
        "bytes": shard.bytes,
        "epoch": shard.epoch,
        "version": shard.version,
        "holder": shard.holder,
        "dtype": shard.dtype,
    }


def _progress(progress: pb.Progress) -> Record:
    return {
        "samples": progress.samples,
        "samples_expected": progress.samples_expected,
        "samples_per_s": progress.samples_per_s,
        "samples_per_s_recent": progress.samples_per_s_recent,
        "seconds": progress.seconds,
        "epoch": progress.epoch,
        "epochs": progress.epochs,
        "staleness": staleness_record(dict(progress.staleness)),
        "dropped_pushes": progress.dropped,
        "shrunk_rounds": progress.shrunk,
        "clock_spread": progress.spread,
        "pushes": progress.pushes,
        "pulls": progress.pulls,
        "bytes_pushed": progress.bytes_pushed,
        "bytes_pulled": progress.bytes_pulled,
        "workers_live": progress.workers_live,
        "workers_seen": progress.workers_seen,
        "reported": dict(progress.reported),
    }


def _progress_line(progress: pb.Progress) -> str:
    stale = staleness_record(dict(progress.staleness))
    of = f" of {progress.samples_expected}" if progress.samples_expected else ""
    return (
        f"{progress.samples}{of} samples · {progress.samples_per_s:.0f}/s · "
        f"epoch {progress.epoch} of {progress.epochs} · {progress.pushes} pushes · "
        f"staleness mean {stale['mean']:.2f}, max {stale['max']}"
    )


def _print_whole(console: Console, table: Table) -> None:
    """A table as wide as it needs, also beyond the terminal or in a pipe: cut-off addresses are of no use."""
    needed = console.measure(table, options=console.options.update(width=1000)).maximum
    Console(highlight=False, width=max(console.width, needed)).print(table, crop=False)


def _members_table(reply: pb.StatusReply) -> Table:
    table = Table(
        *("role", "name", "id", "state", "heard", "steps", "samples", "pid", "host"), box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("address")
    for member in (_member(member) for member in reply.members):
        heard = f"{member['heartbeat_age_s']:.1f} s"
        keys = ("role", "name", "incarnation", "state", "steps", "samples", "pid", "host", "address")
        cells = [str(member[key]) for key in keys]
        table.add_row(*cells[:4], heard, *cells[4:])
    return table


def _shards_table(reply: pb.StatusReply) -> Table:
    table = Table("shard", "bytes", "dtype", "epoch.version", "holder", box=SIMPLE_HEAD, pad_edge=False)
    for shard in reply.shards:
        table.add_row(str(shard.shard), size(shard.bytes), shard.dtype, f"{shard.epoch}.{shard.version}", shard.holder)
    return table
