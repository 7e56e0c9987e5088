"""Entry point of the `elasticep` command.

A subcommand lives in `elasticep/cli/<name>.py` as a click command called `command`, and is one line
of `SUBCOMMANDS`. Modules are imported when their command runs, so `elasticep --help` and shell
completion stay fast and a daemon never imports what only the demo needs.
"""

import contextlib
import errno
import importlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from elasticep import __version__
from elasticep.errors import ElasticEPError

# name -> one-line help
SUBCOMMANDS: dict[str, str] = {
    "up": "Run a whole cluster on this machine: etcd, controller, daemons.",
    "daemon": "Run the node daemon.",
    "controller": "Run a controller replica.",
    "health": "Ask the daemon or controller of this host whether it serves.",
    "group": "Create, inspect and delete groups.",
    "status": "Show members, views and health.",
    "node": "Say that a node is off for good.",
    "checkpoint": "Show the experts of a checkpoint, and whether they are whole.",
    "plan": "Compare the ways to exchange rows, for a model and a group size.",
    "rebalance": "Ask for a rebalance of a group's experts.",
    "drain": "Take ranks out of service.",
    "undrain": "Let ranks back into service.",
    "policy": "Show or change what a running group does about faults.",
    "sim": "Break a simulated cluster in every way, and see that it holds.",
    "demo": "Serve a small model and kill a rank under it.",
}


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_AS_JSON = "elasticep.as_json"


def _exists(name: str) -> bool:
    return importlib.util.find_spec(f"elasticep.cli.{name}") is not None


def wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, also one that cannot be parsed."""
    asked = [word for before, word in itertools.pairwise(words) if before == "--output"]
    asked += [word.removeprefix("--output=") for word in words if word.startswith("--output=")]
    return "json" in asked


def error_json(reason: str, message: str) -> str:
    """What a command that was to answer with JSON answers when it fails."""
    return json.dumps({"error": {"reason": reason, "message": message}})


class LazyGroup(click.Group):
    """A group whose commands are imported only when they are run.

    One that fails under `--output json` says why on stdout as JSON, too: a script that reads it
    finds one document in every case.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note in which form an error is to be told."""
        ctx.meta[_AS_JSON] = wants_json(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except ElasticEPError as error:
            if ctx.meta[_AS_JSON]:
                click.echo(error_json(error.reason, str(error)))
            raise
        except click.ClickException as error:
            if ctx.meta[_AS_JSON]:
                reason = getattr(error, "reason", "USAGE")
                click.echo(error_json(reason, error.format_message()))
            raise

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands whose modules are installed, in the table's order."""
        return [name for name in SUBCOMMANDS if _exists(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None when there is no such command."""
        if cmd_name not in SUBCOMMANDS or not _exists(cmd_name):
            return None
        command = importlib.import_module(f"elasticep.cli.{cmd_name}").command
        if not isinstance(command, click.Command):
            raise TypeError(f"elasticep.cli.{cmd_name}.command is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, without importing any of them."""
        rows = [(name, SUBCOMMANDS[name]) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="elasticep")
def cli() -> None:
    """Fault-tolerant elastic expert parallelism."""


def main() -> None:
    """Run the command line; an `ElasticEPError`, and a full disk, become one line on stderr and
    exit status 1."""
    # What goes wrong in gRPC comes as an error of ours; its own lines would stand between events.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        cli.main()
    except ElasticEPError as error:
        click.echo(f"error: {error.reason}: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        place = error.filename or "where output or temporary files (TMPDIR) go"
        told = f"{error.strerror}: {place}; make room there"
        if wants_json(sys.argv):
            with contextlib.suppress(OSError):  # it may be stdout that is full
                click.echo(error_json("DISK_FULL", told))
        click.echo(f"error: DISK_FULL: {told}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
