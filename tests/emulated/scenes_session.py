"""Native sessions of the CUDA plane with a daemon's stand-in, on an emulated GPU."""

import fcntl
import itertools
import os
import struct
import termios
import threading
import time
from typing import Any

import numpy as np

from elasticep.native import abi, cuda_library, cuda_session, region
from elasticep.native import cuda as native
from elasticep.testing import emulated_cuda
from elasticep.testing.fd_socket import message_of, send
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.placements import spread
from elasticep.testing.small import EXPERTS, LAYERS, TOPK, exchange, geometry
from tests.emulated.stand import until


class EmulatedGroup(LocalGroup):
    """Its data regions are on an emulated GPU."""

    def make_data(self) -> int:
        return cuda_library.create_region(self.geometry, 0)


def counters() -> Any:
    """Two complete steps and a torn one: loads as a daemon can read them, and as the rank has."""
    g = geometry(1, exchange())
    ids = np.array([[0, 1, 2], [2, -1, 5], [2, 1, 7]], np.int32)
    weights = np.ones((3, TOPK), np.float32)
    x, out = np.zeros((2, 3, g.hidden), np.float32)
    with EmulatedGroup(g) as group:
        session = cuda_session.open_session(group.socket_path, group.ticket(0), 60_000)
        context = cuda_session.context_of(session, 0, 1)
        library = cuda_session.session_api()
        group.stage(1, 0, [0], spread(g, [0]))
        stream = emulated_cuda.Stream()
        at, size = region.header_loads_offset(g), LAYERS * EXPERTS * 8

        def told() -> list[list[int]]:
            words = np.frombuffer(os.pread(group.header_fd(0), size, at), np.int64)
            return [[int(n) for n in row] for row in words.reshape(LAYERS, EXPERTS)]

        seen = []
        for torn in (False, True, False):
            library.epc_session_step_begin(session, 3, 0, stream.cuda_stream)
            for layer in range(LAYERS):
                args = native.DispatchArgs(
                    layer=layer,
                    tokens=3 - layer,
                    x_dtype=int(abi.Dtype.FP32),
                    ids_bytes=4,
                    x=x.ctypes.data,
                    ids=ids.ctypes.data,
                    weights=weights.ctypes.data,
                )
                context.dispatch(args, stream.cuda_stream)
                tokens, dtype = 3 - layer, abi.Dtype.FP32
                context.combine(0, 0, tokens, out.ctypes.data, dtype, stream.cuda_stream)
            if torn:
                context.tear(stream.cuda_stream)
            context.step_end(stream.cuda_stream)
            stream.synchronize()
            assert context.result().complete != torn
            until(lambda: told() == context.loads(), "the header's copy")
            seen.append(told())
        library.epc_session_close(session)
    return seen


class Deaf(EmulatedGroup):
    """A daemon that reads nothing until it is told to."""

    reads = threading.Event()

    def _heard(self, rank: int, message: abi.Message) -> None:
        self.reads.wait()
        super()._heard(rank, message)


def unread() -> float:
    """A session ends while its thread waits for a daemon that takes no answers; seconds."""
    with Deaf(geometry(1, exchange())) as group:
        session = cuda_session.open_session(group.socket_path, group.ticket(0), 60_000)
        group.wait_for(lambda: group._seats[0].runner is not None, "the engine")
        runner = group._seats[0].runner
        assert runner is not None
        for _ in range(3000):  # refused: no descriptors come with them
            send(runner, bytes(message_of(abi.MessageType.STAGE, a=1)), [])
        counts = [0]

        def full() -> bool:
            answer = fcntl.ioctl(runner, termios.FIONREAD, struct.pack("i", 0))
            counts.append(struct.unpack("i", answer)[0])
            return counts[-1] > 0 and len(set(itertools.islice(reversed(counts), 100))) == 1

        until(full, "the session to have no room for more answers")
        began = time.monotonic()
        cuda_session.session_api().epc_session_close(session)
        took = time.monotonic() - began
        group.reads.set()
    return took
