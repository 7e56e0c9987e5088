"""torch.compile over the layers of a step, and opcheck of the operators, on a GPU."""

from typing import Any

import torch

from tests.gpu.client_engine import Model


def compiled(model: Model) -> dict[str, Any]:
    """Errors of a compiled step, eager and replayed from a graph; opcheck raises by itself."""
    session, exchange = model.session, model.exchange

    def layers(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        results = []
        for layer in range(model.layers):
            recv = exchange.dispatch(layer, x[layer], ids[layer], weights[layer])
            slots = session.slot_table[layer].long()
            factors = model.factors[slots.clamp(min=0)]
            chosen = recv.ids.long()
            weight = torch.where(chosen >= 0, recv.weights, 0.0)
            y = factors[chosen.clamp(min=0)] * recv.rows.float().unsqueeze(1)
            recv.out.copy_((y * weight.unsqueeze(-1)).sum(1))
            results.append(exchange.combine(layer, recv))
        return torch.stack(results)

    whole = torch.compile(layers, fullgraph=True)
    errors = []
    for _ in range(3):
        model.fresh()
        with session.step(model.tokens) as step:
            model.out.copy_(whole(model.x, model.ids, model.weights))
        assert step.complete
        errors.append(model.wrong())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), session.step(model.tokens) as captured:
        model.out.copy_(whole(model.x, model.ids, model.weights))
    for _ in range(3):
        model.fresh()
        assert session.run_graph(graph, captured).complete
        errors.append(model.wrong())
    _opcheck(model)
    model.fresh()
    assert model.step().complete
    return {"error": max(errors), "steps": len(errors)}


def _opcheck(model: Model) -> None:
    """Outside a step the kernels return at once, so the operators may run as often as wanted."""
    exchange = model.exchange
    fixed = exchange._fixed(0)
    arguments = (model.x[0], model.ids[0], model.weights[0])
    torch.library.opcheck(
        torch.ops.elasticep.exchange_dispatch,
        (
            *(fixed.rows, fixed.scales, fixed.ids, fixed.weights, fixed.counts, fixed.offsets),
            *(fixed.places, fixed.row_slots, exchange._lost[0, 0]),
            *(*arguments, None, exchange._key, 0, 0),
        ),
    )
    out = torch.zeros_like(model.x[0])
    torch.library.opcheck(
        torch.ops.elasticep.exchange_combine, (out, fixed.rows, fixed.out, exchange._key, 0, 0)
    )
