"""What dispatch kernels leave behind in torn steps, and what they do about lost experts."""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticep.native import abi
from elasticep.native import cuda as native
from elasticep.native.structs import WaitPhase
from elasticep.testing import emulated_cuda
from elasticep.testing.placements import spread
from elasticep.testing.small import CAP, EXPERTS, TOPK, exchange, geometry
from tests.emulated.stand import MS, Seat, Stand, mark, over, until

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
_TORN = 1  # of a leave mark


class Batch:
    """Tokens of one rank and their routing, which a kernel reads when it comes to them."""

    def __init__(self, seat: Seat, ids: Ints, weights: Floats | None = None) -> None:
        self.tokens = len(ids)
        self.x = np.full((self.tokens, seat.geometry.hidden), seat.rank + 1, np.float32)
        self.ids = np.ascontiguousarray(ids, np.int32)
        self.weights = np.ones(ids.shape, np.float32) if weights is None else weights
        self.lost = np.full(self.tokens, 7, np.uint8)

    def put(self, seat: Seat, number: int = 0, half: str = "both") -> None:
        """Its dispatch on the seat's stream."""
        seat.here.dispatch(self.args(exchange=number), seat.stream.cuda_stream, half=half)

    def args(self, **where: int) -> native.DispatchArgs:
        """Of a dispatch of it."""
        return native.DispatchArgs(
            **where,
            tokens=self.tokens,
            x_dtype=int(abi.Dtype.FP32),
            ids_bytes=4,
            x=self.x.ctypes.data,
            ids=self.ids.ctypes.data,
            weights=self.weights.ctypes.data,
            lost=self.lost.ctypes.data,
        )


def _words(seat: Seat, tag: int) -> Any:
    """Offsets of the 16-byte words of a region that begin with this tag, ascending."""
    return np.flatnonzero(seat.data[: len(seat.data) // 16 * 16].view(np.uint64)[::2] == tag) * 16


def padding(torn_steps: int) -> Any:
    """Some blocks of a dispatch hear that its step is torn, others get the last word that they
    wait for. What pads the runs of the next, smaller dispatch: how often it was not zero, when that
    many steps had been torn by a wait.
    """
    g = geometry(3, exchange(layout=abi.RowLayout.CONTIGUOUS))
    wrong, torn = 0, 0
    with Stand(g) as stand:
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        seats = stand.seats[:2]
        received = seats[0].here.received(0)
        rows = over(received.rows, (received.rows_count, g.hidden), np.float32)
        row_slots = over(received.row_slots, (received.rows_count,), np.int32)
        offsets = over(received.slot_offsets, (g.slots + 1,), np.int32)
        chosen = np.tile(np.arange(TOPK, dtype=np.int32), (CAP, 1))

        def step(tokens: int, delay: int | None) -> native.StepResult:
            for seat in seats:
                seat.begin(tokens)
            results = [seat.result() for seat in seats]
            assert all(r.status is native.StepStatus.RUN for r in results)
            batches = [Batch(seat, chosen[:tokens]) for seat in seats]
            if delay is None:
                for seat, batch in zip(seats, batches, strict=True):
                    batch.put(seat)
            else:
                _tear_some(seats, batches, results[0].step, delay)
            for seat in seats:
                seat.end()
            first, _ = [seat.result() for seat in seats]
            return first

        delay = 0
        while torn < torn_steps:
            step(1, None)
            result = step(CAP, delay)
            assert not result.complete
            by_wait = int(result.fault.phase == 2)
            torn += by_wait
            delay += 1 - 2 * by_wait if delay else 1  # about where it can go either way
            step(1, None)
            pads = np.flatnonzero(row_slots[: offsets[-1]] < 0)
            assert len(pads) == 2 * 126
            wrong += bool(rows[pads].any())
    return wrong


def _tear_some(seats: list[Seat], batches: list[Batch], step: int, delay: int) -> None:
    """Rank 0 lacks one word of rank 1 when a mark comes, and gets it a little later."""
    tag = step << 28 | 1 << 16 | 1 << 4
    batches[1].put(seats[1], half="send")
    seats[1].stream.synchronize()
    held = int(_words(seats[0], tag)[0])  # the first are of chunks
    word = seats[0].data[held : held + 16].view(np.uint64)
    word[0] = 0
    batches[0].put(seats[0])
    until(lambda: len(_words(seats[1], tag)) > 2 * CAP * TOPK, "rank 0's rows")
    seats[0].marks[2, 0] = mark(step, 1, _TORN)
    for _ in range(delay * 10):
        seats[0].header.status()
    word[0] = tag


def _renormalised(ids: Ints, weights: Floats, lost: int) -> Floats:
    """As csrc/cpu/route.cpp does it, in float32."""
    out = weights.copy()
    for t, row in enumerate(ids):
        if lost not in row:
            continue
        whole = rest = np.float32(0)
        for k, expert in enumerate(row):
            if expert < 0:
                continue
            whole += weights[t, k]
            if expert != lost:
                rest += weights[t, k]
        if rest:
            out[t] = np.where((row >= 0) & (row != lost), weights[t] * (whole / rest), weights[t])
    return out


def lost_experts() -> Any:
    """A view without the last expert under `refuse`, then what operators say while it runs."""
    per_expert = exchange(layout=abi.RowLayout.MASKED, copies=abi.Copies.PER_EXPERT)
    alike = exchange(layout=abi.RowLayout.ARRIVAL, copies=abi.Copies.ALL, replicated=1)
    g = geometry(2, exchange(), per_expert, alike)
    lost = EXPERTS - 1
    table = spread(g, [0, 1])
    table[table == lost] = -1
    rng = np.random.default_rng(5)
    told = []
    with Stand(g) as stand:
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], table)
        ids = rng.random((CAP, EXPERTS)).argsort(axis=1)[:, :TOPK].astype(np.int32)
        ids[0] = -1
        ids[1] = lost  # nothing is left of this one
        weights = rng.random(ids.shape).astype(np.float32)
        for number in range(3):
            for serve, renormalise in ((False, False), (True, False), (True, True)):
                for seat in stand.seats:
                    seat.header.set_policy(serve=serve, renormalise=renormalise)
                    seat.begin(CAP)
                batches = [Batch(seat, ids, weights) for seat in stand.seats]
                for seat, batch in zip(stand.seats, batches, strict=True):
                    batch.put(seat, number)
                results = [seat.result() for seat in stand.seats]
                torn = [seat.here.result().fault for seat in stand.seats]
                expected = _renormalised(ids, weights, lost) if renormalise else weights
                here = _told_weights(stand, number) if serve else expected
                kept = (ids >= 0) & (ids != lost)
                told.append(
                    {
                        "why": [
                            int(f.why) if f.step == r.step else 0
                            for f, r in zip(torn, results, strict=True)
                        ],
                        "flagged": bool((batches[0].lost == (ids == lost).any(1)).all()),
                        "same": bool((here == expected)[kept].all()),
                    }
                )
                for seat in stand.seats:
                    seat.end()
                    seat.result()
    return told


def _told_weights(stand: Stand, number: int) -> Floats:
    """The weights of rank 0's tokens as those hold them who serve the choice."""
    g = stand.geometry
    out = np.zeros((CAP, TOPK), np.float32)
    spec = g.exchange[number]
    per = TOPK if spec.copies == abi.Copies.PER_EXPERT else 1
    for seat in stand.seats:
        received = seat.here.received(number)
        shape = (received.id_rows, TOPK)
        ids, weights = (
            over(received.ids, shape, np.int32),
            over(received.weights, shape, np.float32),
        )
        for t in range(CAP):
            for k in range(TOPK):
                row = t * per + (k if per > 1 else 0)
                if ids[row, k] >= 0:
                    out[t, k] = weights[row, k]
    return out


def two_waits() -> Any:
    """Two channels wait for the same rank: what is on record meanwhile, and after one is over."""
    spec = exchange(channels=2)
    g = geometry(2, spec, spec)
    with Stand(g, suspect_ms=20) as stand:
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        first, second = stand.seats
        for seat in stand.seats:
            seat.begin(1)
        for seat in stand.seats:
            seat.result()
        streams = [emulated_cuda.Stream() for _ in range(2)]
        batches = [Batch(seat, np.zeros((1, TOPK), np.int32)) for seat in stand.seats]

        def put(seat: Seat, channel: int, stream: emulated_cuda.Stream) -> None:
            args = batches[seat.rank].args(exchange=channel, channel=channel)
            seat.here.dispatch(args, stream.cuda_stream)

        def record() -> tuple[int, int]:
            status = first.header.status()
            return status.wait_exchange, status.wait_since_ns

        def waits() -> bool:
            return first.header.status().wait_phase == WaitPhase.DISPATCH

        for channel, stream in enumerate(streams):
            put(first, channel, stream)
        until(waits, "a wait on record")
        held = record()
        while first.header.status().wait_phase and time.monotonic_ns() < held[1] + 500 * MS:
            assert record() == held
        answered_ns = time.monotonic_ns()
        put(second, held[0], second.stream)
        streams[held[0]].synchronize()
        until(lambda: waits() and record()[0] != held[0], "the other's turn")
        other = record()
        put(second, other[0], second.stream)
        streams[other[0]].synchronize()
        over = first.header.status().wait_phase
        for seat in stand.seats:
            seat.end()
            seat.result()
    return {"meanwhile": other[1] < answered_ns, "over": over}


def runs_nothing(how: str) -> Any:
    """A barrier lets no step run, and the kernels of one follow it, as in a graph: the status, and
    whether any byte of the peer's memory changed.
    """
    g = geometry(2, exchange())
    with Stand(g, step_ms=300 if how == "timeout" else 60_000) as stand:
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        seat, peer = stand.seats
        batches = [Batch(s, np.zeros((2, TOPK), np.int32)) for s in stand.seats]
        outs = [np.zeros_like(batch.x) for batch in batches]

        def put(own: Seat, times: int) -> None:
            for _ in range(times):
                batches[own.rank].put(own)
                out, dtype = outs[own.rank].ctypes.data, abi.Dtype.FP32
                own.here.combine(0, 0, 2, out, dtype, own.stream.cuda_stream)
            own.end()

        (ran, _) = stand.enter(0, 1, tokens=2)
        for own in stand.seats:
            put(own, 2)
        assert all(own.result().complete for own in stand.seats)
        if how == "doomed":
            seat.header.mark_dead(1, 1)
        elif how == "expelled":
            seat.marks[1, 0] = mark(ran.step + 1, 2)
        seat.begin(2)
        status = seat.result().status
        before = peer.data.copy()
        put(seat, 1)
        seat.result()
        same = bool((before == peer.data).all())
    return [int(status), same]
