"""What pads the runs of a dispatch after one that some blocks left, because their step was torn
when they began. The others had filled rows by then, also such as those blocks were to label.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from elasticep.native import abi
from elasticep.native import cuda as native
from elasticep.testing import emulated_cuda
from elasticep.testing.small import CAP, exchange, geometry
from tests.emulated.scenes_exchange import Batch
from tests.emulated.stand import Seat, Stand, over, until

EXPERTS: Final = 16  # all on rank 0, each with a run there
KERNELS: Final = 3  # before the one that places rows: tails, or rows, and two that find places
SMS: Final = 12  # of which each of three seats may take a third


def _small() -> tuple[abi.Geometry, int, npt.NDArray[np.int32]]:
    """Rows that arrive and are then copied by a kernel of their own; a block labels 512 rows."""
    g = geometry(3, exchange(layout=abi.RowLayout.CONTIGUOUS), experts=EXPERTS, slots=16, topk=8)
    return g, CAP, np.tile(np.arange(8, dtype=np.int32), (CAP, 1))


def _large() -> tuple[abi.Geometry, int, npt.NDArray[np.int32]]:
    """Rows that are placed while others are on the link; a block labels 1,024 rows."""
    spec = exchange(layout=abi.RowLayout.CONTIGUOUS, max_tokens=512)
    g = geometry(3, spec, experts=EXPERTS, slots=16, topk=8, hidden=2048)
    return g, 40, np.array([[(t + i) % 16 for i in range(8)] for t in range(40)], np.int32)


def padding(large: bool) -> dict[str, Any]:
    """Rows that the first block filled in a torn step; whether pads of the next ones were zero."""
    g, tokens, chosen = _large() if large else _small()
    table = np.full((g.layers, g.max_ranks, g.slots), -1, np.int32)
    table[:, 0] = np.arange(EXPERTS)
    with Stand(g) as stand:
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], table)
        seat, peer = stand.seats[:2]
        if not large:
            seat.here.tune(tuning=native.Tuning.UNFUSED)
        received = seat.here.received(0)
        rows = over(received.rows, (received.rows_count, g.hidden), np.float32)
        row_slots = over(received.row_slots, (received.rows_count,), np.int32)
        offsets = over(received.slot_offsets, (g.slots + 1,), np.int32)
        filled, wrong, pads = [], 0, 0
        for torn in (False, True, False, True, False):
            for each in (seat, peer):
                each.begin(tokens)
            assert all(s.result().status is native.StepStatus.RUN for s in (seat, peer))
            brought = chosen if torn else chosen[::8][:2]  # of every run some
            batches = [Batch(s, brought) for s in (seat, peer)]
            batches[1].put(peer, half="send")
            peer.stream.synchronize()
            if torn:
                rows[:] = 0
                filled.append(_tear_late(seat, batches[0], rows, large))
            else:
                batches[0].put(seat)
                seat.stream.synchronize()
                at = np.flatnonzero(row_slots[: offsets[-1]] < 0)
                pads += len(at)
                wrong += int(rows[at].any(1).sum())
            for each in (seat, peer):
                each.end()
                each.result()
    return {"filled": filled, "wrong": wrong, "pads": pads}


def _tear_late(seat: Seat, batch: Batch, rows: npt.NDArray[np.float32], large: bool) -> int:
    """The dispatch of a step that is torn when its last kernel's first blocks have run."""
    pushers = 1 if large else 0
    emulated_cuda.hold_blocks(KERNELS, pushers + 1)
    side = emulated_cuda.Stream()
    batch.put(seat)
    until(lambda: emulated_cuda.held_blocks() == SMS // 3 - pushers - 1, "blocks that begin late")
    # The first of those that place rows: its chunks are every third one, or the first warps' rows.
    mine = range(0, batch.tokens, 3) if large else range(batch.tokens)
    expected = len(mine) * batch.ids.shape[1] * (2 if large else 1)
    until(lambda: int(rows.any(1).sum()) == expected, "the first block's rows")
    seat.here.tear(side.cuda_stream)
    side.synchronize()
    emulated_cuda.let_blocks_begin()
    seat.stream.synchronize()
    return int(rows.any(1).sum())
