"""Expert weights on an emulated GPU: what is copied from the arena, when, and what is not."""

import pytest

from tests.emulated.stand import run

SCENES = "tests.emulated.scenes_weights"
LAYERS = 2


@pytest.mark.parametrize("seed", [0, 1])
def test_what_a_view_names_is_on_the_gpu_before_it_is_staged_and_nothing_is_copied_twice(
    seed: int,
) -> None:
    copied = [LAYERS * n for n in (12, 14, 14, 15, 16)]
    assert run(f"{SCENES}:views", seed=seed) == [[n, n] for n in copied]


def test_a_label_that_changes_during_a_copy_is_found() -> None:
    assert "layer 0 slot 12 of rank 0 holds expert 9, not expert 3" in run(
        f"{SCENES}:changing_labels"
    )


def test_a_view_is_not_staged_before_its_last_copy_has_run() -> None:
    run(f"{SCENES}:on_their_way")


def test_the_copies_of_a_view_that_is_overtaken_are_called_off() -> None:
    said, copied = run(f"{SCENES}:overtaken")
    assert "view 3 is overtaken by view 4" in said
    assert copied == 0


def test_a_slot_that_a_running_view_names_is_not_overwritten() -> None:
    assert "layer 0 slot 5 of rank 0 is used by view 1" in run(f"{SCENES}:in_use")


def test_a_view_may_be_said_again_when_it_runs() -> None:
    """It is no error of the rank, for which others would be expelled."""
    copied, said = run(f"{SCENES}:said_again")
    assert copied == LAYERS * 12
    assert "view 1 is staged already, with another content" in said


def test_a_view_whose_weights_are_not_in_the_arena_is_not_staged() -> None:
    empty, filling = run(f"{SCENES}:missing")
    assert "layer 0 slot 12 of rank 0 is empty, not expert 3" in empty
    assert "layer 0 slot 12 of rank 0 is being filled with expert 3" in filling


def test_too_little_memory_is_refused_before_anything_is_attached() -> None:
    said, engine, wanted = run(f"{SCENES}:too_little_memory")
    assert f"rank 0: {wanted} bytes are needed and device 0 has {wanted - 1} free" in said
    assert engine == 0


def test_how_far_copies_are_is_said_a_few_times_a_second_and_only_of_views_that_have_some() -> None:
    all_said, took_first, took_third, unit = run(f"{SCENES}:headway")
    assert {epoch for epoch, _, _ in all_said} == {1, 3}
    for view, slots, took in ((1, 12, took_first), (3, 4, took_third)):
        said = [(done, total) for epoch, done, total in all_said if epoch == view]
        assert said[0] == (0, LAYERS * slots * unit)
        assert {total for _, total in said} == {LAYERS * slots * unit}
        done = [done for done, _ in said]
        assert done == sorted(set(done))
        assert done[-1] <= LAYERS * slots * unit
        assert len(said) <= 2 + took / 0.4


def test_nothing_is_said_to_a_daemon_that_does_not_take_it() -> None:
    assert run(f"{SCENES}:no_headway") == []
