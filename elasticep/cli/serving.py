"""Options that the commands that serve, `controller` and `daemon`, have in common."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_flags(flags: Iterable[tuple[str, str]]) -> Callable[[click.Command], click.Command]:
    """Settings of the config as options of a command: (flag, help)."""

    def add(command: click.Command) -> click.Command:
        command.params[:0] = [click.Option([name], help=text) for name, text in flags]
        return command

    return add


def with_logs(function: _Command) -> _Command:
    """`--log-format` and `--log-level`."""
    level = click.option(
        "--log-level",
        envvar="ELASTICEP_LOG_LEVEL",
        default="info",
        show_default=True,
        help="Least level written.",
    )
    form = click.option(
        "--log-format", default="auto", show_default=True, help="auto, console or json."
    )
    return form(level(function))
