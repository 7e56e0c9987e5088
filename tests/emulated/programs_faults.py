"""Ranks of one process that meet faults; every rank replays one graph for all of its steps."""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from elasticep.bench.device_cuda import arrived, dispatch_args
from elasticep.bench.fleet_cuda_child import Member
from elasticep.native import abi
from elasticep.native import cuda as native
from elasticep.testing import emulated_cuda
from tests.gpu.programs_faults import stage

TOKENS = 24
LAYERS = 2


class Rank:
    """Identity experts and top-1 routing of weight one: what comes back is the input itself."""

    def __init__(self, rank: int, context: native.CudaContext) -> None:
        self.rank, self.context = rank, context
        g = context.geometry
        self.stream = emulated_cuda.Stream()
        self.generator = torch.Generator().manual_seed(rank + 1)
        self.x = torch.empty(TOKENS, g.hidden, dtype=torch.bfloat16)
        self.ids = torch.zeros(TOKENS, g.topk, dtype=torch.int64)
        self.weights = torch.ones(TOKENS, g.topk)
        self.out = torch.empty_like(self.x)
        self.a = arrived(context, 0)
        self.graph = emulated_cuda.Graph()
        with self.graph.capture(self.stream):
            self.enqueue()

    def fresh(self) -> None:
        """New inputs, poisoned output."""
        self.x.normal_(generator=self.generator)
        self.ids.random_(0, self.context.geometry.experts, generator=self.generator)
        self.out.fill_(float("nan"))

    def begin(self) -> None:
        self.context.step_begin(TOKENS, self.stream.cuda_stream)

    def layer(self, layer: int, *, tear: bool = False) -> None:
        stream = self.stream.cuda_stream
        args = dispatch_args(0, layer, self.x, abi.Dtype.BF16, self.ids, self.weights)
        self.context.dispatch(args, stream)
        rows = self.a.rows
        emulated_cuda.api().epe_copy(self.a.out.data_ptr(), rows.data_ptr(), rows.nbytes, stream)
        if tear:
            self.context.tear(stream)
        self.context.combine(0, 0, TOKENS, self.out.data_ptr(), abi.Dtype.BF16, stream)

    def end(self) -> None:
        self.context.step_end(self.stream.cuda_stream)

    def enqueue(self, tear: int = -1) -> None:
        self.begin()
        for layer in range(LAYERS):
            self.layer(layer, tear=layer == tear)
        self.end()

    def wait(self) -> native.StepResult:
        """The step that was put on the stream; outputs of a complete one are checked."""
        self.stream.synchronize()
        result = self.context.result()
        if result.complete:
            assert torch.equal(self.out, self.x), "a complete step has a wrong row"
        return result

    def start(self) -> None:
        self.fresh()
        self.graph.replay(self.stream)


def ranks_of(member: Member) -> list[Rank]:
    """Made once, in the view of all ranks that the test does not keep back."""
    if "ranks" not in member.notes:
        emulated_cuda.set_device(member.device)
        member.notes["ranks"] = [Rank(r, c) for r, c in member.contexts.items()]
    return list(member.notes["ranks"])


def step(ranks: list[Rank]) -> list[native.StepResult]:
    for rank in ranks:
        rank.start()
    return [rank.wait() for rank in ranks]


def lines(results: list[native.StepResult]) -> list[dict[str, Any]]:
    return [
        {
            "status": int(r.status),
            "complete": r.complete,
            "step": r.step,
            "epoch": r.epoch,
            "members": sorted(r.members),
            "why": int(r.fault.why) if r.fault.step == r.step else 0,
            "rank": int(r.fault.rank),
        }
        for r in results
    ]


def complete_step(ranks: list[Rank]) -> list[native.StepResult]:
    """A step of all that is complete: where waits may not be long, a slow machine tears some."""
    end = time.monotonic() + 60
    while True:
        results = step(ranks)
        if all(r.complete for r in results):
            return results
        told = {r.fault.why for r in results if not r.complete}
        assert native.Why.TIMEOUT in told, lines(results)
        assert time.monotonic() < end, lines(results)


def formed(member: Member) -> list[Rank]:
    """The ranks, after a complete step of all in their first view."""
    ranks = ranks_of(member)
    for rank in ranks:
        stage(rank.context, 1, [r.rank for r in ranks])
    complete_step(ranks)
    return ranks


def one_is_missing(member: Member, what: str) -> dict[str, Any]:
    """The last rank begins a step and sends nothing; the others wait until the test does `what`.
    Then it goes on; if it is dead, the others in a view without it."""
    ranks = formed(member)
    *others, late = ranks
    everybody = [r.rank for r in ranks]
    for rank in others:
        rank.start()
    late.fresh()
    late.begin()
    late.stream.synchronize()
    member.report(what)
    torn = [rank.wait() for rank in others]
    for layer in range(LAYERS):
        late.layer(layer)
    late.end()
    torn.append(late.wait())
    found = {"torn": lines(torn)}
    if what == "timeout":
        found["after"] = lines(complete_step(ranks))
    elif what == "fenced":
        found["after"] = lines(step(ranks[:1]))
    else:
        for rank in others:
            stage(rank.context, 2, everybody[:-1])
        found["after"] = lines(step(others))
        found["left"] = lines(step([late]))
    return found


def kernels_outlive_their_process(member: Member, where: str) -> dict[str, Any]:
    """The last of two ranks is dead, and its kernels leave the step before the other looks, in a
    wait or at the end of the step."""
    survivor, dead = ranks = formed(member)
    for rank in ranks:
        rank.fresh()
        rank.begin()
    for rank in ranks:
        rank.stream.synchronize()
    member.report(dead.rank)
    member.connection.recv()
    dead.context.tear(dead.stream.cuda_stream)  # what its kernels do that find themselves fenced
    dead.stream.synchronize()
    if where != "end":
        survivor.layer(0)
    survivor.end()
    return lines([survivor.wait()])[0]


def dead_before_the_barrier(member: Member) -> dict[str, Any]:
    """All but the last rank come to a barrier of which the last is dead; then a view without it."""
    ranks = formed(member)
    *others, last = ranks
    everybody = [r.rank for r in ranks]
    for rank in others:
        rank.start()
    member.report(last.rank)
    doomed = lines([rank.wait() for rank in others])
    again = lines(step(others))
    for rank in others:
        stage(rank.context, 2, everybody[:-1])
    return {"doomed": doomed, "again": again, "after": lines(step(others))}


def joins(member: Member) -> list[list[dict[str, Any]]]:
    """The last rank waits in its graph's barrier until a view with it is staged; then a view of the
    first rank alone follows, in which the others are told that they are not."""
    ranks = ranks_of(member)
    *others, last = ranks
    everybody = [r.rank for r in ranks]
    for rank in others:
        stage(rank.context, 1, everybody[:-1])
    found = [lines(step(others))]
    stage(last.context, 2, everybody)
    last.start()
    found.append(lines(step(others)))  # nobody else has staged the view
    for rank in others:
        stage(rank.context, 2, everybody)
    for rank in others:
        rank.start()
    found.append(lines([rank.wait() for rank in ranks]))
    found.append(lines(step(ranks)))
    stage(ranks[0].context, 3, everybody[:1])
    found.append(lines(step(ranks)))
    found.append(lines(step(ranks[:1])))
    return found


def concurrently(ranks: list[Rank], run: Callable[[Rank], Any]) -> list[Any]:
    """`run` of every rank in a thread of its own; what they returned."""
    results: list[Any] = [None] * len(ranks)

    def one(i: int) -> None:
        try:
            emulated_cuda.set_device(ranks[i].context.config.device)
            results[i] = run(ranks[i])
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def soak(member: Member, steps: int, seed: int) -> list[dict[str, Any]]:
    """Steps in which ranks tear and are late at random, while views follow each other; every
    complete step is checked."""
    ranks = ranks_of(member)
    everybody = sorted(member.spec.ranks())
    for rank in ranks:
        stage(rank.context, 1, everybody)
    plan = random.Random(seed)
    tears = {
        n: (plan.choice(everybody), plan.randrange(LAYERS))
        for n in range(steps)
        if plan.random() < 0.2
    }
    changes = {n: epoch for epoch, n in enumerate(sorted(plan.sample(range(steps), steps // 5)), 2)}

    def run(rank: Rank) -> dict[str, Any]:
        delays = random.Random(seed * 1000 + rank.rank)
        found: list[native.StepResult] = []
        for n in range(steps):
            if n in changes:  # at another moment on every rank, as from a daemon
                stage(rank.context, changes[n], everybody)
            if delays.random() < 0.3:
                emulated_cuda.api().epe_pause(delays.randrange(2_000_000), rank.stream.cuda_stream)
            torn_by, at = tears.get(n, (-1, 0))
            if torn_by == rank.rank:
                rank.fresh()
                rank.enqueue(tear=at)
            else:
                rank.start()
            found.append(rank.wait())
        return {
            "steps": [r.step for r in found],
            "status": sorted({int(r.status) for r in found}),
            "complete": [n for n, r in enumerate(found) if r.complete],
            "why": sorted({int(r.fault.why) for r in found}),
            "epoch": found[-1].epoch,
        }

    outcome = concurrently(ranks, run)
    return [{**o, "tears": sorted(tears), "epochs": 1 + len(changes)} for o in outcome]
