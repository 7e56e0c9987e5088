"""What the children of a fleet run to look at single rules: bits, refusals, works, barriers."""

import random
import time
from typing import Any

import torch

from elasticep.bench.device_cuda import TORCH_DTYPES, arrived, dispatch_args
from elasticep.bench.device_streams import device_of, new_stream, pause, synchronize
from elasticep.bench.fleet_cuda import uniform_placement
from elasticep.bench.fleet_cuda_child import Member
from elasticep.native import abi
from tests.gpu.programs import (
    FLOATS,
    Seat,
    check_slot_counts,
    new_batch,
    run_experts,
    seats_of,
)


def odd_rows(tokens: int, hidden: int) -> torch.Tensor:
    """float32 rows with every kind of block: zeros, tiny, huge, NaN, infinities, plain."""
    generator = torch.Generator("cpu").manual_seed(3)
    x = torch.randn(tokens, hidden, generator=generator)
    blocks = x.view(tokens, hidden // 128, 128)
    blocks[0, 0] = 0.0
    blocks[1, 0] *= 1e-39
    blocks[2, 0] *= 1e35
    blocks[3, 0, 5] = float("nan")
    blocks[4, 0, 7] = float("inf")
    blocks[5, 0, 9] = -float("inf")
    blocks[6] *= torch.logspace(-8, 8, 128)
    return x


def quantised_bits(member: Member, dtype: int, packed: bool, global_scale: float) -> dict[str, Any]:
    """Own rows as they arrive against what the CPU plane makes of them."""
    (seat,) = seats_of(member)
    g = seat.context.geometry
    x = odd_rows(16, g.hidden).to(seat.factors.device)
    ids = torch.zeros(16, g.topk, dtype=torch.int64, device=x.device)
    weights = torch.ones(16, g.topk, device=x.device)
    stream = seat.stream.cuda_stream
    seat.context.step_begin(16, stream)
    args = dispatch_args(0, 0, x, abi.Dtype.FP32, ids, weights, global_scale=global_scale)
    synchronize()
    seat.context.dispatch(args, stream)
    synchronize()
    a = arrived(seat.context, 0)
    assert a.scales is not None
    rows = a.rows.view(torch.uint8)[:16].cpu()
    host = x.cpu().contiguous()
    want = torch.zeros_like(rows)
    want_scales = torch.zeros(16, g.hidden // 16 * 4, dtype=torch.uint8)
    code = abi.api().ep_quantise(
        0, dtype, int(packed), host.data_ptr(), int(abi.Dtype.FP32), 16, g.hidden,
        global_scale or 1.0, want.data_ptr(), want_scales.data_ptr(),
    )  # fmt: skip
    abi.check(code, "quantise")
    per_row = {abi.Dtype.FP8: g.hidden // 32, abi.Dtype.MXFP8: g.hidden // 32}.get(
        abi.Dtype(dtype), g.hidden // 16
    )
    want_scales = want_scales.flatten()[: 16 * per_row].view(16, per_row)
    scales = a.scales.cpu()
    if packed:  # exponents of 128 elements each, four to a word
        want_scales = (want_scales.view(torch.int32) >> 23).to(torch.uint8)
        scales = scales[0, :, :16].t().clone(memory_format=torch.contiguous_format)
        scales = scales.view(16, -1).view(torch.uint8)
    if dtype != abi.Dtype.NVFP4:  # a NaN may have either sign
        rows = torch.where((rows & 0x7F) == 0x7F, 0x7F, rows)
        want = torch.where((want & 0x7F) == 0x7F, 0x7F, want)
    arrival = seat.context.received(0).arrivals
    return {
        "rows": int((rows != want).sum()),
        "scales": int((scales[:16] != want_scales).sum()),
        "arrival": arrival is not None,
    }


def rows_quantised_before(member: Member, dtype: int, off: int, tokens: int) -> dict[str, int]:
    """Rows and scales that the engine quantised itself, against what arrives of them. `off`: bytes
    by which the scales lie beside a multiple of four."""
    (seat,) = seats_of(member)
    g = seat.context.geometry
    device = seat.factors.device
    row_bytes = g.hidden // 2 if dtype == abi.Dtype.NVFP4 else g.hidden
    scale_bytes = g.hidden // {abi.Dtype.MXFP8: 32, abi.Dtype.NVFP4: 16}[abi.Dtype(dtype)]
    generator = torch.Generator("cpu").manual_seed(7)
    x = torch.randint(1, 0x7F, (tokens, row_bytes), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (tokens, scale_bytes), generator=generator, dtype=torch.uint8)
    x = x.to(device)
    room = torch.empty(off + scales.numel(), dtype=torch.uint8, device=device)
    room[off:] = scales.flatten().to(device)
    ids = torch.zeros(tokens, g.topk, dtype=torch.int64, device=device)
    weights = torch.ones(tokens, g.topk, device=device)
    stream = seat.stream.cuda_stream
    seat.context.step_begin(tokens, stream)
    args = dispatch_args(
        0, 0, x, abi.Dtype(dtype), ids, weights, x_scales=room[off:] if tokens else None
    )
    synchronize()
    seat.context.dispatch(args, stream)
    synchronize()
    a = arrived(seat.context, 0)
    assert a.scales is not None
    return {
        "rows": int((a.rows.view(torch.uint8)[:tokens] != x).sum()),
        "scales": int((a.scales[:tokens].cpu() != scales).sum()),
    }


def scales_brought(member: Member, scale: float) -> dict[str, Any]:
    """A step with fp8 rows whose scales are all `scale`, but for one token's 1.0."""
    (seat,) = seats_of(member)
    g = seat.context.geometry
    device, tokens = seat.factors.device, 6
    x = torch.ones(tokens, g.hidden, device=device).to(torch.float8_e4m3fn)
    scales = torch.full((tokens, g.hidden // 128), scale, device=device)
    scales[0] = 1.0
    ids = torch.zeros(tokens, g.topk, dtype=torch.int64, device=device)
    weights = torch.ones(tokens, g.topk, device=device)
    out = torch.empty(tokens, g.hidden, dtype=torch.bfloat16, device=device)
    arrived(seat.context, 0).out.zero_()
    synchronize()
    stream = seat.stream.cuda_stream
    seat.context.step_begin(tokens, stream)
    args = dispatch_args(0, 0, x, abi.Dtype.FP8, ids, weights, x_scales=scales)
    seat.context.dispatch(args, stream)
    seat.context.combine(0, 0, tokens, out.data_ptr(), abi.Dtype.BF16, stream)
    seat.context.step_end(stream)
    synchronize()
    result = seat.context.result()
    return {"complete": result.complete, "why": int(result.fault.why)}


def slots_counted(member: Member, tokens: int) -> int:
    """Choices that two dispatches brought, as counts of their slots say; the second is smaller."""
    (seat,) = seats_of(member)
    found = 0
    for n in (tokens, tokens // 3):
        b = new_batch(seat, 0, n)
        synchronize()
        stream = seat.stream.cuda_stream
        seat.context.step_begin(n, stream)
        seat.context.dispatch(dispatch_args(0, 0, b.x, abi.Dtype.BF16, b.ids, b.weights), stream)
        synchronize()
        brought = check_slot_counts(seat, 0)
        assert brought == int((b.ids >= 0).sum())
        found += brought
        seat.context.combine(0, 0, n, b.out.data_ptr(), abi.Dtype.BF16, stream)
        seat.context.step_end(stream)
        synchronize()
        assert seat.context.result().complete
    return found


def many_exchanges(member: Member, count: int) -> dict[str, Any]:
    """One step of `count` exchanges on a channel, and a short one after it."""
    (seat,) = seats_of(member)
    b = new_batch(seat, 0, 1)
    a = arrived(seat.context, 0)
    a.out.zero_()
    synchronize()
    stream = seat.stream.cuda_stream
    found = []
    for exchanges in (count, 1):
        seat.context.step_begin(1, stream)
        for _ in range(exchanges):
            args = dispatch_args(0, 0, b.x, abi.Dtype.BF16, b.ids, b.weights)
            seat.context.dispatch(args, stream)
            seat.context.combine(0, 0, 1, b.out.data_ptr(), abi.Dtype.BF16, stream)
        seat.context.step_end(stream)
        synchronize()
        found.append(seat.context.result())
    return {"complete": [r.complete for r in found], "why": int(found[0].fault.why)}


def tear_with(member: Member, exchange: int, what: str, tokens: int = 8) -> list[dict[str, Any]]:
    """One dispatch that cannot go on, for the reason `what`; the fault of each rank, and a
    whole step after it."""
    seats = seats_of(member)
    g = member.spec.shape()
    for seat in seats:
        seat.context.step_begin(tokens, seat.stream.cuda_stream)
    batches = []
    for seat in seats:
        b = new_batch(seat, exchange, tokens + (seat.rank if what == "tokens" else 0))
        if what == "repeat":
            b.ids.fill_(1)
        elif what == "id" and seat.rank == 0:
            b.ids[3, 1] = g.experts + 4
        elif what == "lost":
            b.ids[2, 0] = g.experts - 1
        batches.append(b)
    synchronize()
    for seat, b in zip(seats, batches, strict=True):
        layer = seat.rank % g.layers if what == "layer" else 0
        args = dispatch_args(exchange, layer, b.x, x_dtype(g, exchange), b.ids, b.weights)
        seat.context.dispatch(args, seat.stream.cuda_stream)
    for seat, b in zip(seats, batches, strict=True):
        stream = seat.stream.cuda_stream
        out = b.out.data_ptr()
        seat.context.combine(exchange, 0, b.x.shape[0], out, x_dtype(g, exchange), stream)
        seat.context.step_end(stream)
    synchronize()
    faults = []
    for seat in seats:
        result = seat.context.result()
        names = ("why", "rank", "layer", "expert", "slot", "rows", "room")
        faults.append({n: int(getattr(result.fault, n)) for n in names})
        faults[-1]["complete"] = result.complete
        counts = arrived(seat.context, exchange).counts  # an expert kernel would read these now
        faults[-1]["counted"] = 0 if counts is None else int(counts.sum())
    return faults


def x_dtype(g: abi.Geometry, exchange: int) -> abi.Dtype:
    """Dtype of the engine's rows."""
    dtype = abi.Dtype(g.exchange[exchange].dispatch_dtype)
    return dtype if dtype in FLOATS else abi.Dtype.BF16


def without_last_expert(member: Member) -> None:
    """Stages a first view in which nobody holds the last expert."""
    g = member.spec.shape()
    ranks = member.spec.ranks()
    experts, weights = uniform_placement(g, ranks)
    weights = [0 if e == g.experts - 1 else w for e, w in zip(experts, weights, strict=True)]
    experts = [-1 if e == g.experts - 1 else e for e in experts]
    for context in member.contexts.values():
        context.stage(1, 0, dict.fromkeys(ranks, 1), experts, weights)
    device = device_of(member.device)
    member.notes["seats"] = [
        Seat(
            rank,
            context,
            new_stream(),
            torch.Generator(device).manual_seed(rank),
            torch.tensor(experts, device=device).view(g.layers, g.max_ranks, g.slots)[:, rank],
            torch.ones(g.experts, g.hidden, device=device),
        )
        for rank, context in member.contexts.items()
    ]


def agreed_works(member: Member) -> list[tuple[int, int, bool]]:
    """(work, settled, complete) of rank 0 over steps of which rank 1 tears the third after rank 0
    has ended it, and a last step without exchanges."""
    seats = seats_of(member)
    g = member.spec.shape()
    lines = []
    for number in range(6):
        exchanges = 0 if number == 5 else 1
        for seat in seats:
            seat.context.step_begin(8, seat.stream.cuda_stream)
        for _ in range(exchanges):
            batches = [new_batch(s, 0, 8) for s in seats]
            synchronize()
            for seat, b in zip(seats, batches, strict=True):
                args = dispatch_args(0, 0, b.x, abi.Dtype.BF16, b.ids, b.weights)
                seat.context.dispatch(args, seat.stream.cuda_stream)
            synchronize()
            for seat in seats:
                run_experts(seat, 0, 0)
            synchronize()
            dtype = abi.Dtype(g.exchange[0].combine_dtype)
            for seat, b in zip(seats, batches, strict=True):
                seat.context.combine(0, 0, 8, b.out.data_ptr(), dtype, seat.stream.cuda_stream)
            synchronize()
        for seat in seats:
            if number == 2 and seat.rank == 1:
                seat.context.tear(seat.stream.cuda_stream)
            seat.context.step_end(seat.stream.cuda_stream)
            synchronize()
        for seat in seats:
            result = seat.context.result()
            lines.append((seat.rank, result.work, result.settled, result.complete))
    return [line[1:] for line in sorted(lines, key=lambda line: line[0])]


def empty_steps(member: Member, count: int) -> list[list[int]]:
    """[number of the last step, status] of each rank here after `count` steps without exchanges,
    in which ranks are slow in turn."""
    seats = seats_of(member)
    delays = random.Random(5)
    for _ in range(count):
        for seat in seats:
            if delays.random() < 0.5:
                pause(delays.randrange(2_000_000), seat.stream)
            seat.context.step_begin(0, seat.stream.cuda_stream)
            seat.context.step_end(seat.stream.cuda_stream)
    synchronize()
    results = [seat.context.result() for seat in seats]
    return [[r.step, int(r.status)] for r in results]


def lone_barrier(member: Member) -> dict[str, int]:
    """The first rank waits at a barrier to which nobody else comes."""
    seat = seats_of(member)[0]
    began = time.monotonic_ns()
    seat.context.step_begin(0, seat.stream.cuda_stream)
    synchronize()
    return {"began": began, "status": int(seat.context.result().status)}


def two_channels(member: Member, rounds: int, tokens: int = 8) -> dict[str, Any]:
    """Two batches in flight on two channels and streams, every second round in halves. Odd ranks
    begin with the second channel."""
    seats = seats_of(member)
    g = member.spec.shape()
    streams = [new_stream() for _ in seats]
    wrong = 0
    for number in range(rounds):
        for seat in seats:
            seat.context.step_begin(tokens, seat.stream.cuda_stream)
        synchronize()
        batches = [[new_batch(s, 0, tokens + 3 * c) for c in (0, 1)] for s in seats]
        synchronize()
        for half in ("send", "receive") if number % 2 else ("both",):
            for seat, pair, other in zip(seats, batches, streams, strict=True):
                for c in (0, 1) if seat.rank % 2 == 0 else (1, 0):
                    b, stream = pair[c], (seat.stream, other)[c]
                    args = dispatch_args(0, c, b.x, abi.Dtype.BF16, b.ids, b.weights, channel=c)
                    seat.context.dispatch(args, stream.cuda_stream, half=half)
        synchronize()
        for seat in seats:
            for c in (0, 1):
                a = arrived(seat.context, 0, c)
                a.out.copy_(a.rows)
        synchronize()
        for seat, pair, other in zip(seats, batches, streams, strict=True):
            for c, stream in enumerate((seat.stream, other)):
                out, n = pair[c].out, pair[c].x.shape[0]
                seat.context.combine(0, c, n, out.data_ptr(), abi.Dtype.BF16, stream.cuda_stream)
        synchronize()
        for seat, pair in zip(seats, batches, strict=True):
            seat.context.step_end(seat.stream.cuda_stream)
            for b in pair:
                per = -(-g.experts // g.max_ranks)
                owners = torch.where(b.ids < 0, -1, b.ids // per)
                ranks = range(g.max_ranks)
                copies = sum((owners == r).any(1).to(torch.int64) for r in ranks)
                assert isinstance(copies, torch.Tensor)
                # bf16 sums of up to four equal rows in fp32, rounded once
                want = (b.x.float() * copies[:, None]).to(TORCH_DTYPES[abi.Dtype.BF16])
                wrong += int((b.out != want).sum())
        synchronize()
        assert all(s.context.result().complete for s in seats)
    return {"wrong": wrong}


def captured_memory(member: Member) -> dict[str, Any]:
    """Bytes that the device lost to capturing a step and replaying it 50 times."""
    (seat,) = seats_of(member)
    g = seat.context.geometry
    batches = [new_batch(seat, i, 8) for i in range(g.exchanges)]
    outs = [arrived(seat.context, i).out for i in range(g.exchanges)]
    synchronize()
    free = torch.cuda.mem_get_info()[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = torch.cuda.memory_allocated()
        stream = torch.cuda.current_stream().cuda_stream
        seat.context.step_begin(8, stream)
        for i, b in enumerate(batches):
            args = dispatch_args(i, 0, b.x, x_dtype(g, i), b.ids, b.weights)
            seat.context.dispatch(args, stream)
            outs[i].fill_(1.0)
            dtype = abi.Dtype(g.exchange[i].combine_dtype)
            seat.context.combine(i, 0, 8, b.out.data_ptr(), dtype, stream)
        seat.context.step_end(stream)
        taken = torch.cuda.memory_allocated() - held
    complete = 0
    for _ in range(50):
        graph.replay()
        synchronize()
        complete += seat.context.result().complete
    lost = free - torch.cuda.mem_get_info()[0]
    return {"complete": complete, "torch": taken, "lost": lost}
