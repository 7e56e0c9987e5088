"""Statistics, tables and cases of the benches."""

import json
from pathlib import Path

import click
import numpy as np
import pytest

from elasticep.bench import __main__ as entry
from elasticep.bench import report
from elasticep.bench.case import Case
from elasticep.errors import ConfigError


def test_percentile_is_a_value_that_was_measured() -> None:
    values = [float(v) for v in range(1, 101)]
    assert report.percentile(values, 50) == 50
    assert report.percentile(values, 99) == 99
    assert report.percentile(values[:50], 99) == 50
    assert report.percentile([7.0], 50) == 7
    with pytest.raises(ConfigError, match="no values"):
        report.percentile([], 50)


def test_paired_ratio_is_of_pairs_and_not_of_medians() -> None:
    # Every pair says 2, though both sides drift by far more than that.
    below = [1.0, 10.0, 100.0, 1000.0]
    ratio = report.paired_ratio([2 * value for value in below], below)
    assert (ratio.median, ratio.low, ratio.high) == (2, 2, 2)
    assert f"{ratio}" == "2.00 [2.00, 2.00]"
    assert f"{ratio:.1f}" == "2.0 [2.0, 2.0]"
    with pytest.raises(ConfigError, match="no pairs"):
        report.paired_ratio([1.0], [])


def test_bootstrap_interval_holds_the_median_and_repeats() -> None:
    values = np.random.default_rng(0).normal(1, 0.1, 50).tolist()
    first = report.paired_ratio(values, [1.0] * 50)
    assert first.low < first.median < first.high
    assert first == report.paired_ratio(values, [1.0] * 50)


def test_verdict_knows_both_directions() -> None:
    assert report.verdict(6.1, 6, at_least=True) == "met (goal >= 6)"
    assert report.verdict(61, 60, at_least=False) == "missed (goal <= 60)"


def test_a_ratio_meets_a_goal_with_its_whole_interval() -> None:
    ratio = report.Ratio(1.01, 0.99, 1.03)
    assert ratio.verdict(1.05, at_least=False) == "met (goal <= 1.05)"
    assert ratio.verdict(1.02, at_least=False) == "undecided (goal <= 1.02)"
    assert ratio.verdict(0.98, at_least=False) == "missed (goal <= 0.98)"
    assert ratio.verdict(0.98, at_least=True) == "met (goal >= 0.98)"
    assert ratio.verdict(1.1, at_least=True) == "missed (goal >= 1.1)"


def test_report_prints_tables_and_writes_figures(
    tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    result = report.Report("exchange")
    table = report.Table("title", ["a", "long name"], notes=["a note"])
    table.add(1, 2.5)
    result.tables.append(table)
    result.figures["x"] = [1, 2]
    path = f"{tmp_path}/figures.json"
    result.finish(path)
    printed = capsys.readouterr().out
    assert "| 1 | 2.5       |" in printed
    assert "- a note" in printed
    with open(path) as file:
        written = json.load(file)
    assert written["figures"] == {"x": [1, 2]}
    assert written["machine"]["cores"] >= 1


@pytest.mark.parametrize("bench", ["exchange", "recovery", "steady --against .", "placement"])
@pytest.mark.parametrize("path", ["{tmp}", "{tmp}/none/of.json"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: str, path: str
) -> None:
    place = path.format(tmp=tmp_path)
    assert entry.main([*bench.split(), "--output", place]) == 2
    said = capsys.readouterr()
    assert f"{place} cannot be written to; name a file in a folder that is" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("exchange --ranks 0", "ranks is 0; it must be at least 1"),
        ("exchange --ranks 129", "ranks is 129; a group has at most 128"),
        ("exchange --hidden -8", "hidden is -8; it must be at least 1"),
        ("exchange --topk 9 --experts 8", "topk is 9 of 8 experts"),
        ("exchange --tokens 0", "has a number below 1"),
        ("exchange --tokens many", "is not a list of numbers"),
        ("exchange --rounds 0", "Invalid value for '--rounds'"),
        ("exchange --round-seconds -1", "Invalid value for '--round-seconds'"),
        ("exchange --launch later", "Invalid value for '--launch'"),
        ("exchange --preset NONE", "no preset 'NONE' here; use ALLGATHER"),
        ("exchange --peers nccl", "no peer 'nccl' here; use gloo, mpi"),
        ("recovery --kills 0", "Invalid value for '--kills'"),
        ("recovery --ranks 1", "Invalid value for '--ranks'"),
        ("steady --against . --pairs 0", "Invalid value for '--pairs'"),
        ("placement --repeats 0", "Invalid value for '--repeats'"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert entry.main(words.split()) in (1, 2)
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_tables_are_there_when_the_disk_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    made = report.Report("test", [report.Table("a table", ["column"], [["cell"]])])
    with pytest.raises(ConfigError, match=r"/dev/full cannot be written .*No space left"):
        made.finish("/dev/full")
    assert "| cell" in capsys.readouterr().out


def test_errors_are_one_line_and_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command(name="sample")
    def sample() -> None:
        raise ConfigError("the number is wrong")

    assert report.run_command(sample, []) == 1
    assert capsys.readouterr().err == "error: the number is wrong\n"
    assert report.run_command(sample, ["--no-such-option"]) == 2


def test_ctrl_c_is_one_word(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command("stopped")
    def command() -> None:
        raise KeyboardInterrupt

    assert report.run_command(command, []) == 130
    assert capsys.readouterr().err.strip() == "stopped"


def test_entry_lists_benches_and_refuses_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["no-such-bench"]) == 2
    assert "recovery" in capsys.readouterr().err
    assert entry.main(["exchange", "--device", "tpu"]) == 2
    assert "cpu or cuda" in capsys.readouterr().err
    assert entry.main(["exchange", "--preset", "SLOW"]) == 1
    assert "ROUTED" in capsys.readouterr().err


def test_remote_rows_count_what_crosses_a_link() -> None:
    case = Case(ranks=3, tokens=40, hidden=64, experts=10, topk=3)
    ids, rank = case.ids(1), 1
    assert all(len(set(row)) == 3 for row in ids.tolist())
    pairs = sum(e % 3 != rank for row in ids.tolist() for e in row)
    per_rank = sum(len({e % 3 for e in row} - {rank}) for row in ids.tolist())
    assert case.remote_rows(rank, "per_rank", False) == (per_rank, per_rank)
    assert case.remote_rows(rank, "per_expert", True) == (pairs, pairs)
    assert case.remote_rows(rank, "all", False) == (80, per_rank)


def test_a_case_survives_its_way_to_another_process() -> None:
    case = Case(ranks=2, tokens=4, hidden=64, experts=8, topk=2, dtype="fp32")
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
