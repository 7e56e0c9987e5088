"""An engine process for the client tests: `python -m tests.gpu.client_engine`.

Reads one JSON order a line, answers with JSON lines: events, then {"done": ...} or {"failed": ...}.
It serves steps of a toy model whose every result it checks against the inputs alone.
"""

import json
import select
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

import elasticep
from elasticep.client.cuda_exchange import CudaExchange
from elasticep.client.cuda_session import CudaSession, CudaStep
from elasticep.client.received import Received
from elasticep.errors import DeviceFailed, Fenced, UsageError
from elasticep.group import GroupConfig
from elasticep.spec import Layout, Reduce

STEADY = 5  # complete steps in a view, after which an engine has loaded what it needs
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


def tell(**event: Any) -> None:
    """One line to the parent."""
    sys.stdout.write(json.dumps({**event, "t": time.monotonic_ns()}) + "\n")
    sys.stdout.flush()


def told(line: str) -> bool:
    """Whether the parent has said this by now; it is taken in."""
    if not select.select([sys.stdin], [], [], 0)[0]:
        return False
    heard = sys.stdin.readline().strip()
    assert heard in (line, ""), heard
    return True


class Model:
    """One exchange's layers with experts that multiply: expert e of any layer by factors[e]."""

    def __init__(self, session: CudaSession, exchange: CudaExchange, tokens: int) -> None:
        self.session, self.exchange, self.tokens = session, exchange, tokens
        g = session.config.geometry
        device = session.device
        seed = torch.Generator(device).manual_seed(7)
        self.factors = torch.rand(g.experts, g.hidden, device=device, generator=seed) + 0.5
        self.random = torch.Generator(device).manual_seed(100 + session.rank)
        dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        self.dtype = dtype[exchange.spec.dispatch_dtype.value]
        self.layers = g.layers
        size = (g.layers, tokens)
        self.x = torch.zeros(*size, g.hidden, dtype=self.dtype, device=device)
        self.ids = torch.zeros(*size, g.topk, dtype=torch.int64, device=device)
        self.weights = torch.zeros(*size, g.topk, device=device)
        self.out = torch.zeros(*size, g.hidden, dtype=self.dtype, device=device)

    def fresh(self) -> None:
        """New inputs, poisoned outputs."""
        self.x.normal_(generator=self.random)
        scores = torch.rand(
            *self.ids.shape[:2],
            self.factors.shape[0],
            device=self.x.device,
            generator=self.random,
        )
        self.ids.copy_(scores.topk(self.ids.shape[-1], -1)[1])
        self.weights.uniform_(0.1, 1.0, generator=self.random)
        self.out.fill_(float("nan"))

    def experts(self, layer: int, recv: Received) -> None:
        """Fixed shapes, and slots looked up on the GPU: good for every view."""
        slots = self.session.slot_table[layer].long()
        if recv.layout in (Layout.CONTIGUOUS, Layout.MASKED):
            self._by_slot(slots, recv)
            return
        factors = self.factors[slots.clamp(min=0)]
        ids = recv.ids.long()
        weight = torch.where(ids >= 0, recv.weights, 0.0)
        per_choice = factors[ids.clamp(min=0)] * recv.rows.float().unsqueeze(1)
        if self.exchange.spec.reduce is Reduce.PER_EXPERT:
            recv.out.copy_(per_choice)
        else:
            recv.out.copy_((per_choice * weight.unsqueeze(-1)).sum(1))

    def _by_slot(self, slots: torch.Tensor, recv: Received) -> None:
        factors = self.factors[slots.clamp(min=0)]
        if recv.layout is Layout.MASKED:
            recv.out.copy_(recv.rows.float() * factors.unsqueeze(1))
            return
        assert recv.offsets is not None
        rows = torch.arange(recv.rows.shape[0], device=slots.device)
        slot = torch.searchsorted(recv.offsets[1:].long(), rows, right=True)
        assert recv.row_slots is not None
        named = recv.row_slots.long()
        assert bool(((named < 0) | (named == slot)).all()), "labels of rows differ from the runs"
        recv.out.copy_(recv.rows.float() * factors[named.clamp(min=0)])

    def layer(self, layer: int) -> None:
        """Dispatch, experts, combine."""
        exchange, out = self.exchange, self.out[layer]
        recv = exchange.dispatch(layer, self.x[layer], self.ids[layer], self.weights[layer])
        self.experts(layer, recv)
        exchange.combine(layer, recv, out)

    def layers_now(self) -> None:
        """All layers, in the step that is open."""
        for layer in range(self.layers):
            self.layer(layer)

    def step(self) -> CudaStep:
        """All layers in a step."""
        with self.session.step(self.tokens) as step:
            self.layers_now()
        assert isinstance(step, CudaStep)
        return step

    def capture(self) -> tuple[torch.cuda.CUDAGraph, CudaStep]:
        """The step as a graph."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self.session.warmup(), torch.cuda.graph(graph):
            step = self.step()
        return graph, step

    def wrong(self) -> float:
        """Largest error of the outputs, relative to the largest result; nan if unwritten."""
        want = torch.zeros(self.out.shape, dtype=torch.float64, device=self.out.device)
        for k in range(self.ids.shape[-1]):
            part = self.factors[self.ids[..., k]].double() * self.x.double()
            want += self.weights[..., k : k + 1].double() * part
        if want.numel() == 0:
            return 0.0
        return float((self.out.double() - want).abs().amax() / want.abs().amax())

    def check(self) -> None:
        """Raise unless every output is right."""
        error = self.wrong()
        coarse = self.exchange.spec.combine_dtype.value == "fp8"
        assert error < (0.08 if coarse else TOLERANCE[self.dtype]), f"error {error}"


class Engine:
    """What orders act on."""

    def __init__(self) -> None:
        self.session: CudaSession
        self.models: dict[tuple[str, int], Model] = {}

    def model(self, exchange: str, tokens: int) -> Model:
        if (exchange, tokens) not in self.models:
            found = self.session.exchange(exchange)
            assert isinstance(found, CudaExchange)
            self.models[exchange, tokens] = Model(self.session, found, tokens)
        return self.models[exchange, tokens]

    def attach(self, config: dict[str, Any], rank: int, socket: str) -> dict[str, Any]:
        began = time.monotonic()
        group = GroupConfig.from_toml_dict(config)
        session = elasticep.attach(rank=rank, socket=socket, config=group, timeout=60)
        assert isinstance(session, CudaSession)
        torch.cuda.set_device(session.device)
        self.session = session
        seconds = time.monotonic() - began
        return {
            "incarnation": session.incarnation,
            "seconds": seconds,
            "device": str(session.device),
        }

    def steps(self, exchange: str, tokens: int, count: int) -> dict[str, Any]:
        """Eager steps by `session.run`; every one is checked."""
        model = self.model(exchange, tokens)
        torn = []
        for _ in range(count):
            model.fresh()

            def forward(step: Any, batch: None) -> int:
                for layer in range(model.layers):
                    model.layer(layer)
                return int(step.epoch)

            epoch = self.session.run(forward, None, tokens=tokens, on_torn=torn.append)
            assert epoch == self.session.view.epoch
            model.check()
        view = self.session.view
        table = self.session.slot_table.cpu().tolist()
        assert table == [list(self.session.slots(layer)) for layer in range(model.layers)]
        return {"members": dict(view.members), "epoch": view.epoch, "torn": len(torn)}

    def works(self, exchange: str, tokens: int, last: int) -> list[int]:
        """Coupled ranks: works that all have complete, each checked as it was computed."""
        model = self.model(exchange, tokens)
        model.fresh()

        def forward(step: Any, work: int) -> int:
            model.layers_now()
            return work

        batches = lambda work: work if work <= last else None  # noqa: E731
        done = [result for _, result in self.session.works(forward, batches)]
        model.check()
        return done

    def load(self) -> int:
        return int(self.session.load().sum())

    def serve(self, exchange: str, tokens: int) -> dict[str, Any]:
        """Replays of one captured step until the parent says "stop"; tells what changes."""
        model = self.model(exchange, tokens)
        model.fresh()
        graph, captured = model.capture()
        tell(event="serving")
        epoch, complete, torn, here = 0, 0, 0, 0
        while not told("stop"):
            model.fresh()
            step = self.session.replay(graph, captured)
            try:
                good = step.complete
            except Fenced as error:
                tell(event="fenced", why=str(error))
                return {"fenced": True, "complete": complete, "torn": torn}
            returned = time.monotonic_ns()
            if not good:
                torn += 1
                fault = self.session._cuda.context.result().fault
                tell(event="torn", at=returned, why=int(fault.why), rank=int(fault.rank))
                continue
            complete += 1
            if step.epoch != epoch:
                epoch, here = step.epoch, 0
                tell(event="view", at=returned, epoch=epoch, members=sorted(step.members))
            here += 1
            if here == STEADY:
                tell(event="steady", epoch=epoch, members=sorted(step.members))
            model.check()
            assert bool(step.token_ok.all())
        self.detach()  # so that the others need not wait for one that has stopped
        return {"complete": complete, "torn": torn, "epoch": epoch}

    def pace(self, exchange: str, tokens: int, count: int) -> dict[str, float]:
        """Microseconds of a step with `complete` read after each: eager, and replayed."""
        model = self.model(exchange, tokens)
        model.fresh()
        graph, captured = model.capture()
        found = {}
        for name, run in (
            ("replayed", lambda: self.session.run_graph(graph, captured)),
            ("eager", lambda: self.session.run(lambda *_: model.layers_now(), None, tokens=tokens)),
        ):
            for _ in range(20):
                run()
            began = time.monotonic_ns()
            for _ in range(count):
                run()
            found[name] = round((time.monotonic_ns() - began) / 1000 / count, 1)
        model.check()
        return found

    def capture_allocates_nothing(self, exchange: str, tokens: int) -> dict[str, int]:
        """Case 22: blocks that torch hands out in a capture, of a step and of nothing much."""
        model = self.model(exchange, tokens)
        cell = torch.zeros(1, device=self.session.device)

        def step() -> None:
            with self.session.step(tokens):
                for layer in range(model.layers):
                    found = model.exchange.dispatch(
                        layer, model.x[layer], model.ids[layer], model.weights[layer]
                    )
                    model.exchange.combine(layer, found, model.out[layer])

        blocks = {}
        for name, body in (("empty", lambda: cell.add_(1)), ("step", step)):
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                body()
            blocks[name] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        return blocks

    def received(self, exchange: str, tokens: int) -> dict[str, Any]:
        """Counts and sources that a captured step looked at, in each of three replays: whether the
        counts are those of the ids, and tokens and scales of all sources."""
        model = self.model(exchange, tokens)
        g = self.session.config.geometry
        seen: list[tuple[torch.Tensor, ...]] = []
        model.fresh()
        self.steps(exchange, tokens, 1)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with self.session.warmup(), torch.cuda.graph(graph), self.session.step(tokens) as captured:
            for layer in range(model.layers):
                args = (model.x[layer], model.ids[layer], model.weights[layer])
                recv = model.exchange.dispatch(layer, *args)
                kept = (recv.counts, recv.ids, recv.source_tokens, recv.source_scales)
                seen.append(tuple(tensor.clone() for tensor in kept))
                model.experts(layer, recv)
                model.exchange.combine(layer, recv, model.out[layer])
        same = []
        for _ in range(3):
            model.fresh()
            self.session.run_graph(graph, captured)
            model.check()
            for counts, ids, _, _ in seen:
                here = ids[ids >= 0].long()
                want = torch.bincount(here, minlength=g.slots_per_rank)
                same.append(bool(torch.equal(counts.long(), want)) and bool(want.any()))
        _, _, sources, scales = seen[-1]
        return {"same": all(same), "tokens": sources.tolist(), "scales": scales.tolist()}

    def capture_while_staging(self, exchange: str, tokens: int) -> dict[str, Any]:
        """Holds a capture open until another view is staged, then replays it into that view."""
        model = self.model(exchange, tokens)
        model.fresh()
        torch.cuda.synchronize()
        first = max(self.session.status().staged)
        graph = torch.cuda.CUDAGraph()
        with self.session.warmup(), torch.cuda.graph(graph):
            tell(event="capturing")
            end = time.monotonic() + 60
            while max(self.session.status().staged) == first:
                assert time.monotonic() < end, "no view was staged"
            model.step()
        step = self.session.run_graph(graph)
        model.check()
        return {"first": first, "epoch": step.epoch, "members": sorted(step.members)}

    def misuse(self, exchange: str) -> dict[str, str]:
        """Errors of the client, each before anything is put on the stream."""
        model = self.model(exchange, 4)
        found: dict[str, str] = {}

        def note(name: str, call: Callable[[], Any]) -> None:
            try:
                call()
            except elasticep.ElasticEPError as error:
                found[name] = f"{type(error).__name__}: {error}"

        args = (model.x[0], model.ids[0], model.weights[0])
        note("outside", lambda: model.exchange.dispatch(0, *args))
        with self.session.step(4) as step:
            note("cpu", lambda: model.exchange.dispatch(0, *(t.cpu() for t in args)))
            many = torch.zeros(
                4096, model.x.shape[-1], dtype=model.dtype, device=self.session.device
            )
            ids = torch.zeros(4096, model.ids.shape[-1], dtype=torch.int64, device=many.device)
            note("cap", lambda: model.exchange.dispatch(0, many, ids, ids.float()))
            for layer in range(model.layers):
                model.layer(layer)
        found["complete"] = str(step.complete)
        found["late"] = str(step.number)
        return found

    def break_device(self, exchange: str) -> str:
        """Case 21: a kernel of the engine fails; whoever asks next is told so."""
        model = self.model(exchange, 4)
        assert model.step().complete
        bad = torch.tensor([1 << 40], device=self.session.device)
        try:
            with self.session.step(4) as step:
                torch.zeros(4, device=self.session.device)[bad].sum()
                for layer in range(model.layers):
                    model.layer(layer)
            return f"complete: {step.complete}"
        except DeviceFailed as error:
            return f"DeviceFailed: {error}"
        except (UsageError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    def compiled(self, exchange: str, tokens: int) -> dict[str, Any]:
        """torch.compile over a whole layer, and opcheck of the operators."""
        from tests.gpu.client_compiled import compiled

        return compiled(self.model(exchange, tokens))

    def detach(self) -> None:
        self.models.clear()
        self.session.detach()


def obey(engine: Any) -> None:
    """Do what the parent says, line by line, until it is gone."""
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        try:
            result = getattr(engine, order.pop("do"))(**order)
        except BaseException:
            tell(failed=traceback.format_exc())
            continue
        tell(done=result)


if __name__ == "__main__":
    obey(Engine())
