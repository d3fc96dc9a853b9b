from ps.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("role", "name", "host", "pid", "torch_version", "cpu_capability", "nonce")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    CPU_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    role: _types_pb2.Role
    name: str
    host: str
    pid: int
    torch_version: str
    cpu_capability: str
    nonce: bytes
    def __init__(self, role: _Optional[_Union[_types_pb2.Role, str]] = ..., name: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., torch_version: _Optional[str] = ..., cpu_capability: _Optional[str] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("incarnation", "name", "secret", "generation", "settings")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    name: str
    secret: bytes
    generation: int
    settings: _types_pb2.JobSettings
    def __init__(self, incarnation: _Optional[int] = ..., name: _Optional[str] = ..., secret: _Optional[bytes] = ..., generation: _Optional[int] = ..., settings: _Optional[_Union[_types_pb2.JobSettings, _Mapping]] = ...) -> None: ...

class ReadyRequest(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ReadyReply(_message.Message):
    __slots__ = ("membership_version",)
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    membership_version: int
    def __init__(self, membership_version: _Optional[int] = ...) -> None: ...

class TakePartRequest(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: bool
    def __init__(self, part: _Optional[bool] = ...) -> None: ...

class TakePartReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionUp(_message.Message):
    __slots__ = ("heartbeat", "ack", "rulings")
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    RULINGS_FIELD_NUMBER: _ClassVar[int]
    heartbeat: Heartbeat
    ack: Ack
    rulings: Rulings
    def __init__(self, heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., rulings: _Optional[_Union[Rulings, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("worker", "server")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerProgress
    server: ServerProgress
    def __init__(self, worker: _Optional[_Union[WorkerProgress, _Mapping]] = ..., server: _Optional[_Union[ServerProgress, _Mapping]] = ...) -> None: ...

class WorkerProgress(_message.Message):
    __slots__ = ("steps", "samples")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    steps: int
    samples: int
    def __init__(self, steps: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class ShardProgress(_message.Message):
    __slots__ = ("shard", "epoch", "version", "pushes", "pulls")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    shard: int
    epoch: int
    version: int
    pushes: int
    pulls: int
    def __init__(self, shard: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., pushes: _Optional[int] = ..., pulls: _Optional[int] = ...) -> None: ...

class ServerProgress(_message.Message):
    __slots__ = ("shards", "bytes_pushed", "bytes_pulled", "staleness", "dropped", "shrunk", "spread")
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PULLED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SHRUNK_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardProgress]
    bytes_pushed: int
    bytes_pulled: int
    staleness: _containers.ScalarMap[int, int]
    dropped: int
    shrunk: int
    spread: int
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardProgress, _Mapping]]] = ..., bytes_pushed: _Optional[int] = ..., bytes_pulled: _Optional[int] = ..., staleness: _Optional[_Mapping[int, int]] = ..., dropped: _Optional[int] = ..., shrunk: _Optional[int] = ..., spread: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("membership_version", "map_epoch", "entries")
    MEMBERSHIP_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    membership_version: int
    map_epoch: int
    entries: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, membership_version: _Optional[int] = ..., map_epoch: _Optional[int] = ..., entries: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionDown(_message.Message):
    __slots__ = ("generation", "membership", "shard_map", "job", "drain", "fenced", "rulings")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    RULINGS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    membership: Membership
    shard_map: _types_pb2.ShardMap
    job: JobUpdate
    drain: Drain
    fenced: Fenced
    rulings: Rulings
    def __init__(self, generation: _Optional[int] = ..., membership: _Optional[_Union[Membership, _Mapping]] = ..., shard_map: _Optional[_Union[_types_pb2.ShardMap, _Mapping]] = ..., job: _Optional[_Union[JobUpdate, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., fenced: _Optional[_Union[Fenced, _Mapping]] = ..., rulings: _Optional[_Union[Rulings, _Mapping]] = ...) -> None: ...

class Rulings(_message.Message):
    __slots__ = ("rulings",)
    RULINGS_FIELD_NUMBER: _ClassVar[int]
    rulings: _containers.RepeatedCompositeFieldContainer[Ruling]
    def __init__(self, rulings: _Optional[_Iterable[_Union[Ruling, _Mapping]]] = ...) -> None: ...

class Ruling(_message.Message):
    __slots__ = ("number", "pushes", "dropped")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    number: int
    pushes: _containers.RepeatedCompositeFieldContainer[PushKey]
    dropped: _containers.RepeatedCompositeFieldContainer[PushKey]
    def __init__(self, number: _Optional[int] = ..., pushes: _Optional[_Iterable[_Union[PushKey, _Mapping]]] = ..., dropped: _Optional[_Iterable[_Union[PushKey, _Mapping]]] = ...) -> None: ...

class PushKey(_message.Message):
    __slots__ = ("incarnation", "sequence")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    sequence: int
    def __init__(self, incarnation: _Optional[int] = ..., sequence: _Optional[int] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("version", "admitted")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    version: int
    admitted: _containers.RepeatedCompositeFieldContainer[Admitted]
    def __init__(self, version: _Optional[int] = ..., admitted: _Optional[_Iterable[_Union[Admitted, _Mapping]]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("incarnation", "secret", "role", "part", "clock")
    class Part(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PART_UNSPECIFIED: _ClassVar[Admitted.Part]
        PART_OUT: _ClassVar[Admitted.Part]
        PART_ENTERING: _ClassVar[Admitted.Part]
        PART_IN: _ClassVar[Admitted.Part]
        PART_KEPT: _ClassVar[Admitted.Part]
    PART_UNSPECIFIED: Admitted.Part
    PART_OUT: Admitted.Part
    PART_ENTERING: Admitted.Part
    PART_IN: Admitted.Part
    PART_KEPT: Admitted.Part
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    secret: bytes
    role: _types_pb2.Role
    part: Admitted.Part
    clock: int
    def __init__(self, incarnation: _Optional[int] = ..., secret: _Optional[bytes] = ..., role: _Optional[_Union[_types_pb2.Role, str]] = ..., part: _Optional[_Union[Admitted.Part, str]] = ..., clock: _Optional[int] = ...) -> None: ...

class JobUpdate(_message.Message):
    __slots__ = ("state", "reason", "release")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    state: _types_pb2.JobState
    reason: str
    release: bool
    def __init__(self, state: _Optional[_Union[_types_pb2.JobState, str]] = ..., reason: _Optional[str] = ..., release: _Optional[bool] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Fenced(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("reason", "exit_code", "detail")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[LeaveRequest.Reason]
        REASON_DONE: _ClassVar[LeaveRequest.Reason]
        REASON_DRAINED: _ClassVar[LeaveRequest.Reason]
        REASON_FAILED: _ClassVar[LeaveRequest.Reason]
    REASON_UNSPECIFIED: LeaveRequest.Reason
    REASON_DONE: LeaveRequest.Reason
    REASON_DRAINED: LeaveRequest.Reason
    REASON_FAILED: LeaveRequest.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: LeaveRequest.Reason
    exit_code: int
    detail: str
    def __init__(self, reason: _Optional[_Union[LeaveRequest.Reason, str]] = ..., exit_code: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProposeModelRequest(_message.Message):
    __slots__ = ("signature", "wait_s")
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    signature: _types_pb2.ModelSignature
    wait_s: float
    def __init__(self, signature: _Optional[_Union[_types_pb2.ModelSignature, _Mapping]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class ProposeModelReply(_message.Message):
    __slots__ = ("verdict", "reason", "shard_map")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[ProposeModelReply.Verdict]
        VERDICT_WAIT: _ClassVar[ProposeModelReply.Verdict]
        VERDICT_INITIALISE: _ClassVar[ProposeModelReply.Verdict]
        VERDICT_READY: _ClassVar[ProposeModelReply.Verdict]
    VERDICT_UNSPECIFIED: ProposeModelReply.Verdict
    VERDICT_WAIT: ProposeModelReply.Verdict
    VERDICT_INITIALISE: ProposeModelReply.Verdict
    VERDICT_READY: ProposeModelReply.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    verdict: ProposeModelReply.Verdict
    reason: str
    shard_map: _types_pb2.ShardMap
    def __init__(self, verdict: _Optional[_Union[ProposeModelReply.Verdict, str]] = ..., reason: _Optional[str] = ..., shard_map: _Optional[_Union[_types_pb2.ShardMap, _Mapping]] = ...) -> None: ...

class FinishInitRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FinishInitReply(_message.Message):
    __slots__ = ("shard_map",)
    SHARD_MAP_FIELD_NUMBER: _ClassVar[int]
    shard_map: _types_pb2.ShardMap
    def __init__(self, shard_map: _Optional[_Union[_types_pb2.ShardMap, _Mapping]] = ...) -> None: ...

class OpenStreamRequest(_message.Message):
    __slots__ = ("stream", "length", "seed", "epochs", "shuffle")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    SHUFFLE_FIELD_NUMBER: _ClassVar[int]
    stream: int
    length: int
    seed: int
    epochs: int
    shuffle: bool
    def __init__(self, stream: _Optional[int] = ..., length: _Optional[int] = ..., seed: _Optional[int] = ..., epochs: _Optional[int] = ..., shuffle: _Optional[bool] = ...) -> None: ...

class OpenStreamReply(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class LeaseDataRequest(_message.Message):
    __slots__ = ("stream", "epoch", "batch_size", "batches", "last", "barrier", "wait_s", "request", "batch_s", "ahead")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BATCH_S_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    stream: int
    epoch: int
    batch_size: int
    batches: int
    last: str
    barrier: bool
    wait_s: float
    request: int
    batch_s: float
    ahead: int
    def __init__(self, stream: _Optional[int] = ..., epoch: _Optional[int] = ..., batch_size: _Optional[int] = ..., batches: _Optional[int] = ..., last: _Optional[str] = ..., barrier: _Optional[bool] = ..., wait_s: _Optional[float] = ..., request: _Optional[int] = ..., batch_s: _Optional[float] = ..., ahead: _Optional[int] = ...) -> None: ...

class LeaseDataReply(_message.Message):
    __slots__ = ("verdict", "range", "batch_sizes")
    class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        VERDICT_UNSPECIFIED: _ClassVar[LeaseDataReply.Verdict]
        VERDICT_RANGE: _ClassVar[LeaseDataReply.Verdict]
        VERDICT_WAIT: _ClassVar[LeaseDataReply.Verdict]
        VERDICT_EPOCH_END: _ClassVar[LeaseDataReply.Verdict]
        VERDICT_STREAM_END: _ClassVar[LeaseDataReply.Verdict]
    VERDICT_UNSPECIFIED: LeaseDataReply.Verdict
    VERDICT_RANGE: LeaseDataReply.Verdict
    VERDICT_WAIT: LeaseDataReply.Verdict
    VERDICT_EPOCH_END: LeaseDataReply.Verdict
    VERDICT_STREAM_END: LeaseDataReply.Verdict
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    RANGE_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    verdict: LeaseDataReply.Verdict
    range: DataRange
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, verdict: _Optional[_Union[LeaseDataReply.Verdict, str]] = ..., range: _Optional[_Union[DataRange, _Mapping]] = ..., batch_sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class DataRange(_message.Message):
    __slots__ = ("stream", "epoch", "begin", "end")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    stream: int
    epoch: int
    begin: int
    end: int
    def __init__(self, stream: _Optional[int] = ..., epoch: _Optional[int] = ..., begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class AckDataRequest(_message.Message):
    __slots__ = ("done", "returned")
    DONE_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    done: _containers.RepeatedCompositeFieldContainer[DataRange]
    returned: _containers.RepeatedCompositeFieldContainer[DataRange]
    def __init__(self, done: _Optional[_Iterable[_Union[DataRange, _Mapping]]] = ..., returned: _Optional[_Iterable[_Union[DataRange, _Mapping]]] = ...) -> None: ...

class AckDataReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("numbers",)
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.ScalarMap[str, float]
    def __init__(self, numbers: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("state", "reason", "generation", "map_epoch", "settings", "members", "shards", "progress", "exit_code", "ids_left")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MAP_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    IDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    state: _types_pb2.JobState
    reason: str
    generation: int
    map_epoch: int
    settings: _types_pb2.JobSettings
    members: _containers.RepeatedCompositeFieldContainer[MemberStatus]
    shards: _containers.RepeatedCompositeFieldContainer[ShardStatus]
    progress: Progress
    exit_code: int
    ids_left: int
    def __init__(self, state: _Optional[_Union[_types_pb2.JobState, str]] = ..., reason: _Optional[str] = ..., generation: _Optional[int] = ..., map_epoch: _Optional[int] = ..., settings: _Optional[_Union[_types_pb2.JobSettings, _Mapping]] = ..., members: _Optional[_Iterable[_Union[MemberStatus, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[ShardStatus, _Mapping]]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., exit_code: _Optional[int] = ..., ids_left: _Optional[int] = ...) -> None: ...

class MemberStatus(_message.Message):
    __slots__ = ("role", "name", "incarnation", "pid", "host", "address", "state", "heartbeat_age_s", "reason", "steps", "samples")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    role: _types_pb2.Role
    name: str
    incarnation: int
    pid: int
    host: str
    address: str
    state: _types_pb2.MemberState
    heartbeat_age_s: float
    reason: str
    steps: int
    samples: int
    def __init__(self, role: _Optional[_Union[_types_pb2.Role, str]] = ..., name: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[_types_pb2.MemberState, str]] = ..., heartbeat_age_s: _Optional[float] = ..., reason: _Optional[str] = ..., steps: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class ShardStatus(_message.Message):
    __slots__ = ("shard", "bytes", "epoch", "version", "holder", "dtype")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    shard: int
    bytes: int
    epoch: int
    version: int
    holder: str
    dtype: str
    def __init__(self, shard: _Optional[int] = ..., bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., holder: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("samples", "samples_expected", "samples_per_s", "samples_per_s_recent", "seconds", "epoch", "epochs", "pushes", "pulls", "bytes_pushed", "bytes_pulled", "staleness", "workers_live", "workers_seen", "reported", "dropped", "shrunk", "spread")
    class StalenessEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class ReportedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_PER_S_RECENT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    PUSHES_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PUSHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_PULLED_FIELD_NUMBER: _ClassVar[int]
    STALENESS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_LIVE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_SEEN_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    SHRUNK_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    samples: int
    samples_expected: int
    samples_per_s: float
    samples_per_s_recent: float
    seconds: float
    epoch: int
    epochs: int
    pushes: int
    pulls: int
    bytes_pushed: int
    bytes_pulled: int
    staleness: _containers.ScalarMap[int, int]
    workers_live: int
    workers_seen: int
    reported: _containers.ScalarMap[str, float]
    dropped: int
    shrunk: int
    spread: int
    def __init__(self, samples: _Optional[int] = ..., samples_expected: _Optional[int] = ..., samples_per_s: _Optional[float] = ..., samples_per_s_recent: _Optional[float] = ..., seconds: _Optional[float] = ..., epoch: _Optional[int] = ..., epochs: _Optional[int] = ..., pushes: _Optional[int] = ..., pulls: _Optional[int] = ..., bytes_pushed: _Optional[int] = ..., bytes_pulled: _Optional[int] = ..., staleness: _Optional[_Mapping[int, int]] = ..., workers_live: _Optional[int] = ..., workers_seen: _Optional[int] = ..., reported: _Optional[_Mapping[str, float]] = ..., dropped: _Optional[int] = ..., shrunk: _Optional[int] = ..., spread: _Optional[int] = ...) -> None: ...
