"""The command line as a whole: what every command has in common."""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from elasticep.cli import operator
from elasticep.cli.main import cli
from elasticep.errors import ConfigError, ElasticEPError, NotLeader, Unavailable
from elasticep.proto import controller_pb2, controller_pb2_grpc, types_pb2
from elasticep.rpc import DETAILS_KEY, status_of

GROUP = """
name = "g"
initial_ranks = 2
[geometry]
layers = 2
experts = 8
topk = 2
hidden = 64
slots_per_rank = 8
max_ranks = 2
[exchanges.decode]
preset = "ROUTED"
"""
OPERATORS = ("status", "drain g 0", "undrain g 0", "policy g", "rebalance g", "group show")


def run(line: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, line.split())
    return result.exit_code, result.output


@pytest.mark.parametrize("name", cli.list_commands(None))  # type: ignore[arg-type]
def test_every_command_explains_itself(name: str) -> None:
    code, text = run(f"{name} --help")
    assert code == 0
    assert text.startswith(f"Usage: cli {name} ")


@pytest.mark.parametrize("line", [*OPERATORS, "health daemon"])
@pytest.mark.parametrize("seconds", ["0", "-3", "soon"])
def test_a_time_limit_that_leaves_no_time_is_refused(line: str, seconds: str) -> None:
    code, text = run(f"{line} --timeout {seconds}")
    assert code == 2
    assert "Invalid value for '--timeout'" in text


def test_a_full_disk_is_one_line() -> None:
    words = ["plan", "--model", "deepseek-v3", "--ranks", "8", "--tokens", "64"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "elasticep.cli.main", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: DISK_FULL: No space left on device: where output or")
    assert len(done.stderr.splitlines()) == 1


class Standby(controller_pb2_grpc.ControllerServiceServicer):
    """A controller that cannot lead, because its etcd is away, say."""

    def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        code, status = status_of(NotLeader("this controller does not lead; nobody leads now"))
        context.set_trailing_metadata(((DETAILS_KEY, status),))
        context.abort(code, "this controller does not lead; nobody leads now")


@pytest.fixture
def standby() -> Iterator[str]:
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(Standby(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_controllers_that_are_there_and_do_not_lead_are_told_from_none(standby: str) -> None:
    line = f"status --timeout 5 --controllers {standby},127.0.0.1:1"
    error = CliRunner().invoke(cli, line.split()).exception
    assert isinstance(error, Unavailable)
    assert f"no controller leads within 5 s ({standby}: this controller does not" in str(error)
    assert "127.0.0.1:1: Connection refused (111)" in str(error)
    assert "does etcd answer them?" in str(error)
    assert "running" not in str(error)


def test_who_hangs_up_is_not_taken_for_nobody() -> None:
    with socket.socket() as listening, futures.ThreadPoolExecutor(1) as pool:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        pool.submit(lambda: listening.accept()[0].close())  # as one that refuses a certificate
        line = f"status --timeout 5 --controllers 127.0.0.1:{listening.getsockname()[1]}"
        error = CliRunner().invoke(cli, line.split()).exception
    assert isinstance(error, Unavailable)
    assert "look at --tls-cert" in str(error)
    assert "running" not in str(error)


def test_a_controller_that_ends_as_it_is_asked_is_asked_again() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as listening,
        futures.ThreadPoolExecutor(1) as pool,
    ):
        listening.bind(f"{folder}/c")
        listening.listen()
        listening.settimeout(60)

        def end_twice() -> None:
            for _ in range(2):
                listening.accept()[0].close()
            listening.close()
            Path(f"{folder}/c").unlink()

        ended = pool.submit(end_twice)
        line = f"status --timeout 30 --controllers unix://{folder}/c"
        error = CliRunner().invoke(cli, line.split()).exception
        ended.result(60)
    assert isinstance(error, Unavailable)
    assert "is `elasticep controller` running?" in str(error)
    assert "--tls-cert" not in str(error)


@pytest.mark.parametrize("word", ["recvmsg:Connection reset by peer", "sendmsg: Broken pipe (32)"])
def test_who_closes_before_it_reads_has_hung_up_too(word: str) -> None:
    told = f"failed to connect to all addresses; last error: UNAVAILABLE: unix:/c: {word}"
    assert operator._hung_up(Unavailable(told))
    assert not operator._hung_up(Unavailable("connect: No such file or directory (2)"))


def test_a_controller_that_is_slow_to_take_a_connection_is_asked_again() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        error = (
            CliRunner()
            .invoke(cli, ["status", "--timeout", "2", "--controllers", address])
            .exception
        )
    assert isinstance(error, Unavailable)
    assert time.monotonic() - began > 1.5  # one attempt has 0.5 s
    assert f"{address} did not answer within 2 s" in str(error)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--only x", "'x' is no index"),
        ("--only -1", "'-1' is no index"),
        ("--days -1", "Invalid value for '--days'"),
        ("--kinds bogus", "there is no fault 'bogus'; known are kill-rank"),
        ("--ranks 2 --nodes 3", "3 nodes share 2 ranks"),
    ],
)
def test_a_simulation_that_makes_no_sense_is_refused(flags: str, said: str) -> None:
    code, text = run(f"sim {flags}")
    assert code == 2
    assert said in text


class Leader(controller_pb2_grpc.ControllerServiceServicer):
    """A controller with one group, one rank of which has a long story."""

    def __init__(self, drain: Exception | None = None) -> None:
        self.drain = drain

    def CreateGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        return controller_pb2.CreateGroupResponse(created=True)

    def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        if isinstance(self.drain, ElasticEPError):
            code, status = status_of(self.drain)
            context.set_trailing_metadata(((DETAILS_KEY, status),))
            context.abort(code, str(self.drain))
        return controller_pb2.DrainResponse(epoch=3)

    def Undrain(self, request: Any, context: Any) -> Any:  # noqa: N802
        return controller_pb2.UndrainResponse()

    def NodeOff(self, request: Any, context: Any) -> Any:  # noqa: N802
        freed = controller_pb2.FreedSeats(group="g", ranks=[2, 3])
        return controller_pb2.NodeOffResponse(freed=[freed])

    def GetCluster(self, request: Any, context: Any) -> Any:  # noqa: N802
        why = "memory needs 488727138304 bytes and 20037136384 are available; " * 5
        view = types_pb2.View(group="g", epoch=3)
        rank = controller_pb2.RankStatus(rank=1, node="n[/b]", state="gone", reason=why.strip())
        config = types_pb2.GroupConfig(name="g")
        group = controller_pb2.GroupStatus(config=config, view=view, ranks=[rank], history=[why])
        endpoint = types_pb2.NodeEndpoint(node="n[/b]", domain="[d]", grpc_address="[a]:1")
        node = controller_pb2.NodeStatus(endpoint=endpoint, state="gone")
        return controller_pb2.GetClusterResponse(leader="c[/b]", groups=[group], nodes=[node])


@contextmanager
def led(leader: Leader) -> Iterator[str]:
    """Where a leader listens."""
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        controller_pb2_grpc.add_ControllerServiceServicer_to_server(leader, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_a_line_of_the_status_is_a_line_in_a_pipe() -> None:
    with led(Leader()) as address:
        code, text = run(f"status --controllers {address}")
    assert code == 0, text
    assert [line.count("bytes") for line in text.splitlines() if "bytes" in line] == [5, 5], text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    for name in ("leader: c[/b]", "n[/b]  [d]     [a]:1"):
        assert name in text, "a name is no markup"


@pytest.mark.parametrize(
    ("line", "text", "plain"),
    [
        (
            "drain g 1,3-4",
            "drained in group g: ranks 1, 3-4; epoch 3 is the first without",
            {"group": "g", "ranks": [1, 3, 4], "epoch": 3},
        ),
        ("undrain g 2", "may join group g again: rank 2", {"group": "g", "ranks": [2]}),
        (
            "node off n",
            "group g: ranks 2-3 may be given to other nodes\nnode n is forgotten",
            {"node": "n", "freed": {"g": [2, 3]}},
        ),
        ("group create FILE", "group g created", {"group": "g", "created": True}),
    ],
)
def test_what_operators_change_is_said_in_words_or_as_json(
    line: str, text: str, plain: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "g.toml"
    file.write_text(GROUP)
    line = line.replace("FILE", str(file))
    with led(Leader()) as address:
        assert run(f"{line} --controllers {address}") == (0, f"{text}\n")
        code, said = run(f"{line} --controllers {address} --output json")
        assert (code, json.loads(said)) == (0, plain)


def test_a_plan_larger_than_a_request_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(f"[{' ' * (32 << 20)}]")
    line = f"rebalance g --import {file} --controllers 127.0.0.1:1"
    error = CliRunner().invoke(cli, line.split()).exception
    assert isinstance(error, ConfigError)
    assert "a controller takes 33554432: write it without spaces" in str(error)


@pytest.mark.parametrize("text", ["", "{", "[[0, 1], [2, 3]", "[" * 200_000])
def test_a_plan_that_is_no_json_is_refused_by_its_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    line = f"rebalance g --import {file} --controllers 127.0.0.1:1"
    error = CliRunner().invoke(cli, line.split()).exception
    assert isinstance(error, ConfigError)
    assert f"{file} is no JSON: " in str(error)


def test_a_plan_that_an_older_controller_does_not_take_is_refused_with_both_sizes(
    tmp_path: Path,
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(f"[{' ' * (5 << 20)}]")
    with led(Leader()) as address:  # with the limit that gRPC has by itself
        line = f"rebalance g --import {file} --controllers {address}"
        error = CliRunner().invoke(cli, line.split()).exception
    assert isinstance(error, ConfigError)
    assert re.search(r"larger than max \(52\d{5} vs. 4194304\).*upgrade the controller", str(error))


def test_a_leader_that_did_part_of_it_is_not_taken_for_none() -> None:
    noted = Unavailable("the drain is noted, but no view without the ranks was proposed")
    with led(Leader(drain=noted)) as address:
        error = CliRunner().invoke(cli, ["drain", "g", "1", "--controllers", address]).exception
    assert isinstance(error, Unavailable)
    assert str(error) == str(noted)
