"""How a session's steps end, whatever happens on the way.

A handler of a signal may raise between any two instructions, also at the very end of a step's
block. So who begins a step looks whether the last one was ended, here and natively, and whoever is
interrupted while ending one gives it up: torn, as a step is that an error leaves.
"""

from typing import TYPE_CHECKING, Final

from elasticep.client.handle import SessionHandle
from elasticep.client.step import Step, give_up_after
from elasticep.errors import ElasticEPError, StepTorn, UsageError

if TYPE_CHECKING:
    from elasticep.client.exchange import Exchange


_LEFT: Final = "another rank left it, or this one was expelled, before its end"


class StepOwner:
    """The open step of a session, if there is one.

    Args:
        handle: the native session.
    """

    def __init__(self, handle: SessionHandle) -> None:
        self._handle = handle
        self._step: Step | None = None
        self._ending = False  # natively a step may be open, though there is none here
        self._kinds: list[Exchange] = []  # all exchanges, an AutoExchange's two apart

    def _check_none_open(self) -> None:
        """Raise `UsageError` if a step is open; one that was not ended is given up."""
        if self._step is not None:
            # Perhaps a handler of a signal raised just before its block could end it.
            self._give_up()
            raise UsageError(
                "a step is open already, and was torn now; leave its `with` block before the next"
            )
        if self._ending:
            self._give_up()

    def _give_up(self) -> None:
        """Tear and end a step that no block will end, or a barrier that nobody waits at."""
        self._step = None
        self._handle.step_cancel()
        self._ending = False

    def _end(self, step: Step, error: BaseException | None) -> bool:
        if self._step is not step:  # given up
            return isinstance(error, StepTorn)
        self._ending = True
        self._step = None
        try:
            return self._ended(step, error)
        except BaseException as raised:
            if self._ending:  # a signal's, in the middle of it
                give_up_after(raised, self._give_up)
            raise

    def _ended(self, step: Step, error: BaseException | None) -> bool:
        typed = error
        for exchange in self._kinds:
            typed = exchange._operators.after(step, typed)
        if isinstance(typed, StepTorn):
            step._why = str(typed)
            self._end_natively()
            return True
        if typed is None and step._open_exchanges:
            typed = UsageError(
                "a step ended with a dispatch that no combine followed; every exchange is "
                "dispatch, then combine. The step was torn for all ranks"
            )
        if typed is None:
            step._complete = self._end_natively()
            step._why = "" if step._complete else _LEFT
            return False
        step._why = f"{type(typed).__name__}: {typed}"
        # The engine's own error is the one to report; what tearing runs into comes as a note.
        for call in (self._handle.step_tear, self._end_natively):
            try:
                call()
            except ElasticEPError as second:
                typed.add_note(f"step {step.number} could not be torn in order: {second}")
        if typed is not error:
            raise typed from error
        return False

    def _end_natively(self) -> bool:
        try:
            complete = self._handle.step_end()
        except ElasticEPError:
            self._ending = False
            raise
        self._ending = False
        return complete
