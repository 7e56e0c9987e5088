"""What a run of the demo is made of, checked before anything is started."""

import enum
from dataclasses import dataclass
from typing import Final

from elasticep.balance import RebalancePolicy
from elasticep.demo.prompts import prompts
from elasticep.demo.scenario import Scenario
from elasticep.errors import ConfigError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Timeouts
from elasticep.spec import ExchangeSpec
from elasticep.weights import TensorSpec, WeightDtype, WeightSpec

EXCHANGE: Final = "decode"
GROUP: Final = "demo"
ROWS: Final = 4
"""Batch rows of an engine."""
REQUESTS_PER_RANK: Final = 3  # one row stays free for a request that is taken over
MAX_RANKS: Final = 32
_MOVING_RANKS: Final = 3
_ONE_COPY: Final = (Scenario.LOST_EXPERT, Scenario.REBALANCE)


class Kill(enum.StrEnum):
    """What is killed."""

    WORKER = "worker"
    ENGINE = "engine"
    DAEMON = "daemon"
    CONTROLLER = "controller"
    NONE = "none"

    @property
    def costs_a_rank(self) -> bool:
        """Whether the group loses a member by it."""
        return self in (Kill.WORKER, Kill.ENGINE)


class Side(enum.StrEnum):
    """Which end of a copy is killed while experts move."""

    SOURCE = "source"
    TARGET = "target"


class Restore(enum.StrEnum):
    """Where experts come from that no rank has any more."""

    BACKUP = "backup"  # in the memory of other nodes
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of the demo's model; `hidden` is a multiple of 8."""

    layers: int = 4
    hidden: int = 128
    experts: int = 16
    topk: int = 4
    heads: int = 4
    kv_heads: int = 2

    @property
    def weights(self) -> WeightSpec:
        """What an expert of the model consists of, gate and up projection as one."""
        inner = self.hidden // 2
        return WeightSpec(
            (
                TensorSpec("w13", WeightDtype.FP32, (2 * inner, self.hidden)),
                TensorSpec("w2", WeightDtype.FP32, (self.hidden, inner)),
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """A run.

    Attributes:
        ranks: engines, one rank each.
        nodes: daemons.
        scenario: what happens.
        kill: what is killed.
        restore: in scenario lost-expert, where its experts come from.
        side: in scenario rebalance with a kill, which end of a copy under way it hits.
        at: step at which it happens; None: in the middle of the answers.
        tokens: tokens to answer to each request.
        seed: of the model's weights.
        timeout_s: when to give up.
    """

    ranks: int = 4
    nodes: int = 2
    scenario: Scenario = Scenario.KILL
    kill: Kill = Kill.WORKER
    restore: Restore | None = None
    side: Side | None = None
    at: int | None = None
    tokens: int = 40
    seed: int = 13
    timeout_s: float = 120.0
    sizes: ModelSizes = ModelSizes()

    def __post_init__(self) -> None:
        for name, low, high in (("ranks", 1, MAX_RANKS), ("nodes", 1, self.ranks)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"--{name} is {value}; use {low} to {high}")
        if not 1 <= self.tokens <= 1000:
            raise ConfigError(f"--tokens is {self.tokens}; use 1 to 1000")
        if self.kill.costs_a_rank and self.ranks == 1:
            raise ConfigError(
                f"--kill {self.kill} with one rank leaves nobody to take its requests over; "
                "use --ranks 2 or more"
            )
        self._check_kill()
        if (self.scenario is Scenario.LOST_EXPERT) is (self.restore is None):
            raise ConfigError("--restore is for --scenario lost-expert, which needs it")
        if self.scenario is not Scenario.KILL and self.ranks == 1:
            raise ConfigError(f"--scenario {self.scenario} needs --ranks 2 or more")
        if self.max_ranks > MAX_RANKS:
            raise ConfigError(
                f"--scenario scale goes from {self.ranks} to {self.max_ranks} ranks; use --ranks "
                f"{MAX_RANKS - 2} or fewer"
            )
        if self.at is not None and not 1 <= self.at < self.steps_needed:
            raise ConfigError(
                f"--at is {self.at}; the answers take {self.steps_needed} steps, so use 1 to "
                f"{self.steps_needed - 1}, or more --tokens"
            )

    def _check_kill(self) -> None:
        if self.scenario is Scenario.REBALANCE:
            self._check_kill_while_moving()
            return
        if self.side is not None:
            raise ConfigError(
                f"--victim {self.side} is for a kill while experts move; use --scenario rebalance "
                "with --kill worker, engine or daemon, or leave --victim away"
            )
        if self.scenario.kills is (self.kill is Kill.NONE) and self.scenario is not Scenario.KILL:
            raise ConfigError(
                f"--scenario {self.scenario} with --kill {self.kill}: "
                + (
                    f"{self.scenario} needs a worker or an engine that is killed"
                    if self.scenario.kills
                    else "nothing is killed in it; leave --kill away"
                )
            )
        if self.scenario.needs_death and not self.kill.costs_a_rank:
            raise ConfigError(
                f"--scenario {self.scenario} with --kill {self.kill}: no rank is lost by it; "
                "use --kill worker or engine"
            )

    def _check_kill_while_moving(self) -> None:
        if self.kill is Kill.CONTROLLER:
            raise ConfigError(
                "--scenario rebalance with --kill controller: it takes no part in a copy; use "
                "--kill worker, engine or daemon"
            )
        if (self.side is None) is not (self.kill is Kill.NONE):
            raise ConfigError(
                f"--scenario rebalance with --kill {self.kill}: "
                + (
                    "name the end of a copy that is killed, --victim source or target"
                    if self.side is None
                    else f"there is no victim; leave --victim {self.side} away"
                )
            )
        if self.kill.costs_a_rank and self.ranks < _MOVING_RANKS:
            raise ConfigError(
                f"--scenario rebalance with --kill {self.kill} leaves {self.ranks - 1} of "
                f"{self.ranks} ranks, among which nothing can move; use --ranks {_MOVING_RANKS} "
                "or more"
            )

    @property
    def max_ranks(self) -> int:
        """Seats of the group."""
        return self.ranks + 2 if self.scenario is Scenario.SCALE else self.ranks

    @property
    def _fewest_ranks(self) -> int:
        return max(1, self.ranks - 1) if self.scenario is Scenario.SCALE else self.ranks

    @property
    def joiners(self) -> int:
        """Ranks that are opened during the run."""
        return {Scenario.REJOIN: 1, Scenario.SCALE: 2}.get(self.scenario, 0)

    @property
    def prompts(self) -> list[bytes]:
        """All requests: those of the first ranks, then those that joiners bring."""
        return prompts((self.ranks + self.joiners) * REQUESTS_PER_RANK)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt) for prompt in self.prompts)

    @property
    def length(self) -> int:
        """Most tokens of a request, prompt and answer."""
        return self.longest_prompt + self.tokens

    @property
    def steps_needed(self) -> int:
        """Steps that the longest request takes when nothing is killed."""
        return self.length - 1

    @property
    def kill_at(self) -> int:
        """The step at which the kill happens."""
        shortest = min(len(prompt) for prompt in self.prompts)
        part = 8 if self.scenario is Scenario.REBALANCE else 2  # the rest is to see it under load
        return shortest + self.tokens // part if self.at is None else self.at

    @property
    def victim(self) -> int:
        """The rank that is killed, or whose daemon is."""
        return self.ranks // 2

    @property
    def loses_a_rank(self) -> bool:
        """Whether a member is killed."""
        return self.scenario.kills and self.kill.costs_a_rank

    def starts_scenario(self, rank: int) -> bool:
        """Whether the scenario begins once this rank is where it begins.

        All are, where one is to be killed inside a step: whoever has not passed its barrier by then
        would find the dead word there, and have no step to repeat.
        """
        idle = self.scenario is Scenario.KILL and self.kill is Kill.NONE
        return not idle and (self.loses_a_rank or rank == self.victim)

    def group_config(self) -> GroupConfig:
        """The group: every expert twice, so that any one rank can go; once if its experts are to
        be lost with it, and then there is room for them elsewhere.
        """
        copies = min(2, self.ranks)
        sizes = self.sizes
        return GroupConfig(
            name=GROUP,
            geometry=GroupGeometry(
                layers=sizes.layers,
                experts=sizes.experts,
                topk=sizes.topk,
                hidden=sizes.hidden,
                # One slot more than the copies need: two of an expert never share a rank.
                slots_per_rank=-(-copies * sizes.experts // self._fewest_ranks) + 1,
                max_ranks=self.max_ranks,
            ),
            exchanges=(
                (
                    EXCHANGE,
                    ExchangeSpec.preset(
                        "ROUTED",
                        dispatch_dtype="fp32",
                        combine_dtype="fp32",
                        reduce="per_expert",
                        max_tokens=ROWS,
                    ),
                ),
            ),
            initial_ranks=self.ranks,
            # A killed daemon is back before this also where two cores are busy with everything.
            timeouts=Timeouts(node_timeout_ms=10_000),
            # Second copies would do: tokens move to them, and no expert has to.
            spare_copies=0 if self.scenario in _ONE_COPY else copies - 1,
            weights=sizes.weights,
            # Nothing moves but what the scenario asks for.
            rebalance=RebalancePolicy(automatic=False, settle_ms=0, window_ms=500),
        )
