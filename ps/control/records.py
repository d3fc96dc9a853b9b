"""What the coordinator remembers across restarts: records that the state emits and the journal stores; no I/O.

A record replaces the older one with the same identity (its first fields); `Replay` is what a journal gives back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ps.control.api import DataRange, JobSettings, ShardMap, StreamSpec
from ps.types import Incarnation, JobState, MemberState, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the coordinator's decisions depend on, apart from events."""

    servers: int = 1
    """Servers to wait for before the model is placed."""
    min_workers: int = 0
    """Data is handed out only once this many workers have been live at the same time."""
    no_workers_s: float = 60.0
    hold: bool = False
    """Announce the release of a job that is over only when told to."""
    max_members: int = 1024
    settings: JobSettings = field(default_factory=JobSettings)

    @property
    def tick_s(self) -> float:
        """Period at which `CoordinatorState.tick` is to be called."""
        return min(1.0, self.settings.heartbeat_s / 2)


class Topic(Enum):
    """What an event may have changed; whoever waits for it looks again."""

    MEMBERS = "members"
    """Membership, or what servers have installed."""
    MODEL = "model"
    """Shard map, or what servers have installed of it."""
    DATA = "data"
    JOB = "job"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsRecord:
    """Incarnations below `reserved_end` may have been handed out."""

    reserved_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """One member, as of now."""

    incarnation: Incarnation
    role: Role
    name: str
    host: str
    pid: int
    secret: bytes = field(repr=False)
    nonce: bytes = field(repr=False)
    state: MemberState
    address: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPruned:
    """A member that ended long ago is forgotten."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """State of the job and the counts that decide its end."""

    state: JobState = JobState.WAITING
    reason: str = ""
    exit_code: int = 0
    released: bool = False
    gate_open: bool = False
    """`min_workers` have been live once."""
    workers_seen: int = 0
    workers_done: int = 0
    """Workers that left with DONE."""
    workers_undone: int = 0
    """Workers that ended in any other way."""
    elapsed_s: float = 0.0
    """Training time up to the last record: a duration, since clocks do not outlive a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRecord:
    """The shard map, and who is writing the initial weights."""

    shard_map: ShardMap
    initialiser: Incarnation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """A data stream was opened."""

    spec: StreamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneRecord:
    """Samples are acknowledged. One that covers a whole epoch replaces the epoch's others."""

    range: DataRange
    whole_epoch: bool = False
    elapsed_s: float = 0.0
    """As in `JobRecord`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRecord:
    """A number that a script reported."""

    name: str
    value: float


Record: TypeAlias = (
    "IdsRecord | MemberRecord | MemberPruned | JobRecord | MapRecord | StreamRecord | DoneRecord | NumberRecord"
)


@dataclass(slots=True, kw_only=True)
class Replay:
    """What a journal holds at start; the empty one for a new job."""

    generation: int = 1
    """Number of this start of the coordinator, from 1."""
    reserved_end: int = 1
    job: JobRecord = field(default_factory=JobRecord)
    members: list[MemberRecord] = field(default_factory=list)
    map: MapRecord | None = None
    streams: list[StreamSpec] = field(default_factory=list)
    done: list[DataRange] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
