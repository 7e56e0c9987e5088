"""What barrier kernels do in regions that earlier incarnations, groups and calls left behind."""

from typing import Any

import numpy as np

from elasticep.native import cuda as native
from elasticep.native.abi import Dtype
from elasticep.native.structs import WaitPhase
from elasticep.testing.placements import spread
from elasticep.testing.small import exchange, geometry
from tests.emulated.stand import Stand, mark, until

Status = native.StepStatus


def formed_anew() -> Any:
    """Doomed barriers of an earlier group left marks far ahead, and no step in the header."""
    g = geometry(3, exchange())
    with Stand(g) as stand:
        stand.seats[0].marks[2, 0] = mark(1000, 7, 3)
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        first = stand.step(0, 1)
        second = stand.step(0, 1)
    return [[r.complete, r.step] for r in first + second]


def younger_group() -> Any:
    """A joiner whose region names steps that its group is far from; its steps until three count."""
    g = geometry(4, exchange())
    with Stand(g) as stand:
        stand.seats[2].marks[3, 0] = mark(500, 7, 3)
        stand.seats[2].cell(1, 3)[:4] = (2, 501, 1, 1)
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        for _ in range(3):
            stand.step(0, 1)
        stand.open(2)
        stand.stage(2, 1, [0, 1, 2], spread(g, [0, 1, 2]))
        complete, torn, members = 0, 0, 0
        while complete < 3:
            results = stand.step(0, 1, 2)
            assert len({(r.step, r.epoch) for r in results}) == 1, results
            complete += all(r.complete for r in results)
            torn += not results[2].complete
            members = len(results[2].members)
        last = results[0].step
    return {"torn": torn, "members": members, "last": last}


def retry() -> Any:
    """A barrier that times out and is tried again with other tokens; what both saw, twice."""
    g = geometry(2, exchange())
    with Stand(g, step_ms=200) as stand:
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        seats = stand.seats
        seats[0].begin(5)
        timed_out = seats[0].result()
        told = []
        for _ in range(2):
            results = stand.together(0, 1, tokens=7)
            told.append([list(r.tokens.values()) for r in results])
    return {"status": int(timed_out.status), "told": told}


def old_mark(later: int) -> Any:
    """A mark for an earlier incarnation, `later` views ago; how a barrier without the others ends,
    which has looked at marks until then, and the next one with them.
    """
    g = geometry(2, exchange())
    with Stand(g, step_ms=300) as stand:
        stand.seats[0].marks[1, 0] = mark(1, 5)
        return _alone_and_together(stand, 5 + later, 0)


def mark_for_predecessor() -> Any:
    """Rank 1 leaves rank 0's former incarnation behind late, in a view that has the new one."""
    g = geometry(2, exchange())
    with Stand(g, step_ms=300) as stand:
        stand.open(0, 1)
        stand.stage(5, 0, [0, 1], spread(g, [0, 1]))
        stand.together(0, 1)
        stand.seats[0].marks[1, 0] = mark(1, 6)
        return _alone_and_together(stand, 6, 5)


def _alone_and_together(stand: Stand, epoch: int, previous: int) -> Any:
    if not previous:
        stand.open(0, 1)
    stand.stage(epoch, previous, [0, 1], spread(stand.geometry, [0, 1]))
    stand.seats[0].begin()
    alone = stand.seats[0].result()
    results = stand.together(0, 1)
    return [int(alone.status), *([int(r.status), r.epoch] for r in results)]


def left_behind() -> Any:
    """The others went on without this rank in a view that it was not given."""
    g = geometry(2, exchange())
    with Stand(g) as stand:
        stand.open(0, 1)
        stand.stage(5, 0, [0, 1], spread(g, [0, 1]))
        stand.step(0, 1)
        stand.seats[0].begin()
        stand.seats[0].marks[1, 0] = mark(2, 6)
        result = stand.seats[0].result()
    return int(result.status)


def skips_nothing() -> Any:
    """Rank 1 has written for a later barrier, rank 2 for none yet: where rank 0 stays, and goes."""
    g = geometry(3, exchange())
    with Stand(g, step_ms=300) as stand:
        stand.open(0, 2)
        stand.stage(1, 0, [0, 1, 2], spread(g, [0, 1, 2]), on=[0, 2])
        seats = stand.seats
        seats[0].begin(3)
        own = seats[2].cell(1, 0)
        until(lambda: int(own[0]) > 0 and int(own[0]) % 2 == 0, "a cell")

        def speak(reader: int) -> None:
            """Rank 1's cell for the barrier after the next, as rank 0's is for this one."""
            cell = seats[reader].cell(1, 1)
            cell[1:] = own[1:]
            cell[1] = 3
            cell[0] = 2

        speak(0)
        alone = [seats[0].result()]
        seats[0].begin(5)  # it has looked often enough by the end
        alone.append(seats[0].result())
        written = int(own[1])
        speak(2)
        results = stand.together(0, 2, tokens=6)
    return {
        "alone": [[int(r.status), r.step] for r in alone],
        "written": written,
        "steps": [[r.step, list(r.tokens.values())] for r in results],
    }


def quiet_joiner() -> Any:
    """A joiner waits at the number of the members' next barrier while one of them has not staged
    its view: the epochs of that step, the joiner's cells before, and of the step that it is in.
    """
    g = geometry(3, exchange())
    with Stand(g) as stand:
        stand.open(0, 1, 2)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        stand.stage(2, 1, [0, 1, 2], spread(g, [0, 1, 2]), on=[0, 2])
        seats = stand.seats
        seats[2].begin(9)
        until(lambda: seats[2].header.status().wait_since_ns > 0, "waits for a view")
        first = stand.step(0, 1)
        cells = [int(seats[r].cell(p, 2)[0]) for r in (0, 1) for p in (0, 1)]
        stand.stage(2, 1, [0, 1, 2], spread(g, [0, 1, 2]), on=[1])
        for rank in (0, 1):
            seats[rank].begin(rank)
        joined = [seat.result() for seat in seats]
        for seat in seats:
            seat.end()
        complete = [seat.result().complete for seat in seats]
        later = stand.step(0, 1, 2)
    return {
        "first": [[int(r.status), r.epoch, r.complete] for r in first],
        "cells": cells,
        "joined": [[int(r.status), r.epoch, r.tokens] for r in joined],
        "complete": complete,
        "later": [[r.epoch, r.complete] for r in later],
    }


def late_joiner() -> Any:
    """The others have gone on in the joiner's view, and wait for it at their next barrier."""
    g = geometry(3, exchange())
    with Stand(g, suspect_ms=20) as stand:
        stand.open(0, 1, 2)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        stand.stage(2, 1, [0, 1, 2], spread(g, [0, 1, 2]))
        seats = stand.seats
        alone = stand.step(0, 1)
        seats[0].begin(7)
        until(lambda: seats[0].header.status().wait_phase == WaitPhase.BARRIER, "waits")
        waits_for = seats[0].header.status().wait_rank
        seats[2].begin(9)
        until(lambda: int(seats[0].cell(0, 2)[0]) + int(seats[0].cell(1, 2)[0]) > 0, "a cell")
        seats[1].begin(8)
        results = [seat.result() for seat in seats]
    return {
        "alone": [[r.epoch, r.complete] for r in alone],
        "waits_for": waits_for,
        "results": [[int(r.status), r.epoch, r.step, r.tokens] for r in results],
    }


def waits_on() -> Any:
    """Barriers with a limit below `suspect_after`, tried again: since when the rank waits."""
    g = geometry(2, exchange())
    with Stand(g, suspect_ms=150, step_ms=100) as stand:
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        seats = stand.seats
        seen = set()
        for _ in range(8):
            seats[0].begin()
            for status in seats[0].meanwhile():
                if status.wait_phase == WaitPhase.BARRIER:
                    seen.add((status.wait_rank, status.wait_since_ns))
            assert seats[0].result().status is Status.TIMEOUT
    return sorted(seen)


def open_end() -> Any:
    """A step that ends inside an exchange: the peer that waits for it hears of it."""
    g = geometry(2, exchange())
    with Stand(g) as stand:
        stand.open(0, 1)
        stand.stage(1, 0, [0, 1], spread(g, [0, 1]))
        x = np.zeros((1, g.hidden), np.float32)
        ids = np.zeros((1, g.topk), np.int32)
        for rank, seat in enumerate(stand.seats):
            seat.begin(1)
            args = native.DispatchArgs(
                tokens=1, x_dtype=0, ids_bytes=4, x=x.ctypes.data, ids=ids.ctypes.data
            )
            seat.here.dispatch(args, seat.stream.cuda_stream)
            if rank == 0:
                out = np.zeros((1, g.hidden), np.float32)
                seat.here.combine(0, 0, 1, out.ctypes.data, Dtype.FP32, seat.stream.cuda_stream)
            seat.end()
        results = [seat.result() for seat in stand.seats]
    return [[r.complete, int(r.fault.why), int(r.fault.rank)] for r in results]
