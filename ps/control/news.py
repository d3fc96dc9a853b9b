"""What a session tells its member: always the newest of each kind, never a backlog."""

from __future__ import annotations

from dataclasses import dataclass

from ps.consistency.policy import Ruling
from ps.control.api import Admitted, ShardMap
from ps.control.tables import Tables
from ps.types import Incarnation, JobState, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a session has told its member so far."""

    membership: int = 0
    rulings: int = 0
    map_epoch: int = 0
    job: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNews:
    """The job's state as members hear it."""

    state: JobState
    reason: str
    released: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a session has to tell its member, in the order of the fields; None = nothing new."""

    membership: tuple[int, tuple[Admitted, ...]] | None = None
    rulings: tuple[Ruling, ...] = ()
    shard_map: ShardMap | None = None
    job: JobNews | None = None
    fenced: str | None = None
    seen: Seen
    """What to pass next time."""


def news(tables: Tables, incarnation: Incarnation, seen: Seen) -> News:
    """What to tell a member that has heard `seen`."""
    member = tables.members.find(incarnation)
    if member is None or member.ended:
        reason = "unknown incarnation" if member is None else member.reason
        return News(fenced=reason or "out of the job", seen=seen)
    version, epoch, job_version = tables.members.version, tables.model.epoch, tables.job.version
    membership = None
    if member.role is Role.SERVER and seen.membership < version:
        membership = version, tables.members.admitted(incarnation)
    job = None
    if seen.job < job_version:
        record = tables.job.record
        job = JobNews(state=record.state, reason=record.reason, released=record.released)
    rulings = tables.rulings.since(seen.rulings) if member.role is Role.SERVER else ()
    return News(
        membership=membership,
        rulings=rulings,
        shard_map=tables.model.shard_map if seen.map_epoch < epoch else None,
        job=job,
        seen=Seen(membership=version, rulings=tables.rulings.end, map_epoch=epoch, job=job_version),
    )
