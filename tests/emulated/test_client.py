"""What a dispatch on an emulated GPU gives an engine, beside what the CPU plane gives."""

import pytest

from tests.emulated.stand import run

SCENES = "tests.emulated.scenes_client"


@pytest.mark.parametrize("formats", [False, True])
def test_what_is_received_is_the_same_on_both_planes(formats: bool) -> None:
    """Field by field and to the bit, in every layout and format: counts and what the sources say,
    too.
    """
    assert run(f"{SCENES}:parity", formats=formats) == []


def test_counts_agree_with_the_ids_in_torn_steps_too() -> None:
    """An expert kernel that sorts rows by slot would else write beyond its buffers."""
    told = run(f"{SCENES}:torn")
    assert told[::2] == told[1::2]
    assert sum(told[0]) > sum(told[4]) > 0


def test_an_attach_that_fails_on_the_engine_s_side_keeps_no_rank() -> None:
    assert run(f"{SCENES}:no_torch_for_gpus") == [0, 0]
