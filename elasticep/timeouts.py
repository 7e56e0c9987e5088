"""Deadlines of a group."""

from dataclasses import dataclass, fields
from typing import Final

from elasticep.errors import ConfigError

MAX_TIMEOUT_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines of a group, all in milliseconds.

    Attributes:
        suspect_after_ms: a wait that lasts this long is reported; nobody is expelled for it.
        hang_timeout_ms: the root of a wait is expelled after this.
        exchange_timeout_ms: a wait inside a step tears the step after this.
        step_timeout_ms: a step barrier returns unpassed after this.
        node_timeout_ms: a node not heard of for this long is gone.
    """

    suspect_after_ms: int = 500
    hang_timeout_ms: int = 5_000
    exchange_timeout_ms: int = 10_000
    step_timeout_ms: int = 30_000
    node_timeout_ms: int = 1_500

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if (
                not isinstance(value, int)
                or isinstance(value, bool)
                or not 1 <= value <= MAX_TIMEOUT_MS
            ):
                raise ConfigError(
                    f"timeouts.{name} is {value!r}; it must be 1 to {MAX_TIMEOUT_MS} milliseconds"
                )
        if self.hang_timeout_ms <= self.suspect_after_ms:
            raise ConfigError(
                f"timeouts.hang_timeout_ms ({self.hang_timeout_ms}) must be above "
                f"suspect_after_ms ({self.suspect_after_ms}): waits are reported first"
            )
        if self.node_timeout_ms < 100:
            raise ConfigError(
                f"timeouts.node_timeout_ms is {self.node_timeout_ms}; below 100 a busy node "
                "would be taken for a dead one"
            )
