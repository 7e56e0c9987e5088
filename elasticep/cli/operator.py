"""What the operator's commands share: finding the leader, and one call to it."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from elasticep.config import TlsConfig
from elasticep.errors import ConfigError, ElasticEPError, NotLeader, Unavailable

if TYPE_CHECKING:
    import grpc.aio
    from rich.console import RenderableType

    from elasticep.proto.controller_pb2_grpc import ControllerServiceAsyncStub

DEFAULT_CONTROLLER = "127.0.0.1:7400"
_R = TypeVar("_R")
Call = Callable[["ControllerServiceAsyncStub", float], Awaitable[_R]]


def controller_options(command: click.Command) -> click.Command:
    """Add the options that say how the controllers are reached."""
    command.params += [
        click.Option(
            ["--controllers"],
            default=DEFAULT_CONTROLLER,
            show_default=True,
            envvar="ELASTICEP_CONTROLLERS",
            help="Addresses of the controllers, with commas; the one that leads is found.",
        ),
        click.Option(
            ["--timeout"],
            type=click.FloatRange(0.1),
            default=15.0,
            show_default=True,
            help="Seconds to wait.",
        ),
        *(
            click.Option(
                [f"--tls-{name}"], default="", envvar=f"ELASTICEP_TLS_{name.upper()}", help=text
            )
            for name, text in (
                ("cert", "PEM certificate for mutual TLS."),
                ("key", "Its key."),
                ("ca", "PEM certificate of the authority that signs the controllers'."),
            )
        ),
    ]
    return command


def ask(options: dict[str, Any], call: Call[_R]) -> _R:
    """Make a call to whichever controller leads.

    Args:
        options: `controllers`, `timeout` and `tls_*` as `controller_options` gives them.
        call: gets a stub and the seconds that are left.

    Raises:
        ElasticEPError: what the leader answered; `Unavailable` when none answered in time.
    """
    addresses = [part.strip() for part in options["controllers"].split(",") if part.strip()]
    if not addresses:
        raise ConfigError("no controller is named; use --controllers")
    tls = TlsConfig(cert=options["tls_cert"], key=options["tls_key"], ca=options["tls_ca"])
    return asyncio.run(_ask(addresses, tls, options["timeout"], call))


async def _ask(addresses: list[str], tls: TlsConfig, timeout_s: float, call: Call[_R]) -> _R:
    import grpc.aio

    from elasticep.proto.controller_pb2_grpc import ControllerServiceStub
    from elasticep.rpc import open_channel

    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    heard: dict[str, ElasticEPError] = {}
    while (left_s := end - loop.time()) > 0:
        for address in addresses:
            try:
                async with open_channel(address, tls) as channel:
                    return await call(ControllerServiceStub(channel), max(0.1, left_s))
            except grpc.aio.AioRpcError as error:
                heard[address] = _said(error)
                if _is_answer(error, heard[address]):
                    raise heard[address] from None
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise Unavailable(
                        f"{address} did not answer within {timeout_s:g} s; see its log, or wait "
                        "longer with --timeout"
                    ) from None
        if not any(
            isinstance(error, NotLeader) or _is_slow(error) or _is_restarting(address, error)
            for address, error in heard.items()
        ):
            break  # nobody of ours is there: waiting would not help
        await asyncio.sleep(0.1)
    told = "; ".join(f"{address}: {error}" for address, error in heard.items())
    if any(isinstance(error, NotLeader) for error in heard.values()):
        raise Unavailable(
            f"no controller leads within {timeout_s:g} s ({told}); name all of them with "
            "--controllers, and see their logs: does etcd answer them?"
        )
    remedy = "is `elasticep controller` running?"
    if any(_hung_up(e) and not _is_restarting(address, e) for address, e in heard.items()):
        remedy = (
            "who listens there wants other certificates, or none: look at --tls-cert, --tls-key "
            "and --tls-ca, when they run out, and whether both sides use TLS"
        )
    raise Unavailable(f"no controller answered ({told}); {remedy}")


def _said(error: "grpc.aio.AioRpcError") -> ElasticEPError:
    """The error that a call ended with; of one that nobody took, the kernel's word alone."""
    import grpc

    from elasticep.rpc import typed_error

    details = error.details() or ""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:
        return ConfigError(
            f"a message is larger than one side takes ({details}; bytes): ask for one group "
            "instead of all, write a plan without spaces and line breaks, or upgrade the controller"
        )
    if details.startswith("failed to connect"):
        return Unavailable(details.rpartition("connect: ")[2] or details)
    return typed_error(error, "the call")


def _is_answer(call: "grpc.aio.AioRpcError", error: ElasticEPError) -> bool:
    """Whether the leader said so, and no other would say better."""
    from elasticep.rpc import error_info

    told = error_info(call) is not None
    return not isinstance(error, NotLeader) and (told or not isinstance(error, Unavailable))


def _is_slow(error: ElasticEPError) -> bool:
    """Whether somebody took the connection, or may yet, and did not go on with it in time."""
    return "timeout occurred" in str(error).lower() or "timed out" in str(error)


def _is_restarting(address: str, error: ElasticEPError) -> bool:
    """Whether who broke off can only have ended: on a Unix socket nobody asks for certificates."""
    return address.startswith("unix:") and _hung_up(error)


def output_option(command: click.Command) -> click.Command:
    """Add `--output`, the form of what is answered."""
    kinds = click.Choice(["text", "json"])
    command.params.append(click.Option(["--output"], type=kinds, default="text", show_default=True))
    return command


def say(output: str, plain: dict[str, Any], text: str) -> None:
    """Print an answer: as one JSON document, or in words."""
    click.echo(json.dumps(plain, indent=2) if output == "json" else text)


def print_parts(parts: "list[RenderableType]") -> None:
    """Print lines and tables; to a file or a pipe one line of each, without blanks behind."""
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(*parts, sep="\n")
        return
    console.width = 1_000  # who searches in it wants a sentence in one line
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


# The kernel's word depends on whether ours had been sent when the other side closed.
_BROKEN_OFF: Final = ("socket closed", "reset by peer", "broken pipe", "handshake failed")


def _hung_up(error: ElasticEPError) -> bool:
    """Whether somebody took the connection and broke off before it answered."""
    told = str(error).lower()
    return any(word in told for word in _BROKEN_OFF)


def parse_ranks(text: str) -> list[int]:
    """Read "3" or "0-2,5"; `ConfigError` when it is neither."""
    from elasticep.config import parse_seats

    try:
        (seats,) = parse_seats(f"x:{text}")
    except ValueError:
        raise ConfigError(f"{text!r} names no ranks; use a form such as 3 or 0-2,5") from None
    return list(seats.ranks)
