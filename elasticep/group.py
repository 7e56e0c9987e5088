"""A group's configuration: what every engine, daemon and controller of one EP instance agrees on.

A group is created once. Whoever comes later brings the same config or is refused with
`GroupMismatch`, which names the fields that differ. The order of `exchanges` is part of the
config: dispatch and combine name an exchange by its index.
"""

import enum
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

from elasticep.balance import RebalancePolicy
from elasticep.config import GROUP_NAME, refuse_unknown
from elasticep.device import Device, check_cuda
from elasticep.errors import ConfigError, GroupMismatch
from elasticep.geometry import GroupGeometry
from elasticep.group_input import choice, differences, pairs, read_exchange, table
from elasticep.proto import types_pb2
from elasticep.spec import ExchangeSpec
from elasticep.timeouts import Timeouts
from elasticep.weights import ArenaLayout, TensorSpec, WeightSpec

__all__ = ["Completion", "GroupConfig", "Launch", "LostExperts", "Timeouts"]

MAX_EXCHANGES = 8
_GEOMETRY_FIELDS = ("layers", "experts", "topk", "hidden", "slots_per_rank", "max_ranks")
_OPTIONAL_FIELDS = (
    "min_ranks",
    "spare_copies",
    "flap_limit",
    "manual_readmission",
    "staging_slots",
)
_E = TypeVar("_E", bound=enum.StrEnum)


class _Unsaid(int):
    """A default that gives way where it cannot be; what somebody wrote does not."""


class LostExperts(enum.StrEnum):
    """What happens while an expert has no live replica."""

    REFUSE = "refuse"  # no step runs
    SERVE = "serve"  # steps run, tokens that needed it are flagged


class Completion(enum.StrEnum):
    """When a step counts."""

    LOCAL = "local"  # each rank repeats its own torn steps: inputs of ranks are independent
    AGREED = "agreed"  # all ranks repeat together: inputs are coupled (tensor parallelism)


class Launch(enum.StrEnum):
    """Who runs the kernels."""

    SERVICE = "service"  # the worker process
    INLINE = "inline"  # the engine's own thread or stream


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """What all members of a group share; validated when made, so every instance is usable.

    Attributes:
        name: lower case letters, digits, ".", "_" and "-", at most 63 characters.
        geometry: layers, experts, top-k, hidden size, slots per rank, most ranks.
        exchanges: (name, spec) pairs; the index in this tuple is the exchange's number.
        timeouts: deadlines in milliseconds.
        lost_experts: policy while an expert has no live replica.
        launch: who runs the kernels.
        device: where the data regions are; on GPUs kernels run inline.
        completion: when a step counts.
        initial_ranks: the first view waits for ranks 0..initial_ranks-1.
        min_ranks: no view with fewer members is proposed.
        spare_copies: copies of an expert beyond its first, where slots allow; with 2 or more all
            slots are filled, experts with much load first. Not given: 1, or 0 where one rank is
            all that can be.
        flap_limit: a rank that dies this often in ten minutes waits for an operator; 0: never.
        manual_readmission: every rank that was expelled waits for an operator.
        staging_slots: slots per rank and layer that plans leave empty, so that moves have a place
            to pass through.
        rebalance: when and how far experts are moved in the background.
        weights: the tensors of an expert, if the daemons keep the expert weights; None: engines
            keep their own.
    """

    name: str
    geometry: GroupGeometry
    exchanges: tuple[tuple[str, ExchangeSpec], ...]
    initial_ranks: int
    timeouts: Timeouts = field(default_factory=Timeouts)
    lost_experts: LostExperts = LostExperts.REFUSE
    launch: Launch = Launch.SERVICE
    completion: Completion = Completion.LOCAL
    device: Device = Device.CPU
    min_ranks: int = 1
    spare_copies: int = _Unsaid(1)
    flap_limit: int = 3
    manual_readmission: bool = False
    staging_slots: int = 0
    rebalance: RebalancePolicy = field(default_factory=RebalancePolicy)
    weights: WeightSpec | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = choice(choices, name, {name: getattr(self, name)})
            object.__setattr__(self, name, value)  # an engine may write "agreed"
        for name, kind in _PARTS.items():
            part = getattr(self, name)
            if not isinstance(part, kind) and not (name == "weights" and part is None):
                raise ConfigError(
                    f"group {self.name!r}: {name} is a {type(part).__name__}; give a "
                    f"{kind.__name__}, or read a group's file with GroupConfig.from_toml_dict"
                )
        object.__setattr__(self, "exchanges", pairs(self.name, self.exchanges))
        if isinstance(self.spare_copies, _Unsaid):
            fits = min(int(self.spare_copies), self.geometry.max_ranks - 1)
            object.__setattr__(self, "spare_copies", fits)
        self.validate()

    def validate(self) -> None:
        """Raise `ConfigError` naming the first field that cannot be used."""
        _check_name("the group's name", self.name)
        parts = sum(len(spec.parts()) for _, spec in self.exchanges)
        if not 1 <= parts <= MAX_EXCHANGES:
            raise ConfigError(
                f"group {self.name!r} has {parts} exchanges (prefill parts included); "
                f"it needs 1 to {MAX_EXCHANGES}"
            )
        names = [name for name, _ in self.exchanges]
        for name in names:
            _check_name(f"an exchange of group {self.name!r}", name)
        for _, spec in self.exchanges:
            self.geometry.check_exchange(spec)
        most = self.geometry.max_ranks
        self._check_range("initial_ranks", 1, most, "geometry.max_ranks")
        self._check_range("min_ranks", 1, self.initial_ranks, "initial_ranks")
        self._check_range("spare_copies", 0, most - 1, "geometry.max_ranks - 1")
        self._check_range("flap_limit", 0, 1_000, "deaths in ten minutes, 0 for no limit")
        if not isinstance(self.manual_readmission, bool):
            raise ConfigError(f"group {self.name!r}: manual_readmission must be true or false")
        self.arena_layout()
        if self.device is Device.CUDA:
            inline = self.launch is Launch.INLINE
            check_cuda(self.name, inline, self.geometry.hidden, self.exchanges)
        most_staging = self.geometry.slots_per_rank - 1
        self._check_range("staging_slots", 0, most_staging, "geometry.slots_per_rank - 1")
        usable = self.geometry.slots_per_rank - self.staging_slots
        slots = self.initial_ranks * usable
        if slots < self.geometry.experts:
            raise ConfigError(
                f"group {self.name!r}: {self.initial_ranks} initial ranks with "
                f"{usable} slots each hold {slots} experts of "
                f"{self.geometry.experts}; raise initial_ranks or geometry.slots_per_rank"
            )
        if self.geometry.experts % self.rebalance.groups:
            raise ConfigError(
                f"group {self.name!r}: {self.geometry.experts} experts do not divide into "
                f"{self.rebalance.groups} groups; change rebalance.groups"
            )

    def arena_layout(self) -> ArenaLayout | None:
        """How a rank's expert weights lie in memory; None if engines keep their own.

        Raises:
            ConfigError: larger than any arena may be.
        """
        if self.weights is None:
            return None
        return ArenaLayout(self.geometry.layers, self.geometry.slots_per_rank, self.weights)

    def _check_range(self, name: str, low: int, high: int, limit: str) -> None:
        value = getattr(self, name)
        if not _is_int(value) or not low <= value <= high:
            raise ConfigError(
                f"group {self.name!r}: {name} is {value!r}; it must be {low} to {high} ({limit})"
            )

    # ---- plain form (TOML, JSON)

    def to_dict(self) -> dict[str, Any]:
        """The form that `from_toml_dict` reads; plain values only."""
        weights = {} if self.weights is None else {"weights": self.weights.to_dict()}
        return {
            "name": self.name,
            "initial_ranks": self.initial_ranks,
            "min_ranks": self.min_ranks,
            "spare_copies": self.spare_copies,
            "flap_limit": self.flap_limit,
            "manual_readmission": self.manual_readmission,
            "staging_slots": self.staging_slots,
            "rebalance": self.rebalance.to_dict(),
            "lost_experts": self.lost_experts.value,
            "launch": self.launch.value,
            "completion": self.completion.value,
            "device": self.device.value,
            "geometry": {name: getattr(self.geometry, name) for name in _GEOMETRY_FIELDS},
            "timeouts": {f.name: getattr(self.timeouts, f.name) for f in fields(self.timeouts)},
            "exchanges": {name: spec.to_dict() for name, spec in self.exchanges},
            **weights,
        }

    @classmethod
    def from_toml_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a group file.

        Keys: `name`, `initial_ranks`, `min_ranks`, `spare_copies`, `flap_limit`,
        `manual_readmission`, `staging_slots`, `lost_experts`, `launch`, `device`, `completion` and
        the tables `[geometry]`, `[timeouts]`, `[rebalance]`, `[exchanges.NAME]` and
        `[weights.NAME]` (the last two in the order of the file). Unknown keys raise
        `ConfigError` with the nearest known one.
        """
        refuse_unknown("the group file", data, [f.name for f in fields(cls)])
        geometry = table(data, "geometry")
        timeouts = table(data, "timeouts", optional=True)
        exchanges = table(data, "exchanges")
        refuse_unknown("[geometry]", geometry, _GEOMETRY_FIELDS)
        refuse_unknown("[timeouts]", timeouts, [f.name for f in fields(Timeouts)])
        for name in ("name", "initial_ranks"):
            if name not in data:
                raise ConfigError(f"the group file lacks {name}")
        missing = [name for name in _GEOMETRY_FIELDS if not _is_int(geometry.get(name))]
        if missing:
            raise ConfigError(f"[geometry] needs whole numbers for {', '.join(missing)}")
        device = choice(Device, "device", data)
        inline = {"launch": Launch.INLINE.value} if device is Device.CUDA else {}
        launch = choice(Launch, "launch", {**inline, **data})
        rebalance = RebalancePolicy.from_dict(table(data, "rebalance", optional=True))
        rest: dict[str, Any] = {name: data[name] for name in _OPTIONAL_FIELDS if name in data}
        return cls(
            name=data["name"],
            geometry=GroupGeometry(**geometry),
            exchanges=tuple(
                (name, read_exchange(name, table(exchanges, name))) for name in exchanges
            ),
            initial_ranks=data["initial_ranks"],
            timeouts=Timeouts(**timeouts),
            lost_experts=choice(LostExperts, "lost_experts", data),
            launch=launch,
            device=device,
            completion=choice(Completion, "completion", data),
            rebalance=rebalance,
            weights=WeightSpec.from_dict(table(data, "weights")) if "weights" in data else None,
            **rest,
        )

    def canonical_json(self) -> str:
        """One text per config: sorted keys; lists where the order counts."""
        plain = self.to_dict()
        if self.weights is not None:
            plain["weights"] = [[name, tensor] for name, tensor in plain["weights"].items()]
        plain["exchanges"] = [[name, spec.to_dict()] for name, spec in self.exchanges]
        return _canonical(plain)

    def digest(self) -> str:
        """SHA-256 of `canonical_json`, in hex."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def require_same(self, other: "GroupConfig") -> None:
        """Raise `GroupMismatch` naming the fields in which `other` differs from this config."""
        different = list(differences("", self.to_dict(), other.to_dict()))
        if not different and self.digest() != other.digest():
            different = ["the order of the exchanges, or of the tensors in weights"]
        if different:
            raise GroupMismatch(
                f"group {self.name!r} exists with another config: {'; '.join(different[:8])}; "
                "use the group's config, or another group name"
            )

    # ---- wire form

    def to_proto(self) -> types_pb2.GroupConfig:
        """The message that crosses between processes."""
        return types_pb2.GroupConfig(
            name=self.name,
            geometry=types_pb2.Geometry(
                **{name: getattr(self.geometry, name) for name in _GEOMETRY_FIELDS}
            ),
            exchanges=[
                types_pb2.Exchange(name=name, spec_json=_canonical(spec.to_dict()))
                for name, spec in self.exchanges
            ],
            timeouts=types_pb2.Timeouts(
                **{f.name: getattr(self.timeouts, f.name) for f in fields(self.timeouts)}
            ),
            lost_experts=_LOST_TO_PROTO[self.lost_experts],
            launch=_LAUNCH_TO_PROTO[self.launch],
            completion=_COMPLETION_TO_PROTO[self.completion],
            device=_DEVICE_TO_PROTO[self.device],
            initial_ranks=self.initial_ranks,
            min_ranks=self.min_ranks,
            spare_copies=self.spare_copies,
            flap_limit=self.flap_limit,
            manual_readmission=self.manual_readmission,
            staging_slots=self.staging_slots,
            rebalance=self.rebalance.to_proto(),
            weights=_weights_to_proto(self.weights),
        )

    @classmethod
    def from_proto(cls, message: types_pb2.GroupConfig) -> Self:
        """Read a message; a timeout or enum that is not set takes its default."""
        timeouts = {
            f.name: getattr(message.timeouts, f.name)
            for f in fields(Timeouts)
            if getattr(message.timeouts, f.name)
        }
        exchanges = []
        for exchange in message.exchanges:
            try:
                plain = json.loads(exchange.spec_json)
            except ValueError as error:
                raise ConfigError(
                    f"exchange {exchange.name!r}: spec_json is not JSON ({error})"
                ) from None
            exchanges.append((exchange.name, read_exchange(exchange.name, plain)))
        return cls(
            name=message.name,
            geometry=GroupGeometry(
                **{name: getattr(message.geometry, name) for name in _GEOMETRY_FIELDS}
            ),
            exchanges=tuple(exchanges),
            timeouts=Timeouts(**timeouts),
            lost_experts=_from_proto(_LOST_TO_PROTO, "lost_experts", message.lost_experts),
            launch=_from_proto(_LAUNCH_TO_PROTO, "launch", message.launch),
            completion=_from_proto(_COMPLETION_TO_PROTO, "completion", message.completion),
            device=_from_proto(_DEVICE_TO_PROTO, "device", message.device),
            initial_ranks=message.initial_ranks,
            min_ranks=message.min_ranks or 1,
            spare_copies=message.spare_copies,
            flap_limit=message.flap_limit if message.HasField("flap_limit") else 3,
            manual_readmission=message.manual_readmission,
            staging_slots=message.staging_slots,
            rebalance=RebalancePolicy.from_proto(message.rebalance)
            if message.HasField("rebalance")
            else RebalancePolicy(),
            weights=_weights_from_proto(message.weights) if message.HasField("weights") else None,
        )


_LOST_TO_PROTO = {
    LostExperts.REFUSE: types_pb2.LOST_EXPERTS_POLICY_REFUSE,
    LostExperts.SERVE: types_pb2.LOST_EXPERTS_POLICY_SERVE,
}
_COMPLETION_TO_PROTO = {
    Completion.LOCAL: types_pb2.COMPLETION_LOCAL,
    Completion.AGREED: types_pb2.COMPLETION_AGREED,
}
_DEVICE_TO_PROTO = {Device.CPU: types_pb2.DEVICE_CPU, Device.CUDA: types_pb2.DEVICE_CUDA}
_LAUNCH_TO_PROTO = {
    Launch.SERVICE: types_pb2.LAUNCH_SERVICE,
    Launch.INLINE: types_pb2.LAUNCH_INLINE,
}


def _from_proto(table: Mapping[_E, int], name: str, number: int) -> _E:
    if number == 0:  # not set: the first one is the default
        return next(iter(table))
    for member, known in table.items():
        if known == number:
            return member
    raise ConfigError(f"{name} has the number {number}, which this version does not know")


def _weights_to_proto(weights: WeightSpec | None) -> types_pb2.WeightSpec | None:
    if weights is None:
        return None
    return types_pb2.WeightSpec(
        tensors=[
            types_pb2.WeightTensor(name=tensor.name, dtype=tensor.dtype.value, shape=tensor.shape)
            for tensor in weights.tensors
        ]
    )


def _weights_from_proto(message: types_pb2.WeightSpec) -> WeightSpec:
    return WeightSpec(
        tuple(TensorSpec.of(t.name, t.dtype, tuple(t.shape)) for t in message.tensors)
    )


def _canonical(plain: object) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_name(what: str, name: object) -> None:
    if not isinstance(name, str) or not GROUP_NAME.fullmatch(name):
        raise ConfigError(
            f"{what} is {name!r}; use at most 63 of a-z, 0-9, '.', '_' and '-', "
            "beginning and ending with a letter or digit"
        )


_CHOICES: dict[str, type[enum.StrEnum]] = {
    "lost_experts": LostExperts,
    "launch": Launch,
    "completion": Completion,
    "device": Device,
}
_PARTS: dict[str, type] = {
    "geometry": GroupGeometry,
    "timeouts": Timeouts,
    "rebalance": RebalancePolicy,
    "weights": WeightSpec,
}
