"""The demo's rebalance: asked for as an operator does, with an eye on how long steps take."""

import enum
import json
import os
import statistics
import subprocess
import sys
from typing import Any, Final

from elasticep.demo.migration import RATE
from elasticep.demo.settings import DemoSettings, Kill
from elasticep.errors import Unavailable
from elasticep.testing.cluster import daemon_name

_STEPS_AFTER: Final = 40  # until the load under the new placement is looked at
_STEPS_BEFORE: Final = 40  # what a step takes otherwise is the median of so many
_NS_PER_MS: Final = 1e6
_TIMES: Final = 3.0  # no step while experts move may take longer than so many usual ones
_TIMES_LONGEST: Final = 1.5  # or, on a machine where some steps take long anyhow, than the longest


def environment(settings: DemoSettings) -> dict[str, dict[str, str]]:
    """Variables of the daemons: loads are told often, for a run is short. If something is to be
    killed while experts move, they move slowly, and every copy is told.
    """
    more = {"ELASTICEP_DAEMON_LOAD_INTERVAL_MS": "100"}
    if settings.kill is not Kill.NONE:
        more |= {"ELASTICEP_DAEMON_WEIGHTS_RATE": str(RATE), "ELASTICEP_LOG_LEVEL": "debug"}
    return {daemon_name(node): more for node in range(settings.nodes)}


class _Phase(enum.Enum):
    BEFORE = 0
    ASKED = 1  # the command runs, nothing is known of a plan yet
    MOVING = 2
    AFTER = 3
    MEASURING = 4
    DONE = 5


class Balance:
    """Follows one rebalance."""

    def __init__(self) -> None:
        self._phase = _Phase.BEFORE
        self._process: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._said = b""
        self._last_ns: dict[int, int] = {}
        self._usual_ms: list[float] = []
        self._moving_ms: list[float] = []
        self._still_ms: list[float] = []  # while the command starts, and afterwards
        self._after = 0
        self._killed_ns = 0  # a member was
        self._recovery_ms: dict[int, float] = {}
        self._plan: dict[str, Any] = {}
        self._result: dict[str, Any] = {}
        self._measured = 0.0
        self._unfinished = 0

    # ---- what the demo's parent does

    def ask(self, controller: str, group: str) -> str:
        """Ask for a rebalance; returns the command for the timeline."""
        self._command = ["--controllers", controller, "--output", "json"]
        self._start("rebalance", group, "--force", "--watch")
        self._phase = _Phase.ASKED
        return f"elasticep rebalance {group} --force --watch"

    def step(self, rank: int, at_ns: int) -> None:
        """A rank completed a step."""
        before_ns = self._last_ns.get(rank)
        self._last_ns[rank] = at_ns
        if before_ns is None:
            return
        took_ms = (at_ns - before_ns) / _NS_PER_MS
        if before_ns <= self._killed_ns < at_ns:
            self._recovery_ms[rank] = took_ms  # no wait for weights that move, but the recovery
        elif self._phase is _Phase.BEFORE:
            self._usual_ms = [*self._usual_ms[1 - _STEPS_BEFORE * len(self._last_ns) :], took_ms]
        elif self._phase is _Phase.MOVING:
            self._moving_ms.append(took_ms)
        else:
            self._still_ms.append(took_ms)
            self._after += self._phase is _Phase.AFTER

    def member_killed(self, rank: int, at_ns: int) -> None:
        """A rank was killed: the step that is open on the others is not judged."""
        self._killed_ns = at_ns
        self._last_ns.pop(rank, None)

    def look(self, group: str, unfinished: int) -> bool:
        """Whether it is done and measured; to be called again until it is.

        Args:
            group: the group.
            unfinished: requests that are still answered.

        Raises:
            Unavailable: a command failed.
        """
        process = self._process
        if process is not None:
            assert process.stdout is not None
            self._said += process.stdout.read() or b""
            if self._phase is _Phase.ASKED and b"\n" in self._said:
                self._phase = _Phase.MOVING
            if process.poll() is None:
                return False
            self._said += process.stdout.read() or b""
            self._unfinished = unfinished
            self._ended(process)
        elif self._phase is _Phase.AFTER and self._after >= _STEPS_AFTER * len(self._last_ns):
            self._phase = _Phase.MEASURING
            self._start("status", group)
        return self._phase is _Phase.DONE

    @property
    def told(self) -> str:
        """One line for the timeline."""
        after = self._result.get("imbalance_after", 0.0)
        return (
            f"rebalanced: imbalance {self._plan.get('imbalance_before', 0.0):.3f} -> {after:.3f}, "
            f"{self._result.get('moves', 0)} experts copied in {self._plan.get('stages', 0)} views"
        )

    def details(self) -> dict[str, Any]:
        """Figures for the report."""
        median = statistics.median(self._moving_ms or self._usual_ms or [0.0])
        longest = max(self._moving_ms, default=0.0)
        return {
            "imbalance_before": self._plan.get("imbalance_before"),
            "imbalance_planned": self._plan.get("imbalance_after"),
            "imbalance_after": self._measured,
            "moves": self._result.get("moves"),
            "move_bytes": self._result.get("move_bytes"),
            "views": self._plan.get("stages"),
            "done": self._result.get("done", False),
            "requests_unfinished": self._unfinished,
            "step_ms_usual": round(statistics.median(self._usual_ms or [0.0]), 3),
            "step_ms_median": round(median, 3),
            "step_ms_longest": round(longest, 3),
            "step_ms_limit": round(self.limit_ms, 3),
            "step_ms_recovery": round(max(self._recovery_ms.values(), default=0.0), 3),
            "steps_watched": len(self._moving_ms),
            "steps_waited": not self._moving_ms or longest > self.limit_ms,
        }

    @property
    def limit_ms(self) -> float:
        """What a step may take while experts move: three times what it takes before. A busy
        machine, on which the operator's command takes a core as it starts, makes some steps long
        by itself; half as long again as those is no wait for weights either.
        """
        usual = self._usual_ms or [0.0]
        longest = max(*usual, *self._still_ms, 0.0)
        return max(_TIMES * statistics.median(usual), _TIMES_LONGEST * longest)

    def end(self) -> None:
        """Nothing of it is left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    # ---- the commands

    def _start(self, *words: str) -> None:
        self._said = b""
        command = [sys.executable, "-m", "elasticep.cli.main", *words, *self._command]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _ended(self, process: subprocess.Popen[bytes]) -> None:
        self._process = None
        said = self._said.decode(errors="replace")
        assert process.stdout is not None
        process.stdout.close()
        if process.returncode:
            raise Unavailable(f"a command of the operator failed: {said.strip()}")
        if self._phase is _Phase.MEASURING:
            (group,) = json.loads(said)["groups"]
            self._measured = group["load"]["imbalance"]
            self._phase = _Phase.DONE
            return
        first, *_, last = [json.loads(line) for line in said.splitlines()]
        self._plan, self._result = first["plan"], last.get("last", {})
        self._phase = _Phase.AFTER
