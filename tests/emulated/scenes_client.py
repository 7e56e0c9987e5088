"""Client sessions on emulated GPUs beside those of the CPU plane: what the same dispatch gives."""

from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from elasticep.client.attach import _attach_cuda
from elasticep.client.cuda_handle import CudaHandle
from elasticep.client.cuda_session import CudaSession
from elasticep.client.received import Received
from elasticep.client.session import Session
from elasticep.client.step import Step
from elasticep.device import Device
from elasticep.errors import NativeError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native import cuda_library
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec, Layout
from elasticep.testing import emulated_cuda
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, equal_weights, spread

RANKS, LAYERS, EXPERTS, TOPK, HIDDEN, CAP = 2, 2, 8, 3, 512, 8
TOKENS: Final = (5, 2)
FP32: Final[dict[str, Any]] = {
    "dispatch_dtype": "fp32", "combine_dtype": "fp32", "max_tokens": CAP,
}  # fmt: skip
EXCHANGES: Final = {
    "routed": ExchangeSpec.preset("ROUTED", **FP32),
    "each": ExchangeSpec.preset("ROUTED", reduce="per_expert", **FP32),
    "gather": ExchangeSpec.preset("ALLGATHER", **FP32),
    "normal": ExchangeSpec.preset("NORMAL", **FP32),
    "latency": ExchangeSpec.preset("LOW_LATENCY", **FP32),
    "prefill": ExchangeSpec.preset("EXPAND_SYNC", **FP32),
    "small": ExchangeSpec.preset("ROUTED", **{**FP32, "dispatch_dtype": "nvfp4"}),
    "alike": ExchangeSpec.preset("ALLGATHER", replicated_input=True, **FP32),
}


FORMATS: Final = {
    name: ExchangeSpec.preset(preset, **{**FP32, **changes})
    for name, preset, changes in (
        ("fp8", "EXPAND", {"dispatch_dtype": "fp8"}),
        ("columns", "EXPAND", {"dispatch_dtype": "fp8", "scale_layout": "columns"}),
        ("packed", "EXPAND_SYNC", {"dispatch_dtype": "fp8", "scale_layout": "packed"}),
        ("mxfp8", "EXPAND_SYNC", {"dispatch_dtype": "mxfp8", "scale_layout": "packed"}),
        ("exact", "NORMAL", {"dispatch_dtype": "mxfp8"}),
        ("sums", "ROUTED", {"combine_dtype": "fp8"}),
        ("sums-by-expert", "LOW_LATENCY", {"combine_dtype": "fp8"}),
        ("half", "ROUTED", {"dispatch_dtype": "bf16", "combine_dtype": "bf16"}),
    )
}


class EmulatedHandle(CudaHandle):
    """Its GPU's memory is the host's, and each call has run when it returns, since what torch does
    is in no stream.
    """

    def __init__(self, group: LocalGroup, rank: int) -> None:
        emulated_cuda.set_device(rank)
        super().__init__(group.socket_path, group.ticket(rank), 60_000, rank, 1)
        self.device = torch.device("cpu")
        self._own = emulated_cuda.Stream()

    @property
    def stream(self) -> int:
        return self._own.cuda_stream

    def dispatch(self, *args: Any, **options: Any) -> None:
        super().dispatch(*args, **options)
        self._own.synchronize()

    def combine(self, *args: Any, **options: Any) -> None:
        super().combine(*args, **options)
        self._own.synchronize()

    def count_slots(self, exchange: int, channel: int, counts: int) -> None:
        super().count_slots(exchange, channel, counts)
        self._own.synchronize()


class EmulatedGroup(LocalGroup):
    """Each seat's memory is on a GPU of its own."""

    _made = 0

    def make_data(self) -> int:
        self._made += 1
        return cuda_library.create_region(self.geometry, self._made - 1)


def config(device: Device, specs: dict[str, ExchangeSpec]) -> GroupConfig:
    return GroupConfig(
        name="both",
        geometry=GroupGeometry(
            layers=LAYERS, experts=EXPERTS, topk=TOPK, hidden=HIDDEN,
            slots_per_rank=EXPERTS, max_ranks=RANKS,
        ),
        exchanges=tuple(specs.items()),
        initial_ranks=RANKS,
        device=device,
        launch=Launch.INLINE,
    )  # fmt: skip


def sessions_of(device: Device, specs: dict[str, ExchangeSpec]) -> tuple[LocalGroup, list[Any]]:
    """A group and the sessions of its ranks, whose first view is staged."""
    setup = config(device, specs)
    geometry = geometry_struct(setup)
    sessions: list[Any] = []
    group: LocalGroup
    if device is Device.CPU:
        group = LocalGroup(geometry)
        sessions += [attach_to(group, setup, rank) for rank in range(RANKS)]
    else:
        torch.cuda.is_current_stream_capturing = lambda: False  # torch for CPUs does not know
        group = EmulatedGroup(geometry)
        for rank in range(RANKS):
            handle = EmulatedHandle(group, rank)
            sessions.append(CudaSession(handle, setup, rank=rank, incarnation=1))
    table = spread(geometry, range(RANKS))
    group.stage(1, 0, list(range(RANKS)), table, equal_weights(table, list(range(RANKS))))
    return group, sessions


def batch(rank: int, layer: int, alike: bool) -> tuple[Any, Any, Any]:
    seed = torch.Generator().manual_seed(7 + layer if alike else 10 * rank + layer)
    tokens = TOKENS[0 if alike else rank] - layer
    ids = torch.rand(tokens, EXPERTS, generator=seed).topk(TOPK)[1]
    ids[0, layer] = -1
    x = torch.randn(tokens, HIDDEN, generator=seed)
    return x, ids, torch.rand(tokens, TOPK, generator=seed)


def told(recv: Received, spec: ExchangeSpec) -> dict[str, Any]:
    """What an engine may rely on, copied; all else of the tensors is undefined."""
    found: dict[str, Any] = {
        "counts": recv.counts.clone(),
        "source_tokens": recv.source_tokens.clone(),
        "source_scales": recv.source_scales[recv.source_tokens > 0],  # of others it is undefined
        "token_ok": recv.token_ok.clone(),
        **{name: getattr(recv, name).clone() for name in ("ids", "weights")},
    }
    come = (recv.ids >= 0).any(1)
    if recv.layout is Layout.MASKED:
        rows, counts = recv.rows.shape[1], recv.counts
        come = torch.arange(rows) < counts[:, None]
    elif recv.layout is Layout.CONTIGUOUS:
        assert recv.offsets is not None
        assert recv.row_slots is not None
        end = int(recv.offsets[-1])
        come = torch.arange(len(recv.rows)) < end
        found |= {"offsets": recv.offsets.clone(), "row_slots": recv.row_slots[:end].clone()}
    if recv.places is not None:
        found["places"] = recv.places.clone()
    found["rows"] = recv.rows[come].view(torch.uint8)
    if recv.scales is not None:
        found["scales"] = recv.scales[come].clone()
    if spec.cpu_sync:
        found |= {"arrived": torch.tensor(recv.arrived), "room": torch.tensor(len(recv.rows))}
    return found


def exchanges(session: Session, specs: dict[str, ExchangeSpec]) -> dict[str, dict[str, Any]]:
    """A complete step of all exchanges: what each dispatch and combine gave, by exchange and
    layer.
    """
    if isinstance(session, CudaSession):
        emulated_cuda.set_device(session.rank)

    def forward(step: Step, _: None) -> dict[str, dict[str, Any]]:
        found = {}
        for name, spec in specs.items():
            exchange: Any = session.exchange(name)
            for layer in range(LAYERS):
                x, ids, weights = batch(session.rank, layer, spec.replicated_input)
                if spec.dispatch_dtype.value == "bf16":
                    x = x.bfloat16()
                scale = 0.5 if name == "small" else 1.0
                recv = exchange.dispatch(layer, x, ids, weights, global_scale=scale)
                all_of = found[f"{name} {layer}"] = told(recv, spec)
                recv.out.zero_()
                if name == "each":
                    recv.out.copy_(recv.rows[:, None, :])
                elif recv.out.dtype == recv.rows.dtype:
                    recv.out.copy_(recv.rows)
                all_of["out"] = exchange.combine(layer, recv)
        return found

    return session.run(forward, None, tokens=max(TOKENS))


def same(field: str, here: torch.Tensor, there: torch.Tensor) -> bool:
    """To the bit, but sums: GPUs fuse products into them."""
    if field != "out":
        return torch.equal(here, there)
    return here.dtype == there.dtype and torch.allclose(here, there, 1e-5, 1e-5)


def parity(formats: bool) -> list[str]:
    """Where the two planes differ, in words: with both ranks, then without the second one, of which
    nothing may be left.
    """
    specs = FORMATS if formats else EXCHANGES
    both: list[list[dict[str, dict[str, Any]]]] = []
    for device in (Device.CPU, Device.CUDA):
        group, sessions = sessions_of(device, specs)
        together = on_all(sessions, lambda session: exchanges(session, specs))
        group.mark_dead(1)
        alone = spread(group.geometry, [0])
        group.stage(2, 1, [0], alone, equal_weights(alone, [0]))
        both.append([*together, exchanges(sessions[0], specs)])
        assert dict(sessions[0].view.members) == {0: 1}
        for session in sessions:
            session.detach()
        group.close()
    return [
        f"{who}, {where}: {field} is {there[where][field]}, not {here[where][field]}"
        for who, here, there in zip(("rank 0", "rank 1", "rank 0 alone"), *both, strict=True)
        for where in here
        for field in here[where]
        if not same(field, here[where][field], there[where][field])
    ]


def torn() -> list[list[int]]:
    """Counts and those of the ids, in a step that is torn before its dispatch and one after it."""
    group, sessions = sessions_of(Device.CUDA, EXCHANGES)

    def steps(session: CudaSession) -> list[list[int]]:
        emulated_cuda.set_device(session.rank)
        exchange: Any = session.exchange("routed")
        found = []
        for tears, tokens in ((False, 5), (True, 2), (False, 2)):
            x, ids, weights = batch(session.rank, 0, True)
            with session.step(tokens) as step:
                if tears:
                    session._handle.step_tear()
                recv = exchange.dispatch(0, x[:tokens], ids[:tokens], weights[:tokens])
                found.append(recv.counts.tolist())
                here = recv.ids[recv.ids >= 0]
                found.append(torch.bincount(here, minlength=EXPERTS).tolist())
                exchange.combine(0, recv)
            assert step.complete != tears
        return found

    (first, _) = on_all(sessions, steps)
    for session in sessions:
        session.detach()
    group.close()
    return first


def no_torch_for_gpus() -> list[int]:
    """Attaching with a torch that makes no tensors on GPUs; who has the rank before and after."""
    setup = config(Device.CUDA, EXCHANGES)
    with EmulatedGroup(geometry_struct(setup)) as group:
        settings: Any = SimpleNamespace(rank=0)
        holders = []
        for _ in range(2):
            answer: Any = SimpleNamespace(
                fd_socket=group.socket_path, ticket=group.ticket(0), incarnation=1
            )
            with pytest.raises(NativeError, match="install a torch for CUDA"):
                _attach_cuda(answer, setup, settings, 60_000)
            holders.append(group.status(0).engine_pid)
    return holders
