"""Which signals end a process that serves, in order."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """SIGTERM, SIGINT, and SIGHUP, as of a terminal that is closed; not that one where it was
    ignored when the process started (nohup).
    """
    always = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return always if ignored else (*always, signal.SIGHUP)


def interrupt_on_stop() -> None:
    """Let all of them end a command as Ctrl-C does, so that it cleans up: `KeyboardInterrupt`."""
    for number in stop_signals():
        signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)
