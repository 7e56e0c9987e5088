from elasticep.proto import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateGroupRequest(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: _types_pb2.GroupConfig
    def __init__(self, config: _Optional[_Union[_types_pb2.GroupConfig, _Mapping]] = ...) -> None: ...

class CreateGroupResponse(_message.Message):
    __slots__ = ("created",)
    CREATED_FIELD_NUMBER: _ClassVar[int]
    created: bool
    def __init__(self, created: bool = ...) -> None: ...

class NodeMessage(_message.Message):
    __slots__ = ("hello", "seat", "staged", "adopted", "wait", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    STAGED_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: NodeHello
    seat: _types_pb2.Seat
    staged: Staged
    adopted: Adopted
    wait: WaitReport
    heartbeat: NodeHeartbeat
    def __init__(self, hello: _Optional[_Union[NodeHello, _Mapping]] = ..., seat: _Optional[_Union[_types_pb2.Seat, _Mapping]] = ..., staged: _Optional[_Union[Staged, _Mapping]] = ..., adopted: _Optional[_Union[Adopted, _Mapping]] = ..., wait: _Optional[_Union[WaitReport, _Mapping]] = ..., heartbeat: _Optional[_Union[NodeHeartbeat, _Mapping]] = ...) -> None: ...

class NodeHello(_message.Message):
    __slots__ = ("endpoint", "session_id", "seats")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    endpoint: _types_pb2.NodeEndpoint
    session_id: str
    seats: _containers.RepeatedCompositeFieldContainer[_types_pb2.Seat]
    def __init__(self, endpoint: _Optional[_Union[_types_pb2.NodeEndpoint, _Mapping]] = ..., session_id: _Optional[str] = ..., seats: _Optional[_Iterable[_Union[_types_pb2.Seat, _Mapping]]] = ...) -> None: ...

class NodeHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Staged(_message.Message):
    __slots__ = ("group", "epoch", "rank", "incarnation", "error")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    group: str
    epoch: int
    rank: int
    incarnation: int
    error: str
    def __init__(self, group: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class Adopted(_message.Message):
    __slots__ = ("group", "epoch", "rank", "incarnation", "step")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    group: str
    epoch: int
    rank: int
    incarnation: int
    step: int
    def __init__(self, group: _Optional[str] = ..., epoch: _Optional[int] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class WaitReport(_message.Message):
    __slots__ = ("group", "rank", "incarnation", "waits_for", "phase", "waited_ms", "progress")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    WAITED_MS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    incarnation: int
    waits_for: int
    phase: str
    waited_ms: int
    progress: int
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., waits_for: _Optional[int] = ..., phase: _Optional[str] = ..., waited_ms: _Optional[int] = ..., progress: _Optional[int] = ...) -> None: ...

class ControllerMessage(_message.Message):
    __slots__ = ("grant", "proposal", "fence", "heartbeat")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FENCE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    grant: SeatGrant
    proposal: Proposal
    fence: Fence
    heartbeat: ControllerHeartbeat
    def __init__(self, grant: _Optional[_Union[SeatGrant, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., fence: _Optional[_Union[Fence, _Mapping]] = ..., heartbeat: _Optional[_Union[ControllerHeartbeat, _Mapping]] = ...) -> None: ...

class SeatGrant(_message.Message):
    __slots__ = ("config", "rank", "incarnation")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    config: _types_pb2.GroupConfig
    rank: int
    incarnation: int
    def __init__(self, config: _Optional[_Union[_types_pb2.GroupConfig, _Mapping]] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("view", "nodes")
    VIEW_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    view: _types_pb2.View
    nodes: _containers.RepeatedCompositeFieldContainer[_types_pb2.NodeEndpoint]
    def __init__(self, view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[_types_pb2.NodeEndpoint, _Mapping]]] = ...) -> None: ...

class Fence(_message.Message):
    __slots__ = ("group", "rank", "incarnation", "epoch", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    incarnation: int
    epoch: int
    reason: str
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ControllerHeartbeat(_message.Message):
    __slots__ = ("leader_revision",)
    LEADER_REVISION_FIELD_NUMBER: _ClassVar[int]
    leader_revision: int
    def __init__(self, leader_revision: _Optional[int] = ...) -> None: ...

class WatchViewRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class GetClusterRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "incarnation", "node", "state", "epoch", "reason")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    node: str
    state: str
    epoch: int
    reason: str
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., node: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("config", "view", "adopted_epoch", "ranks", "history")
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    config: _types_pb2.GroupConfig
    view: _types_pb2.View
    adopted_epoch: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    history: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, config: _Optional[_Union[_types_pb2.GroupConfig, _Mapping]] = ..., view: _Optional[_Union[_types_pb2.View, _Mapping]] = ..., adopted_epoch: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., history: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("endpoint", "connected", "last_heard_ms_ago")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    LAST_HEARD_MS_AGO_FIELD_NUMBER: _ClassVar[int]
    endpoint: _types_pb2.NodeEndpoint
    connected: bool
    last_heard_ms_ago: int
    def __init__(self, endpoint: _Optional[_Union[_types_pb2.NodeEndpoint, _Mapping]] = ..., connected: bool = ..., last_heard_ms_ago: _Optional[int] = ...) -> None: ...

class GetClusterResponse(_message.Message):
    __slots__ = ("leader", "groups", "nodes")
    LEADER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    leader: str
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    def __init__(self, leader: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("group", "ranks", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    def __init__(self, group: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class UndrainRequest(_message.Message):
    __slots__ = ("group", "ranks")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    group: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, group: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class UndrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
