from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_COORDINATOR: _ClassVar[Role]
    ROLE_SERVER: _ClassVar[Role]
    ROLE_WORKER: _ClassVar[Role]
    ROLE_OBSERVER: _ClassVar[Role]

class MemberState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMBER_STATE_UNSPECIFIED: _ClassVar[MemberState]
    MEMBER_STATE_JOINING: _ClassVar[MemberState]
    MEMBER_STATE_LIVE: _ClassVar[MemberState]
    MEMBER_STATE_DRAINING: _ClassVar[MemberState]
    MEMBER_STATE_LEFT: _ClassVar[MemberState]
    MEMBER_STATE_DEAD: _ClassVar[MemberState]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_WAITING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_FINISHED: _ClassVar[JobState]
    JOB_STATE_FAILED: _ClassVar[JobState]
    JOB_STATE_INTERRUPTED: _ClassVar[JobState]
ROLE_UNSPECIFIED: Role
ROLE_COORDINATOR: Role
ROLE_SERVER: Role
ROLE_WORKER: Role
ROLE_OBSERVER: Role
MEMBER_STATE_UNSPECIFIED: MemberState
MEMBER_STATE_JOINING: MemberState
MEMBER_STATE_LIVE: MemberState
MEMBER_STATE_DRAINING: MemberState
MEMBER_STATE_LEFT: MemberState
MEMBER_STATE_DEAD: MemberState
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_WAITING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_FINISHED: JobState
JOB_STATE_FAILED: JobState
JOB_STATE_INTERRUPTED: JobState

class ParamSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype", "group", "sparse", "buffer")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    group: int
    sparse: bool
    buffer: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., group: _Optional[int] = ..., sparse: _Optional[bool] = ..., buffer: _Optional[str] = ...) -> None: ...

class ModelSignature(_message.Message):
    __slots__ = ("params", "optimizer", "whole_tensors")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_TENSORS_FIELD_NUMBER: _ClassVar[int]
    params: _containers.RepeatedCompositeFieldContainer[ParamSpec]
    optimizer: str
    whole_tensors: bool
    def __init__(self, params: _Optional[_Iterable[_Union[ParamSpec, _Mapping]]] = ..., optimizer: _Optional[str] = ..., whole_tensors: _Optional[bool] = ...) -> None: ...

class ServerPeer(_message.Message):
    __slots__ = ("incarnation", "name", "address")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    name: str
    address: str
    def __init__(self, incarnation: _Optional[int] = ..., name: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("shard", "epoch", "incarnation")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    shard: int
    epoch: int
    incarnation: int
    def __init__(self, shard: _Optional[int] = ..., epoch: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ShardMap(_message.Message):
    __slots__ = ("epoch", "signature", "shard_bytes", "holders", "servers", "initialised_by")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    SERVERS_FIELD_NUMBER: _ClassVar[int]
    INITIALISED_BY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    signature: ModelSignature
    shard_bytes: int
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    servers: _containers.RepeatedCompositeFieldContainer[ServerPeer]
    initialised_by: int
    def __init__(self, epoch: _Optional[int] = ..., signature: _Optional[_Union[ModelSignature, _Mapping]] = ..., shard_bytes: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ..., servers: _Optional[_Iterable[_Union[ServerPeer, _Mapping]]] = ..., initialised_by: _Optional[int] = ...) -> None: ...

class JobSettings(_message.Message):
    __slots__ = ("consistency", "exact", "shard_bytes", "heartbeat_s", "lease_s", "lost_coordinator_s", "transports", "channels")
    CONSISTENCY_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    LOST_COORDINATOR_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    consistency: str
    exact: bool
    shard_bytes: int
    heartbeat_s: float
    lease_s: float
    lost_coordinator_s: float
    transports: _containers.RepeatedScalarFieldContainer[str]
    channels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, consistency: _Optional[str] = ..., exact: _Optional[bool] = ..., shard_bytes: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., lost_coordinator_s: _Optional[float] = ..., transports: _Optional[_Iterable[str]] = ..., channels: _Optional[_Iterable[str]] = ...) -> None: ...
