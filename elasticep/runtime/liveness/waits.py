"""Which wait records become reports to the controller; pure."""

from dataclasses import dataclass

from elasticep.native.region import HeaderStatus
from elasticep.native.structs import WaitPhase

_NS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank has waited longer than it should.

    Attributes:
        waits_for: rank that it waits for.
        phase: barrier, dispatch or combine.
        since_ns: CLOCK_MONOTONIC at which this wait began.
        waited_ms: how long it lasts by now.
        progress: its own progress counter.
    """

    waits_for: int
    phase: str
    since_ns: int
    waited_ms: int
    progress: int


def overdue(status: HeaderStatus, now_ns: int, suspect_after_ms: int) -> Wait | None:
    """The wait to report, if the rank waits and has done so for `suspect_after_ms`.

    A rank that says it waits for itself waits for its first view, that is for the controller.
    """
    if status.wait_phase not in (WaitPhase.BARRIER, WaitPhase.DISPATCH, WaitPhase.COMBINE):
        return None
    if status.wait_rank == status.rank:
        return None
    waited_ms = (now_ns - status.wait_since_ns) // _NS_PER_MS
    if waited_ms < suspect_after_ms:
        return None
    phase = WaitPhase(status.wait_phase).name.lower()
    return Wait(status.wait_rank, phase, status.wait_since_ns, waited_ms, status.progress)


def describe(status: HeaderStatus, now_ns: int) -> str:
    """A wait in words, or "": "dispatch of exchange 3 for rank 2, 12 ms"."""
    if status.wait_phase == WaitPhase.JOIN:
        waited_ms = max(0, now_ns - status.wait_since_ns) // _NS_PER_MS
        return f"join for a view with this rank, {waited_ms} ms"
    if status.wait_phase not in (WaitPhase.BARRIER, WaitPhase.DISPATCH, WaitPhase.COMBINE):
        return ""
    phase = WaitPhase(status.wait_phase).name.lower()
    what = phase if phase == "barrier" else f"{phase} of exchange {status.wait_exchange}"
    waited_ms = max(0, now_ns - status.wait_since_ns) // _NS_PER_MS
    return f"{what} for rank {status.wait_rank}, {waited_ms} ms"


def should_report(reported: Wait | None, wait: Wait, again_after_ms: int) -> bool:
    """Whether a wait is news: another one than reported, or the same some time later."""
    if reported is None or (wait.since_ns, wait.waits_for) != (
        reported.since_ns,
        reported.waits_for,
    ):
        return True
    return (
        wait.progress != reported.progress or wait.waited_ms >= reported.waited_ms + again_after_ms
    )
