"""The torch operators against doubles of the C functions that they call, for both planes.

Nothing here needs a rank or a GPU: memory is the host's, and what the operators hand on is compared
with what the eager path hands to the same functions.
"""

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from elasticep.errors import StepTorn, TensorError, UsageError
from elasticep.geometry import GroupGeometry
from elasticep.native import abi, operators
from elasticep.native.cuda_structs import DispatchArgs
from elasticep.native.cuda_structs import Received as CudaReceived
from elasticep.spec import ExchangeSpec

torch = pytest.importorskip("torch")

CAP, HIDDEN, TOPK, SLOTS, LAYERS, ROOM = 4, 8, 2, 3, 2, 8
FIELDS = ("rows", "ids", "weights", "counts", "offsets", "places", "row_slots", "out")


class Memory:
    """What a dispatch delivers, filled with numbers."""

    def __init__(self) -> None:
        self.rows = torch.randn(ROOM, HIDDEN)
        self.ids = torch.randint(0, SLOTS, (ROOM, TOPK), dtype=torch.int32)
        self.weights = torch.rand(ROOM, TOPK)
        self.counts = torch.arange(SLOTS, dtype=torch.int32)
        self.offsets = torch.arange(SLOTS + 1, dtype=torch.int32)
        self.places = torch.randint(0, ROOM, (ROOM, TOPK), dtype=torch.int32)
        self.row_slots = torch.randint(0, SLOTS, (ROOM,), dtype=torch.int32)
        self.out = torch.zeros(ROOM, HIDDEN)
        self.lost = torch.zeros(CAP, dtype=torch.uint8)

    def fill(self, raw: Any) -> None:
        """As an `ep_received` or an `epc_received`."""
        names = {"counts": "slot_counts", "offsets": "slot_offsets"}
        kinds = dict(type(raw)._fields_)
        for field in FIELDS:
            name = names.get(field, field)
            address = ctypes.c_void_p(getattr(self, field).data_ptr())
            setattr(raw, name, ctypes.cast(address, kinds[name]))
        raw.rows_count, raw.id_rows = ROOM, ROOM


class Core:
    """Doubles of the core's functions, which log what they are called with."""

    def __init__(self, memory: Memory) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers = {"send": 0, "receive": 0, "combine": 0}
        self.before_receive: Callable[[], int] | None = None
        self._u32, self._at = ctypes.c_uint32, ctypes.c_void_p
        u, p = self._u32, self._at

        def send(*args: Any) -> int:
            rows = ctypes.cast(args[4], ctypes.POINTER(abi.Rows)).contents
            self.calls.append(("send", *args[1:4], rows.x, rows.scales, rows.x_dtype, *args[5:]))
            return self.answers["send"]

        def receive(session: int, exchange: int, channel: int, out: int, lost: int) -> int:
            self.calls.append(("receive", exchange, channel, lost))
            memory.fill(ctypes.cast(out, ctypes.POINTER(abi.Received)).contents)
            return self.before_receive() if self.before_receive else self.answers["receive"]

        def combine(session: int, exchange: int, channel: int, out: int, dtype: int) -> int:
            self.calls.append(("combine", exchange, channel, out, dtype))
            return self.answers["combine"]

        self._held = (
            ctypes.CFUNCTYPE(ctypes.c_int, p, u, u, u, p, p, u, p, u)(send),
            ctypes.CFUNCTYPE(ctypes.c_int, p, u, u, p, p)(receive),
            ctypes.CFUNCTYPE(ctypes.c_int, p, u, u, p, u)(combine),
            ctypes.CFUNCTYPE(p)(lambda: ctypes.addressof(self._text)),
        )
        self._text = ctypes.create_string_buffer(b"a sentence of the core")
        address = operators.address_of
        send_at, receive_at, combine_at, error_at = map(address, self._held)
        calls = operators.CpuCalls(
            send_at, receive_at, combine_at, error_at, ctypes.pointer(operators.interpreter())
        )
        self.rank = operators.Rank(operators.Plane.CPU, 1, calls)


class Target:
    """An exchange as `compiled.Operators` needs it, and a session as far as errors go."""

    def __init__(
        self, rank: operators.Rank, spec: ExchangeSpec | None = None, hidden: int = HIDDEN
    ) -> None:
        from elasticep.client.compiled import Operators

        geometry = GroupGeometry(
            layers=LAYERS, experts=4, topk=TOPK, hidden=hidden, slots_per_rank=SLOTS, max_ranks=2
        )
        self.name, self._number = "decode", 0
        self.spec = spec or ExchangeSpec.preset(
            "ROUTED", dispatch_dtype="fp32", combine_dtype="fp32", max_tokens=CAP, channels=2
        )
        kinds = {abi.Error.ETORN: StepTorn, abi.Error.EINVAL: TensorError}
        handle = SimpleNamespace(
            failure=lambda code, text: kinds.get(abi.Error(code), UsageError)(text)
        )
        self._session = SimpleNamespace(config=SimpleNamespace(geometry=geometry), _handle=handle)
        self.noted: list[tuple[int, int, int]] = []
        self.operators = Operators(self, rank)  # type: ignore[arg-type]
        self.key = self.operators.key

    def _note_compiled(self, step: Any, channel: int, layer: int, tokens: int) -> None:
        self.noted.append((channel, layer, tokens))


@pytest.fixture
def memory() -> Memory:
    torch.manual_seed(5)
    return Memory()


@pytest.fixture
def core(memory: Memory) -> Core:
    return Core(memory)


@pytest.fixture
def target(core: Core) -> Iterator[Target]:
    made = Target(core.rank)
    yield made
    made.operators.close()


def batch(tokens: int = 3) -> tuple[Any, Any, Any]:
    ids = torch.zeros(tokens, TOPK, dtype=torch.int64)
    return torch.randn(tokens, HIDDEN), ids, torch.ones(tokens, TOPK)


def delivered(memory: Memory) -> tuple[Any, ...]:
    return (
        *(memory.rows, None, memory.ids, memory.weights, memory.counts),
        *(memory.offsets, memory.places, memory.row_slots, memory.lost),
    )


def dispatch(memory: Memory, key: int, rows: Any, channel: int = 0, layer: int = 0) -> None:
    args = (*delivered(memory), *rows, None, key, channel, layer)
    torch.ops.elasticep.exchange_dispatch(*args)


def test_opcheck_of_both_operators(memory: Memory, target: Target) -> None:
    torch.library.opcheck(
        torch.ops.elasticep.exchange_dispatch,
        (*delivered(memory), *batch(), None, target.key, 0, 0),
    )
    out = torch.zeros(CAP, HIDDEN)
    dispatch(memory, target.key, batch(CAP))
    torch.library.opcheck(
        torch.ops.elasticep.exchange_combine, (out, memory.rows, memory.out, target.key, 0, 0)
    )


@pytest.mark.parametrize("tokens", [0, 3])
def test_what_the_core_is_called_with(
    memory: Memory, core: Core, target: Target, tokens: int
) -> None:
    x, ids, weights = batch(tokens)
    out = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    dispatch(memory, target.key, (x, ids.int(), weights), channel=1, layer=1)
    torch.ops.elasticep.exchange_combine(out, memory.rows, memory.out, target.key, 1, 1)
    sent, received, combined = core.calls
    assert sent[:7] == ("send", 0, 1, 1, x.data_ptr() or None, None, abi.Dtype.FP32)
    assert sent[8:] == (4, weights.data_ptr() or None, tokens)
    assert received == ("receive", 0, 1, memory.lost.data_ptr() if tokens else None)
    assert combined == ("combine", 0, 1, out.data_ptr() or None, abi.Dtype.BF16)


def test_a_wait_that_comes_back_for_signals_goes_on(
    memory: Memory, core: Core, target: Target
) -> None:
    """Nothing is raised where none came, nor kept for later."""
    from elasticep import ops

    answers = [int(abi.Error.EINTR)] * 3
    real = core.answers["receive"]
    core.before_receive = lambda: answers.pop() if answers else real
    dispatch(memory, target.key, batch())
    assert [call[0] for call in core.calls] == ["send", *["receive"] * 4]
    assert ops.raised(target.key) is None
    assert ops.raised(0) is None


def test_tensors_that_are_not_the_exchange_s_own_are_copied(
    memory: Memory, core: Core, target: Target
) -> None:
    copy = Memory()
    dispatch(copy, target.key, batch(CAP))  # `fill` is of the first memory
    for field in FIELDS[:-1]:
        assert torch.equal(getattr(copy, field), getattr(memory, field)), field
    y = torch.randn(ROOM, HIDDEN)
    out = torch.zeros(CAP, HIDDEN)
    torch.ops.elasticep.exchange_combine(out, copy.rows, y, target.key, 0, 0)
    assert torch.equal(memory.out, y)
    for wrong in (memory.rows[:1].clone(), torch.zeros(ROOM + 1, HIDDEN)):
        with pytest.raises(RuntimeError, match=r"rows of exchange 'decode' has \d+ bytes"):
            torch.ops.elasticep.exchange_dispatch(
                wrong, *delivered(copy)[1:], *batch(), None, target.key, 0, 0
            )


X, IDS, WEIGHTS = batch()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((X.double(), IDS, WEIGHTS), r"x .*dtype Double"),
        ((X.bfloat16(), IDS, WEIGHTS), r"x .*dtype BFloat16"),
        ((X, IDS.to(torch.int16), WEIGHTS), r"topk_ids .*Short; it needs int64 or int32"),
        ((X, IDS, WEIGHTS.half()), r"topk_weights .*Half; it needs float32"),
        ((X[:, :4], IDS, WEIGHTS), r"x .*\[3, 4\]; it needs \[3, 8\]"),
        ((X[0], IDS, WEIGHTS), r"x .*shape \[8\]; it needs \[tokens, 8\]"),
        ((X, IDS[:1], WEIGHTS), r"topk_ids .*\[1, 2\]; it needs \[3, 2\]"),
        ((X, IDS, WEIGHTS[:, :1]), r"topk_weights .*\[3, 1\]; it needs \[3, 2\]"),
        ((X.T.contiguous().T, IDS, WEIGHTS), r"x .*gaps in memory"),
        (batch(5), f"5 tokens for exchange 'decode', whose cap is {CAP}"),
    ],
)
def test_a_wrong_tensor_is_refused_before_the_core_is_called(
    memory: Memory, core: Core, target: Target, bad: tuple[Any, Any, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        dispatch(memory, target.key, bad)
    assert core.calls == []
    with pytest.raises(RuntimeError, match="no channel 2; it has 2"):
        dispatch(memory, target.key, batch(), channel=2)
    with pytest.raises(RuntimeError, match=r"layer 2 is outside 0\.\.1"):
        dispatch(memory, target.key, batch(), layer=2)
    dispatch(memory, target.key, batch())
    for out, why in ((torch.zeros(1, HIDDEN), r"out .*\[1, 8\]"), (IDS, "out .*Long")):
        with pytest.raises(RuntimeError, match=why):
            torch.ops.elasticep.exchange_combine(out, memory.rows, memory.out, target.key, 0, 0)
    assert [call[0] for call in core.calls] == ["send", "receive"]


def test_a_session_learns_once_what_operators_did(
    memory: Memory, core: Core, target: Target
) -> None:
    step: Any = SimpleNamespace(_open_exchanges=set())
    assert target.operators.after(step, None) is None
    dispatch(memory, target.key, batch(2), channel=1, layer=1)
    assert target.operators.after(step, None) is None
    assert (target.noted, step._open_exchanges) == ([(1, 1, 2)], {(0, 1)})
    for error, code in ((StepTorn, abi.Error.ETORN), (TensorError, abi.Error.EINVAL)):
        core.answers["receive"] = int(code)
        with pytest.raises(RuntimeError, match="a sentence of the core") as caught:
            dispatch(memory, target.key, batch())
        assert isinstance(target.operators.after(step, caught.value), error)
    core.answers["receive"] = 0
    dispatch(memory, target.key, batch(1))
    target.operators.forget()
    mine = RuntimeError("of the engine")
    assert target.operators.after(step, mine) is mine
    assert target.noted == [(1, 1, 2)]
    target.operators.close()
    with pytest.raises(RuntimeError, match="is not open in this process: its session is detached"):
        dispatch(memory, target.key, batch())


# ---- quantised rows


def test_scales_by_column_are_copied_with_their_strides(core: Core, memory: Memory) -> None:
    spec = ExchangeSpec.preset(
        "NORMAL",
        dispatch_dtype="fp8",
        combine_dtype="bf16",
        max_tokens=CAP,
        scale_layout="columns",
        layout="contiguous",
    )
    hidden, lead = 256, 12
    real = torch.rand(2, lead)  # [columns][lead]
    rows = torch.zeros(ROOM, hidden, dtype=torch.float8_e4m3fn)

    class Wide(Memory):
        def fill(self, raw: Any) -> None:
            memory.fill(raw)
            raw.rows, raw.scales = rows.data_ptr(), real.data_ptr()
            raw.scale_columns, raw.scale_lead = 2, lead

    wide = Core(Wide())
    target = Target(wide.rank, spec, hidden)
    given = torch.zeros(ROOM, 2)
    x = torch.zeros(3, hidden, dtype=torch.float8_e4m3fn)

    def send(scales: Any) -> None:
        args = (rows, given, *delivered(memory)[2:], x, *batch()[1:], scales, target.key, 0, 0)
        torch.ops.elasticep.exchange_dispatch(*args)

    scales = torch.ones(3, 2)
    send(scales)
    assert torch.equal(given, real.T[:ROOM])
    assert wide.calls[0][4:7] == (x.data_ptr(), scales.data_ptr(), abi.Dtype.FP8)
    for bad, why in ((scales[:, :1], r"x_scales .*\[3, 1\]; it needs \[3, 2\]"), (x, "x_scales")):
        with pytest.raises(RuntimeError, match=why):
            send(bad)
    target.operators.close()


# ---- the CUDA plane


class Cuda:
    """Doubles of the CUDA library's functions, for ctypes and for the operators alike."""

    def __init__(self, memory: Memory) -> None:
        self.calls: list[tuple[Any, ...]] = []
        u, p = ctypes.c_uint32, ctypes.c_void_p
        names = [name for name, _ in DispatchArgs._fields_]

        def dispatch(context: int, args: Any, stream: int) -> int:
            if isinstance(args, int):
                args = ctypes.cast(args, ctypes.POINTER(DispatchArgs)).contents
            self.calls.append(("dispatch", context, *(getattr(args, n) for n in names), stream))
            return 0

        def combine(*args: int) -> int:
            self.calls.append(("combine", *(arg or 0 for arg in args)))
            return 0

        def tune(*args: int) -> int:
            self.calls.append(("tune", *args))
            return 0

        def received_of(context: int, exchange: int, channel: int, out: Any) -> int:
            if isinstance(out, int):
                out = ctypes.cast(out, ctypes.POINTER(CudaReceived)).contents
            memory.fill(out)
            return 0

        def stream(device: int, out: Any) -> int:
            out[0] = 77
            return 0

        self.epc_dispatch, self.epc_combine, self.epc_tune = dispatch, combine, tune
        self.epc_received_of = received_of
        self._held = (
            ctypes.CFUNCTYPE(ctypes.c_int, p, p, p)(dispatch),
            ctypes.CFUNCTYPE(ctypes.c_int, p, u, u, u, p, u, p)(combine),
            ctypes.CFUNCTYPE(ctypes.c_int, p, u, u)(tune),
            ctypes.CFUNCTYPE(ctypes.c_int, p, u, u, p)(received_of),
            ctypes.CFUNCTYPE(p)(lambda: None),
            operators.STREAM(stream),
        )
        self.table = operators.CudaCalls(*map(operators.address_of, self._held))


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("num_sms", [None, 6])
def test_operators_and_eager_calls_ask_the_same_of_the_gpu(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, tokens: int, num_sms: int | None
) -> None:
    from elasticep.client import cuda_handle
    from elasticep.client.handle import DispatchInput
    from elasticep.native import cuda as native

    library = Cuda(memory)
    monkeypatch.setattr(native, "api", lambda: library)
    monkeypatch.setattr(cuda_handle.CudaHandle, "stream", 77)
    eager = cuda_handle.CudaHandle.__new__(cuda_handle.CudaHandle)
    config = native.ContextConfig(rank=0, incarnation=1, device=0)
    eager.context = native.CudaContext.borrowed(4242, abi.Geometry(), config)
    eager._sms, eager._args = ctypes.c_uint32(0), {}
    spec = ExchangeSpec.preset(
        "ROUTED",
        dispatch_dtype="fp32",
        combine_dtype="fp32",
        max_tokens=CAP,
        channels=2,
        num_sms=num_sms,
    )
    sms = ctypes.c_uint32(0)
    plane = operators.Plane.CUDA
    target = Target(operators.Rank(plane, eager.context.address, library.table, -1, sms), spec)
    (x, ids, weights), lost = batch(tokens), memory.lost
    out = torch.zeros(tokens, HIDDEN)
    given = DispatchInput(
        *(x.data_ptr() or None, abi.Dtype.FP32.value, ids.data_ptr() or None, 8),
        *(weights.data_ptr() or None, tokens),
    )
    for _ in range(2):  # the second time nothing is left to tune
        eager.use_sms(spec.num_sms or 0)
        eager.dispatch(0, 1, 1, given, lost.data_ptr() if tokens else None)
        eager.use_sms(spec.num_sms or 0)
        eager.combine(0, 1, out.data_ptr() or None, abi.Dtype.FP32.value)
    wanted, library.calls = library.calls, []
    for _ in range(2):
        dispatch(memory, target.key, (x, ids, weights), channel=1, layer=1)
        torch.ops.elasticep.exchange_combine(out, memory.rows, memory.out, target.key, 1, 1)
    assert library.calls == wanted
    assert [call[0] for call in wanted].count("tune") == (num_sms is not None)
    assert (sms.value, eager._sms.value) == (num_sms or 0, num_sms or 0)
    target.operators.close()
