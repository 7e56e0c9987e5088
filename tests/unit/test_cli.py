"""The command line as a whole: what every command has in common."""

import pytest
from click.testing import CliRunner

from elasticep.cli.main import cli

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
