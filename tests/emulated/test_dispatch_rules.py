"""What dispatch kernels do about torn steps and lost experts, on an emulated GPU."""

import pytest

from elasticep.native.cuda_structs import StepStatus, Why
from tests.emulated.stand import run

SCENES = "tests.emulated.scenes_exchange"


def test_what_pads_a_run_is_zero_after_a_step_that_only_some_blocks_left() -> None:
    """Those who went on filled rows whose labels were for others to write."""
    assert run(f"{SCENES}:padding", sms=12, torn_steps=12) == 0


@pytest.mark.parametrize("large", [False, True], ids=["copy", "push_and_expand"])
def test_what_pads_a_run_is_zero_after_blocks_began_too_late_for_their_step(large: bool) -> None:
    """They label nothing, and rows of their share may be there: of the block that was in time."""
    told = run("tests.emulated.scenes_padding:padding", sms=12, large=large)
    assert told["wrong"] == 0
    assert min(told["filled"]) > 100
    assert told["pads"] > 2000


@pytest.mark.parametrize("how", [StepStatus.TIMEOUT, StepStatus.DOOMED, StepStatus.EXPELLED])
def test_kernels_behind_a_barrier_that_let_no_step_run_touch_no_peer(how: StepStatus) -> None:
    """Their flags would name the last step that ran here, in which a peer may still be."""
    assert run(f"{SCENES}:runs_nothing", how=how.name.lower()) == [how, True]


def test_one_wait_is_on_record_until_it_is_over_and_then_the_other_channels() -> None:
    """Not parts of two, nor none because the other ended: a hang would have another root."""
    told = run(f"{SCENES}:two_waits", sms=12)
    assert told["meanwhile"]  # each since it began, not since the other was over
    assert told["over"] == 0


def test_what_is_done_about_lost_experts_changes_while_ranks_run() -> None:
    """Refused, flagged, and flagged with the weights that are left raised to the same sum, bit for
    bit as on the CPU; in rows per rank, per expert, and with replicated input.
    """
    for at, told in enumerate(run(f"{SCENES}:lost_experts")):
        if at % 3 == 0:
            assert told["why"] == [Why.LOST, Why.LOST]
        else:
            assert told == {"why": [0, 0], "flagged": True, "same": True}
