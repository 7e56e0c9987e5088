"""What an operator may change about a running group, without creating it anew.

A group's config says what holds at first; `elasticep policy` changes it at run time. The present
policies are in the store, so they outlive the leader that took them.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Self

from elasticep.balance import RebalancePolicy
from elasticep.errors import ConfigError
from elasticep.group import GroupConfig, LostExperts
from elasticep.proto import controller_pb2, types_pb2

FLAP_WINDOW_MS: Final = 600_000
_WINDOW_RANGE_MS: Final = (1_000, 86_400_000)
_OF_CONFIG: Final = (
    "min_ranks",
    "lost_experts",
    "manual_readmission",
    "flap_limit",
    "spare_copies",
    "staging_slots",
    "rebalance",
)
_REBALANCE: Final = "rebalance."  # before the names of its settings, as operators type them
_LOST: Final = {
    LostExperts.REFUSE: types_pb2.LOST_EXPERTS_POLICY_REFUSE,
    LostExperts.SERVE: types_pb2.LOST_EXPERTS_POLICY_SERVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """What holds for a group now.

    Attributes:
        min_ranks: no view with fewer members is proposed.
        lost_experts: what happens while an expert has no live replica.
        renormalise: under `serve`, the weights of what is left of a token's experts grow so that
            their sum stays what it was.
        manual_readmission: every rank that was expelled waits for an operator.
        flap_limit: a rank that ends this often within the window waits for an operator; 0: never.
        flap_window_ms: that window.
        spare_copies: copies of an expert beyond its first, where slots allow.
        staging_slots: slots per rank and layer that plans leave empty.
        rebalance: when and how far experts are moved in the background.
    """

    min_ranks: int
    lost_experts: LostExperts
    renormalise: bool = False
    manual_readmission: bool
    flap_limit: int
    flap_window_ms: int = FLAP_WINDOW_MS
    spare_copies: int = 1
    staging_slots: int = 0
    rebalance: RebalancePolicy = field(default_factory=RebalancePolicy)

    @classmethod
    def of(cls, config: GroupConfig) -> Self:
        """What a group's config says."""
        return cls(**{name: getattr(config, name) for name in _OF_CONFIG})

    def apply(self, config: GroupConfig) -> GroupConfig:
        """The group's config with these policies in it.

        Raises:
            ConfigError: they do not fit the group; the message names the field and its range.
        """
        for name in ("renormalise", "manual_readmission"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"group {config.name!r}: {name} must be true or false")
        low, high = _WINDOW_RANGE_MS
        if not low <= self.flap_window_ms <= high:
            raise ConfigError(
                f"group {config.name!r}: flap_window_ms is {self.flap_window_ms}; it must be "
                f"{low} to {high}"
            )
        return replace(config, **{name: getattr(self, name) for name in _OF_CONFIG})

    # ---- plain and wire form

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, by field; those of `rebalance` in a dictionary of their own."""
        return {**asdict(self), "lost_experts": self.lost_experts.value}

    @classmethod
    def from_dict(cls, plain: dict[str, Any], config: GroupConfig) -> Self:
        """Read `to_dict`'s form; what an older version did not write is as the config says.

        Raises:
            ValueError, TypeError, ConfigError: it is of any other form, or out of range.
        """
        of_config = cls.of(config)
        given = {**of_config.to_dict(), **plain}
        given["rebalance"] = RebalancePolicy.from_dict(
            {**of_config.rebalance.to_dict(), **given["rebalance"]}
        )
        return cls(**{**given, "lost_experts": LostExperts(given["lost_experts"])})

    def to_proto(self) -> controller_pb2.GroupPolicies:
        """The message, with all fields set."""
        given = {
            **asdict(self),
            "lost_experts": _LOST[self.lost_experts],
            "rebalance": self.rebalance.to_proto(),
        }
        return controller_pb2.GroupPolicies(**given)

    @classmethod
    def from_proto(cls, message: controller_pb2.GroupPolicies) -> Self:
        """Read a message that has all fields set."""
        blank = cls(
            min_ranks=1, lost_experts=LostExperts.REFUSE, manual_readmission=False, flap_limit=0
        )
        return blank.changed(message)

    def changed(self, message: controller_pb2.GroupPolicies) -> Self:
        """These policies with the fields that a message has set.

        Raises:
            ConfigError: it sets a policy for lost experts that this version does not know, or a
                setting of `rebalance` out of its range.
        """
        given = {field.name: value for field, value in message.ListFields()}
        if "lost_experts" in given:
            known = {number: policy for policy, number in _LOST.items()}
            if given["lost_experts"] not in known:
                raise ConfigError(
                    f"lost_experts has the number {given['lost_experts']}, which this version "
                    "does not know"
                )
            given["lost_experts"] = known[given["lost_experts"]]
        if "rebalance" in given:
            settings = {each.name: value for each, value in given["rebalance"].ListFields()}
            given["rebalance"] = replace(self.rebalance, **settings)
        return replace(self, **given)


def change_from_text(settings: dict[str, str]) -> controller_pb2.GroupPolicies:
    """A change as an operator types it: name -> value; `rebalance.target` for its settings.

    Raises:
        ConfigError: a name or value that cannot be used; names the ones there are.
    """
    message = controller_pb2.GroupPolicies()
    kinds = _kinds()
    for name, text in settings.items():
        if name not in kinds:
            raise ConfigError(f"there is no policy {name!r}; known are {', '.join(kinds)}")
        value = _value(name, kinds[name], text)
        try:
            if name.startswith(_REBALANCE):
                setattr(message.rebalance, name.removeprefix(_REBALANCE), value)
            else:
                setattr(message, name, value)
        except ValueError:  # protobuf: more than the field holds
            raise ConfigError(f"{name} is {text}, which is more than can be") from None
    return message


def flat(plain: Mapping[str, Any]) -> dict[str, Any]:
    """`Policies.to_dict`'s form with the names that `change_from_text` takes."""
    settings = {f"{_REBALANCE}{name}": value for name, value in plain["rebalance"].items()}
    return {name: value for name, value in plain.items() if name != "rebalance"} | settings


def _kinds() -> dict[str, object]:
    """Name as operators type it -> type."""
    own = {f.name: f.type for f in fields(Policies) if f.name != "rebalance"}
    return own | {f"{_REBALANCE}{f.name}": f.type for f in fields(RebalancePolicy)}


def _value(name: str, kind: object, text: str) -> Any:
    if kind is bool:
        if text not in ("true", "false"):
            raise ConfigError(f"{name} is {text!r}; it must be true or false")
        return text == "true"
    if kind is int:
        if not text.isdecimal() or len(text) > 19:
            raise ConfigError(f"{name} is {text!r}; it must be a whole number")
        return int(text)
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f"{name} is {text!r}; it must be a number") from None
    try:
        return _LOST[LostExperts(text)]
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; use one of {', '.join(LostExperts)}") from None
