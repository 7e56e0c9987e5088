"""Times dispatch + combine on GPUs, NCCL beside it (`bench exchange --device cuda`).

Cold L2 and aligned ranks before every run; the whole operation is timed (routing, flags, waits);
medians over runs, the maximum over ranks.
"""

import argparse
import functools
import json
import runpy
import socket
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import click
import torch
import torch.distributed as dist

from elasticep.bench import fleet_cuda
from elasticep.bench.device_cuda import arrived, dispatch_args
from elasticep.bench.device_streams import (
    EMULATED,
    Graph,
    Mark,
    current_stream,
    device_of,
    pause,
    synchronize,
    use,
)
from elasticep.bench.exchange_cuda_cases import (
    DECODE_CAP,
    MODELS,
    SHAPES,
    VARIANTS,
    Batch,
    Variant,
    groups,
    model_geometry,
    remote_bytes,
)
from elasticep.bench.exchange_cuda_report import line_of, plot, table
from elasticep.bench.fleet_cuda_child import Member
from elasticep.bench.fleet_cuda_pool import FleetPool
from elasticep.errors import ElasticEPError
from elasticep.native import abi, cuda_library
from elasticep.native import cuda as native

FLUSH_BYTES: Final = 256 << 20
SLEEP_CYCLES: Final = 1_500_000


class BenchError(ElasticEPError):
    """A measurement that says nothing: the timed step was torn."""


def spread(values: list[float]) -> list[float]:
    """The maximum over ranks of each value."""
    where = "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor(values, device=where)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(v) for v in tensor.tolist()]


class Timer:
    """Times calls as described above; every rank calls it with the same arguments. Ranks that
    share a GPU take turns on it: such times say that a run works, and nothing else. Without NCCL
    ranks are aligned by the step barrier alone.

    Attributes:
        alone: this rank has its GPU to itself.
        nccl: ranks are aligned by it, and it can be timed.
    """

    def __init__(self, context: native.CudaContext, runs: int, alone: bool) -> None:
        self.context = context
        self.runs = runs
        self.alone = alone
        self.nccl = dist.get_backend() == "nccl"
        self.warm = 3 if self.nccl else 1
        device = device_of(context.config.device)
        self.flush = torch.empty(0 if EMULATED else FLUSH_BYTES, dtype=torch.uint8, device=device)
        self.one = torch.ones(1, device=device)

    def align(self) -> None:
        """Let the host be ahead of the device, and the ranks begin together."""
        if self.alone:
            pause(SLEEP_CYCLES, current_stream())
        if self.nccl:
            dist.all_reduce(self.one)

    def __call__(self, calls: Sequence[Callable[[], object]], tokens: int) -> list[float]:
        """Median of each call and, last, of all of them without a gap; maximum over ranks."""
        spans: list[list[float]] = [[] for _ in range(len(calls) + 1)]
        for i in range(2 * (self.runs + self.warm)):
            split = i % 2 == 0
            stream = current_stream().cuda_stream
            self.flush.zero_()
            if self.alone:
                pause(SLEEP_CYCLES, current_stream())
            self.context.step_begin(tokens, stream)
            if self.nccl:
                dist.all_reduce(self.one)
            marks = [Mark()]
            for j, call in enumerate(calls):
                call()
                if split and j + 1 < len(calls):
                    marks.append(Mark())
            marks.append(Mark())
            self.context.step_end(stream)
            synchronize()
            if i < 2 * self.warm:
                continue
            if not split:
                spans[-1].append(marks[0].us_until(marks[-1]))
                continue
            for j in range(len(calls)):
                spans[j].append(marks[j].us_until(marks[j + 1]))
        return spread([statistics.median(s) for s in spans])


def steady_us(timer: Timer, pair: Callable[[], None], tokens: int) -> float:
    """Microseconds per dispatch + combine inside one captured step of 20 of them."""
    context = timer.context
    repeats, rounds = (2, 3) if EMULATED else (20, 12)
    synchronize()
    graph = Graph()
    dist.barrier()
    with graph.capture() as stream:
        context.step_begin(tokens, stream)
        for _ in range(repeats):
            pair()
        context.step_end(stream)
    empty = Graph()
    with empty.capture() as stream:
        context.step_begin(tokens, stream)
        context.step_end(stream)
    spans: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 * rounds):
        full = i % 2 == 0
        timer.align()
        begin = Mark()
        (graph if full else empty).replay()
        end = Mark()
        synchronize()
        if i >= rounds // 3:
            spans[full].append(begin.us_until(end))
    one_pair = (statistics.median(spans[True]) - statistics.median(spans[False])) / repeats
    return spread([one_pair])[0]


_joined: list[int] = []  # the port at which this process has met the others


def connect(member: Member, port: int, nccl: bool = True) -> tuple[int, native.CudaContext]:
    """Meets the other ranks at this port, once, and stages the first view."""
    ((rank, context),) = member.contexts.items()
    device = use(member.device)
    if _joined != [port]:
        if dist.is_initialized():
            dist.destroy_process_group()
        # NCCL wants a GPU for each rank.
        nccl = nccl and member.spec.sharing(member.index) == 1 and device.type == "cuda"
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=len(member.spec.ranks()),
            device_id=device if nccl else None,
        )
        _joined[:] = [port]
    g = member.spec.shape()
    ranks = member.spec.ranks()
    experts, weights = fleet_cuda.uniform_placement(g, ranks)
    context.stage(1, 0, dict.fromkeys(ranks, 1), experts, weights)
    return rank, context


def time_nccl(timer: Timer, batch: Batch, ranks: int) -> float:
    """All-gather of the rows and reduce-scatter of as many, in microseconds."""
    gathered = batch.x.repeat(ranks, 1)
    calls = [
        functools.partial(dist.all_gather_into_tensor, gathered, batch.x),
        functools.partial(dist.reduce_scatter_tensor, batch.out, gathered),
    ]
    return timer(calls, batch.x.shape[0])[-1]


def time_exchange(timer: Timer, index: int, batch: Batch, graph: bool) -> tuple[list[float], float]:
    """Dispatch, combine and both, then both inside a captured step; microseconds."""
    context, tokens = timer.context, batch.x.shape[0]
    arrived(context, index).out.normal_()
    args = dispatch_args(index, 0, batch.x, abi.Dtype.BF16, batch.ids, batch.weights)

    def send() -> None:
        context.dispatch(args, current_stream().cuda_stream)

    def back() -> None:
        stream = current_stream().cuda_stream
        context.combine(index, 0, tokens, batch.out.data_ptr(), abi.Dtype.BF16, stream)

    def both() -> None:
        send()
        back()

    synchronize()
    dist.barrier()
    times = timer([send, back], tokens)
    result = context.result()
    # All are told alike: whoever goes on meets the others.
    if spread([float(not result.complete)])[0]:
        why = "on another rank" if result.complete else native.Why(result.fault.why).name
        raise BenchError(f"exchange {index} with {tokens} tokens was torn: {why}")
    return times, steady_us(timer, both, tokens) if graph else 0.0


def time_model(
    member: Member,
    model: str,
    tokens: list[int],
    variants: list[str],
    port: int,
    runs: int = 30,
    plan: int = 0,
    num_sms: int = 0,
    extras: bool = True,
    compare: str = "",
    tuning: int = 0,
    nccl: bool = True,
    go_on: bool = False,
) -> list[dict[str, Any]]:
    """Runs in every child: all lines of one model. The first rank reports each as it comes, and
    with `go_on` also what a torn exchange said.

    Raises:
        BenchError: a timed step was torn, without `go_on`.
    """
    rank, context = connect(member, port, nccl)
    context.tune(native.Plan(plan), num_sms, native.Tuning(tuning))
    hidden, experts, topk = SHAPES[model]
    ranks = len(member.spec.ranks())
    timer = Timer(context, runs, member.spec.sharing(member.index) == 1)
    chosen = [v for v in VARIANTS if v.name in variants]
    lines: list[dict[str, Any]] = []

    def note(line: dict[str, Any]) -> None:
        lines.append(line)
        if rank == 0:
            member.report(line)

    for count in tokens:
        batch = Batch.random(count, hidden, experts, topk, seed=100 + rank)
        beside = time_nccl(timer, batch, ranks) if extras and timer.nccl else 0.0
        fixed = {"model": model, "tokens": count, "nccl_us": beside}
        if compare:
            make = runpy.run_path(compare)["make"]
            pair = make(rank, ranks, batch.x, batch.ids, batch.weights, batch.out)
            times = timer(list(pair), count)
            moved = remote_bytes(VARIANTS[0], batch.ids, experts, ranks, hidden)
            note(line_of(Path(compare).stem, times, 0.0, moved, fixed))
        for i, v in enumerate(chosen):
            if count > max(v.caps):
                continue
            try:
                index, graphs = 2 * i + (count > DECODE_CAP), extras and timer.alone
                times, graph = time_exchange(timer, index, batch, graphs)
            except BenchError as error:
                if not go_on:
                    raise
                if rank == 0:
                    member.report({"failed": f"{model}, {v.name}, {count} tokens: {error}"})
                continue
            moved = remote_bytes(v, batch.ids, experts, ranks, hidden)
            note(line_of(v.name, times, graph, moved, fixed))
    return lines


def free_port() -> int:
    """A TCP port of the loopback that is free now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def places(ranks: int) -> dict[str, Any]:
    """A process per rank, on as many GPUs as there are."""
    gpus = min(cuda_library.device_count(), ranks)
    return {
        "devices": tuple(r % gpus for r in range(ranks)),
        "seats": tuple((r,) for r in range(ranks)),
    }


def measure_group(
    model: str,
    together: list[Variant],
    tokens: list[int],
    ranks: int,
    *,
    port: int,
    pool: FleetPool | None = None,
    limit_s: float = 300.0,
    on_line: Callable[[dict[str, Any]], None] = lambda _: None,
    **options: Any,
) -> list[dict[str, Any]]:
    """The lines of variants that are exchanges of one group.

    Args:
        model: of `SHAPES`.
        together: one of `groups`.
        tokens: of each batch.
        ranks: a process for each, on as many GPUs as there are.
        port: where the processes meet; another one for other processes.
        pool: where they come from.
        limit_s: seconds that they may take.
        on_line: gets each line as it comes, see `time_model`.
        options: further arguments of `time_model`.

    Raises:
        NativeError: a process failed, with what it said, or took too long.
    """
    spec = fleet_cuda.FleetSpec(
        geometry=model_geometry(*SHAPES[model], ranks=ranks, variants=together),
        exchange_timeout_ms=60_000,
        step_timeout_ms=60_000,
        **places(ranks),
    )
    with fleet_cuda.Fleet(spec, pool) as fleet:
        names = [v.name for v in together]
        arguments = {"model": model, "tokens": tokens, "variants": names, "port": port}
        fleet.start("elasticep.bench.exchange_cuda:time_model", **arguments, **options)
        return list(fleet.finish(limit_s, lambda _, line: on_line(line))[0])


def measure(
    models: list[str], tokens: list[int], variants: list[str], ranks: int = 2, **options: Any
) -> list[dict[str, Any]]:
    """All lines of `models`, from a process per rank on as many GPUs as there are."""
    lines: list[dict[str, Any]] = []
    for model in models:
        for together in groups(variants):
            lines += measure_group(model, together, tokens, ranks, port=free_port(), **options)
    return sorted(lines, key=lambda x: (models.index(x["model"]), x["tokens"]))


def main(arguments: Sequence[str]) -> int:
    """`python -m elasticep.bench exchange --device cuda ...`; prints the table."""
    parser = argparse.ArgumentParser(prog="bench exchange --device cuda", description=__doc__)
    parser.add_argument("--device", choices=["cuda"], default="cuda")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=[8, 64, 128, 512, 4096])
    names = [v.name for v in VARIANTS]
    parser.add_argument("--variants", nargs="*", default=names, choices=names)
    parser.add_argument("--ranks", type=int, default=2, help="one per GPU, in turn if fewer")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--num-sms", type=int, default=0)
    parser.add_argument(
        "--compare",
        type=Path,
        help="Python file whose make(rank, ranks, x, ids, weights, out) "
        "gives (dispatch, combine), timed in the same loop",
    )
    parser.add_argument("--json", type=Path, help="write the lines to this file as well")
    parser.add_argument("--png", type=Path, help="draw them into this file")
    given = parser.parse_args(list(arguments))
    if cuda_library.device_count() < 1:
        click.echo("bench exchange --device cuda needs a CUDA device", err=True)
        return 1
    compare = str(given.compare.resolve()) if given.compare else ""
    options: dict[str, Any] = {"runs": given.runs, "num_sms": given.num_sms, "compare": compare}
    options["ranks"] = given.ranks
    lines = measure(given.models, given.tokens, given.variants, **options)
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1))
    if given.png:
        plot(lines, given.png)
    click.echo(table(lines))
    return 0
