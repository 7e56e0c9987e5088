"""README and docs: the engine runs as written, and every command and link is there."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import elasticep
from elasticep.cli.main import SUBCOMMANDS, cli
from elasticep.runtime.seats import SeatState

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


def block(kind: str) -> str:
    """The only fenced block of a kind in the README."""
    found = re.findall(rf"^```{kind}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.mark.timeout(400)
def test_engine_of_the_readme_runs_as_written(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "engine.py").write_text(block("python"))
    script = block("sh").replace("/tmp/eep", str(tmp_path / "eep"))
    # `elasticep` and `python` of this environment; a build in the tree need not be installed.
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, arguments in (("elasticep", "-m elasticep.cli.main "), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ELASTICEP_")}
    path = f"{folder}:{os.environ['PATH']}"
    script_process = subprocess.Popen(
        ["bash", "-e", "-c", script + "wait\n"],
        cwd=tmp_path,
        env={**kept, "PATH": path, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = script_process.communicate(timeout=380)
    finally:
        script_process.kill()
        _end_what_is_left(tmp_path)
    logs = "".join(log.read_text() for log in tmp_path.glob("eep/*.log"))
    assert script_process.returncode == 0, said + logs
    for rank in range(2):
        assert f"rank {rank}: 20 steps in epoch 1, all as one process" in said


def _end_what_is_left(folder: Path) -> None:
    """SIGKILL to processes that a failed run left in `folder`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = (process / "cwd").readlink() == folder
        except OSError:
            continue
        if ours:
            os.kill(int(process.name), signal.SIGKILL)


def targets_of_the_makefile() -> set[str]:
    text = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", text, flags=re.MULTILINE))


def commands_of(text: str) -> set[str]:
    """`make X` and `elasticep X` where they are code: in backticks, or in a block."""
    code = re.findall(r"^```(?:sh)?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    code += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    # After whitespace or at the beginning: elasticep/engines and docs/elasticep are no commands.
    found: set[str] = set()
    for part in code:
        found |= {f"make {word}" for word in re.findall(r"(?<!\S)make ([a-z][\w-]*)", part)}
        found |= {f"elasticep {word}" for word in re.findall(r"(?<!\S)elasticep ([a-z]\w*)", part)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_of_a_page_exists(page: Path) -> None:
    known = {f"make {target}" for target in targets_of_the_makefile()}
    known |= {
        f"elasticep {name}"
        for name in SUBCOMMANDS
        if cli.get_command(None, name) is not None  # type: ignore[arg-type]
    }
    assert commands_of(page.read_text()) - known == set()


def test_commands_are_found_in_the_readme() -> None:
    assert commands_of(README) >= {"make demo", "make test", "elasticep demo", "elasticep daemon"}


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target}: there is no such file"
        if anchor:
            assert anchor in anchors_of(file), f"{target}: there is no such heading"


def test_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    missing = {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"} - linked
    assert missing == set(), "add a line to docs/README.md"


def test_pages_name_no_flag_that_a_command_lacks() -> None:
    for page in PAGES:
        for name, rest in re.findall(
            r"(?<!\S)elasticep ([a-z]+)((?: [^`\n&|;]+)?)", page.read_text()
        ):
            command = cli.get_command(None, name) if name in SUBCOMMANDS else None  # type: ignore[arg-type]
            if command is None or hasattr(command, "commands"):
                continue
            known = {
                option
                for parameter in command.params
                for option in parameter.opts + parameter.secondary_opts
            }
            flags = set(re.findall(r"(?<!\S)(--[a-z][a-z-]+)", rest))
            assert flags <= known | {"--help"}, (
                f"{page.name}: elasticep {name} has no {flags - known}"
            )


@pytest.mark.parametrize("name", ["operations.md", "faults.md"])
def test_log_events_of_a_page_are_written_somewhere(name: str) -> None:
    source = "".join(path.read_text() for path in Path(elasticep.__file__).parent.rglob("*.py"))
    written = set(re.findall(r"\"([a-z]+\.[a-z_]+)\"", source))
    written |= {f"seat.{state}" for state in SeatState}
    cells = re.findall(r"^\|.*\|$", (ROOT / "docs" / name).read_text(), flags=re.MULTILINE)
    events = set(re.findall(r"`([a-z]+\.[a-z_]+)`", "".join(cells)))
    events -= {"step.complete", "step.token_ok"}  # of the client
    assert len(events) > 10
    assert events - written == set()
