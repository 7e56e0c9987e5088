"""GPU ranks that are killed while they decode: from the kill to the first complete step after it.

A rank per GPU serves steps of a few layers from one captured graph. Ranks are killed together; each
survivor's step tears, it is given the view without them (the parent of the fleet stands for the
controller), stages it and goes on replaying the same graph. Every expert has a copy on every rank.
"""

import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import torch

from elasticep.bench.device_cuda import arrived, dispatch_args
from elasticep.bench.device_streams import Graph, copy, synchronize, use
from elasticep.bench.fleet_cuda import Fleet, FleetSpec
from elasticep.bench.fleet_cuda_child import Member
from elasticep.bench.fleet_cuda_pool import Child
from elasticep.errors import NativeError
from elasticep.native import abi
from elasticep.native import cuda as native

TOKENS: Final = 64
LAYERS: Final = 4
EXPERTS: Final = 16
HIDDEN: Final = 2048


def group(ranks: int) -> bytes:
    """A small group; what is measured is not the exchange."""
    g = abi.Geometry(
        layers=LAYERS,
        experts=EXPERTS,
        topk=2,
        hidden=HIDDEN,
        slots=EXPERTS,
        max_ranks=ranks,
        exchanges=1,
        launch=int(abi.Launch.INLINE),
    )
    g.exchange[0] = abi.ExchangeConfig(
        copies=int(abi.Copies.PER_RANK),
        layout=int(abi.RowLayout.ROUTED),
        dispatch_dtype=int(abi.Dtype.BF16),
        combine_dtype=int(abi.Dtype.BF16),
        reduce=int(abi.Reduce.PER_RANK),
        max_tokens=TOKENS,
        channels=1,
    )
    return bytes(g)


def stage(context: native.CudaContext, epoch: int, ranks: list[int]) -> None:
    """The view of `ranks`: every expert on each, its tokens split evenly."""
    g = context.geometry
    experts = [-1] * (g.max_ranks * g.slots)
    weights = [0] * len(experts)
    share, rest = divmod(65536, len(ranks))
    for i, rank in enumerate(ranks):
        for e in range(g.experts):
            experts[rank * g.slots + e] = e
            weights[rank * g.slots + e] = share + (rest if i == 0 else 0)
    members = dict.fromkeys(ranks, 1)
    context.stage(epoch, epoch - 1, members, experts * g.layers, weights * g.layers)


class Decode:
    """A captured step of `LAYERS` exchanges, with experts that return their input."""

    def __init__(self, member: Member) -> None:
        device = use(member.device)
        ((self.rank, self.context),) = member.contexts.items()
        g = member.spec.shape()
        self.x = torch.randn(TOKENS, g.hidden, device=device).bfloat16()
        self.ids = torch.randint(g.experts, (TOKENS, g.topk), device=device)
        self.weights = torch.ones(TOKENS, g.topk, device=device)
        self.out = torch.empty_like(self.x)
        self.a = arrived(self.context, 0)
        synchronize()
        self.graph = Graph()
        with self.graph.capture() as stream:
            self.context.step_begin(TOKENS, stream)
            for layer in range(LAYERS):
                args = dispatch_args(0, layer, self.x, abi.Dtype.BF16, self.ids, self.weights)
                self.context.dispatch(args, stream)
                copy(self.a.out, self.a.rows, stream)
                self.context.combine(0, 0, TOKENS, self.out.data_ptr(), abi.Dtype.BF16, stream)
            self.context.step_end(stream)

    def step(self) -> native.StepResult:
        """One replay, waited for."""
        self.graph.replay()
        synchronize()
        return self.context.result()


def serve(member: Member, steps: int) -> dict[str, Any]:
    """Serves until a step tears, goes on in the view that it is given, and returns when."""
    run = Decode(member)
    stage(run.context, 1, member.spec.ranks())
    member.sync()
    while not run.step().complete:
        pass
    member.report("serving")
    while (torn := run.step()).complete:
        pass
    back_ns = time.monotonic_ns()
    member.report("torn")
    stage(run.context, 2, member.connection.recv())
    tries = 1
    while not (result := run.step()).complete or result.epoch != 2:
        tries += 1
    complete_ns = time.monotonic_ns()
    rest = [run.step().complete for _ in range(steps)]
    return {
        "rank": run.rank,
        "why": native.Why(torn.fault.why).name,
        "back_ns": back_ns,
        "complete_ns": complete_ns,
        "tries": tries,
        "rest": all(rest),
    }


@dataclass(frozen=True, slots=True)
class Line:
    """One round: milliseconds after the kill, the last of the survivors."""

    ranks: int
    killed: int
    back_ms: float
    complete_ms: float
    tries: int


def once(ranks: int, killed: int, devices: tuple[int, ...], limit_s: float = 120.0) -> Line:
    """Kills the last `killed` ranks of `ranks` when all serve; `limit_s`: seconds for all of it.

    Raises:
        NativeError: a survivor failed.
    """
    spec = FleetSpec(
        geometry=group(ranks), devices=devices, seats=tuple((r,) for r in range(ranks))
    )
    alive = list(range(ranks - killed))
    serving: set[tuple[int, ...]] = set()
    killed_ns = 0
    with Fleet(spec) as fleet:

        def on_report(child: Child, what: str) -> None:
            nonlocal killed_ns
            if what == "torn":
                if child.seats[0] in alive:  # a victim may see another's death before its own
                    child.connection.send(alive)
                return
            serving.add(child.seats)
            if len(serving) == ranks:
                killed_ns = time.monotonic_ns()
                for victim in fleet.children[ranks - killed :]:
                    victim.process.kill()

        fleet.start("elasticep.bench.recovery_cuda:serve", steps=20)
        results = [r for r in fleet.finish(limit_s, on_report, may_die=True) if r]
    if len(results) != len(alive) or not all(r["rest"] for r in results):
        raise NativeError(f"not every survivor went on: {results}")
    last = {k: max(r[k] for r in results) for k in ("back_ns", "complete_ns", "tries")}
    return Line(
        ranks=ranks,
        killed=killed,
        back_ms=(last["back_ns"] - killed_ns) / 1e6,
        complete_ms=(last["complete_ns"] - killed_ns) / 1e6,
        tries=last["tries"],
    )


def table(lines: list[Line]) -> str:
    """Medians of the rounds as a Markdown table."""
    rows = [
        "| ranks | killed | rounds | steps torn, ms | complete again, ms |",
        "|---|---|---|---|---|",
    ]
    for killed in sorted({x.killed for x in lines}):
        mine = [x for x in lines if x.killed == killed]
        back = statistics.median(x.back_ms for x in mine)
        complete = statistics.median(x.complete_ms for x in mine)
        rows.append(f"| {mine[0].ranks} | {killed} | {len(mine)} | {back:.2f} | {complete:.2f} |")
    return "\n".join(rows)
