"""An asyncio event loop without real time: when nothing is ready it jumps to the next timer."""

import asyncio
import contextvars
from collections.abc import Callable
from contextvars import Context
from typing import Any, Final

from elasticep.errors import UsageError


class Process:
    """A simulated process whose coroutines can be stopped and continued.

    Whatever the loop is asked to call in this process's context while it is stopped is kept back,
    as SIGSTOP does to a process: messages pile up, timers fire when it continues.

    Attributes:
        name: in the trace.
        alive: it was not killed.
        stopped: it gets no turn.
        ahead_s: how far its clock has jumped.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.ahead_s = 0.0
        self.held: list[asyncio.Handle] = []
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)


_PROCESS: Final[contextvars.ContextVar[Process | None]] = contextvars.ContextVar(
    "simulated_process", default=None
)
TICK_S: Final = 1e-6  # no two events of one stream are closer


class _Jump:
    """Stands in for a selector: waiting takes no time."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise UsageError("the simulation waits for something that nobody will do")
        self._loop.now_s += timeout_s
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in an order that depends on nothing but what was asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._selector = _Jump(self)
        self._clock_resolution = 1e-9
        self.set_exception_handler(self._unhandled)
        self.errors: list[str] = []

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.loop.call_soon`; a stopped process gets its calls when it continues."""
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        if process is not None and process.stopped:
            handle = asyncio.Handle(callback, args, self, context)
            process.held.append(handle)
            return handle
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """See `asyncio.loop.call_at`; every timer takes some time, so nothing waits in place."""
        at_s = max(when, self.now_s + TICK_S)
        return super().call_at(at_s, callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """What would be another thread's work is done here and now, in the one order of events."""
        future: asyncio.Future[Any] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop_process(self, process: Process) -> None:
        """SIGSTOP."""
        process.stopped = True

    def continue_process(self, process: Process) -> None:
        """SIGCONT."""
        process.stopped = False
        held, process.held = process.held, []
        for handle in held:
            self._ready.append(handle)  # type: ignore[attr-defined]

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no file descriptors here."""

    def _write_to_self(self) -> None:
        """There are no other threads here."""

    def _unhandled(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")
