"""The control plane as workers and servers see it: records and the `Control` protocol, no gRPC.

Two implementations: `ps.control.client.GrpcControl`, and `ps.alone.LocalControl` for a job that runs in one process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from ps.consistency.policy import Ruling
from ps.sharding.spec import ModelSignature
from ps.types import Incarnation, JobState, LeaveReason, Part, Role, ShardId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Settings of the whole job, decided by the coordinator."""

    consistency: str = "asp"
    exact: bool = False
    """Servers run kernels on which splitting a tensor changes no bit."""
    shard_bytes: int = 0
    """Target shard size; 0 = chosen from the model's size."""
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    """A member without a heartbeat for this long, and without a session, is evicted."""
    lost_coordinator_s: float = 30.0
    transports: tuple[str, ...] = ("uv",)
    """TensorPipe transports, best first; `uv` last. The same on every member."""
    channels: tuple[str, ...] = ("basic",)
    """TensorPipe channels, best first; `basic` last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPeer:
    """Where a server's RPC agent can be reached."""

    incarnation: Incarnation
    name: str
    address: str
    """TensorPipe address, e.g. `uv://10.0.0.5:40733`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Which server holds a shard, and the shard's epoch (it rises at promotion and restore)."""

    shard: ShardId
    epoch: int
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMap:
    """Where every shard is. The plan follows from `signature` and `shard_bytes`."""

    epoch: int
    """Rises with every change."""
    signature: ModelSignature
    shard_bytes: int
    holders: tuple[Holder, ...]
    """One per shard, index = shard id."""
    servers: tuple[ServerPeer, ...]
    initialised_by: Incarnation | None
    """The worker whose initial weights count, None until it has finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The answer to a join."""

    incarnation: Incarnation
    name: str
    secret: bytes = field(repr=False)
    generation: int
    settings: JobSettings


class Verdict(Enum):
    """What a worker that proposed its model has to do next."""

    WAIT = "wait"
    INITIALISE = "initialise"
    READY = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The answer to `propose_model`; `shard_map` is set for INITIALISE and READY."""

    verdict: Verdict
    reason: str
    shard_map: ShardMap | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """One `worker.epochs(...)` call; `stream` numbers the calls of a script. All workers must agree."""

    stream: int
    length: int
    seed: int
    epochs: int
    shuffle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAsk:
    """What a worker asks for next."""

    stream: int
    epoch: int
    """Ranges of this epoch or an older one are wanted."""
    batch_size: int
    batches: int
    """Upper bound, from the worker's own pace."""
    last: str
    """`merge`, `short` or `drop`: what becomes of an epoch's short last batch."""
    barrier: bool
    batch_s: float = 0.0
    """Seconds that this worker needs for a batch; 0: not known yet."""
    ahead: int = 0
    """Batches that it holds and has not begun. With some of them it is not told to wait, but may get nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRange:
    """Positions [begin, end) of an epoch's permutation."""

    stream: int
    epoch: int
    begin: int
    end: int


class LeaseVerdict(Enum):
    """Kinds of answers to a lease request."""

    RANGE = "range"
    WAIT = "wait"
    EPOCH_END = "epoch_end"
    STREAM_END = "stream_end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The answer to `lease`; `range` and `batch_sizes` are set for RANGE."""

    verdict: LeaseVerdict
    range: DataRange | None = None
    batch_sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """What a worker's heartbeat tells."""

    steps: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardProgress:
    """Counters of one shard."""

    shard: ShardId
    epoch: int
    version: int
    pushes: int
    pulls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerProgress:
    """What a server's heartbeat tells."""

    shards: tuple[ShardProgress, ...] = ()
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Staleness in versions → number of shard pushes."""
    dropped: int = 0
    """Pushes that the consistency choice left out, on the shard with the most."""
    shrunk: int = 0
    """Rounds that closed without a worker they had counted on, on the shard with the most."""
    spread: int = 0
    """Clock of the fastest worker less that of the slowest, now, on the shard where that is most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A member that may call this server, with the secret it must show (derived for this server)."""

    incarnation: Incarnation
    role: Role
    secret: bytes = field(repr=False)
    part: Part = Part.IN
    """Workers: their part in clocks and rounds."""
    clock: int = 0
    """With IN: the clock of its first push since it came in."""


class SessionListener(Protocol):
    """What a member does on news from the coordinator.

    Called on the session's thread, one at a time, in order; must return quickly. What is acknowledged
    (membership, shard map) must be in force when the method returns.
    """

    def on_membership(self, version: int, admitted: tuple[Admitted, ...]) -> tuple[int, ...]:
        """Servers only: exactly these may call from now on.

        Returns the lowest and the highest clock at which an ENTERING worker counts on this server's shards; empty when
        clocks don't matter. The acknowledgement takes them along.
        """
        ...

    def on_rulings(self, rulings: tuple[Ruling, ...]) -> None:
        """Servers only: what a shard elsewhere has decided for all; in any order, and perhaps again."""
        ...

    def on_shard_map(self, shard_map: ShardMap) -> None:
        """A newer map is in force."""
        ...

    def on_job(self, state: JobState, reason: str, release: bool) -> None:
        """The job's state changed; `release`: over and saved, servers and observers exit."""
        ...

    def on_drain(self, reason: str) -> None:
        """The coordinator asks this member to leave."""
        ...

    def on_fenced(self, reason: str) -> None:
        """This incarnation was evicted; nothing it sends counts any more."""
        ...

    def on_lost(self, reason: str) -> None:
        """No coordinator for `lost_coordinator_s`; the session has ended for good."""
        ...

    def progress(self) -> WorkerProgress | ServerProgress:
        """What the next heartbeat tells. Called on the heartbeat thread."""
        ...


class Control(Protocol):
    """A member's line to the coordinator.

    Thread-safe. Every method but `start_session` blocks, at most until its own deadline; on the main
    thread signal handlers run meanwhile. Raises `CoordinatorLost`, `Fenced`, `JobFailed`, `Refused` or a
    subclass of `ModelError`.
    """

    def join(self, *, role: Role, name: str = "", timeout_s: float = 30.0) -> Joined:
        """Become a member; retries while the coordinator can't be reached, until `timeout_s`."""
        ...

    def start_session(self, listener: SessionListener) -> None:
        """Start heartbeats and news; returns once the coordinator has answered the first message."""
        ...

    def ready(self, address: str, *, timeout_s: float = 30.0) -> None:
        """Announce this process's RPC agent; back when every live server knows this member."""
        ...

    def take_part(self, part: bool, *, timeout_s: float = 30.0) -> None:
        """Workers: False = push nothing until True is called; nobody waits for this worker meanwhile.

        With True back when every live server counts it, from the same clock. Either is fine when it is so already.
        Call with no push under way.
        """
        ...

    def propose_model(self, signature: ModelSignature, *, wait_s: float = 2.0) -> Proposal:
        """Show the worker's model; ask again on WAIT. Raises `ModelMismatch` on a different model."""
        ...

    def finish_init(self, *, timeout_s: float = 30.0) -> ShardMap:
        """Say that the initial weights are written; the map returned is in force on all holders."""
        ...

    def shard_map(self) -> ShardMap | None:
        """The newest map heard of."""
        ...

    def open_stream(self, spec: StreamSpec) -> int:
        """Open or re-open a data stream; returns its oldest unfinished epoch."""
        ...

    def lease(self, ask: LeaseAsk, *, wait_s: float = 2.0) -> Lease:
        """Next range of samples, see `LeaseVerdict`."""
        ...

    def ack(self, done: tuple[DataRange, ...], returned: tuple[DataRange, ...] = ()) -> None:
        """Samples that are done, and samples that others may have."""
        ...

    def report(self, numbers: Mapping[str, float]) -> None:
        """Numbers for status and summary; the last value of each name wins."""
        ...

    def leave(self, reason: LeaveReason, *, exit_code: int = 0, detail: str = "") -> None:
        """Say goodbye; the member is out when this returns. Does nothing when already out."""
        ...

    def close(self) -> None:
        """End the session and the channel without a goodbye; idempotent, bounded."""
        ...
