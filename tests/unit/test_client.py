"""The client's own rules, against a double of the native session: one rank, its own peer."""

import ctypes
import os
from collections import deque
from typing import Any

import numpy as np
import pytest

from elasticep.client.handle import DispatchInput
from elasticep.client.session import Session, Step
from elasticep.errors import (
    CapExceeded,
    ElasticEPError,
    ExpertsLost,
    Fenced,
    PlacementError,
    SpecError,
    StepTimeout,
    StepTorn,
    TensorError,
    UsageError,
)
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, LostExperts
from elasticep.native import abi
from elasticep.spec import ExchangeSpec

torch = pytest.importorskip("torch")

CAP, RANKS, HIDDEN, EXPERTS, TOPK, SLOTS, LAYERS = 4, 2, 8, 4, 2, 3, 2


def config(**changes: Any) -> GroupConfig:
    spec = ExchangeSpec.preset(
        "ROUTED",
        dispatch_dtype="fp32",
        combine_dtype="fp32",
        reduce="per_expert",
        max_tokens=CAP,
        channels=2,
    )
    return GroupConfig(
        **{
            "name": "double",
            "geometry": GroupGeometry(
                layers=LAYERS,
                experts=EXPERTS,
                topk=TOPK,
                hidden=HIDDEN,
                slots_per_rank=SLOTS,
                max_ranks=RANKS,
            ),
            "exchanges": (("decode", spec), ("wide", ExchangeSpec.preset("ALLGATHER"))),
            "initial_ranks": 2,
            **changes,
        }
    )


class DoubleHandle:
    """Delivers what was sent to where it came from. Calls are logged; answers can be scripted."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.failures: dict[str, deque[ElasticEPError | None]] = {}
        self.complete: deque[bool] = deque()
        self.epoch = 1
        self.placement = np.full((LAYERS, RANKS, SLOTS), -1, np.int32)
        self.placement[:, 0, :2] = (0, 2)
        self.placement[:, 1, :2] = (1, 3)
        self.lost = b""
        rooms = RANKS * CAP
        self.rows = np.zeros((rooms, HIDDEN), np.float32)
        self.ids = np.full((rooms, TOPK), -1, np.int32)
        self.weights = np.zeros((rooms, TOPK), np.float32)
        self.counts = np.zeros(SLOTS, np.int32)
        self.out = np.zeros((rooms, TOPK, HIDDEN), np.float32)
        self.step = 0

    def fail(self, call: str, *errors: ElasticEPError | None) -> None:
        self.failures[call] = deque(errors)

    def _log(self, call: str, *what: Any) -> None:
        self.calls.append((call, *what) if what else call)
        waiting = self.failures.get(call)
        error = waiting.popleft() if waiting else None
        if error is not None:
            raise error

    def close(self) -> None:
        self._log("close")

    def step_begin(self, tokens: int, timeout_ms: int) -> abi.StepInfo:
        self._log("step_begin", tokens, timeout_ms)
        self.step += 1
        info = abi.StepInfo(epoch=self.epoch, step=self.step, digest=7, members=2)
        info.incarnation[0], info.incarnation[1] = 1, 3
        return info

    def step_end(self) -> bool:
        self._log("step_end")
        return self.complete.popleft() if self.complete else True

    def step_tear(self) -> None:
        self._log("step_tear")

    def dispatch_send(self, exchange: int, channel: int, layer: int, t: DispatchInput) -> None:
        self._log("dispatch_send", exchange, channel, layer, t.tokens)
        if t.tokens:
            assert t.x is not None
            count = t.tokens * HIDDEN
            sent = np.ctypeslib.as_array((ctypes.c_float * count).from_address(t.x))
            self.rows[: t.tokens] = sent.reshape(t.tokens, HIDDEN)

    def dispatch_recv(
        self, exchange: int, channel: int, out: abi.Received, lost: int | None
    ) -> None:
        self._log("dispatch_recv", exchange, channel)
        if lost is not None:
            ctypes.memmove(lost, self.lost, len(self.lost))
        out.rows, out.out = self.rows.ctypes.data, self.out.ctypes.data
        out.ids = self.ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        out.weights = self.weights.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        out.slot_counts = self.counts.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        out.rows_count, out.id_rows, out.arrived = RANKS * CAP, RANKS * CAP, 2
        out.row_dtype = out.out_dtype = abi.Dtype.FP32

    def dispatch(
        self,
        exchange: int,
        channel: int,
        layer: int,
        tensors: DispatchInput,
        out: abi.Received,
        lost: int | None,
    ) -> None:
        self.dispatch_send(exchange, channel, layer, tensors)
        self.dispatch_recv(exchange, channel, out, lost)

    def combine_send(self, exchange: int, channel: int) -> None:
        self._log("combine_send", exchange, channel)

    def combine_recv(self, exchange: int, channel: int, out: int | None, dtype: int) -> None:
        self._log("combine_recv", exchange, channel, dtype)
        if out is not None:
            ctypes.memmove(out, self.out[:, 0].copy().ctypes.data, HIDDEN * 4)

    def combine(self, exchange: int, channel: int, out: int | None, dtype: int) -> None:
        self.combine_send(exchange, channel)
        self.combine_recv(exchange, channel, out, dtype)

    def slots(self, epoch: int, shape: tuple[int, int, int]) -> Any:
        self._log("slots", epoch)
        assert shape == self.placement.shape
        return self.placement.copy()

    def loads(self, shape: tuple[int, int]) -> Any:
        return np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)

    def warmup(self, on: bool) -> None:
        self._log("warmup", on)

    def status(self) -> abi.Status:
        return abi.Status(rank=0)

    def operators(self) -> None:
        return None

    def failure(self, code: int, text: str) -> ElasticEPError:
        return UsageError(text)

    @property
    def names(self) -> list[str]:
        return [call if isinstance(call, str) else call[0] for call in self.calls]


@pytest.fixture
def handle() -> DoubleHandle:
    return DoubleHandle()


@pytest.fixture
def session(handle: DoubleHandle) -> Session:
    return Session(handle, config(), rank=0, incarnation=1)


def batch(tokens: int = 2) -> tuple[Any, Any, Any]:
    x = torch.arange(tokens * HIDDEN, dtype=torch.float32).view(tokens, HIDDEN)
    return x, torch.zeros((tokens, TOPK), dtype=torch.int64), torch.ones((tokens, TOPK))


# ---- steps


def test_step_is_complete_only_after_its_end(session: Session) -> None:
    with session.step(2) as step:
        assert not step.complete
        assert (step.number, step.epoch, dict(step.members)) == (1, 1, {0: 1, 1: 3})
    assert step.complete


def test_torn_exchange_leaves_the_block_and_an_incomplete_step(
    session: Session, handle: DoubleHandle
) -> None:
    handle.fail("dispatch_send", StepTorn("rank 1 is dead"))
    handle.complete.append(False)
    exchange = session.exchange("decode")
    reached = []
    with session.step() as step:
        exchange.dispatch(0, *batch())
        reached.append("after")
    assert not step.complete
    assert reached == []
    assert handle.names[-1] == "step_end"
    assert "step_tear" not in handle.names


def test_error_in_the_engine_tears_the_step_and_propagates(
    session: Session, handle: DoubleHandle
) -> None:
    with pytest.raises(ZeroDivisionError), session.step() as step:
        _ = 1 / 0
    assert handle.names[-2:] == ["step_tear", "step_end"]
    assert not step.complete
    with session.step() as again:
        pass
    assert again.complete


def test_engines_error_stays_the_one_raised_when_tearing_fails(
    session: Session, handle: DoubleHandle
) -> None:
    handle.fail("step_tear", Fenced(3, "left behind"))
    with pytest.raises(ZeroDivisionError) as caught, session.step():
        _ = 1 / 0
    assert any("left behind" in note for note in caught.value.__notes__)


def test_missing_combine_tears_the_step(session: Session, handle: DoubleHandle) -> None:
    exchange = session.exchange("decode")
    with pytest.raises(UsageError, match="no combine followed"), session.step():
        exchange.dispatch(0, *batch())
    assert handle.names[-2:] == ["step_tear", "step_end"]


def test_barrier_errors_leave_no_step_open(session: Session, handle: DoubleHandle) -> None:
    handle.fail("step_begin", StepTimeout("rank 1 did not come"))
    with pytest.raises(StepTimeout), session.step(timeout=0.25):
        pass
    assert handle.calls[0] == ("step_begin", 0, 250)
    with session.step() as step:
        pass
    assert step.complete


def test_steps_do_not_nest_and_are_used_once(session: Session) -> None:
    step = session.step()
    with step, pytest.raises(UsageError, match="open already"), session.step():
        pass
    with pytest.raises(UsageError, match="entered before"), step:
        pass


@pytest.mark.parametrize("tokens", [-1, 129])
def test_step_refuses_more_tokens_than_any_exchange_takes(session: Session, tokens: int) -> None:
    with pytest.raises(CapExceeded, match=f"{tokens} tokens.*takes 0 to 128"):
        session.step(tokens)


# ---- run


def test_run_repeats_with_the_same_batch_until_complete(
    session: Session, handle: DoubleHandle
) -> None:
    handle.complete.extend([False, False, True])
    seen: list[tuple[int, str]] = []
    torn: list[int] = []

    def forward(step: Step, words: str) -> str:
        seen.append((step.number, words))
        return f"{words} {step.number}"

    result = session.run(forward, "batch", tokens=2, on_torn=lambda step: torn.append(step.number))
    assert result == "batch 3"
    assert seen == [(1, "batch"), (2, "batch"), (3, "batch")]
    assert torn == [1, 2]


def test_run_repeats_when_the_forward_pass_was_cut_short(
    session: Session, handle: DoubleHandle
) -> None:
    handle.fail("dispatch_send", StepTorn("torn"), None)
    handle.complete.extend([False, True])
    exchange = session.exchange("decode")

    def forward(step: Step, _: None) -> int:
        exchange.combine(1, exchange.dispatch(1, *batch()))
        return step.number

    assert session.run(forward, None) == 2


@pytest.mark.parametrize("error", [Fenced(4, "hung"), StepTimeout("nobody came")])
def test_run_raises_what_a_repeat_cannot_mend(
    session: Session, handle: DoubleHandle, error: ElasticEPError
) -> None:
    handle.complete.append(False)
    handle.fail("step_begin", None, error)
    with pytest.raises(type(error)):
        session.run(lambda step, _: None, None)


def test_lost_experts_are_named(session: Session, handle: DoubleHandle) -> None:
    handle.placement[1, 1, 0] = -1  # expert 1 of layer 1
    handle.fail("dispatch_send", PlacementError("token 0 needs an expert"))
    exchange = session.exchange("decode")

    def forward(step: Step, _: None) -> None:
        exchange.dispatch(1, *batch())

    with pytest.raises(ExpertsLost, match="layer 1 expert 1") as caught:
        session.run(forward, None)
    assert caught.value.lost == ((1, 1),)
    assert handle.names[-2:] == ["step_tear", "step_end"]


# ---- exchanges


def test_exchange_by_name_and_by_spec_is_the_same(session: Session) -> None:
    by_name = session.exchange("wide")
    assert session.exchange(config().exchanges[1][1]) is by_name
    with session.step():
        pass
    with pytest.raises(SpecError, match="no exchange 'prefill'; it has 'decode', 'wide'"):
        session.exchange("prefill")


def test_rows_are_views_of_shared_memory(session: Session, handle: DoubleHandle) -> None:
    exchange = session.exchange("decode")
    with session.step():
        recv = exchange.dispatch(0, *batch())
        assert recv.rows.data_ptr() == handle.rows.ctypes.data
        assert recv.out.shape == (RANKS * CAP, TOPK, HIDDEN)
        assert recv.rows[1, 0] == 8.0
        assert (recv.arrived, recv.layer, recv.layout) == (2, 0, "routed")
        recv.out[0, 0] = 5.0
        assert handle.out[0, 0, 0] == 5.0
        out = exchange.combine(0, recv)
        assert out.dtype == torch.float32
        assert out[0].tolist() == [5.0] * HIDDEN
        again = exchange.dispatch(1, *batch())
        assert again.rows is recv.rows
        exchange.combine(1, again, out=torch.empty((2, HIDDEN), dtype=torch.bfloat16))
    assert handle.calls[-2] == ("combine_recv", 0, 0, abi.Dtype.BF16)


def test_zero_tokens_are_fine(session: Session, handle: DoubleHandle) -> None:
    exchange = session.exchange("decode")
    with session.step() as step:
        out = exchange.combine(0, exchange.dispatch(0, *batch(0)))
    assert out.shape == (0, HIDDEN)
    assert step.complete
    assert step.token_ok.shape == (0,)


def test_halves_keep_their_order_on_each_channel(session: Session) -> None:
    exchange = session.exchange("decode")
    with session.step():
        exchange.dispatch_send(0, *batch(), channel=0)
        exchange.dispatch_send(0, *batch(1), channel=1)
        first, second = exchange.dispatch_recv(channel=0), exchange.dispatch_recv(channel=1)
        with pytest.raises(UsageError, match="without dispatch_send"):
            exchange.dispatch_recv(channel=1)
        with pytest.raises(UsageError, match="without combine_send"):
            exchange.combine_recv(channel=0)
        exchange.combine_send(0, first)
        exchange.combine_send(0, second)
        assert exchange.combine_recv(channel=1).shape == (1, HIDDEN)
        assert exchange.combine_recv(channel=0).shape == (2, HIDDEN)
        with pytest.raises(UsageError, match="no channel 2"):
            exchange.dispatch(0, *batch(), channel=2)


def test_calls_out_of_order_name_the_remedy(session: Session) -> None:
    exchange = session.exchange("decode")
    with pytest.raises(UsageError, match=r"with session\.step"):
        exchange.dispatch(0, *batch())
    with session.step():
        recv = exchange.dispatch(0, *batch())
        with pytest.raises(UsageError, match="combine it first"):
            exchange.dispatch(1, *batch())
        with pytest.raises(UsageError, match="what the last dispatch returned"):
            exchange.combine(1, recv)
        exchange.combine(0, recv)
        with pytest.raises(UsageError, match="without dispatch"):
            exchange.combine(0, recv)
    with session.step(), pytest.raises(UsageError, match="without dispatch"):
        exchange.combine(0, recv)
    with session.step(), pytest.raises(UsageError, match=r"layer 2 is outside 0\.\.1"):
        exchange.dispatch(2, *batch())


X, IDS, WEIGHTS = batch()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ((X.double(), IDS, WEIGHTS), r"x .*torch\.float64; it needs torch\.float32"),
        ((X.bfloat16(), IDS, WEIGHTS), r"x .*torch\.bfloat16; it needs torch\.float32"),
        ((X, IDS.to(torch.int16), WEIGHTS), r"topk_ids .*int16; it needs torch\.int64 or"),
        ((X, IDS, WEIGHTS.half()), r"topk_weights .*float16; it needs torch\.float32"),
        ((X[:, :4], IDS, WEIGHTS), r"x .*\[2, 4\]; it needs \[tokens, 8\]"),
        ((X[0], IDS, WEIGHTS), r"x .*shape \[8\]"),
        ((X, IDS[:1], WEIGHTS), r"topk_ids .*\[1, 2\]; it needs \[2, 2\]"),
        ((X, IDS, WEIGHTS[:, :1]), r"topk_weights .*\[2, 1\]; it needs \[2, 2\]"),
        ((X.to("meta"), IDS, WEIGHTS), r"x .*device meta; it needs the CPU"),
        ((X.T.contiguous().T, IDS, WEIGHTS), r"x .*gaps in memory.*\.contiguous\(\)"),
        ((X, IDS.T.contiguous().T, WEIGHTS), r"topk_ids .*gaps in memory"),
    ],
)
def test_wrong_tensors_are_refused_before_anything_is_written(
    session: Session, handle: DoubleHandle, bad: tuple[Any, Any, Any], message: str
) -> None:
    exchange = session.exchange("decode")
    with session.step() as step:
        with pytest.raises(TensorError, match=message):
            exchange.dispatch(0, *bad)
        assert "dispatch_send" not in handle.names
        exchange.combine(0, exchange.dispatch(0, *batch()))
    assert step.complete


def test_cap_is_checked_before_anything_is_written(session: Session, handle: DoubleHandle) -> None:
    exchange = session.exchange("decode")
    with (
        session.step(),
        pytest.raises(CapExceeded, match=f"5 tokens for exchange 'decode', whose cap is {CAP}"),
    ):
        exchange.dispatch(0, *batch(5))
    assert "dispatch_send" not in handle.names


def test_wrong_output_tensors_are_refused(session: Session) -> None:
    exchange = session.exchange("decode")
    with session.step():
        recv = exchange.dispatch(0, *batch())
        with pytest.raises(TensorError, match=r"out .*\[1, 8\]; it needs \[2, 8\]"):
            exchange.combine(0, recv, out=torch.empty(1, HIDDEN))
        with pytest.raises(TensorError, match=r"out .*int64"):
            exchange.combine(0, recv, out=torch.empty((2, HIDDEN), dtype=torch.int64))
        exchange.combine(0, recv)


def test_a_torn_dispatch_may_be_followed_by_a_new_step(
    session: Session, handle: DoubleHandle
) -> None:
    exchange = session.exchange("decode")
    handle.fail("dispatch_recv", StepTorn("torn"))
    handle.complete.append(False)
    with session.step():
        exchange.dispatch(0, *batch())
    with session.step() as step:
        exchange.combine(0, exchange.dispatch(0, *batch()))
    assert step.complete


def test_token_ok_marks_tokens_that_needed_a_lost_expert(handle: DoubleHandle) -> None:
    session = Session(handle, config(lost_experts=LostExperts.SERVE), rank=0, incarnation=1)
    exchange = session.exchange("decode")
    with session.step() as step:
        handle.lost = bytes([0, 1])
        recv = exchange.dispatch(0, *batch())
        assert recv.token_ok.tolist() == [True, False]
        exchange.combine(0, recv)
        handle.lost = bytes([0, 0])
        recv = exchange.dispatch(1, *batch())
        assert recv.token_ok.tolist() == [True, True]
        exchange.combine(1, recv)
    assert step.token_ok.tolist() == [True, False]
    with session.step() as step:
        for tokens in (1, 2):
            exchange.combine(0, exchange.dispatch(0, *batch(tokens)))
    with pytest.raises(UsageError, match="token_ok of what each dispatch returned"):
        _ = step.token_ok


# ---- view and weights


def test_view_is_read_once_per_epoch(session: Session, handle: DoubleHandle) -> None:
    with pytest.raises(UsageError, match="no step has begun"):
        _ = session.view
    for epoch in (1, 1, 4):
        handle.epoch = epoch
        with session.step():
            assert session.view.epoch == epoch
            assert session.slots(1) == (0, 2, -1)
    assert [call for call in handle.calls if call[0] == "slots"] == [("slots", 1), ("slots", 4)]
    with pytest.raises(ValueError, match="read-only"):
        session.view.placement[0, 0, 0] = 1
    with pytest.raises(UsageError, match="layer -1 is outside"):
        session.slots(-1)


def test_weights_are_asked_for_again_only_when_slots_change(
    session: Session, handle: DoubleHandle
) -> None:
    asked: list[tuple[int, tuple[int, ...]]] = []
    with session.step(), pytest.raises(UsageError, match="register_weights"):
        session.weights(0)

    def load(layer: int, slots: tuple[int, ...]) -> list[int]:
        asked.append((layer, slots))
        return list(slots)

    session.register_weights(load)
    with session.step():
        assert session.weights(0) == [0, 2, -1]
        assert session.weights(0) is session.weights(0)
    handle.epoch = 2
    handle.placement[1, 0, 2] = 3
    with session.step():
        session.weights(0)
        assert session.weights(1) == [0, 2, 3]
    assert asked == [(0, (0, 2, -1)), (1, (0, 2, 3))]


def test_load_and_warmup_reach_the_core(session: Session, handle: DoubleHandle) -> None:
    assert session.load().shape == (LAYERS, EXPERTS)
    with pytest.raises(ZeroDivisionError), session.warmup():
        _ = 1 / 0
    assert handle.calls == [("warmup", True), ("warmup", False)]


# ---- whose session it is


def test_detach_ends_a_session_once(handle: DoubleHandle) -> None:
    released: list[str] = []
    session = Session(
        handle, config(), rank=0, incarnation=1, release=lambda: released.append("rpc")
    )
    with session:
        exchange = session.exchange("decode")
        with session.step(), pytest.raises(UsageError, match="detach inside a step"):
            session.detach()
    session.detach()
    assert released == ["rpc"]
    assert handle.names.count("close") == 1
    for call in (session.step().__enter__, session.load, lambda: exchange.dispatch(0, *batch())):
        with pytest.raises(UsageError, match="detached"):
            call()


def test_detach_closes_even_if_the_daemon_cannot_be_told(handle: DoubleHandle) -> None:
    def broken() -> None:
        raise OSError("no daemon")

    session = Session(handle, config(), rank=0, incarnation=1, release=broken)
    with pytest.raises(OSError, match="no daemon"):
        session.detach()
    assert handle.names == ["close"]


def test_forked_child_is_refused(session: Session, handle: DoubleHandle) -> None:
    exchange = session.exchange("decode")
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        refused = 0
        for call in (
            session.step().__enter__,
            session.detach,
            session.load,
            lambda: exchange.dispatch(0, *batch()),
        ):
            try:
                call()
            except UsageError as error:
                refused += "inherited by a fork" in str(error)
        os.write(write, bytes([refused]))
        os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"\x04"
    os.close(read)
    os.waitpid(pid, 0)
    assert handle.calls == []
