"""Why a step on a GPU does not count: what its kernels left in the fault record, in the words of
the CPU plane.
"""

import ctypes
from collections.abc import Callable
from typing import Final

from elasticep.errors import (
    CapExceeded,
    ElasticEPError,
    ExpertsLost,
    StepTimeout,
    TensorError,
    UsageError,
)
from elasticep.group import GroupConfig
from elasticep.native.convert import exchange_numbers
from elasticep.native.cuda import StepResult, StepStatus, Why

_CALLS: Final = {2: "dispatch", 3: "combine"}  # of a fault's phase


class Reasons:
    """What to say of the steps of one rank.

    Args:
        config: of the group.
        rank: whose steps they are.
        incarnation: of the rank.
    """

    def __init__(self, config: GroupConfig, rank: int, incarnation: int) -> None:
        self._config = config
        self._me = f"rank {rank} incarnation {incarnation}"
        self._names = {
            number: name for name, numbers in exchange_numbers(config).items() for number in numbers
        }

    def incomplete(self, result: StepResult) -> str:
        """Why a step that ran, or was to run, has to be repeated."""
        step, fault = result.step, result.fault
        if result.status is StepStatus.NO_VIEW:
            return f"no step ran: {self._me} has been given no view yet"
        if result.status is StepStatus.DOOMED:
            return (
                f"step {step} did not run: {_who(result)} is dead, and epoch {result.epoch}, which "
                "has it as a member, is the latest view yet; it must be repeated"
            )
        known = fault.step == step and fault.why
        reason = self._torn(result) if known else "a rank left it before its end"
        return f"step {step} is torn: {reason}; it must be repeated"

    def _torn(self, result: StepResult) -> str:
        fault, step = result.fault, result.step
        match fault.why:
            case Why.PASSED_BY:
                reason = f"rank {fault.rank} went on to a later step or disagrees on the exchange"
            case Why.PEER_LEFT:
                reason = f"rank {fault.rank} left step {step}"
            case Why.PEER_DEAD:
                reason = f"{_who(result)} is dead"
            case Why.FENCED:
                reason = "this rank was fenced"
            case Why.TIMEOUT:
                limit = self._config.timeouts.exchange_timeout_ms
                reason = f"rank {fault.rank} did not answer within {limit} ms"
            case Why.ENDED:
                reason = f"rank {fault.rank} ended step {step} without this exchange"
            case Why.ENGINE:
                return "the engine tore it, or ended it inside an exchange"
            case _:
                reason = f"an exchange could not be done here ({Why(fault.why).name})"
        if fault.phase not in _CALLS:
            return reason
        return f"{reason} (in the {_CALLS[fault.phase]} of exchange {self._name(fault.exchange)})"

    def barrier(self, result: StepResult) -> StepTimeout:
        """A barrier that did not end in time."""
        fault, step = result.fault, result.step
        if not result.epoch:
            return StepTimeout(
                f"step barrier: no view with {self._me} was adopted in time; see `elasticep "
                "status` for what the controller waits for. Enter a new step to go on waiting"
            )
        who = "a member"
        if (fault.step, fault.why) == (step, Why.TIMEOUT):
            who = f"rank {fault.rank}"
        return StepTimeout(
            f"step barrier: {who} did not reach barrier {step} in time; step {step} did not run. "
            "Enter a new step to go on waiting"
        )

    def hopeless(
        self, result: StepResult, lost: Callable[[], list[tuple[int, int]]]
    ) -> ElasticEPError | None:
        """The error of a torn step whose repeat could only end in the same way, by this rank's own.

        Args:
            result: of the step.
            lost: `(layer, expert)` of all that no member of its view holds.
        """
        fault = result.fault
        if fault.step != result.step:
            return None
        where = f"layer {fault.layer}, exchange {self._name(fault.exchange)}"
        match fault.why:
            case Why.ROOM:
                return CapExceeded(
                    f"{where}: slot {fault.slot} gets {fault.rows} rows and has room for "
                    f"{fault.room}; raise masked_room or leave it out"
                )
            case Why.LOST:
                return ExpertsLost(lost() or [(int(fault.layer), int(fault.expert))])
            case Why.IDS:
                return TensorError(
                    f"{where}: a token names expert {ctypes.c_int32(fault.expert).value}; ids must "
                    f"be -1 (none) or 0..{self._config.geometry.experts - 1}"
                )
            case Why.DISAGREE:
                return UsageError(
                    f"{where}: rank {fault.rank} is at another layer, or brings {fault.rows} "
                    f"tokens of replicated input where this rank brings {fault.room}"
                )
            case Why.SEQUENCE:
                return UsageError(
                    f"{where}: a step has at most 4,095 exchanges on one channel; end the step "
                    "before this one, or use another channel"
                )
            case Why.SCALES:
                return TensorError(
                    f"{where}: a scale of token {fault.rows} is no power of two, and the exchange "
                    "packs scales as exponents (UE8M0); bring such scales, or another scale layout"
                )
        return None

    def _name(self, number: int) -> str:
        return repr(self._names.get(number, number))


def _who(result: StepResult) -> str:
    rank = result.fault.rank
    incarnation = result.members.get(rank)
    return f"rank {rank}" if incarnation is None else f"rank {rank} incarnation {incarnation}"
