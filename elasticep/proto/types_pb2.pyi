from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LostExpertsPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOST_EXPERTS_POLICY_UNSPECIFIED: _ClassVar[LostExpertsPolicy]
    LOST_EXPERTS_POLICY_REFUSE: _ClassVar[LostExpertsPolicy]
    LOST_EXPERTS_POLICY_SERVE: _ClassVar[LostExpertsPolicy]

class Launch(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAUNCH_UNSPECIFIED: _ClassVar[Launch]
    LAUNCH_SERVICE: _ClassVar[Launch]
    LAUNCH_INLINE: _ClassVar[Launch]

class SeatState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEAT_STATE_UNSPECIFIED: _ClassVar[SeatState]
    SEAT_STATE_EMPTY: _ClassVar[SeatState]
    SEAT_STATE_READY: _ClassVar[SeatState]
    SEAT_STATE_ATTACHED: _ClassVar[SeatState]
    SEAT_STATE_DEAD: _ClassVar[SeatState]
LOST_EXPERTS_POLICY_UNSPECIFIED: LostExpertsPolicy
LOST_EXPERTS_POLICY_REFUSE: LostExpertsPolicy
LOST_EXPERTS_POLICY_SERVE: LostExpertsPolicy
LAUNCH_UNSPECIFIED: Launch
LAUNCH_SERVICE: Launch
LAUNCH_INLINE: Launch
SEAT_STATE_UNSPECIFIED: SeatState
SEAT_STATE_EMPTY: SeatState
SEAT_STATE_READY: SeatState
SEAT_STATE_ATTACHED: SeatState
SEAT_STATE_DEAD: SeatState

class Geometry(_message.Message):
    __slots__ = ("layers", "experts", "topk", "hidden", "slots_per_rank", "max_ranks")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    TOPK_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    SLOTS_PER_RANK_FIELD_NUMBER: _ClassVar[int]
    MAX_RANKS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    experts: int
    topk: int
    hidden: int
    slots_per_rank: int
    max_ranks: int
    def __init__(self, layers: _Optional[int] = ..., experts: _Optional[int] = ..., topk: _Optional[int] = ..., hidden: _Optional[int] = ..., slots_per_rank: _Optional[int] = ..., max_ranks: _Optional[int] = ...) -> None: ...

class Exchange(_message.Message):
    __slots__ = ("name", "spec_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec_json: str
    def __init__(self, name: _Optional[str] = ..., spec_json: _Optional[str] = ...) -> None: ...

class Timeouts(_message.Message):
    __slots__ = ("suspect_after_ms", "hang_timeout_ms", "exchange_timeout_ms", "step_timeout_ms", "node_timeout_ms")
    SUSPECT_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    HANG_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NODE_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    suspect_after_ms: int
    hang_timeout_ms: int
    exchange_timeout_ms: int
    step_timeout_ms: int
    node_timeout_ms: int
    def __init__(self, suspect_after_ms: _Optional[int] = ..., hang_timeout_ms: _Optional[int] = ..., exchange_timeout_ms: _Optional[int] = ..., step_timeout_ms: _Optional[int] = ..., node_timeout_ms: _Optional[int] = ...) -> None: ...

class GroupConfig(_message.Message):
    __slots__ = ("name", "geometry", "exchanges", "timeouts", "lost_experts", "launch", "initial_ranks", "min_ranks", "spare_copies")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    LOST_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    INITIAL_RANKS_FIELD_NUMBER: _ClassVar[int]
    MIN_RANKS_FIELD_NUMBER: _ClassVar[int]
    SPARE_COPIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    geometry: Geometry
    exchanges: _containers.RepeatedCompositeFieldContainer[Exchange]
    timeouts: Timeouts
    lost_experts: LostExpertsPolicy
    launch: Launch
    initial_ranks: int
    min_ranks: int
    spare_copies: int
    def __init__(self, name: _Optional[str] = ..., geometry: _Optional[_Union[Geometry, _Mapping]] = ..., exchanges: _Optional[_Iterable[_Union[Exchange, _Mapping]]] = ..., timeouts: _Optional[_Union[Timeouts, _Mapping]] = ..., lost_experts: _Optional[_Union[LostExpertsPolicy, str]] = ..., launch: _Optional[_Union[Launch, str]] = ..., initial_ranks: _Optional[int] = ..., min_ranks: _Optional[int] = ..., spare_copies: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("rank", "incarnation", "node")
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    incarnation: int
    node: str
    def __init__(self, rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., node: _Optional[str] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("slot_expert", "slot_weight")
    SLOT_EXPERT_FIELD_NUMBER: _ClassVar[int]
    SLOT_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    slot_expert: bytes
    slot_weight: bytes
    def __init__(self, slot_expert: _Optional[bytes] = ..., slot_weight: _Optional[bytes] = ...) -> None: ...

class View(_message.Message):
    __slots__ = ("group", "epoch", "previous_epoch", "members", "expelled", "placement", "digest", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    EXPELLED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: str
    epoch: int
    previous_epoch: int
    members: _containers.RepeatedCompositeFieldContainer[Member]
    expelled: _containers.RepeatedCompositeFieldContainer[Member]
    placement: Placement
    digest: int
    reason: str
    def __init__(self, group: _Optional[str] = ..., epoch: _Optional[int] = ..., previous_epoch: _Optional[int] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., expelled: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., digest: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class NodeEndpoint(_message.Message):
    __slots__ = ("node", "domain", "grpc_address", "fd_socket")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FD_SOCKET_FIELD_NUMBER: _ClassVar[int]
    node: str
    domain: str
    grpc_address: str
    fd_socket: str
    def __init__(self, node: _Optional[str] = ..., domain: _Optional[str] = ..., grpc_address: _Optional[str] = ..., fd_socket: _Optional[str] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("group", "rank", "incarnation", "state", "epoch", "cause")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    group: str
    rank: int
    incarnation: int
    state: SeatState
    epoch: int
    cause: str
    def __init__(self, group: _Optional[str] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., state: _Optional[_Union[SeatState, str]] = ..., epoch: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...
