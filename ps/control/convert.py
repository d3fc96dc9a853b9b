"""Proto ⇄ dataclass for the control plane. What comes from afar is checked here: `WireError` for what can't be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeVar

from ps.consistency.policy import PushKey, Ruling
from ps.control.api import (
    Admitted,
    DataRange,
    Holder,
    JobSettings,
    Joined,
    Lease,
    LeaseAsk,
    LeaseVerdict,
    Proposal,
    ServerPeer,
    ServerProgress,
    ShardMap,
    ShardProgress,
    StreamSpec,
    Verdict,
    WorkerProgress,
)
from ps.errors import WireError
from ps.sharding.spec import ModelSignature, ParamSpec
from ps.types import Incarnation, JobState, LeaveReason, MemberState, Part, Role, ShardId
from ps.v1 import coordinator_pb2 as pb
from ps.v1 import types_pb2 as types

E = TypeVar("E", bound=Enum)

_ROLES: Mapping[Role, types.Role] = {
    Role.COORDINATOR: types.ROLE_COORDINATOR,
    Role.SERVER: types.ROLE_SERVER,
    Role.WORKER: types.ROLE_WORKER,
    Role.OBSERVER: types.ROLE_OBSERVER,
}
_MEMBER_STATES: Mapping[MemberState, types.MemberState] = {
    MemberState.JOINING: types.MEMBER_STATE_JOINING,
    MemberState.LIVE: types.MEMBER_STATE_LIVE,
    MemberState.DRAINING: types.MEMBER_STATE_DRAINING,
    MemberState.LEFT: types.MEMBER_STATE_LEFT,
    MemberState.DEAD: types.MEMBER_STATE_DEAD,
}
_PARTS: Mapping[Part, pb.Admitted.Part] = {
    Part.OUT: pb.Admitted.PART_OUT,
    Part.ENTERING: pb.Admitted.PART_ENTERING,
    Part.IN: pb.Admitted.PART_IN,
    Part.KEPT: pb.Admitted.PART_KEPT,
}
_JOB_STATES: Mapping[JobState, types.JobState] = {
    JobState.WAITING: types.JOB_STATE_WAITING,
    JobState.RUNNING: types.JOB_STATE_RUNNING,
    JobState.FINISHED: types.JOB_STATE_FINISHED,
    JobState.FAILED: types.JOB_STATE_FAILED,
    JobState.INTERRUPTED: types.JOB_STATE_INTERRUPTED,
}
_LEAVE_REASONS: Mapping[LeaveReason, pb.LeaveRequest.Reason] = {
    LeaveReason.DONE: pb.LeaveRequest.REASON_DONE,
    LeaveReason.DRAINED: pb.LeaveRequest.REASON_DRAINED,
    LeaveReason.FAILED: pb.LeaveRequest.REASON_FAILED,
}
_VERDICTS: Mapping[Verdict, pb.ProposeModelReply.Verdict] = {
    Verdict.WAIT: pb.ProposeModelReply.VERDICT_WAIT,
    Verdict.INITIALISE: pb.ProposeModelReply.VERDICT_INITIALISE,
    Verdict.READY: pb.ProposeModelReply.VERDICT_READY,
}
_LEASE_VERDICTS: Mapping[LeaseVerdict, pb.LeaseDataReply.Verdict] = {
    LeaseVerdict.RANGE: pb.LeaseDataReply.VERDICT_RANGE,
    LeaseVerdict.WAIT: pb.LeaseDataReply.VERDICT_WAIT,
    LeaseVerdict.EPOCH_END: pb.LeaseDataReply.VERDICT_EPOCH_END,
    LeaseVerdict.STREAM_END: pb.LeaseDataReply.VERDICT_STREAM_END,
}


def _find(table: Mapping[E, int], number: int, what: str) -> E:
    for item, known in table.items():
        if known == number:
            return item
    raise WireError(f"{what} {number} is not known here; is the other side newer?")


def role_to_proto(role: Role) -> types.Role:
    """Enum number of a role."""
    return _ROLES[role]


def role_from_proto(number: int) -> Role:
    """Raises `WireError` for an unknown number, as do the others."""
    return _find(_ROLES, number, "role")


def member_state_to_proto(state: MemberState) -> types.MemberState:
    """Enum number of a member's state."""
    return _MEMBER_STATES[state]


def member_state_from_proto(number: int) -> MemberState:
    """Member state of an enum number."""
    return _find(_MEMBER_STATES, number, "member state")


def job_state_to_proto(state: JobState) -> types.JobState:
    """Enum number of a job's state."""
    return _JOB_STATES[state]


def job_state_from_proto(number: int) -> JobState:
    """Job state of an enum number."""
    return _find(_JOB_STATES, number, "job state")


def leave_reason_to_proto(reason: LeaveReason) -> pb.LeaveRequest.Reason:
    """Enum number of a leave reason."""
    return _LEAVE_REASONS[reason]


def leave_reason_from_proto(number: int) -> LeaveReason:
    """Leave reason of an enum number."""
    return _find(_LEAVE_REASONS, number, "leave reason")


def settings_to_proto(settings: JobSettings) -> types.JobSettings:
    """Settings for a `JoinReply`."""
    return types.JobSettings(
        consistency=settings.consistency,
        exact=settings.exact,
        shard_bytes=settings.shard_bytes,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        lost_coordinator_s=settings.lost_coordinator_s,
        transports=settings.transports,
        channels=settings.channels,
    )


def settings_from_proto(settings: types.JobSettings) -> JobSettings:
    """Settings out of a `JoinReply`."""
    return JobSettings(
        consistency=settings.consistency,
        exact=settings.exact,
        shard_bytes=settings.shard_bytes,
        heartbeat_s=settings.heartbeat_s,
        lease_s=settings.lease_s,
        lost_coordinator_s=settings.lost_coordinator_s,
        transports=tuple(settings.transports),
        channels=tuple(settings.channels),
    )


def joined_to_proto(joined: Joined) -> pb.JoinReply:
    """Answer to a join."""
    return pb.JoinReply(
        incarnation=joined.incarnation,
        name=joined.name,
        secret=joined.secret,
        generation=joined.generation,
        settings=settings_to_proto(joined.settings),
    )


def joined_from_proto(reply: pb.JoinReply) -> Joined:
    """Answer to a join."""
    return Joined(
        incarnation=Incarnation(reply.incarnation),
        name=reply.name,
        secret=reply.secret,
        generation=reply.generation,
        settings=settings_from_proto(reply.settings),
    )


def signature_to_proto(signature: ModelSignature) -> types.ModelSignature:
    """A model's signature."""
    params = [
        types.ParamSpec(name=p.name, shape=p.shape, dtype=p.dtype, group=p.group, sparse=p.sparse, buffer=p.buffer)
        for p in signature.params
    ]
    return types.ModelSignature(params=params, optimizer=signature.optimizer, whole_tensors=signature.whole_tensors)


def signature_from_proto(signature: types.ModelSignature) -> ModelSignature:
    """A model's signature."""
    if any(size < 0 for param in signature.params for size in param.shape):
        raise WireError("a parameter has a negative size")
    params = (
        ParamSpec(name=p.name, shape=tuple(p.shape), dtype=p.dtype, group=p.group, sparse=p.sparse, buffer=p.buffer)
        for p in signature.params
    )
    return ModelSignature(params=tuple(params), optimizer=signature.optimizer, whole_tensors=signature.whole_tensors)


def shard_map_to_proto(shard_map: ShardMap) -> types.ShardMap:
    """A whole shard map."""
    return types.ShardMap(
        epoch=shard_map.epoch,
        signature=signature_to_proto(shard_map.signature),
        shard_bytes=shard_map.shard_bytes,
        holders=[types.Holder(shard=h.shard, epoch=h.epoch, incarnation=h.incarnation) for h in shard_map.holders],
        servers=[
            types.ServerPeer(incarnation=p.incarnation, name=p.name, address=p.address) for p in shard_map.servers
        ],
        initialised_by=shard_map.initialised_by or 0,
    )


def shard_map_from_proto(shard_map: types.ShardMap) -> ShardMap:
    """A whole shard map."""
    return ShardMap(
        epoch=shard_map.epoch,
        signature=signature_from_proto(shard_map.signature),
        shard_bytes=shard_map.shard_bytes,
        holders=tuple(
            Holder(shard=ShardId(h.shard), epoch=h.epoch, incarnation=Incarnation(h.incarnation))
            for h in shard_map.holders
        ),
        servers=tuple(
            ServerPeer(incarnation=Incarnation(p.incarnation), name=p.name, address=p.address)
            for p in shard_map.servers
        ),
        initialised_by=Incarnation(shard_map.initialised_by) if shard_map.initialised_by else None,
    )


def proposal_to_proto(proposal: Proposal) -> pb.ProposeModelReply:
    """Answer to a model proposal."""
    shard_map = shard_map_to_proto(proposal.shard_map) if proposal.shard_map else None
    return pb.ProposeModelReply(verdict=_VERDICTS[proposal.verdict], reason=proposal.reason, shard_map=shard_map)


def proposal_from_proto(reply: pb.ProposeModelReply) -> Proposal:
    """Answer to a model proposal."""
    shard_map = shard_map_from_proto(reply.shard_map) if reply.HasField("shard_map") else None
    return Proposal(verdict=_find(_VERDICTS, reply.verdict, "verdict"), reason=reply.reason, shard_map=shard_map)


def stream_to_proto(spec: StreamSpec) -> pb.OpenStreamRequest:
    """A data stream."""
    return pb.OpenStreamRequest(
        stream=spec.stream, length=spec.length, seed=spec.seed, epochs=spec.epochs, shuffle=spec.shuffle
    )


def stream_from_proto(request: pb.OpenStreamRequest) -> StreamSpec:
    """A data stream."""
    return StreamSpec(
        stream=request.stream, length=request.length, seed=request.seed, epochs=request.epochs, shuffle=request.shuffle
    )


def range_to_proto(part: DataRange) -> pb.DataRange:
    """A range of positions."""
    return pb.DataRange(stream=part.stream, epoch=part.epoch, begin=part.begin, end=part.end)


def range_from_proto(part: pb.DataRange) -> DataRange:
    """A range of positions."""
    return DataRange(stream=part.stream, epoch=part.epoch, begin=part.begin, end=part.end)


def ask_to_proto(ask: LeaseAsk, *, wait_s: float, request: int) -> pb.LeaseDataRequest:
    """A request for data."""
    return pb.LeaseDataRequest(
        stream=ask.stream, epoch=ask.epoch, batch_size=ask.batch_size, batches=ask.batches, last=ask.last,
        barrier=ask.barrier, wait_s=wait_s, request=request, batch_s=ask.batch_s, ahead=ask.ahead,
    )  # fmt: skip


def ask_from_proto(request: pb.LeaseDataRequest) -> LeaseAsk:
    """A request for data."""
    return LeaseAsk(
        stream=request.stream, epoch=request.epoch, batch_size=request.batch_size, batches=request.batches,
        last=request.last, barrier=request.barrier, batch_s=request.batch_s, ahead=request.ahead,
    )  # fmt: skip


def lease_to_proto(lease: Lease) -> pb.LeaseDataReply:
    """Answer to a request for data."""
    return pb.LeaseDataReply(
        verdict=_LEASE_VERDICTS[lease.verdict],
        range=range_to_proto(lease.range) if lease.range else None,
        batch_sizes=lease.batch_sizes,
    )


def lease_from_proto(reply: pb.LeaseDataReply) -> Lease:
    """Answer to a request for data."""
    return Lease(
        verdict=_find(_LEASE_VERDICTS, reply.verdict, "lease verdict"),
        range=range_from_proto(reply.range) if reply.HasField("range") else None,
        batch_sizes=tuple(reply.batch_sizes),
    )


def heartbeat_to_proto(progress: WorkerProgress | ServerProgress) -> pb.Heartbeat:
    """What a heartbeat tells."""
    if isinstance(progress, WorkerProgress):
        return pb.Heartbeat(worker=pb.WorkerProgress(steps=progress.steps, samples=progress.samples))
    shards = [
        pb.ShardProgress(shard=s.shard, epoch=s.epoch, version=s.version, pushes=s.pushes, pulls=s.pulls)
        for s in progress.shards
    ]
    return pb.Heartbeat(
        server=pb.ServerProgress(
            shards=shards,
            bytes_pushed=progress.bytes_pushed,
            bytes_pulled=progress.bytes_pulled,
            staleness=progress.staleness,
            dropped=progress.dropped,
            shrunk=progress.shrunk,
            spread=progress.spread,
        )
    )


def heartbeat_from_proto(heartbeat: pb.Heartbeat) -> WorkerProgress | ServerProgress | None:
    """What a heartbeat tells; None when it only says "alive"."""
    if heartbeat.HasField("worker"):
        return WorkerProgress(steps=heartbeat.worker.steps, samples=heartbeat.worker.samples)
    if not heartbeat.HasField("server"):
        return None
    server = heartbeat.server
    shards = (
        ShardProgress(shard=ShardId(s.shard), epoch=s.epoch, version=s.version, pushes=s.pushes, pulls=s.pulls)
        for s in server.shards
    )
    return ServerProgress(
        shards=tuple(shards),
        bytes_pushed=server.bytes_pushed,
        bytes_pulled=server.bytes_pulled,
        staleness=dict(server.staleness),
        dropped=server.dropped,
        shrunk=server.shrunk,
        spread=server.spread,
    )


def rulings_to_proto(rulings: Sequence[Ruling]) -> pb.Rulings:
    """What one shard has decided for all."""
    return pb.Rulings(
        rulings=[
            pb.Ruling(number=ruling.number, pushes=_keys(ruling.pushes), dropped=_keys(ruling.dropped))
            for ruling in rulings
        ]
    )


def _keys(keys: Sequence[PushKey]) -> list[pb.PushKey]:
    return [pb.PushKey(incarnation=incarnation, sequence=sequence) for incarnation, sequence in keys]


def rulings_from_proto(rulings: pb.Rulings) -> tuple[Ruling, ...]:
    """What one shard has decided for all."""
    return tuple(
        Ruling(
            ruling.number,
            tuple((Incarnation(key.incarnation), key.sequence) for key in ruling.pushes),
            tuple((Incarnation(key.incarnation), key.sequence) for key in ruling.dropped),
        )
        for ruling in rulings.rulings
    )


def membership_to_proto(version: int, admitted: tuple[Admitted, ...]) -> pb.Membership:
    """Who may call a server."""
    return pb.Membership(
        version=version,
        admitted=[
            pb.Admitted(
                incarnation=a.incarnation, secret=a.secret, role=_ROLES[a.role], part=_PARTS[a.part], clock=a.clock
            )
            for a in admitted
        ],
    )


def admitted_from_proto(membership: pb.Membership) -> tuple[Admitted, ...]:
    """Who may call a server."""
    return tuple(
        Admitted(
            incarnation=Incarnation(a.incarnation),
            secret=a.secret,
            role=role_from_proto(a.role),
            part=_find(_PARTS, a.part, "part"),
            clock=a.clock,
        )
        for a in membership.admitted
    )
