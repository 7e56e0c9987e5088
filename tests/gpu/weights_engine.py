"""An engine whose experts lie in memory of the daemons: `python -m tests.gpu.weights_engine`.

Orders and answers are those of `tests.gpu.client_engine`. It runs on an emulated GPU, too, where
torch's own work is called by the stream. Every step is compared with the checkpoint alone.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import elasticep
from elasticep.bench import device_streams
from elasticep.checkpoint import open_checkpoint
from elasticep.client.cuda_session import CudaSession, CudaStep
from elasticep.client.received import Received
from elasticep.errors import ExpertsLost
from elasticep.group import GroupConfig
from elasticep.weights import split_unit
from tests.gpu.client_engine import STEADY, obey, tell, told

SCALE = 64.0
TOLERANCE = 1e-5


class Model:
    """Layers whose expert e multiplies by what the checkpoint has for it (`factor_of`)."""

    def __init__(self, session: CudaSession, checkpoint: str, tokens: int) -> None:
        self.session, self.tokens = session, tokens
        self.exchange = session.exchange("decode")
        g, device = session.config.geometry, session.device
        self.layers, spec = g.layers, session.config.weights
        assert spec is not None
        units = open_checkpoint(checkpoint).units(spec)
        self.bytes = {
            (layer, e): units.read(layer, e) for layer in range(g.layers) for e in range(g.experts)
        }
        factors = np.empty((g.layers, g.experts, g.hidden), np.float32)
        for (layer, expert), data in self.bytes.items():
            parts = split_unit(spec, data)
            factors[layer, expert] = parts["w1"].astype(np.float32)
            factors[layer, expert] += parts["w2"][:4].astype(np.float32).sum(0)
        self.factors = torch.from_numpy(factors / SCALE)
        # Taken once, before any step: graph and eager steps use these very tensors.
        self.weights = [session.weights(layer) for layer in range(g.layers)]
        self.random = torch.Generator().manual_seed(100 + session.rank)
        size = (g.layers, tokens)
        self.x = torch.zeros(*size, g.hidden, device=device)
        self.ids = torch.zeros(*size, g.topk, dtype=torch.int64, device=device)
        self.router = torch.zeros(*size, g.topk, device=device)
        self.out = torch.zeros(*size, g.hidden, device=device)

    def fresh(self) -> None:
        """New inputs, poisoned outputs."""
        self.x.copy_(torch.randn(self.x.shape, generator=self.random))
        experts = self.factors.shape[1]
        scores = torch.rand(*self.ids.shape[:2], experts, generator=self.random)
        self.ids.copy_(scores.topk(self.ids.shape[-1], -1)[1])
        self.router.copy_(torch.rand(self.router.shape, generator=self.random) + 0.1)
        self.out.fill_(float("nan"))

    def experts(self, layer: int, recv: Received) -> None:
        """Fixed shapes: rows of a slot with the weights that lie in it."""
        weights = self.weights[layer]
        factors = (weights["w1"].float() + weights["w2"][:, :4].float().sum(1)) / SCALE
        ids = recv.ids.long().clamp(max=factors.shape[0] - 1)
        weight = torch.where(ids >= 0, recv.weights, 0.0)
        per_choice = factors[ids.clamp(min=0)] * recv.rows.unsqueeze(1)
        recv.out.copy_((per_choice * weight.unsqueeze(-1)).sum(1))

    def step(self) -> CudaStep:
        """All layers."""
        with self.session.step(self.tokens) as step:
            for layer in range(self.layers):
                recv = self.exchange.dispatch(
                    layer, self.x[layer], self.ids[layer], self.router[layer]
                )
                compute(lambda layer=layer, recv=recv: self.experts(layer, recv))
                self.exchange.combine(layer, recv, self.out[layer])
        assert isinstance(step, CudaStep)
        return step

    def check(self) -> None:
        """Every output follows from the checkpoint and the inputs alone."""
        x, ids, router = self.x.cpu().double(), self.ids.cpu(), self.router.cpu().double()
        want = torch.zeros(x.shape, dtype=torch.float64)
        for layer in range(self.layers):
            for k in range(ids.shape[-1]):
                part = self.factors[layer][ids[layer, :, k]].double() * x[layer]
                want[layer] += router[layer, :, k : k + 1] * part
        error = float((self.out.cpu().double() - want).abs().amax() / want.abs().amax())
        assert error < TOLERANCE, f"error {error}"

    def check_slots(self) -> list[list[int]]:
        """What the view names lies on the GPU, to the bit; the experts in this rank's slots."""
        table = self.session.slot_table.cpu().tolist()
        for layer, row in enumerate(table):
            assert row == list(self.session.slots(layer)), (layer, row)
            here = {name: tensor.cpu() for name, tensor in self.weights[layer].items()}
            for slot, expert in enumerate(row):
                if expert >= 0:
                    parts = (t[slot].reshape(-1).view(torch.uint8).numpy() for t in here.values())
                    found = b"".join(part.tobytes() for part in parts)
                    assert found == self.bytes[layer, expert], (layer, slot, expert)
        return table

    def addresses(self) -> list[int]:
        """Where all tensors of weights are now."""
        layers = (self.session.weights(layer) for layer in range(self.layers))
        return [tensor.data_ptr() for layer in layers for tensor in layer.values()]


def compute(work: Callable[[], None]) -> None:
    """The engine's own kernels, in the order of the stream."""
    if device_streams.EMULATED:
        from tests.emulated import client

        client.kernel(work)
    else:
        work()


def failed() -> list[str]:
    """What went wrong in them."""
    if not device_streams.EMULATED:
        return []
    from tests.emulated import client

    return client.failures


def capture(graph: device_streams.Graph) -> contextlib.AbstractContextManager[Any]:
    """What is put on the stream goes into the graph."""
    if not device_streams.EMULATED:
        return graph.capture()
    from tests.emulated import client

    return client.capture(graph)


class Engine:
    """What orders act on."""

    def __init__(self) -> None:
        self.session: CudaSession
        self.checkpoint = ""

    def attach(
        self, config: dict[str, Any], rank: int, socket: str, checkpoint: str
    ) -> dict[str, float]:
        began = time.monotonic()
        group = GroupConfig.from_toml_dict(config)
        session = elasticep.attach(rank=rank, socket=socket, config=group, timeout=60)
        assert isinstance(session, CudaSession)
        if not device_streams.EMULATED:
            torch.cuda.set_device(session.device)
        self.session, self.checkpoint = session, checkpoint
        return {"seconds": time.monotonic() - began}

    def copied(self) -> dict[str, float]:
        found = self.session.weights_copied
        return {"slots": found.slots, "bytes": found.bytes, "seconds": found.ns / 1e9}

    def eager(self, tokens: int, count: int) -> int:
        """Eager steps that ask for the weights inside, where they are compared with the view."""
        model = Model(self.session, self.checkpoint, tokens)
        model.fresh()

        def forward(step: Any, batch: None) -> int:
            for layer in range(model.layers):
                assert self.session.weights(layer) is model.weights[layer]
            for layer in range(model.layers):
                recv = model.exchange.dispatch(
                    layer, model.x[layer], model.ids[layer], model.router[layer]
                )
                compute(lambda layer=layer, recv=recv: model.experts(layer, recv))
                model.exchange.combine(layer, recv, model.out[layer])
            return int(step.epoch)

        for _ in range(count):
            epoch = self.session.run(forward, None, tokens=tokens)
            model.check()
            model.fresh()
        return epoch

    def between(self) -> None:
        """Before each replay."""

    def serve(self, tokens: int) -> dict[str, Any]:
        """Replays of one captured step until the parent says "stop"; tells of every new view."""
        model = Model(self.session, self.checkpoint, tokens)
        model.fresh()
        addresses = model.addresses()
        device_streams.synchronize()
        graph = device_streams.Graph()
        with self.session.warmup(), capture(graph):
            captured = model.step()
        tell(event="serving")
        epoch = complete = torn = here = 0
        while not told("stop"):
            self.between()
            model.fresh()
            step = self.session.replay(graph, captured)  # type: ignore[arg-type]
            try:
                good = step.complete
            except ExpertsLost:  # until somebody has loaded them
                good = False
            if not good:
                torn += 1
                continue
            assert not failed(), failed()
            model.check()
            complete += 1
            if step.epoch != epoch:
                epoch, here = step.epoch, 0
                slots, copied = model.check_slots(), self.copied()
                members = sorted(step.members)
                tell(event="view", epoch=epoch, members=members, slots=slots, copied=copied)
            here += 1
            if here == STEADY:
                tell(event="steady", epoch=epoch, members=sorted(step.members))
        assert model.addresses() == addresses
        self.session.detach()
        return {"complete": complete, "torn": torn, "epoch": epoch}


def main(engine: Engine) -> None:
    """Obey until the parent is gone."""
    if device_streams.EMULATED:
        from tests.emulated import client

        client.install()
    obey(engine)


if __name__ == "__main__":
    main(Engine())
