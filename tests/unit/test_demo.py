"""The demo's pure parts: measurements, settings, messages, display, scenarios."""

import dataclasses
import io
import json
from typing import Any

import pytest
from rich.console import Console

from elasticep.control.placement import Placement
from elasticep.demo.display import LiveDisplay, PlainDisplay, Progress, RankLine, choose_display
from elasticep.demo.journal import Journal
from elasticep.demo.measure import KillWatch, steps_repeated
from elasticep.demo.prompts import prompts
from elasticep.demo.report import Report
from elasticep.demo.scenario import Scenario, script
from elasticep.demo.settings import DemoSettings, Kill, Restore, Side
from elasticep.demo.wire import pipe
from elasticep.errors import ConfigError
from elasticep.placement import round_robin, without

# ---- measurements


def test_detection_is_the_last_end_of_a_wait_and_recovery_the_last_complete_step() -> None:
    watch = KillWatch(1_000_000, frozenset({0, 1}), after_epoch=4)
    watch.torn(0, 900_000)  # before the kill
    watch.torn(2, 9_000_000)  # the victim itself
    watch.torn(0, 3_000_000)
    watch.torn(0, 8_000_000)  # a second one tells nothing new
    assert watch.detect_ms is None
    watch.entered(1, 4, 1_500_000)  # still the old view
    watch.entered(1, 5, 5_000_000)
    assert watch.detect_ms == 4.0
    watch.complete(0, 4, 1_100_000, 2_000_000)  # a step of the old view
    watch.complete(0, 5, 900_000, 2_000_000)  # begun before the kill
    watch.complete(0, 5, 6_000_000, 7_000_000)
    assert not watch.recovered
    assert watch.recover_ms is None
    watch.complete(1, 6, 6_000_000, 11_000_000)
    assert watch.recovered
    assert watch.recover_ms == 10.0


def test_a_kill_that_costs_no_member_has_nothing_to_detect() -> None:
    watch = KillWatch(1_000_000, frozenset({0}), after_epoch=None)
    watch.entered(0, 9, 2_000_000)
    watch.complete(0, 1, 1_200_000, 3_000_000)
    assert watch.detect_ms is None
    assert watch.recover_ms == 2.0


def test_a_step_that_tore_on_several_ranks_counts_once() -> None:
    assert steps_repeated([(0, 7), (1, 7), (2, 8), (0, 9)], {0, 1}) == 2


# ---- settings


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 16, 31])
def test_any_rank_of_the_group_can_be_spared(ranks: int) -> None:
    config = DemoSettings(ranks=ranks, nodes=min(2, ranks)).group_config()
    placed: Placement = round_robin(config.geometry, range(ranks), config.spare_copies)
    for dead in range(ranks):
        assert without(placed, [dead])[1] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "--ranks is 0; use 1 to 32"),
        ({"ranks": 33}, "--ranks is 33"),
        ({"ranks": 2, "nodes": 3}, "--nodes is 3; use 1 to 2"),
        ({"tokens": 0}, "--tokens is 0"),
        ({"at": 0}, "--at is 0"),
        ({"at": 10_000}, "--at is 10000; the answers take"),
        ({"ranks": 1, "nodes": 1, "kill": Kill.ENGINE}, "leaves nobody"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoSettings(**settings)  # type: ignore[arg-type]


def test_the_kill_falls_into_the_answers() -> None:
    settings = DemoSettings(ranks=8, tokens=20)
    assert all(
        len(prompt) <= settings.kill_at < len(prompt) + settings.tokens - 1
        for prompt in settings.prompts
    )


def test_prompts_are_different_sentences() -> None:
    texts = prompts(100)
    assert len(set(texts)) == 100
    assert all(text.decode("ascii").endswith(".") for text in texts)


# ---- messages and display


def test_pipe_tells_when_the_other_side_is_gone() -> None:
    ours, theirs = pipe()
    theirs.send("view", epoch=3)
    theirs.send("left")
    theirs.close()
    assert list(ours.receive()) == [{"kind": "view", "epoch": 3}, {"kind": "left"}]
    assert not ours.open
    ours.close()


MOVED = {
    **dict.fromkeys(("imbalance_before", "imbalance_after", "imbalance_planned"), 1.0),
    **dict.fromkeys(("step_ms_median", "step_ms_longest", "step_ms_usual", "step_ms_limit"), 1.0),
    "moves": 1,
    "views": 1,
    "done": True,
    "requests_unfinished": 1,
    "steps_waited": False,
}
REPORT = Report(
    ranks=4,
    nodes=2,
    killed="worker",
    detect_ms=1.25,
    recover_ms=None,
    steps_repeated=1,
    tokens_total=480,
    tokens_identical=True,
    requests_lost=0,
    epochs=[1, 2],
    details={"victim": "worker of rank 2", "min_margin": 0.00123},
)


def test_report_has_the_keys_that_scripts_read() -> None:
    assert list(REPORT.to_dict()) == [
        *("ranks", "nodes", "killed", "detect_ms", "recover_ms", "steps_repeated"),
        *("tokens_total", "tokens_identical", "requests_lost", "epochs", "details"),
    ]
    json.dumps(REPORT.to_dict())
    assert REPORT.good
    assert dict(REPORT.rows())["tokens identical"] == "yes"


@pytest.mark.parametrize(
    ("changes", "row", "text"),
    [
        ({"tokens_identical": False}, "tokens identical", "NO"),
        ({"requests_lost": 1}, "requests lost", "1"),
        ({"details": {"rebalance": MOVED | {"steps_waited": True}}}, "steps meanwhile", "TOO LONG"),
        ({"details": {"rebalance": MOVED, "migration": {"in_flight": 0}}}, None, ""),
    ],
)
def test_a_run_that_went_wrong_is_not_good_and_says_so(
    changes: dict[str, Any], row: str | None, text: str
) -> None:
    report = dataclasses.replace(REPORT, **changes)
    assert not report.good
    if row is not None:
        assert text in dict(report.rows())[row]


def test_plain_display_prints_lines_and_the_table() -> None:
    stream = io.StringIO()
    display = choose_display(stream, table=True)
    assert isinstance(display, PlainDisplay)
    display.event("members [0, 1]")
    display.result(REPORT)
    text = stream.getvalue()
    assert "s  members [0, 1]\n" in text
    assert "worker of rank 2" in text
    assert "1.2 ms" in text
    assert "0.00123" in text


def test_live_display_shows_ranks_rate_and_timeline() -> None:
    stream = io.StringIO()
    display = LiveDisplay(Console(file=stream, force_terminal=True, width=100, color_system=None))
    progress = Progress([RankLine(0, 0, "serving", epoch=3, step=17), RankLine(1, 0, "dead")], 40)
    progress.add_tokens(12)
    display.progress(progress)
    for number in range(20):
        display.event(f"happening {number}")
    display.close()
    text = stream.getvalue()
    assert "epoch 3   12 of 40 tokens   12 tokens/s" in text
    assert "happening 19" in text
    last_picture = text[text.rindex("timeline") :]
    assert "happening 5\n" not in last_picture


# ---- scenarios


class StageDouble:
    """Does what scripts ask for at once, and writes it down."""

    victim, ranks = 2, 4

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = False
        self.whole = True
        self.middle = False

    def reached(self) -> bool:
        return self.now

    def kill(self) -> None:
        self.log.append("kill")

    def backed_up(self) -> bool:
        return self.whole

    def recovered(self) -> bool:
        return self.now

    def open(self, rank: int) -> None:
        self.log.append(f"open {rank}")

    def serves(self, rank: int) -> bool:
        return self.now

    def drain(self, ranks: object) -> None:
        self.log.append(f"drain {ranks}")

    def gone(self, rank: int) -> bool:
        return self.now

    def rebalance(self) -> None:
        self.log.append("rebalance")

    def moving(self) -> bool:
        return self.middle

    def rebalanced(self) -> bool:
        return self.now


@pytest.mark.parametrize(
    ("scenario", "log"),
    [
        (Scenario.KILL, ["kill"]),
        (Scenario.REJOIN, ["kill", "open 2"]),
        (Scenario.SCALE, ["open 4", "open 5", "drain [3, 4, 5]"]),
        (Scenario.DRAIN, ["drain [2]"]),
        (Scenario.LOST_EXPERT, ["kill"]),
        (Scenario.REBALANCE, ["rebalance"]),
    ],
)
def test_scripts_wait_for_decoding_and_do_their_part(scenario: Scenario, log: list[str]) -> None:
    stage = StageDouble()
    running = script(scenario, stage, kill=False)
    next(running)
    assert stage.log == []
    stage.now = True
    assert list(running) == []
    assert stage.log == log


def test_a_kill_in_a_rebalance_waits_until_experts_are_on_their_way() -> None:
    stage = StageDouble()
    running = script(Scenario.REBALANCE, stage)
    stage.now = True
    for _ in range(3):
        next(running)
    assert stage.log == ["rebalance"]
    stage.middle = True
    assert list(running) == []
    assert stage.log == ["rebalance", "kill"]


def test_experts_are_lost_only_when_they_can_be_restored() -> None:
    stage = StageDouble()
    stage.whole = False
    running = script(Scenario.LOST_EXPERT, stage)
    stage.now = True
    for _ in range(3):
        next(running)
    assert stage.log == []
    stage.whole = True
    assert list(running) == []
    assert stage.log == ["kill"]


def test_a_seat_is_taken_anew_only_when_its_engine_is_known_to_be_gone() -> None:
    stage = StageDouble()
    stage.gone = lambda rank: False  # type: ignore[method-assign]
    running = script(Scenario.REJOIN, stage)
    stage.now = True
    for _ in range(3):
        next(running)
    assert stage.log == ["kill"], "survivors recovered first"
    stage.gone = lambda rank: True  # type: ignore[method-assign]
    assert list(running) == []
    assert stage.log == ["kill", "open 2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scenario": Scenario.DRAIN, "kill": Kill.WORKER}, "nothing is killed in it"),
        ({"scenario": Scenario.REJOIN, "kill": Kill.NONE}, "needs a worker or an engine"),
        ({"scenario": Scenario.REJOIN, "kill": Kill.DAEMON}, "no rank is lost"),
        ({"scenario": Scenario.LOST_EXPERT, "kill": Kill.DAEMON}, "no rank is lost"),
        ({"scenario": Scenario.LOST_EXPERT}, "--restore"),
        ({"scenario": Scenario.REBALANCE}, "--victim source or target"),
        (
            {"scenario": Scenario.REBALANCE, "kill": Kill.NONE, "side": Side.SOURCE},
            "there is no victim; leave --victim source away",
        ),
        (
            {"scenario": Scenario.REBALANCE, "kill": Kill.CONTROLLER, "side": Side.TARGET},
            "takes no part in a copy; use --kill worker, engine or daemon",
        ),
        (
            {"scenario": Scenario.REBALANCE, "side": Side.TARGET, "ranks": 2},
            "among which nothing can move; use --ranks 3 or more",
        ),
        ({"side": Side.TARGET}, "use --scenario rebalance with --kill worker"),
        ({"restore": Restore.DISK}, "--restore"),
        (
            {"scenario": Scenario.SCALE, "kill": Kill.NONE, "ranks": 1, "nodes": 1},
            "needs --ranks 2",
        ),
        ({"scenario": Scenario.SCALE, "kill": Kill.NONE, "ranks": 32}, "use --ranks 30 or fewer"),
    ],
)
def test_scenarios_that_make_no_sense_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoSettings(**settings)  # type: ignore[arg-type]


def test_a_joiner_brings_requests_of_its_own() -> None:
    journal = Journal([b"one", b"two"], 2, [0, 1])
    journal.take_over(1)
    (assignment,) = journal.add([b"late"], 2, 1)
    assert (assignment.request, assignment.prompt) == (2, tuple(b"late"))
    assert not journal.done
    assert [a.request for a in journal.of(1)] == [2]
