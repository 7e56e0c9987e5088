"""What the children of a fleet run on emulated GPUs only."""

import torch

from elasticep.bench.device_cuda import arrived, dispatch_args
from elasticep.bench.device_streams import Graph, copy, synchronize
from elasticep.bench.fleet_cuda_child import Member
from elasticep.native import abi, cuda_library
from elasticep.testing import emulated_cuda
from tests.gpu.programs import new_batch, seats_of


def set_seed(_: Member, seed: int) -> None:
    emulated_cuda.set_seed(seed)


def abi_version(_: Member) -> int:
    return int(cuda_library.api().epc_abi_version())


def captured(member: Member, replays: int) -> int:
    """Complete steps of as many replays of one graph, which has an exchange of every kind."""
    (seat,) = seats_of(member)
    g = seat.context.geometry
    kinds = [i for i in range(g.exchanges) if not g.exchange[i].cpu_sync]
    batches = [new_batch(seat, i, 8) for i in kinds]
    graph = Graph()
    counts = torch.zeros(len(kinds), g.slots, dtype=torch.int32)
    with graph.capture() as stream:
        seat.context.step_begin(8, stream)
        for i, b, counted in zip(kinds, batches, counts, strict=True):
            args = dispatch_args(i, 0, b.x, abi.Dtype.BF16, b.ids, b.weights)
            seat.context.dispatch(args, stream)
            seat.context.count_slots(i, 0, counted.data_ptr(), stream)
            a = arrived(seat.context, i)
            rows = min(a.out.shape[0], a.rows.shape[0])
            copy(a.out[:rows], a.rows[:rows], stream)
            seat.context.combine(i, 0, 8, b.out.data_ptr(), abi.Dtype.BF16, stream)
        seat.context.step_end(stream)
    complete = 0
    for _ in range(replays):
        graph.replay()
        synchronize()
        complete += seat.context.result().complete
        for b, counted in zip(batches, counts, strict=True):
            assert int(counted.sum()) == int((b.ids >= 0).sum())
        counts.fill_(-9)
    return complete
