"""Steps on GPUs that end early or do not count: who hears of it at once, and in which words."""

import re
from typing import Any, Final

import pytest

from tests.emulated.stand import run

SMS: Final = 8  # for the kernels of two ranks that wait on one GPU
SCENES: Final = "tests.emulated.scenes"
WITHOUT_COMBINE: Final = "UsageError: a step ended with a dispatch that no combine followed"
OWN: Final = {
    "open": WITHOUT_COMBINE,
    "swallowed": WITHOUT_COMBINE,
    "swallowed-combine": r"step \d+ is torn: the engine tore it, or ended it inside an exchange;",
}
RAISED: Final = {
    "open": "UsageError",
    "swallowed": "UsageError",
    "swallowed-combine": "",
    "between": "",  # the scene takes it in
}


def torn(told: dict[str, Any], reason: str) -> None:
    """It does not count for this reason: a pattern, in which N is the step's number."""
    assert not told["complete"], told
    assert told["raised"] == "", told
    number = told["number"]
    sentence = rf"step {number} is torn: {reason.replace('N', str(number))}; it must be repeated"
    assert re.fullmatch(sentence, told["why"]), told


@pytest.mark.parametrize("seed", [0, 5])
def test_a_rank_that_ends_a_step_early_tears_it_for_all_at_once(seed: int) -> None:
    """Also where its own kernels wait for a rank that is late: nobody waits for a time-out, a
    minute here. The next step is complete.
    """
    found = run(f"{SCENES}_ends:early", seed=seed, sms=SMS)
    fewer, unnoted = found.pop("fewer"), found.pop("unnoted")
    assert len(found) == 12
    for way, told in found.items():
        assert told["at_once"], (way, told)
        assert told["raised"] == RAISED.get(way, "OwnError"), (way, told)
        own = told["own"]
        assert (own["complete"], own["raised"]) == (False, ""), (way, told)
        assert re.match(OWN.get(way, "OwnError: of rank 0$"), own["why"]), (way, told)
        name = "exact" if way in ("signal", "swallowed") else "first"
        torn(
            told["peer"],
            rf"rank [02] left step N \(in the (dispatch|combine) of exchange '{name}'\)",
        )
        torn(told["late"], r"rank [01] left step N( \(in the .* of exchange '\w+'\))?")
    assert fewer["at_once"], fewer
    assert (fewer["own"]["complete"], fewer["own"]["why"]) == (True, ""), fewer
    others, where = (fewer["peer"], fewer["late"]), r" \(in the dispatch of exchange 'first'\)"
    for told in others:
        torn(told, rf"(rank 0 ended step N without this exchange|rank [12] left step N){where}")
    assert any("ended step" in told["why"] for told in others), fewer
    for told in (unnoted["peer"], unnoted["late"]):
        torn(told, r"rank [012] left step N( \(in the dispatch of exchange 'first'\))?")
    assert unnoted["own"]["complete"], unnoted
    assert fewer["next"]["complete"], fewer


def test_a_step_says_why_it_does_not_count() -> None:
    found = run(f"{SCENES}_why:reasons", sms=SMS)
    where = r" \(in the dispatch of exchange 'first'\)"
    for which in ("dead", "dead, agreed"):
        both = found[which]["torn"]
        for told in both:
            torn(told, rf"(rank 2 incarnation 1 is dead|rank [01] left step N){where}")
        assert any("is dead" in told["why"] for told in both), found
        for told in found[which]["doomed"]:
            assert told["why"] == (
                f"step {told['number']} did not run: rank 2 incarnation 1 is dead, and epoch 1, "
                "which has it as a member, is the latest view yet; it must be repeated"
            ), found
        assert (found[which]["after"]["complete"], found[which]["after"]["why"]) == (True, "")
    late = found["late"]
    for told in late:
        torn(told, rf"(rank [012] did not answer within 1500 ms|rank [01] left step N){where}")
    assert any("did not answer" in told["why"] for told in late), found
    first, again = found["late at the barrier"]
    number = first["number"]
    assert first["raised"] == first["why"]
    assert first["why"] == (
        f"StepTimeout: step barrier: rank 2 did not reach barrier {number} in time; step "
        f"{number} did not run. Enter a new step to go on waiting"
    )
    assert (again["complete"], again["number"], again["why"]) == (True, number, "")
    fenced = found["fenced"]
    assert fenced["raised"] == fenced["why"]
    assert fenced["why"].startswith("Fenced: this rank was expelled (epoch 5): drained: new card;")
