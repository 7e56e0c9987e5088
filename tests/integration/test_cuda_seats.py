"""Seats on GPUs without one: the daemon's part, with a CUDA library that hands out host memory.

The stand-in makes memfds where the real library makes device memory, so that an engine of the CPU
plane can run on what the daemon keeps: allocator, descriptors, seats and views are the real ones.
"""

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from elasticep.device import Device
from elasticep.errors import ConfigError
from elasticep.group import GroupConfig, Launch
from elasticep.native.cuda_library import PROTOTYPES
from elasticep.native.library import CORE_NAME, CUDA_NAME, LIBRARY_DIR
from elasticep.proto import controller_pb2, types_pb2
from elasticep.spec import ExchangeSpec
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, reason_of, wait_for
from elasticep.testing.processes import descriptors

# epc_region_create: a memfd of the group's size; 6 takes for ever, 7 is full, 8 missing, 9 broken.
_LIBRARY = r"""
#include "cuda/elasticep_cuda.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
static const char* text = "";
const char* epc_last_error(void) { return text; }
uint32_t epc_abi_version(void) { return EPC_ABI_VERSION; }
uint64_t epc_struct_size(const char* name) {
  if (!strcmp(name, "config")) return sizeof(epc_config);
  if (!strcmp(name, "step_info")) return sizeof(epc_step_info);
  if (!strcmp(name, "received")) return sizeof(epc_received);
  if (!strcmp(name, "dispatch_args")) return sizeof(epc_dispatch_args);
  if (!strcmp(name, "counts")) return sizeof(epc_counts);
  return !strcmp(name, "fault") ? sizeof(epc_fault) : 0;
}
int epc_region_create(const ep_geometry* g, uint32_t device) {
  ep_layout_info layout;
  if (device == 7) { text = "device 7 has too little memory"; return EP_ESHORT; }
  if (device == 8) { text = "invalid device ordinal"; return EP_EUSAGE; }
  if (device == 9) { text = "device 9 failed"; return EP_EDEVICE; }
  while (device == 6) sleep(1);
  return ep_layout(g, &layout) ? EP_EINVAL : ep_memory_create("stand-in", layout.data_bytes);
}
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("lib")
    source = folder / "stand_in.c"
    source.write_text(_LIBRARY)
    rest = "".join(
        f"int {name}() {{ return -1; }}\n" for name in PROTOTYPES if f" {name}(" not in _LIBRARY
    )
    (folder / "rest.c").write_text(rest)
    headers = Path(__file__).parents[2] / "csrc"
    subprocess.run(
        [
            *(compiler, "-shared", "-fPIC", "-w", "-I", str(headers)),
            *("-o", str(folder / CUDA_NAME), str(source), str(folder / "rest.c")),
            *("-L", str(LIBRARY_DIR), "-l:" + CORE_NAME, f"-Wl,-rpath,{LIBRARY_DIR}"),
        ],
        check=True,
        capture_output=True,
    )
    (folder / CORE_NAME).symlink_to(LIBRARY_DIR / CORE_NAME)
    return folder


def on_gpu(**changes: Any) -> GroupConfig:
    return small_config(device=Device.CUDA, launch=Launch.INLINE, **changes)


def start(lab: Lab, libraries: Path, seats: str, *flags: str) -> DaemonProcess:
    daemon = lab.daemon("n0", seats, *flags, start=False)
    daemon.environment["ELASTICEP_LIBRARY_DIR"] = str(libraries)
    return daemon.start()


def test_an_allocator_makes_the_memory_and_leaves(libraries: Path) -> None:
    with Lab() as lab:
        lab.create(on_gpu())
        daemon = start(lab, libraries, "g:0-1", "--devices", "3,4")
        engines = lab.serve(daemon, [0, 1])
        assert lab.step(engines) == ["stepped 1 2 1"] * 2
        taken = daemon.events("memory.taken")
        assert sorted((event["rank"], event["device"]) for event in taken) == [(0, 3), (1, 4)]
        seat = daemon.seat("g", 0)
        assert (seat.worker_pid, seat.engine_pid) == (0, engines[0].pid)
        wait_for(lambda: len(lab.processes()) == 3, "the allocators to be gone")  # daemon, engines
        # The memory outlives its engine: the next incarnation gets it without another allocator.
        engines[1].close()
        lab.controller.wait_seat("g", 1, types_pb2.SEAT_STATE_READY, 2)
        again = lab.engine(daemon, "g", 1).up()
        lab.controller.wait_seat("g", 1, types_pb2.SEAT_STATE_ATTACHED, 2)
        assert len(daemon.events("memory.taken")) == 2
        again.close()


def test_a_restarted_daemon_takes_the_memory_that_engines_bring(libraries: Path) -> None:
    with Lab() as lab:
        lab.create(on_gpu())
        daemon = start(lab, libraries, "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        daemon.kill()
        daemon.start()
        wait_for(lambda: len(daemon.events("seat.reattached")) == 2, "both engines to come back")
        assert lab.step(engines) == ["stepped 1 2 1"] * 2
        engines[1].close()
        lab.controller.wait_seat("g", 1, types_pb2.SEAT_STATE_READY, 2)
        assert len(daemon.events("memory.taken")) == 2


def test_what_an_allocator_cannot_do_ends_the_incarnation_with_the_reason(libraries: Path) -> None:
    with Lab() as lab:
        lab.create(on_gpu())
        daemon = start(lab, libraries, "g:0", "--devices", "7")
        dead = lab.controller.wait_seat("g", 0, types_pb2.SEAT_STATE_DEAD, 1)
        assert "device 7 has too little memory" in dead.cause
        again = lab.controller.wait_seat("g", 0, types_pb2.SEAT_STATE_DEAD, 2)  # tried anew
        assert again.cause == dead.cause
        assert not daemon.events("memory.taken")
        with pytest.raises(grpc.RpcError) as caught:
            daemon.attach("g", 0, wait_ms=60_000)
        assert reason_of(caught.value) == "MEMORY_SHORT"


def refusal(libraries: Path, device: int) -> tuple[str, str]:
    """Reason and text with which an attach to a seat on a device is refused."""
    with Lab() as lab:
        lab.create(on_gpu())
        daemon = start(lab, libraries, "g:0", "--devices", str(device))
        with pytest.raises(grpc.RpcError) as caught:
            daemon.attach("g", 0, wait_ms=60_000)
        return reason_of(caught.value), str(cast(grpc.Call, caught.value).details())


def test_a_device_that_is_not_there_is_told_with_its_setting(libraries: Path) -> None:
    reason, text = refusal(libraries, 8)
    assert reason == "USAGE"
    assert "device 8: invalid device ordinal; this node has 0 usable GPUs" in text
    assert "daemon.devices" in text


def test_a_device_that_is_broken_is_told_as_such(libraries: Path) -> None:
    reason, text = refusal(libraries, 9)
    assert reason == "DEVICE_FAILED"
    assert "region on device 9: device 9 failed" in text


def test_an_engine_hears_at_once_that_there_is_no_cuda_library(tmp_path: Path) -> None:
    (tmp_path / CORE_NAME).symlink_to(LIBRARY_DIR / CORE_NAME)
    with Lab() as lab:
        lab.create(on_gpu())
        daemon = start(lab, tmp_path, "g:0")
        with pytest.raises(grpc.RpcError) as caught:
            daemon.attach("g", 0, wait_ms=60_000)
        assert reason_of(caught.value) == "NATIVE"
        text = str(cast(grpc.Call, caught.value).details())
        assert str(tmp_path / CUDA_NAME) in text
        assert text.endswith("build with ELASTICEP_CUDA=ON where nvcc is on PATH"), "not cut"


def test_an_allocator_that_dies_ends_the_incarnation(libraries: Path) -> None:
    with Lab() as lab:
        lab.create(on_gpu())
        start(lab, libraries, "g:0", "--devices", "6")

        def allocator() -> int | None:
            for pid in lab.processes():
                if b"allocator" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
            return None

        os.kill(wait_for(allocator, "the allocator"), 9)
        dead = lab.controller.wait_seat("g", 0, types_pb2.SEAT_STATE_DEAD, 1)
        assert "the allocator ended: killed by SIGKILL" in dead.cause


@pytest.mark.parametrize(
    ("device", "said"),
    [("3", "memory.taken"), ("6", "seat.starting"), ("7", "seat.start_failed")],
)
def test_a_group_is_let_go_of_whether_its_memory_is_there_or_coming_or_cannot_be_had(
    libraries: Path, device: str, said: str
) -> None:
    with Lab() as lab:
        lab.create(on_gpu())
        daemon = start(lab, libraries, "g:0", "--devices", device)
        wait_for(lambda: daemon.events(said), said)
        lab.controller.auto_grant = False
        gone = controller_pb2.GroupForgotten(group="g", incarnation=99, reason="a test")
        lab.controller.order("n0", controller_pb2.ControllerMessage(forgotten=gone))
        wait_for(lambda: daemon.events("group.forgotten"), "the group to be let go of")
        wait_for(lambda: lab.processes() == [daemon.pid], "its allocator to be gone")
        held = descriptors(daemon.pid)
        assert held
        assert not [name for name in held if "stand-in" in name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"launch": Launch.SERVICE}, "launch = 'inline'"),
        (
            {"exchanges": (("sums", ExchangeSpec.preset("ROUTED", combine_dtype="fp8")),)},
            "rows of 132 bytes; on a GPU they are a multiple of 16",
        ),
    ],
)
def test_what_kernels_do_not_carry_out_is_refused(changes: dict[str, Any], words: str) -> None:
    plain: dict[str, Any] = {"device": Device.CUDA, "launch": Launch.INLINE}
    geometry = small_config().geometry
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        small_config(**{**plain, "geometry": replace(geometry, hidden=128), **changes})
