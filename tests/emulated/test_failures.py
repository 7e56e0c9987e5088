"""Calls of CUDA that fail are told with what they were for, the limit and the remedy, as the right
kind of error; nothing is left behind that keeps the next try from working.
"""

import re

from tests.emulated.stand import run

SCENES = "tests.emulated.scenes_failures"


def test_what_keeps_a_context_from_coming_up_is_told_with_limit_and_remedy() -> None:
    said = run(f"{SCENES}:contexts")
    wanted = (
        (
            "MemoryShort",
            r"the records of rank 0: \d+ bytes of pinned host memory are needed and \d+ are a",
        ),
        (
            "MemoryShort",
            r"the header of rank 0: \d+ bytes of pinned host memory are needed and \d+ are a",
        ),
        ("UsageError", r"pinning the header of rank 0: OS call failed.*ulimit"),
        (
            "MemoryShort",
            r"the tables of rank 0: \d+ bytes are needed and device 0 has \d+ free; lower",
        ),
        (
            "MemoryShort",
            r"the tables of rank 0: \d+ bytes are needed and device 0 has \d+ free; lower",
        ),
        ("UsageError", r"device 0, of compute capability 9\.0: no kernel.*ELASTICEP_CUDA_ARCHS"),
        ("MemoryShort", r"the regions of 2 ranks: \d+ bytes of address space.*ulimit -v"),
        ("UsageError", r"opening the memory of rank 0: invalid arg.*CUDA_VISIBLE_DEVICES"),
        ("UsageError", r"opening the memory of rank 1: invalid arg.*CUDA_VISIBLE_DEVICES"),
        ("MemoryShort", r"mapping the memory of rank 0: out of memory; leave the GPU"),
        ("UsageError", r"access of device 0 to the memory of rank 0: invalid argument"),
    )
    assert [kind for kind, _ in said] == [kind for kind, _ in wanted]
    for (_, sentence), (_, pattern) in zip(said, wanted, strict=True):
        assert re.search(pattern, sentence), sentence
        assert "rank 0 on device 0" in sentence


def test_a_limit_of_locked_memory_is_named() -> None:
    ((kind, sentence),) = run(f"{SCENES}:limits")
    assert kind == "MemoryShort"
    assert "a process may lock 65536" in sentence
    assert sentence.endswith("raise that of locked memory (ulimit -l, LimitMEMLOCK)")


def test_a_peer_on_a_gpu_that_cannot_be_accessed_is_told_as_such() -> None:
    ((kind, sentence),) = run(f"{SCENES}:far_peer")
    assert kind == "UsageError"
    assert "the memory of rank 1 is on device 1, which device 0 cannot access" in sentence
    assert "let daemon.devices name such" in sentence


def test_a_region_that_cannot_be_made_is_told_with_its_device() -> None:
    said = run(f"{SCENES}:regions")
    wanted = (
        ("UsageError", r"device 9, where this process sees 2: invalid device.*CUDA_VISIBLE_DEV"),
        ("MemoryShort", r"rows and outputs: \d+ bytes are needed and device 0 has \d+ free; lower"),
        ("UsageError", r"a descriptor of GPU memory: OS call failed.*ulimit -n"),
        ("MemoryShort", r"rows and outputs: \d+ bytes of address space"),
        ("UsageError", r"mapping a rank's rows and outputs: invalid argument"),
    )
    for (kind, sentence), (type_of, pattern) in zip(said, wanted, strict=True):
        assert kind == type_of
        assert re.search(pattern, sentence), sentence


def test_a_driver_that_is_too_old_is_told_with_the_version_that_is_needed() -> None:
    for kind, sentence in run(f"{SCENES}:old_driver"):
        assert kind == "UsageError"
        assert "driver version is insufficient" in sentence
        assert sentence.endswith("install a driver for CUDA 13.0 or newer")


def test_a_host_without_gpus_has_none() -> None:
    assert run(f"{SCENES}:no_device") == 0


def test_an_error_that_ends_the_context_is_a_failure_of_the_device() -> None:
    ((kind, sentence),) = run(f"{SCENES}:broken_device")
    assert kind == "DeviceFailed"
    assert "uncorrectable NVLink error" in sentence


def test_weights_whose_buffers_cannot_be_pinned_keep_the_seat_free() -> None:
    said = run(f"{SCENES}:staging_buffers")
    for kind, sentence in said:
        assert kind == "MemoryShort"
        assert re.search(
            r"through which the expert weights of rank 0 come: \d+ bytes of pinned", sentence
        ), sentence
    assert len({sentence.split(" of pinned")[0] for _, sentence in said}) == 1, "all that is needed"
