"""What the children of a fleet run in the tests: exchanges with toy experts, against float64."""

from dataclasses import dataclass
from typing import Any

import torch

from elasticep.bench.device_cuda import TORCH_DTYPES, Arrived, arrived, dispatch_args
from elasticep.bench.device_streams import new_stream, synchronize, use
from elasticep.bench.fleet_cuda import uniform_placement
from elasticep.bench.fleet_cuda_child import Member
from elasticep.errors import CapExceeded
from elasticep.native import abi
from elasticep.native import cuda as native

FLOATS = (abi.Dtype.FP32, abi.Dtype.FP16, abi.Dtype.BF16)
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class Seat:
    """One rank held by this process."""

    rank: int
    context: native.CudaContext
    stream: Any
    generator: torch.Generator
    slot_expert: torch.Tensor  # [layers, slots] of this rank
    factors: torch.Tensor  # [experts, hidden]: expert e multiplies a row by factors[e]
    batches: int = 0  # that it has brought


def weighted_placement(g: abi.Geometry, ranks: list[int]) -> tuple[list[int], list[int]]:
    """Expert e has 1 + e % 3 copies on following ranks, with uneven weights."""
    experts = [-1] * (g.max_ranks * g.slots)
    weights = [0] * len(experts)
    used = dict.fromkeys(ranks, 0)
    shares = ((65536,), (40000, 25536), (30000, 20000, 15536))
    for e in range(g.experts):
        copies = min(1 + e % 3, len(ranks))
        for i in range(copies):
            rank = ranks[(e + i) % len(ranks)]
            at = rank * g.slots + used[rank]
            used[rank] += 1
            experts[at], weights[at] = e, shares[copies - 1][i]
    return experts * g.layers, weights * g.layers


def seats_of(member: Member, *, weighted: bool = False) -> list[Seat]:
    """Made once per process; stages the first view."""
    if "seats" in member.notes:
        return member.notes["seats"]
    device = use(member.device)
    g = member.spec.shape()
    ranks = member.spec.ranks()
    place = weighted_placement if weighted else uniform_placement
    experts, weights = place(g, ranks)
    seats = []
    for rank, context in member.contexts.items():
        generator = torch.Generator(device).manual_seed(7)
        factors = torch.rand(g.experts, g.hidden, device=device, generator=generator) + 0.5
        generator.manual_seed(1000 + rank)
        context.stage(1, 0, dict.fromkeys(ranks, 1), experts, weights)
        seats.append(
            Seat(rank, context, new_stream(), generator, table(g, rank, experts, device), factors)
        )
    synchronize()
    member.notes["seats"] = seats
    return seats


def table(g: abi.Geometry, rank: int, slot_expert: list[int], device: torch.device) -> torch.Tensor:
    """[layers, slots] of a rank."""
    whole = torch.tensor(slot_expert, dtype=torch.long, device=device)
    return whole.view(g.layers, g.max_ranks, g.slots)[:, rank].contiguous()


def decode_rows(a: Arrived, dtype: abi.Dtype, hidden: int) -> torch.Tensor:
    """Arrived rows as float32 [rows, hidden]."""
    if dtype in FLOATS:
        return a.rows.float()
    assert a.scales is not None
    n = a.rows.shape[0]
    if a.scales.dim() == 3:
        return a.rows.float() * column_scales(a.scales, dtype, n, hidden)
    if dtype == abi.Dtype.FP8:
        scale = a.scales.view(torch.float32).repeat_interleave(128, 1)
        return a.rows.float() * scale
    if dtype == abi.Dtype.MXFP8:
        scale = torch.exp2(a.scales.float() - 127).repeat_interleave(32, 1)
        return a.rows.float() * scale
    values = torch.tensor([*FP4, *(-v for v in FP4)], device=a.rows.device)
    codes = torch.stack((a.rows & 15, a.rows >> 4), -1).view(n, hidden).long()
    scale = a.scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    return values[codes] * scale


def column_scales(scales: torch.Tensor, dtype: abi.Dtype, rows: int, hidden: int) -> torch.Tensor:
    """Scales of [blocks, columns, lead] words for every element, float32 [rows, hidden]."""
    block = 128 if dtype == abi.Dtype.FP8 else 32
    words = scales[..., : rows // scales.shape[0]].transpose(1, 2).reshape(rows, -1)
    if words.shape[1] == hidden // block:  # fp32 columns
        return words.contiguous().view(torch.float32).repeat_interleave(block, 1)
    powers = words.contiguous().view(torch.uint8)[:, : hidden // block]
    return torch.exp2(powers.float() - 127).repeat_interleave(block, 1)


def check_layout(a: Arrived, room: int) -> None:
    """Counts, labels, places and padding of the layouts by expert agree."""
    assert a.counts is not None
    assert a.places is not None
    ids, places = a.ids.long(), a.places.long()
    assert torch.equal(places >= 0, ids >= 0)
    used = places[places >= 0]
    assert used.unique().numel() == used.numel()
    slots = a.counts.numel()
    assert torch.equal(torch.bincount(ids[ids >= 0], minlength=slots), a.counts.long())
    if a.offsets is None:
        assert torch.equal(places[places >= 0] // room, ids[ids >= 0])
        return
    assert a.row_slots is not None
    end = int(a.offsets[slots])
    labels = torch.full((a.rows.shape[0],), -1, device=ids.device)
    labels[used] = ids[ids >= 0]
    assert torch.equal(labels, a.row_slots.long())
    padding = a.rows[:end][a.row_slots[:end] < 0]
    assert not padding.view(torch.uint8).any(), "what pads a run is not zero"
    # Rows of a slot are in the order of source, token and top-k.
    order = torch.argsort(ids[ids >= 0], stable=True)
    assert bool((used[order].diff()[ids[ids >= 0][order].diff() == 0] == 1).all())


def check_slot_counts(seat: Seat, exchange: int, channel: int = 0) -> int:
    """Rows per slot, counted on the GPU, are what the ids say in every layout; their sum."""
    g = seat.context.geometry
    a = arrived(seat.context, exchange, channel)
    config = g.exchange[exchange]
    ids = a.ids.long()
    if config.cpu_sync and config.layout == abi.RowLayout.ARRIVAL:
        assert a.counts is not None
        ids = ids[: int(a.counts[0])]
    counts = torch.full((g.slots,), -9, dtype=torch.int32, device=ids.device)
    synchronize()
    seat.context.count_slots(exchange, channel, counts.data_ptr(), seat.stream.cuda_stream)
    synchronize()
    want = torch.bincount(ids[ids >= 0], minlength=g.slots)
    assert torch.equal(counts.long(), want), (exchange, counts, want)
    return int(want.sum())


def run_experts(seat: Seat, exchange: int, layer: int) -> None:
    """The toy expert kernel: reads what arrived in any layout and writes what is owed."""
    g = seat.context.geometry
    config = g.exchange[exchange]
    a = arrived(seat.context, exchange)
    a.out.fill_(float("nan"))  # rows that are not owed must never be read
    if config.layout in (abi.RowLayout.CONTIGUOUS, abi.RowLayout.MASKED):
        check_layout(a, config.masked_room or g.max_ranks * config.max_tokens)
    per_expert = config.reduce == abi.Reduce.PER_EXPERT
    rows = decode_rows(a, abi.Dtype(config.dispatch_dtype), g.hidden)
    of_slot = seat.slot_expert[layer]
    if config.layout in (abi.RowLayout.CONTIGUOUS, abi.RowLayout.MASKED):
        assert a.counts is not None
        room = config.masked_room or g.max_ranks * config.max_tokens
        for slot in torch.nonzero(a.counts).flatten().tolist():
            start = int(a.offsets[slot]) if a.offsets is not None else slot * room
            stop = start + int(a.counts[slot])
            assert start % 128 == 0 or config.layout == abi.RowLayout.MASKED
            y = rows[start:stop] * seat.factors[of_slot[slot]]
            a.out[start:stop] = y.to(a.out.dtype)
        return
    ids = a.ids.long()
    if config.cpu_sync and a.counts is not None:
        ids = ids.clone()
        ids[int(a.counts[0]) :] = -1
    out = a.out.view(ids.shape[0], -1, g.hidden)
    total = torch.zeros_like(rows)
    for k in range(g.topk):
        valid = ids[:, k] >= 0
        y = rows[valid] * seat.factors[of_slot[ids[valid, k]]]
        if per_expert:
            out[valid, k] = y.to(out.dtype)
        else:
            total[valid] += a.weights[valid, k : k + 1] * y
    if not per_expert:
        come = (ids >= 0).any(1)
        out[come, 0] = total[come].to(out.dtype)


@dataclass
class Batch:
    """What one rank brings to one exchange."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


def new_batch(seat: Seat, exchange: int, tokens: int, spread: float = 1.0) -> Batch:
    """Fresh random inputs; some ids are -1."""
    g = seat.context.geometry
    config = g.exchange[exchange]
    dtype = abi.Dtype(config.dispatch_dtype)
    x_dtype = TORCH_DTYPES[dtype] if dtype in FLOATS else torch.bfloat16
    device = seat.factors.device
    if config.replicated:  # the same on every rank
        seat.generator.manual_seed(seat.batches)
    seat.batches += 1
    x = torch.randn(tokens, g.hidden, device=device, generator=seat.generator) * spread
    scores = torch.rand(tokens, g.experts, device=device, generator=seat.generator)
    ids = scores.topk(g.topk, -1)[1]
    if g.topk > 1:
        drop = torch.rand(tokens, g.topk, device=device, generator=seat.generator) < 0.05
        ids = torch.where(drop, -1, ids)
    weights = torch.rand(tokens, g.topk, device=device, generator=seat.generator)
    back = abi.Dtype(config.combine_dtype)
    out_dtype = TORCH_DTYPES[back if back in FLOATS else abi.Dtype.BF16]
    out = torch.full((tokens, g.hidden), float("nan"), dtype=out_dtype, device=device)
    return Batch(x.to(x_dtype), ids, weights, out)


def reference(seat: Seat, b: Batch) -> torch.Tensor:
    """[tokens, hidden] float64, from the inputs alone."""
    out = torch.zeros(b.out.shape, dtype=torch.float64, device=b.out.device)
    for k in range(b.ids.shape[1]):
        valid = b.ids[:, k] >= 0
        part = b.x[valid].double() * seat.factors[b.ids[valid, k]].double()
        out[valid] += b.weights[valid, k : k + 1].double() * part
    return out


def error_of(seat: Seat, b: Batch) -> float:
    """Relative error; nan when anything was left unwritten."""
    if b.out.numel() == 0:
        return 0.0
    want = reference(seat, b)
    norm = want.norm().item()
    difference = (b.out.double() - want).norm().item()
    return difference / norm if norm else difference


def x_dtype_of(config: Any) -> abi.Dtype:
    dtype = abi.Dtype(config.dispatch_dtype)
    return dtype if dtype in FLOATS else abi.Dtype.BF16


def send(seat: Seat, args: native.DispatchArgs, halves: int) -> None:
    """A dispatch, or its first half: halves 1 on even ranks, 2 on all."""
    half = "send" if seat.rank % 2 < halves else "both"
    seat.context.dispatch(args, seat.stream.cuda_stream, half=half)


def receive(seat: Seat, args: native.DispatchArgs, halves: int) -> None:
    """The second half, where there was a first."""
    if seat.rank % 2 < halves:
        seat.context.dispatch(args, seat.stream.cuda_stream, half="receive")


def check_whole(seat: Seat, exchange: int) -> None:
    """What arrived counts: nobody has torn the step, or who did and why is said here."""
    result = seat.context.result()
    fault = {name: int(getattr(result.fault, name)) for name, _ in result.fault._fields_}
    torn = fault["why"] and fault["step"] == result.step
    assert not torn, f"rank {seat.rank}, exchange {exchange}, step {result.step} is torn: {fault}"


def check_count(seat: Seat, exchange: int) -> None:
    """What the host is told with cpu_sync is what lies in device memory."""
    config = seat.context.geometry.exchange[exchange]
    if not config.cpu_sync:
        return
    a, told = arrived(seat.context, exchange), seat.context.wait_counts(exchange)
    cell = a.offsets[-1] if a.offsets is not None else a.counts[0]
    assert (told.torn, told.rows) == (0, int(cell)), (told.torn, told.rows, int(cell))
    if a.offsets is None:
        assert told.arrived == told.rows
    else:
        assert told.arrived == int((a.ids >= 0).any(1).sum())


def one_step(member: Member, plan: list[tuple[int, list[int]]], halves: int = 0) -> dict[str, Any]:
    """A step of the exchanges of `plan`: (exchange, tokens of each rank). All ranks of this
    process are enqueued before anything waits, since their kernels wait for each other.
    """
    seats = seats_of(member)
    g = member.spec.shape()
    announced = plan[0][1] if plan else [0] * g.max_ranks
    for seat in seats:
        seat.context.step_begin(announced[seat.rank], seat.stream.cuda_stream)
    errors: dict[int, float] = {}
    for sequence, (exchange, tokens) in enumerate(plan):
        layer = sequence % g.layers
        batches = [new_batch(s, exchange, tokens[s.rank]) for s in seats]
        synchronize()
        dtype = x_dtype_of(g.exchange[exchange])
        for seat, b in zip(seats, batches, strict=True):
            args = dispatch_args(exchange, layer, b.x, dtype, b.ids, b.weights)
            send(seat, args, halves)
        if halves:
            for seat, b in zip(seats, batches, strict=True):
                args = dispatch_args(exchange, layer, b.x, dtype, b.ids, b.weights)
                receive(seat, args, halves)
        synchronize()
        for seat in seats:
            check_whole(seat, exchange)
        for seat in seats:
            check_count(seat, exchange)
            check_slot_counts(seat, exchange)
            run_experts(seat, exchange, layer)
        synchronize()
        back = abi.Dtype(g.exchange[exchange].combine_dtype)
        out_dtype = back if back in FLOATS else abi.Dtype.BF16
        for seat, b in zip(seats, batches, strict=True):
            out = b.out.data_ptr() if b.out.numel() else 0
            stream = seat.stream.cuda_stream
            if seat.rank % 2 < halves:
                seat.context.combine(exchange, 0, 0, 0, out_dtype, stream, half="send")
                half = "receive"
            else:
                half = "both"
            seat.context.combine(exchange, 0, b.x.shape[0], out, out_dtype, stream, half=half)
        synchronize()
        for seat, b in zip(seats, batches, strict=True):
            e = error_of(seat, b)
            errors[exchange] = max(errors.get(exchange, 0.0), e) if e == e else float("nan")
    for seat in seats:
        seat.context.step_end(seat.stream.cuda_stream)
    synchronize()
    results = [s.context.result() for s in seats]
    return {
        "errors": errors,
        "complete": all(r.complete for r in results),
        "status": [int(r.status) for r in results],
        "why": [int(r.fault.why) for r in results],
        "epochs": [r.epoch for r in results],
        "steps": [r.step for r in results],
    }


def steps(
    member: Member,
    plans: list[list[tuple[int, list[int]]]],
    weighted: bool = False,
    halves: int = 0,
) -> list[dict[str, Any]]:
    """Several steps after each other; halves: see `send`."""
    seats_of(member, weighted=weighted)
    return [one_step(member, plan, halves) for plan in plans]


def loads(member: Member) -> int:
    """Sum of all load counters of the ranks held here."""
    return sum(n for s in seats_of(member) for layer in s.context.loads() for n in layer)


def too_many(member: Member) -> str:
    """The error of a batch above the cap, and a whole step after it."""
    (seat,) = seats_of(member)
    g = member.spec.shape()
    b = new_batch(seat, 0, g.exchange[0].max_tokens + 1)
    args = dispatch_args(0, 0, b.x, abi.Dtype.BF16, b.ids, b.weights)
    try:
        seat.context.dispatch(args, seat.stream.cuda_stream)
    except CapExceeded as error:
        assert one_step(member, [(0, [5] * g.max_ranks)])["complete"]
        return str(error)
    return "no error"
