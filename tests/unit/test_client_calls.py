"""An exchange's calls, their order and what they refuse, against a double of the native session."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from elasticep.client.session import Session
from elasticep.errors import CapExceeded, SpecError, StepTorn, TensorError, UsageError
from elasticep.group import LostExperts
from elasticep.native import abi
from elasticep.spec import ExchangeSpec
from tests.unit.client_double import CAP, HIDDEN, RANKS, SLOTS, TOPK, DoubleHandle, batch, config

torch = pytest.importorskip("torch")


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
    with session.step(), pytest.raises(UsageError, match="combine on exchange 'decode' with None"):
        exchange.combine(0, None)


@pytest.mark.parametrize("layer", [1.0, "1", None])
def test_a_layer_that_is_no_number_leaves_the_channel_free(session: Session, layer: Any) -> None:
    exchange = session.exchange("decode")
    with session.step() as step:
        with pytest.raises(UsageError, match=r"layer is .*; it must be a whole number"):
            exchange.dispatch(layer, *batch())
        exchange.combine(1, exchange.dispatch(np.int64(1), *batch()))
    assert step.complete


@pytest.mark.parametrize("channel", [1.0, "1", None])
def test_a_channel_that_is_no_number_is_refused(session: Session, channel: Any) -> None:
    exchange = session.exchange("decode")
    calls: tuple[Callable[[], Any], ...] = (
        lambda: exchange.dispatch(0, *batch(), channel=channel),
        lambda: exchange.dispatch_recv(channel=channel),
        lambda: exchange.combine_recv(channel=channel),
        lambda: exchange.input(1, channel=channel),
    )
    with session.step() as step:
        for call in calls:
            with pytest.raises(UsageError, match=r"channel is .*; it must be a whole number"):
                call()
        exchange.combine(0, exchange.dispatch(0, *batch(), channel=np.int64(1)))
    assert step.complete


def test_tokens_that_are_no_number_below_the_cap_are_refused(session: Session) -> None:
    exchange = session.exchange("decode")
    for tokens in ("2", 2.0):
        with pytest.raises(UsageError, match=r"tokens is .*; it must be a whole number"):
            session.step(tokens)
    for buffer in (exchange.input, exchange.output):
        with pytest.raises(UsageError, match=r"tokens is 2\.0; it must be a whole number"):
            buffer(2.0)  # type: ignore[arg-type]
        for tokens in (-1, CAP + 1):
            with pytest.raises(CapExceeded, match=f"{tokens} tokens for exchange 'decode'"):
                buffer(tokens)


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
        (([1.0], IDS, WEIGHTS), r"x .*type list; it needs a torch\.Tensor"),
        ((X.numpy(), IDS, WEIGHTS), r"x .*type ndarray; it needs a torch\.Tensor"),
        ((X, IDS.tolist(), WEIGHTS), r"topk_ids .*type list; it needs a torch\.Tensor"),
        ((X, IDS, WEIGHTS.numpy()), r"topk_weights .*type ndarray; it needs a torch\.Tensor"),
        ((X, IDS, None), r"topk_weights .*type NoneType; it needs a torch\.Tensor"),
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


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), "1", None, torch.ones(2)])
def test_a_global_scale_that_is_none_is_refused(
    session: Session, handle: DoubleHandle, scale: Any
) -> None:
    exchange = session.exchange("decode")
    wrong = r"global_scale .*; it needs (one|a number) above 0"
    with session.step(), pytest.raises(TensorError, match=wrong):
        exchange.dispatch(0, *batch(), global_scale=scale)
    assert "dispatch_send" not in handle.names


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
        for shared in (recv.rows[1:3], recv.out.view(-1, HIDDEN)[:2]):  # peers may be there
            with pytest.raises(TensorError, match=r"out .*memory of what dispatch returned; it n"):
                exchange.combine(0, recv, out=shared)
        with pytest.raises(TensorError, match=r"out .*int64"):
            exchange.combine(0, recv, out=torch.empty((2, HIDDEN), dtype=torch.int64))
        with pytest.raises(TensorError, match=r"out .*type list; it needs a torch\.Tensor"):
            exchange.combine(0, recv, out=[])
        exchange.combine(0, recv)


def test_a_step_whose_result_a_handler_of_a_signal_took_away_is_torn(
    session: Session, handle: DoubleHandle
) -> None:
    """It may run when the native call has returned: the sums were there, and nobody has them."""
    exchange = session.exchange("decode")
    handle.fail("combine_recv", KeyboardInterrupt())
    with session.step():
        recv = exchange.dispatch(0, *batch())
        with pytest.raises(KeyboardInterrupt):
            exchange.combine(0, recv)
        assert handle.names[-1] == "step_tear"


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
        handle.lost = bytes([1, 0])
        recv = exchange.dispatch(1, *batch(), channel=1)
        assert recv.token_ok.tolist() == [False, True]
        exchange.combine(1, recv)
        handle.lost = bytes([0, 0])
        exchange.combine(0, exchange.dispatch(0, *batch()))
        exchange.combine(0, exchange.dispatch(0, *batch(0)))  # brings no size of its own
    assert step.token_ok.tolist() == [False, True]
    with session.step() as step:
        for tokens in (1, 2):
            exchange.combine(0, exchange.dispatch(0, *batch(tokens)))
    with pytest.raises(UsageError, match="token_ok of what each dispatch returned"):
        _ = step.token_ok


def test_rows_of_changing_number_are_parts_of_one_tensor() -> None:
    """With `cpu_sync` every dispatch has another; whatever came before, all rows are there."""
    from elasticep.client.received import ReceivedTensors

    spec = ExchangeSpec.preset(
        "NORMAL", dispatch_dtype="fp32", combine_dtype="fp32", max_tokens=CAP
    )
    tensors = ReceivedTensors("normal", spec, config().geometry)
    whole = np.arange(RANKS * CAP * HIDDEN, dtype=np.float32).reshape(-1, HIDDEN)
    numbers = np.arange(RANKS * CAP * TOPK, dtype=np.int32).reshape(-1, TOPK)
    ints = numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
    floats = numbers.view(np.float32).ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    for rows in (3, 1, RANKS * CAP, 0, 2):
        struct = abi.Received(rows=whole.ctypes.data, out=whole.ctypes.data, arrived=rows)
        struct.ids, struct.weights, struct.slot_counts = ints, floats, ints
        struct.rows_count = struct.id_rows = rows
        struct.row_dtype = struct.out_dtype = abi.Dtype.FP32
        recv = tensors.received(struct, 0, 0, torch.ones(0, dtype=torch.bool))
        assert recv.rows.is_contiguous()
        np.testing.assert_array_equal(recv.rows.numpy(), whole[:rows])
        np.testing.assert_array_equal(recv.ids.numpy(), numbers[:rows])
        assert recv.counts.tolist() == numbers.reshape(-1)[:SLOTS].tolist()
