"""Views of the state for people: `psctl status` and `summary.json`."""

from __future__ import annotations

from ps.control import convert
from ps.control.api import ShardProgress
from ps.control.membership import Member
from ps.control.progress import Json, Totals, totals
from ps.control.progress import summary as make_summary
from ps.control.tables import Tables
from ps.types import Role, ShardId
from ps.v1 import coordinator_pb2 as pb


def summary(tables: Tables, now: float) -> dict[str, Json]:
    """Content of `summary.json`."""
    return make_summary(
        state=tables.job.state,
        reason=tables.job.record.reason,
        samples=tables.samples,
        seconds=tables.job.elapsed_s(now),
        workers_seen=tables.job.record.workers_seen,
        totals=_totals(tables),
        reported=tables.numbers,
    )


def status(tables: Tables, now: float) -> pb.StatusReply:
    """What `Status` answers, but for the coordinator's own entry among the members."""
    record = tables.job.record
    return pb.StatusReply(
        state=convert.job_state_to_proto(record.state),
        reason=record.reason,
        generation=tables.generation,
        map_epoch=tables.model.epoch,
        settings=convert.settings_to_proto(tables.options.settings),
        members=[_member(member, now) for member in tables.members],
        shards=_shards(tables),
        progress=_progress(tables, now),
        exit_code=record.exit_code,
        ids_left=tables.members.ids_left,
    )


def _totals(tables: Tables) -> Totals:
    return totals(member.server for member in tables.members if member.role is Role.SERVER)


def _member(member: Member, now: float) -> pb.MemberStatus:
    return pb.MemberStatus(
        role=convert.role_to_proto(member.role),
        name=member.name,
        incarnation=member.incarnation,
        pid=member.pid,
        host=member.host,
        address=member.address,
        state=convert.member_state_to_proto(member.state),
        heartbeat_age_s=max(0.0, now - member.heard_at),
        reason=member.reason,
        steps=member.worker.steps,
        samples=member.worker.samples,
    )


def _shards(tables: Tables) -> list[pb.ShardStatus]:
    plan, shard_map = tables.model.plan, tables.model.shard_map
    if plan is None or shard_map is None:
        return []
    versions: dict[ShardId, ShardProgress] = {}
    for incarnation in tables.model.holders():
        member = tables.members.find(incarnation)
        versions.update({shard.shard: shard for shard in (member.server.shards if member else ())})
    names = {peer.incarnation: peer.name for peer in shard_map.servers}
    return [
        pb.ShardStatus(
            shard=shard.id,
            bytes=shard.nbytes,
            epoch=holder.epoch,
            version=versions[shard.id].version if shard.id in versions else 0,
            holder=names[holder.incarnation],
            dtype=shard.dtype,
        )
        for shard, holder in zip(plan.shards, shard_map.holders, strict=True)
    ]


def _progress(tables: Tables, now: float) -> pb.Progress:
    samples, seconds, sums = tables.samples, tables.job.elapsed_s(now), _totals(tables)
    stream = tables.data.streams[-1] if tables.data.streams else None
    return pb.Progress(
        samples=samples,
        samples_expected=tables.data.samples_expected,
        samples_per_s=samples / seconds if seconds > 0 else 0.0,
        samples_per_s_recent=tables.rates.recent(),
        seconds=seconds,
        epoch=stream.first if stream else 0,
        epochs=stream.spec.epochs if stream else 0,
        pushes=sums.pushes,
        pulls=sums.pulls,
        bytes_pushed=sums.bytes_pushed,
        bytes_pulled=sums.bytes_pulled,
        staleness=dict(sums.staleness),
        dropped=sums.dropped,
        shrunk=sums.shrunk,
        spread=sums.spread,
        workers_live=len(tables.members.live(Role.WORKER)),
        workers_seen=tables.job.record.workers_seen,
        reported=tables.numbers,
    )
