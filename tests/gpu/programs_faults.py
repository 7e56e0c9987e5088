"""What the children of a fleet run while ranks of it are killed or stopped."""

import os
import random
import signal
import time
from typing import Any

import torch

from elasticep.bench.device_cuda import arrived, dispatch_args
from elasticep.bench.device_streams import (
    Graph,
    copy,
    current_stream,
    pause,
    synchronize,
    use,
)
from elasticep.bench.fleet_cuda_child import Member
from elasticep.native import abi
from elasticep.native import cuda as native

TOKENS = 48


def shared_placement(g: abi.Geometry, ranks: list[int]) -> tuple[list[int], list[int]]:
    """Every expert on every one of `ranks`, tokens split evenly."""
    experts = [-1] * (g.max_ranks * g.slots)
    weights = [0] * len(experts)
    share, rest = divmod(65536, len(ranks))
    for i, rank in enumerate(ranks):
        for e in range(g.experts):
            experts[rank * g.slots + e] = e
            weights[rank * g.slots + e] = share + (rest if i == 0 else 0)
    return experts * g.layers, weights * g.layers


def stage(context: native.CudaContext, epoch: int, ranks: list[int]) -> None:
    """The view of `ranks`, each in its first incarnation."""
    tables = shared_placement(context.geometry, ranks)
    context.stage(epoch, epoch - 1, dict.fromkeys(ranks, 1), *tables)


class Layers:
    """Steps of two layers with experts that return their input; one graph for all of them.

    With identity experts and top-1 routing of weight one the result is the input, bit for bit.
    """

    def __init__(self, member: Member, layers: int = 2) -> None:
        device = use(member.device)
        ((self.rank, self.context),) = member.contexts.items()
        g = member.spec.shape()
        self.generator = torch.Generator(device).manual_seed(self.rank + 1)
        self.x = torch.empty(TOKENS, g.hidden, dtype=torch.bfloat16, device=device)
        self.ids = torch.zeros(TOKENS, g.topk, dtype=torch.int64, device=device)
        self.weights = torch.ones(TOKENS, g.topk, device=device)
        self.out = torch.empty_like(self.x)
        self.a = arrived(self.context, 0)
        self.layers = layers
        self.fresh()
        synchronize()
        self.graph = Graph()
        with self.graph.capture() as stream:
            self.enqueue(stream)

    def fresh(self) -> None:
        """New inputs, poisoned output."""
        self.x.normal_(generator=self.generator)
        g = self.context.geometry
        self.ids.random_(0, g.experts, generator=self.generator)
        self.out.fill_(float("nan"))

    def enqueue(self, stream: int) -> None:
        """One step."""
        self.context.step_begin(TOKENS, stream)
        for layer in range(self.layers):
            args = dispatch_args(0, layer, self.x, abi.Dtype.BF16, self.ids, self.weights)
            self.context.dispatch(args, stream)
            copy(self.a.out, self.a.rows, stream)
            self.context.combine(0, 0, TOKENS, self.out.data_ptr(), abi.Dtype.BF16, stream)
        self.context.step_end(stream)

    def step(self) -> native.StepResult:
        """Replays the graph and waits; outputs of a complete step are checked."""
        self.fresh()
        self.graph.replay()
        synchronize()
        result = self.context.result()
        if result.complete:
            assert torch.equal(self.out, self.x), "a complete step has a wrong row"
        return result


def survivor(member: Member, victims: list[int]) -> list[dict[str, Any]]:
    """Rank 0 serves with one victim after another; each joins, is killed and is left behind."""
    run = Layers(member)
    epoch = 1
    stage(run.context, epoch, [0])
    assert run.step().complete
    lines = []
    for victim in victims:
        member.report(("turn", victim))
        member.connection.recv()  # the victim waits in its barrier
        epoch += 1
        stage(run.context, epoch, [0, victim])
        for _ in range(1000):
            result = run.step()
            if result.complete and victim in result.members:
                break
        assert victim in result.members, result
        for _ in range(5):
            assert run.step().complete
        member.report(("kill", victim))
        while (result := run.step()).complete:
            pass
        back_ns = time.monotonic_ns()
        epoch += 1
        stage(run.context, epoch, [0])
        tries = 0
        while not (after := run.step()).complete:
            tries += 1
            assert tries < 1000
        lines.append(
            {
                "victim": victim,
                "back_ns": back_ns,
                "complete_ns": time.monotonic_ns(),
                "why": int(result.fault.why),
                "rank": int(result.fault.rank),
                "members": list(after.members),
                "tries": tries,
            }
        )
    return lines


def victim(member: Member) -> None:
    """Joins when told, then serves until it is killed."""
    run = Layers(member)
    member.connection.recv()
    stage(run.context, 2 * run.rank, [0, run.rank])
    run.graph.replay()
    member.report(("joined", run.rank))
    while True:
        synchronize()
        run.graph.replay()


def kills(member: Member, victims: list[int]) -> list[dict[str, Any]] | None:
    """Rank 0 survives, all others are victims."""
    if 0 in member.contexts:
        return survivor(member, victims)
    victim(member)
    return None


def stopped(member: Member) -> dict[str, Any]:
    """Rank 1 stops itself in the middle of an exchange, is expelled and goes on."""
    run = Layers(member, layers=1)
    stage(run.context, 1, [0, 1])
    member.sync()
    for _ in range(10):
        assert run.step().complete
    if run.rank == 0:
        while (result := run.step()).complete:
            pass
        stage(run.context, 2, [0])
        complete = 0
        for _ in range(1000):
            complete += run.step().complete
            if complete == 20:
                break
        member.report("alone")
        member.connection.recv()  # the other one is awake again and has done its worst
        later = [run.step().complete for _ in range(20)]
        return {"why": int(result.fault.why), "complete": complete, "later": all(later)}
    run.fresh()
    stream = current_stream().cuda_stream
    run.context.step_begin(TOKENS, stream)
    args = dispatch_args(0, 0, run.x, abi.Dtype.BF16, run.ids, run.weights)
    run.context.dispatch(args, stream)
    synchronize()
    member.report("stopping")
    os.kill(os.getpid(), signal.SIGSTOP)
    copy(run.a.out, run.a.rows, stream)
    run.context.combine(0, 0, TOKENS, run.out.data_ptr(), abi.Dtype.BF16, stream)
    run.context.step_end(stream)
    synchronize()
    results = [run.context.result()]
    results += [run.step() for _ in range(5)]
    member.report("awake")
    return {
        "complete": [r.complete for r in results],
        "status": [int(r.status) for r in results],
    }


def soak(member: Member, exchanges: int, per_step: int, seed: int) -> dict[str, Any]:
    """Exchanges with random delays inside every rank, checked on the device."""
    device = use(member.device)
    ((rank, context),) = member.contexts.items()
    g = member.spec.shape()
    half = g.experts // 2
    context.stage(1, 0, {0: 1, 1: 1}, *_halves(g))
    delays = random.Random(seed * 1000 + rank)
    generator = torch.Generator(device).manual_seed(seed * 1000 + rank)
    cap = g.exchange[0].max_tokens
    a = arrived(context, 0)
    bad = torch.zeros((), dtype=torch.int64, device=device)
    x_all = torch.randn(cap + 4096, g.hidden, device=device, generator=generator).bfloat16()
    out = torch.empty(cap, g.hidden, dtype=torch.bfloat16, device=device)
    weights = torch.ones(cap, g.topk, device=device)
    stream = current_stream().cuda_stream
    incomplete = 0
    for first in range(0, exchanges, per_step):
        context.step_begin(cap, stream)
        for i in range(first, first + per_step):
            tokens = delays.choice((0, 1, 7, cap // 2, cap))
            start = delays.randrange(4096)
            x = x_all[start : start + tokens]
            ids = torch.randint(g.experts, (tokens, g.topk), device=device, generator=generator)
            out.fill_(float("nan"))
            if delays.random() < 0.3:
                pause(delays.randrange(60_000), current_stream())
            args = dispatch_args(0, i % g.layers, x, abi.Dtype.BF16, ids, weights)
            context.dispatch(args, stream)
            if delays.random() < 0.3:
                pause(delays.randrange(60_000), current_stream())
            copy(a.out, a.rows, stream)
            context.combine(0, 0, tokens, out.data_ptr(), abi.Dtype.BF16, stream)
            copies = 1 + ((ids < half).any(1) & (ids >= half).any(1)).to(x.dtype)
            bad += (out[:tokens] != x * copies[:, None]).sum()
        context.step_end(stream)
        synchronize()
        incomplete += not context.result().complete
    return {"wrong": int(bad), "incomplete": incomplete, "exchanges": exchanges}


def _halves(g: abi.Geometry) -> tuple[list[int], list[int]]:
    experts = [-1] * (2 * g.slots)
    half = g.experts // 2
    for e in range(g.experts):
        experts[e // half * g.slots + e % half] = e
    return experts * g.layers, [65536 if e >= 0 else 0 for e in experts] * g.layers
