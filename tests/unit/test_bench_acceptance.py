"""The batches of `bench acceptance`: what is run when, what counts as passed, what is reported."""

import json
import os
import re
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from elasticep.bench import acceptance
from elasticep.bench.acceptance import Batch, batches_of, junit, lines_of, run, sanitized
from elasticep.bench.acceptance_report import GOALS, checks, goals, kills

pytestmark = pytest.mark.timeout(180)  # processes are started
ROOT = Path(__file__).parents[2]
JUNIT = "<testsuites><testsuite>{}</testsuite></testsuites>"
PASSED, SKIPPED = '<testcase name="a"/>', '<testcase name="b"><skipped/></testcase>'
FAILED = '<testcase name="c"><failure/></testcase>'


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def plain(name: str, text: str, **options: Any) -> Batch:
    return Batch("correct", name, (script(text),), lambda _log, _out: {}, 0.0, **options)


def state(out: Path) -> dict[str, str]:
    done = json.loads((out / "acceptance.json").read_text())
    return {name: batch["state"] for name, batch in done.items()}


def test_what_is_done_is_not_done_again_and_what_failed_only_if_asked(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    note = f"open({str(ran)!r}, 'a').write('{{}} ')"
    batches = [
        plain("good", note.format("good")),
        plain("bad", note.format("bad") + "; raise SystemExit(4)"),
        plain("later", note.format("later")),
    ]
    out = tmp_path / "out"
    assert run(batches[:2], out, 60.0, gpus=1) == 1
    assert run(batches, out, 60.0, gpus=1) == 1
    assert ran.read_text().split() == ["good", "bad", "later"]
    assert state(out) == {"good": "passed", "bad": "failed", "later": "passed"}
    assert run(batches, out, 60.0, gpus=1, again=True) == 1
    assert ran.read_text().split()[3:] == ["bad"]
    report = (out / "acceptance.md").read_text()
    assert "| correct | good | passed |" in report
    assert "ended with 4" in report


def test_a_batch_that_takes_too_long_is_ended_with_what_it_started(tmp_path: Path) -> None:
    shell = ("sh", "-c", f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait")
    batch = Batch("correct", "slow", (shell,), lambda _log, _out: {}, 0.0)
    assert run([batch], tmp_path, 2.0, gpus=1) == acceptance.UNFINISHED
    pid = int((tmp_path / "pid").read_text())
    with suppress(ProcessLookupError):  # gone and reaped
        process = os.pidfd_open(pid)
        assert select.select([process], [], [], 60.0)[0], "it goes on"
        os.close(process)
    assert state(tmp_path) == {"slow": "unfinished"}
    assert run([plain("slow", "pass")], tmp_path, 60.0, gpus=1) == 0


def test_a_batch_that_would_not_fit_is_left_for_the_next_call(tmp_path: Path) -> None:
    long = Batch("soak", "long", (script("pass"),), lambda _l, _o: {}, expected_s=58.0)
    first = plain("first", "import signal; signal.sigtimedwait([], 2.0)")
    assert run([first, long], tmp_path, 59.5, gpus=1) == acceptance.UNFINISHED
    assert state(tmp_path) == {"first": "passed"}
    assert run([first, long], tmp_path, 59.5, gpus=1) == 0
    # One that expects more than a call has is begun when the call is its own.
    endless = Batch("soak", "endless", (script("pass"),), lambda _l, _o: {}, expected_s=1e6)
    assert run([endless], tmp_path, 59.5, gpus=1) == 0


def test_batches_that_cannot_run_here_are_skipped_until_they_can(tmp_path: Path) -> None:
    two = plain("two", "pass", gpus=2)
    tool = plain("tool", "pass", tools=("no-such-tool",))
    assert run([two, tool], tmp_path, 60.0, gpus=1) == 0
    assert state(tmp_path) == {"two": "skipped", "tool": "skipped"}
    assert run([two, tool], tmp_path, 60.0, gpus=2) == 0
    assert state(tmp_path) == {"two": "passed", "tool": "skipped"}


@pytest.mark.parametrize(
    ("cases", "found"),
    [
        ([PASSED, PASSED, SKIPPED], {"passed": 2, "skipped": 1, "failed": 0}),
        ([PASSED, FAILED], None),
        ([SKIPPED], {"passed": 0, "skipped": 1, "failed": 0}),
        ([], None),
    ],
)
def test_tests_count_as_passed_when_none_failed(
    tmp_path: Path, cases: list[str], found: dict[str, int] | None
) -> None:
    (tmp_path / "x.xml").write_text(JUNIT.format("".join(cases)))
    if found is None:
        with pytest.raises(ValueError, match=r": c$|no such test"):
            junit("x")(tmp_path / "log", tmp_path)
    else:
        assert junit("x")(tmp_path / "log", tmp_path) == found


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        ("def test_it(): pass", "passed"),
        ("def test_it(): assert False", "failed"),
        ("import pytest; pytest.importorskip('no_such_module')\ndef test_it(): pass", "skipped"),
        ("import pytest\ndef test_it(): pytest.skip('not here')", "skipped"),
        ("", "failed"),
    ],
)
def test_pytest_says_how_a_batch_ends(tmp_path: Path, body: str, ends: str) -> None:
    (tmp_path / "test_some.py").write_text(body)
    alone = ("-c", "/dev/null", f"--rootdir={tmp_path}", f"{tmp_path}/test_some.py")
    command = (sys.executable, "-m", "pytest", "-q", f"--junitxml={tmp_path}/some.xml", *alone)
    batch = Batch("correct", "some", (command,), junit("some"), 0.0)
    assert run([batch], tmp_path, 60.0, gpus=1) == (ends == "failed")
    assert state(tmp_path) == {"some": ends}


@pytest.mark.parametrize(
    ("log", "good"),
    [
        ("=== ERROR SUMMARY: 0 errors\n=== ERROR SUMMARY: 0 errors\n", True),
        ("=== RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", True),
        ("=== ERROR SUMMARY: 0 errors\n=== ERROR SUMMARY: 3 errors\n", False),
        ("no summary at all\n", False),
    ],
)
def test_a_sanitizer_must_say_of_every_process_that_it_found_nothing(
    tmp_path: Path, log: str, good: bool
) -> None:
    (tmp_path / "x.xml").write_text(JUNIT.format(PASSED))
    (tmp_path / "log").write_text(log)
    if good:
        sanitized("x")(tmp_path / "log", tmp_path)
    else:
        with pytest.raises(ValueError, match="summaries"):
            sanitized("x")(tmp_path / "log", tmp_path)


def line(model: str, variant: str, tokens: int, us: float) -> dict[str, Any]:
    return {"model": model, "variant": variant, "tokens": tokens, "total_us": us}


def test_times_are_held_against_the_goals() -> None:
    _, model, variant, tokens, goal = GOALS[0]
    for us, met in ((goal, "yes"), (goal + 0.1, "no")):
        found = {f"exchange-{model}": [line(model, variant, tokens, us)]}
        rows = goals({"x": {"found": found}})
        assert rows[2].endswith(f"| {us:.1f} | {goal:g} | {met} |")
        assert rows[3].endswith("| not measured |")
    assert goals({"x": {"found": {"passed": 3}}}) == []


def test_kills_and_checks_are_summed_up() -> None:
    runs = {
        f"kills-{i}": {
            "found": {f"kills-{i}": [{"back_ms": i + k, "complete_ms": 9.0, "futex_ms": k}]}
        }
        for i, k in ((1, 0.5), (2, 0.25))
    }
    after = "1.50, 1.88, 2.25 | 9.00, 9.00, 9.00 | 0.25, 0.38, 0.50 |  |  |"
    assert kills(runs)[-1] == f"| all | 2 | {after}"
    times = {"off-1": 20.0, "on-1": 21.0, "off-2": 20.0, "on-2": 21.0}
    lines = {f"checks-{k}": [line("m", "ROUTED", 64, us)] for k, us in times.items()}
    assert checks({"c": {"found": lines}})[2] == "| 64 | 20.0 20.0 | 21.0 21.0 | +5.0% |"


def test_results_of_benches_are_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    assert lines_of("a")(tmp_path / "log", tmp_path) == {"a": [1]}
    with pytest.raises(OSError, match=r"b\.json"):
        lines_of("a", "b")(tmp_path / "log", tmp_path)


def test_every_gpu_test_is_in_a_batch_and_every_batch_has_one(tmp_path: Path) -> None:
    """By pytest's own selection; tests are only collected."""
    batches = [b for b in batches_of(tmp_path) if "pytest" in b.commands[0]]
    assert len({b.name for b in batches}) == len(batches)
    chosen: dict[str, set[str]] = {}
    selections = {b.commands[0][b.commands[0].index("pytest") + 1 :]: b.name for b in batches}
    collect = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    whole = subprocess.run(
        (*collect, acceptance.TESTS), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    every = set(re.findall(r"^tests/gpu/\S+::.+$", whole, re.M))
    for selection, name in selections.items():
        where = next(x for x in selection if x.startswith(acceptance.TESTS))
        expression = selection[selection.index("-k") + 1] if "-k" in selection else ""
        chosen[name] = {t for t in every if t.startswith(where) and matches(expression, t)}
        assert chosen[name], name
    assert set().union(*chosen.values()) == every
    assert {len(chosen[n]) for n in ("product-128", "product-4096")} == {36}


def test_batches_are_run_by_name_in_the_order_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("--out", str(tmp_path), "--list", "--only", "stopped", "formats")
    assert acceptance.main(chosen) == 0
    listed = [x.split(":")[0] for x in capsys.readouterr().out.splitlines()]
    assert listed == ["faults stopped", "correct formats"]
    with pytest.raises(acceptance.AcceptanceError, match="no batch tea"):
        acceptance.main((*chosen, "tea"))


def matches(expression: str, test: str) -> bool:
    """What `-k` means for conjunctions of words."""
    name = test.split("::", 1)[1]
    for term in filter(None, expression.split(" and ")):
        negated, word = term.startswith("not "), term.removeprefix("not ")
        if (word in name) == negated:
            return False
    return True
