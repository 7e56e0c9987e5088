"""`--output json`: a script reads one document from stdout, also when a command fails."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from elasticep.cli.main import cli, wants_json
from elasticep.errors import ElasticEPError

NOBODY = "--controllers 127.0.0.1:1"


@pytest.mark.parametrize(
    "line",
    [
        f"status {NOBODY}",
        "status --daemon /nowhere/daemon.sock --timeout 5",
        f"group delete g {NOBODY}",
        f"group show g {NOBODY}",
        f"node off n {NOBODY}",
        f"drain g 0 {NOBODY}",
        f"undrain g 0 {NOBODY}",
        f"policy g {NOBODY}",
        f"rebalance g {NOBODY}",
        f"rebalance g --watch {NOBODY}",
        f"rebalance g --export - {NOBODY}",
    ],
)
def test_that_nobody_answers_is_told_as_json(line: str) -> None:
    done = CliRunner().invoke(cli, [*line.split(), "--output", "json"])
    assert isinstance(done.exception, ElasticEPError)
    error = json.loads(done.stdout)["error"]
    assert error == {"reason": "UNAVAILABLE", "message": str(done.exception)}


@pytest.mark.parametrize(
    ("line", "reason", "said"),
    [
        ("drain g x", "CONFIG_INVALID", "'x' names no ranks"),
        ("policy g --set nix=1", "CONFIG_INVALID", "nix"),
        ("group create /nowhere/group.toml", "CONFIG_INVALID", "/nowhere/group.toml"),
        ("checkpoint /nowhere", "CHECKPOINT_INVALID", "/nowhere"),
        ("drain g", "USAGE", "Missing argument 'RANKS'"),
        ("status --timeout soon", "USAGE", "--timeout"),
        ("nix", "USAGE", "No such command 'nix'"),
    ],
)
@pytest.mark.parametrize("form", ["--output json", "--output=json"])
def test_what_cannot_be_used_is_told_as_json(line: str, reason: str, said: str, form: str) -> None:
    done = CliRunner().invoke(cli, [*line.split(), *form.split()])
    assert done.exit_code == (2 if reason == "USAGE" else 1)
    error = json.loads(done.stdout)["error"]
    assert error["reason"] == reason
    assert said in error["message"]


@pytest.mark.parametrize(
    ("arguments", "reason", "said"),
    [
        ("--model nix --ranks 8 --tokens 64", "CONFIG_INVALID", "no model or file 'nix'"),
        ("--model deepseek-v3 --ranks 4 --tokens 8 --slots 3", "GEOMETRY_INVALID", "12 slots"),
        ("--model deepseek-v3 --ranks 4", "USAGE", "--tokens"),
    ],
)
def test_a_plan_is_refused_with_the_same_reason_in_both_forms(
    arguments: str, reason: str, said: str
) -> None:
    plain = CliRunner().invoke(cli, ["plan", *arguments.split()])
    asked = CliRunner().invoke(cli, ["plan", *arguments.split(), "--output", "json"])
    assert plain.exit_code == asked.exit_code == 2
    error = json.loads(asked.stdout)["error"]
    assert error["reason"] == reason
    assert said in error["message"]
    assert plain.stderr == f"error: {reason}: {error['message']}\n"


def test_words_stay_on_stderr_and_the_status_says_what_kind_of_error_it_was() -> None:
    words = [sys.executable, "-m", "elasticep.cli.main", "drain", "g"]
    for extra, status in ((["x"], 1), ([], 2)):
        asked = subprocess.run(
            [*words, *extra, "--output", "json"], capture_output=True, text=True, timeout=120
        )
        plain = subprocess.run([*words, *extra], capture_output=True, text=True, timeout=120)
        assert asked.returncode == plain.returncode == status
        assert asked.stderr == plain.stderr
        assert json.loads(asked.stdout)["error"]["message"] in asked.stderr
        assert not plain.stdout


def test_a_full_folder_for_temporary_files_is_told_as_json() -> None:
    code = (
        "import errno, os, sys; from elasticep.cli import main; "
        "sys.argv[1:] = ['status', '--output', 'json']; "
        "main.cli.main = lambda: (_ for _ in ()).throw(OSError(errno.ENOSPC, 'full', '/t')); "
        "main.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    told = "full: /t; make room there"
    assert json.loads(done.stdout) == {"error": {"reason": "DISK_FULL", "message": told}}
    assert done.stderr == f"error: DISK_FULL: {told}\n"


@pytest.mark.parametrize(
    ("words", "json_wanted"),
    [
        (["status", "--output", "json"], True),
        (["status", "--output=json"], True),
        (["status", "--output", "text"], False),
        (["status", "json"], False),
        (["drain", "--output"], False),
    ],
)
def test_what_is_asked_for_is_seen_without_parsing(words: list[str], json_wanted: bool) -> None:
    assert wants_json(words) is json_wanted
