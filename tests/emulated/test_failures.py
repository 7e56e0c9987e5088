"""Calls of CUDA that fail are told with what they were for, the limit and the remedy, as the right
kind of error; nothing is left behind that keeps the next try from working.
"""

import re
from typing import Final, cast

import grpc
import pytest

from elasticep.device import Device
from elasticep.errors import DeviceFailed
from elasticep.group import Launch
from elasticep.testing import emulated_cuda
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import reason_of
from tests.emulated.stand import run

SCENES: Final = "tests.emulated.scenes_failures"
INITIALISATION: Final = 3
INSUFFICIENT_DRIVER: Final = 35
UNKNOWN: Final = 999
REMEDY: Final = "reset the GPU (nvidia-smi --gpu-reset) or take it out of daemon.devices"


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


def test_a_region_on_a_broken_device_is_a_failure_of_the_device_with_a_remedy() -> None:
    said = run(f"{SCENES}:broken_regions")
    assert len(said) == 6
    for kind, sentence in said:
        assert kind == "DeviceFailed"
        assert re.match(
            r"region on device 1: .*: device 1 failed: uncorrectable (ECC|NVLink) error", sentence
        ), sentence
        assert sentence.endswith(REMEDY)


def test_a_seat_on_a_broken_device_is_refused_with_that_failure() -> None:
    """By the daemon, whose allocator met it; an engine that attaches had heard `NativeError`."""
    with Lab() as lab:
        lab.create(small_config(device=Device.CUDA, launch=Launch.INLINE))
        daemon = lab.daemon("n0", "g:0", "--devices", "1", start=False)
        broken = {emulated_cuda.FAILING_VARIABLE: "cudaMemset=220"}
        daemon.environment.update(emulated_cuda.environment() | broken)
        daemon.start()
        with pytest.raises(grpc.RpcError) as caught:
            daemon.attach("g", 0, wait_ms=60_000)
        assert reason_of(caught.value) == DeviceFailed.reason
        sentence = str(cast(grpc.Call, caught.value).details())
        assert "device 1 failed: uncorrectable NVLink error" in sentence
        assert sentence.endswith(REMEDY), "not cut"


def test_a_driver_that_cannot_be_used_is_told_with_what_to_do() -> None:
    for kind, sentence in run(f"{SCENES}:no_driver", status=INSUFFICIENT_DRIVER):
        assert kind == "UsageError"
        assert "driver version is insufficient" in sentence
        assert sentence.endswith("install a driver for CUDA 13.0 or newer")
    for kind, sentence in run(f"{SCENES}:no_driver", status=INITIALISATION):
        assert kind == "UsageError"
        assert "Xid" in sentence
    for kind, sentence in run(f"{SCENES}:no_driver", status=UNKNOWN):
        assert kind == "DeviceFailed"
        assert "device 1 failed" in sentence


def test_a_host_without_gpus_has_none() -> None:
    assert run(f"{SCENES}:no_device") == 0


def test_an_error_that_ends_the_context_is_a_failure_of_the_device() -> None:
    ((kind, sentence),) = run(f"{SCENES}:broken_device")
    assert kind == "DeviceFailed"
    assert "cudaMemsetAsync: device 0 failed: uncorrectable NVLink error" in sentence
    assert sentence.endswith(REMEDY)


def test_weights_whose_buffers_cannot_be_pinned_keep_the_seat_free() -> None:
    said = run(f"{SCENES}:staging_buffers")
    for kind, sentence in said:
        assert kind == "MemoryShort"
        assert re.search(
            r"through which the expert weights of rank 0 come: \d+ bytes of pinned", sentence
        ), sentence
    assert len({sentence.split(" of pinned")[0] for _, sentence in said}) == 1, "all that is needed"
