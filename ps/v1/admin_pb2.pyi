from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ReportExitRequest(_message.Message):
    __slots__ = ("name", "pid", "exit_code", "final")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    name: str
    pid: int
    exit_code: int
    final: bool
    def __init__(self, name: _Optional[str] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., final: _Optional[bool] = ...) -> None: ...

class ReportExitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("interrupted", "reason")
    INTERRUPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    interrupted: bool
    reason: str
    def __init__(self, interrupted: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
