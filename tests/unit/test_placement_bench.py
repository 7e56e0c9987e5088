"""The placement bench: it runs, its figures are what it says, its files are written."""

import csv
import json

import numpy as np
import pytest

from elasticep.bench import placement as bench
from elasticep.bench.__main__ import main
from elasticep.bench.placement_cases import Case, recorded, run_greedy, run_planner
from elasticep.errors import ConfigError


@pytest.fixture
def small(monkeypatch):
    """The bench with small synthetic loads."""
    rng = np.random.default_rng(0)
    loads = rng.integers(1, 1_000, (2, 3, 32))
    case = Case("small", ((loads[0], loads[1]),), 8, 2, 10, "3 layers x 32 experts")
    monkeypatch.setattr(bench, "synthetic", lambda: iter([case]))
    return case


def test_it_prints_tables_and_writes_json_and_a_picture(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture, output = tmp_path / "p.png", tmp_path / "p.json"
    words = ["placement", "--repeats", "1", "--plot", str(picture), "--output", str(output)]
    assert main(words) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    figures = json.loads(output.read_text())["figures"]["small"]
    assert figures["elasticep"]["now_worst"] <= 1.001
    assert figures["elasticep"]["single"] == 0
    assert figures["elasticep"]["lost"] == 0
    assert figures["greedy"]["moves_percent"] > figures["elasticep"]["moves_percent"]
    printed = capsys.readouterr().out
    assert "met (goal <= 1.001)" in printed
    assert "not the public library's" in printed


def test_recorded_loads_are_read(tmp_path):
    freq = np.random.default_rng(1).random((5, 2, 32)).astype(np.float32)
    np.savez(tmp_path / "a.npz", freq=freq)
    with (tmp_path / "b.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "ep_0", "ep_1", "ep_2"])
        writer.writerow(["layer_0", 7, 0, 5])
    domains, _, counts, _ = recorded(tmp_path, most_pairs=3)
    assert len(domains.pairs) == 3
    assert np.array_equal(domains.pairs[0][0], np.rint(freq[0].astype(float) * 1e6))
    assert np.array_equal(domains.pairs[0][1], np.rint(freq[1].astype(float) * 1e6))
    assert counts.pairs[0][0].tolist() == [[7, 0, 5]]


def test_a_folder_without_loads_is_refused(small, tmp_path, capsys):
    with pytest.raises(ConfigError, match="holds no"):
        list(recorded(tmp_path, 1))
    assert main(["placement", "--data", str(tmp_path)]) == 1
    assert "holds no" in capsys.readouterr().err


def test_both_planners_are_measured_by_the_same_rule(small):
    """Greedy's figures recomputed the slow way, for one layer."""
    now, following = small.pairs[0]
    result = run_greedy(small, now, following, repeats=1)
    assert result.now.shape == (3,)
    assert (result.now >= 1.0).all()
    assert 0 < result.moves <= small.places
    ours = run_planner(small, now, following, repeats=1)
    assert ours.lost == 0
    assert result.lost > 0  # single copies of the plain greedy on the rank that died
    assert ours.now.max() < result.now.max()
