from elasticep.proto import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AttachRequest(_message.Message):
    __slots__ = ("group", "rank", "pid", "config", "layout_digest", "abi_version", "wait_ms")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ABI_VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    pid: int
    config: _types_pb2.GroupConfig
    layout_digest: int
    abi_version: int
    wait_ms: int
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., config: _Optional[_Union[_types_pb2.GroupConfig, _Mapping]] = ..., layout_digest: _Optional[int] = ..., abi_version: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("ticket", "fd_socket", "config", "incarnation", "launch")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FD_SOCKET_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    fd_socket: str
    config: _types_pb2.GroupConfig
    incarnation: int
    launch: _types_pb2.Launch
    def __init__(self, ticket: _Optional[str] = ..., fd_socket: _Optional[str] = ..., config: _Optional[_Union[_types_pb2.GroupConfig, _Mapping]] = ..., incarnation: _Optional[int] = ..., launch: _Optional[_Union[_types_pb2.Launch, str]] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ("group", "rank", "incarnation")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    incarnation: int
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class DetachResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SeatStatus(_message.Message):
    __slots__ = ("seat", "worker_pid", "engine_pid", "step", "progress", "torn_steps", "staged_epochs", "wait")
    SEAT_FIELD_NUMBER: _ClassVar[int]
    WORKER_PID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TORN_STEPS_FIELD_NUMBER: _ClassVar[int]
    STAGED_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    seat: _types_pb2.Seat
    worker_pid: int
    engine_pid: int
    step: int
    progress: int
    torn_steps: int
    staged_epochs: _containers.RepeatedScalarFieldContainer[int]
    wait: str
    def __init__(self, seat: _Optional[_Union[_types_pb2.Seat, _Mapping]] = ..., worker_pid: _Optional[int] = ..., engine_pid: _Optional[int] = ..., step: _Optional[int] = ..., progress: _Optional[int] = ..., torn_steps: _Optional[int] = ..., staged_epochs: _Optional[_Iterable[int]] = ..., wait: _Optional[str] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("node", "domain", "controller_connected", "seats")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CONTROLLER_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    node: str
    domain: str
    controller_connected: bool
    seats: _containers.RepeatedCompositeFieldContainer[SeatStatus]
    def __init__(self, node: _Optional[str] = ..., domain: _Optional[str] = ..., controller_connected: bool = ..., seats: _Optional[_Iterable[_Union[SeatStatus, _Mapping]]] = ...) -> None: ...

class ReportDeathRequest(_message.Message):
    __slots__ = ("group", "rank", "incarnation", "cause")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    incarnation: int
    cause: str
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class ReportDeathResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InjectFaultRequest(_message.Message):
    __slots__ = ("group", "rank", "fault")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    fault: str
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., fault: _Optional[str] = ...) -> None: ...

class InjectFaultResponse(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...
