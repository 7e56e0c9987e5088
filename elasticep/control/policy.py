"""What a plan is made from, besides loads: the ranks there are and what is wanted."""

from collections.abc import Sequence
from dataclasses import dataclass

from elasticep.errors import ConfigError

MAX_RATIO = 1_000.0


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank that is alive.

    Attributes:
        rank: its seat.
        node: the host it runs on; ranks of a node are taken to die together.
        domain: the set of ranks that can map each other's memory; copies within it are cheaper.
        slots: experts it can hold per layer; may differ between ranks.
        draining: about to leave: it may be copied from, but gets no copies and no tokens that
            another rank can take.
    """

    rank: int
    node: str
    domain: str
    slots: int
    draining: bool = False

    def __post_init__(self) -> None:
        if self.rank < 0 or self.slots < 0:
            raise ConfigError(f"rank {self.rank} with {self.slots} slots: both must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPolicy:
    """What a plan should achieve and what it may cost.

    Attributes:
        target: highest rank load over the mean at which an existing placement is good enough; a
            re-split always goes for the least, moves stop at this.
        min_gain: a placement is built anew only if that lowers the highest rank load by this
            fraction more than the repair does.
        max_moves: most copies of experts over all layers; 0 only splits again, None has no limit.
        cover: give every expert copies in two places (nodes, domains), where slots allow.
        fill: leave no slot empty; further copies make later re-splits better, free slots make
            later moves quicker.
        weighted: replicas take shares by weight. False: evenly, for engines without weights.
        groups: expert groups of group-limited routing, each kept inside one node for its tokens;
            second copies may still lie elsewhere. 1 = none.
        expert_bytes: bytes of one expert, or one figure per layer.
    """

    target: float = 1.03
    min_gain: float = 0.01
    max_moves: int | None = None
    cover: bool = True
    fill: bool = False
    weighted: bool = True
    groups: int = 1
    expert_bytes: int | Sequence[int] = 0

    def __post_init__(self) -> None:
        if not 1.0 <= self.target <= MAX_RATIO:
            raise ConfigError(f"policy.target is {self.target}; it must be 1.0 to {MAX_RATIO}")
        if not 0.0 <= self.min_gain <= MAX_RATIO:
            raise ConfigError(f"policy.min_gain is {self.min_gain}; it must be 0.0 to {MAX_RATIO}")
        if self.max_moves is not None and self.max_moves < 0:
            raise ConfigError(
                f"policy.max_moves is {self.max_moves}; it must be 0 or more, or None"
            )
        if self.groups < 1:
            raise ConfigError(f"policy.groups is {self.groups}; it must be 1 or more")

    def bytes_of(self, layer: int) -> int:
        """Bytes of one expert of a layer."""
        if isinstance(self.expert_bytes, int):
            return self.expert_bytes
        return self.expert_bytes[layer]
