"""Sessions of the CUDA plane on an emulated GPU: what they do for their daemon."""

import numpy as np

from tests.emulated.stand import run


def test_case_13_a_daemon_reads_loads_that_lie_on_a_gpu_from_the_header() -> None:
    """Counted once, when a step completes; the copy follows within the second."""
    first, second, third = run("tests.emulated.scenes_session:counters")
    once = np.zeros((2, 12), int)
    once[0, [0, 1, 2, 5, 7]] = [1, 2, 3, 1, 1]
    once[1, [0, 1, 2, 5]] = [1, 1, 2, 1]
    assert first == second == once.tolist()
    assert third == (2 * once).tolist()


def test_a_session_ends_at_once_though_its_daemon_takes_no_answers() -> None:
    """And its thread does not go on with a descriptor that may be another's by then."""
    assert run("tests.emulated.scenes_session:unread") < 20
