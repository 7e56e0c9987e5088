"""Logs: events with keys, on stderr."""

import sys
from contextlib import suppress
from typing import Final, TextIO, cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from elasticep.errors import ConfigError

FORMATS: Final = ("auto", "console", "json")
LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class _Unfailing:
    """A stream whose lines are lost where they cannot be written: on a terminal that was closed, on
    a full disk. What the process does must not end with its log.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def open_log(style: str, level: str, **keys: str) -> FilteringBoundLogger:
    """A logger for one process.

    Args:
        style: "json" (one object a line), "console", or "auto": console on a terminal.
        level: least level that is written.
        keys: written with every event.

    Raises:
        ConfigError: no such format or level.
    """
    if style not in FORMATS or level not in LEVELS:
        raise ConfigError(
            f"log format {style!r} with level {level!r}; formats are {', '.join(FORMATS)}, "
            f"levels {', '.join(LEVELS)}"
        )
    as_json = style == "json" or (style == "auto" and not sys.stderr.isatty())
    last: Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    processors: list[Processor] = [
        _without_none,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        last,
    ]
    log: FilteringBoundLogger = structlog.wrap_logger(
        # A line is one write: whoever is killed leaves no half of one for its successor to go on.
        structlog.WriteLogger(cast(TextIO, _Unfailing(sys.stderr))),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    return log.bind(**keys)


def _without_none(
    _: object, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return {key: value for key, value in event.items() if value is not None}
