"""The rules of a CUDA session against a double of its handle: what is asked, when, and of whom."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elasticep.errors import (
    CapExceeded,
    DeviceFailed,
    ExpertsLost,
    Fenced,
    StepTimeout,
    TensorError,
    UsageError,
)
from elasticep.group import Completion, LostExperts
from elasticep.native.cuda_structs import StepStatus
from elasticep.spec import ExchangeSpec
from tests.unit.cuda_double import (
    CAP,
    HIDDEN,
    LAYERS,
    Handle,
    forward,
    inputs,
    patch,
    session_of,
)

torch = pytest.importorskip("torch")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    patch(monkeypatch)
    return session_of


def test_a_step_waits_for_nothing_until_it_is_asked(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle)
    run = forward(session)
    with session.step(3) as step:
        out = run(step, None)
        assert step.complete is False
    assert not [call for call in handle.calls if call.startswith("wait")]
    assert step.complete is True
    assert (step.number, step.epoch, dict(step.members)) == (1, 1, {0: 1})
    assert handle.calls == [
        *("enter 0", "begin 3", "dispatch both", "combine both", "end", "wait ended 1"),
    ]
    assert torch.equal(out, 2 * inputs(3)[0])
    assert bool(step.token_ok.all())
    assert session.view.epoch == 1
    assert session.slots(0) == (0, 1, 2, 3)
    assert session.slot_table.tolist() == [[0, 1, 2, 3]] * LAYERS
    # Once a view has run there is nothing to wait for on the host.
    session.run(run, None, tokens=3)
    assert handle.calls.count("enter 0") == 1
    session.detach()
    assert handle.closed


def test_facts_are_those_of_the_latest_step_only(make: Callable[..., Any]) -> None:
    session = make(Handle())
    with session.step() as first:
        assert first.number == 1
    with session.step():
        pass
    assert first.number == 1  # asked in time, so it is known
    with pytest.raises(UsageError, match="a later step has begun"):
        _ = first.complete


def test_a_doomed_step_lets_the_host_wait_for_the_next_view(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle)
    run = forward(session)
    handle.status = StepStatus.DOOMED
    with session.step() as step:
        run(step, None)
    assert step.complete is False
    handle.status = StepStatus.RUN  # the pause is over without a view, or with one
    assert torch.equal(session.run(run, None, tokens=3), 2 * inputs(3)[0])
    assert handle.calls.count("enter 1") == 1


def test_a_torn_step_is_repeated(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle)
    run = forward(session)
    handle.complete = False
    torn = []

    def note(step: Any) -> None:
        torn.append(step.number)
        handle.complete = True

    session.run(run, None, tokens=3, on_torn=note)
    assert torn == [1]


def test_errors_of_a_step(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle)
    handle.status = StepStatus.TIMEOUT
    with session.step() as step:
        pass
    with pytest.raises(StepTimeout, match="Enter a new step"):
        _ = step.complete
    handle.status = StepStatus.EXPELLED
    with session.step() as step:
        pass
    with pytest.raises(Fenced, match="went on without it"):
        _ = step.complete
    handle.status, handle.broken = StepStatus.RUN, True
    with session.step() as step:
        pass
    with pytest.raises(DeviceFailed):
        _ = step.complete
    handle.broken = False
    handle.why = Fenced(3, "expelled")
    with pytest.raises(Fenced, match="epoch 3"), session.step():
        pass
    with pytest.raises(Fenced, match="epoch 3"):
        session.replay(SimpleNamespace(replay=lambda: None))


def test_waits_of_the_native_session_come_back_for_signals_and_go_on() -> None:
    """With the deadline that they had."""
    from elasticep.client.cuda_handle import CudaHandle
    from elasticep.native.abi import Error
    from elasticep.native.cuda_session import Wait

    asked: list[tuple[object, ...]] = []

    def answer(*arguments: object) -> int:
        asked.append(arguments)
        return 0 if len(asked) % 3 == 0 else int(Error.EINTR)

    handle: Any = CudaHandle.__new__(CudaHandle)
    handle._api = SimpleNamespace(
        epc_session_enter=answer, epc_session_wait=answer, epc_session_await_counts=answer
    )
    handle._session = 7
    handle.context = SimpleNamespace(
        config=SimpleNamespace(rank=0),
        result=lambda: "told",
        wait_counts=lambda exchange, channel: [exchange, channel],
    )
    handle.enter(4, 100)
    assert asked == [(7, 4, 100, 0), (7, 4, 100, 1), (7, 4, 100, 1)]
    assert handle.wait(Wait.ENDED, 2, 5) == "told"
    assert asked[3:] == [(7, int(Wait.ENDED), 2, 5)] * 3
    assert handle.counts(4, 1) == [4, 1]
    assert asked[6:] == [(7, 4, 1)] * 3


def test_a_signal_at_a_barrier_ends_the_step_that_is_on_the_stream() -> None:
    """And none where no barrier was put there."""
    from elasticep.client.cuda_handle import CudaHandle

    said: list[str] = []
    handle: Any = CudaHandle.__new__(CudaHandle)
    handle._session = 7
    handle._api = SimpleNamespace(
        epc_session_call_off=lambda session: said.append(f"call off {session}")
    )
    handle.context = SimpleNamespace(
        tear=lambda stream: said.append("tear"), step_end=lambda stream: said.append("end")
    )
    handle._begun = False
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CudaHandle, "stream", 5)
        handle.step_cancel()
        assert said == []
        handle._begun = True
        handle.step_cancel()
        handle.step_cancel()
    assert said == ["call off 7", "tear", "end"]


def test_an_error_inside_a_step_tears_it_for_all(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle)
    with pytest.raises(ZeroDivisionError), session.step() as step:
        _ = 1 // 0
    assert handle.calls[-2:] == ["tear", "end"]
    assert step.why.startswith("ZeroDivisionError: ")  # known without a wait
    assert not step.complete
    assert step.why.startswith("ZeroDivisionError: ")
    exchange = session.exchange("decode")
    with pytest.raises(UsageError, match="no combine followed"), session.step():
        exchange.dispatch(0, *inputs(2))
    with pytest.raises(UsageError, match="open already"), session.step(), session.step():
        pass


def test_lost_experts(make: Callable[..., Any]) -> None:
    handle = Handle()
    handle.lose = [1]
    session = make(handle)
    with pytest.raises(ExpertsLost, match="expert"):
        session.run(forward(session), None, tokens=3)
    handle = Handle()
    handle.lose = [1]
    handle.serves = True
    session = make(handle, lost_experts=LostExperts.SERVE)
    exchange = session.exchange("decode")
    with session.step(3) as step:
        recv = exchange.dispatch(0, *inputs(3))
        assert recv.token_ok.tolist() == [True, False, True]
        exchange.combine(0, recv)
    assert step.complete
    assert step.token_ok.tolist() == [True, False, True]


def test_what_is_done_about_lost_experts_is_what_operators_say_now(
    make: Callable[..., Any],
) -> None:
    handle = Handle()
    handle.lose = [1]
    session = make(handle)  # of a group that was made with `refuse`
    exchange = session.exchange("decode")
    for serves in (False, True):
        handle.serves = serves
        with session.step(3) as step:
            recv = exchange.dispatch(0, *inputs(3))
            assert recv.token_ok.tolist() == [True, False, True]
            exchange.combine(0, recv)
        assert step.token_ok.tolist() == [True, False, True]
        if serves:
            assert step.complete
        else:
            with pytest.raises(ExpertsLost):
                _ = step.complete


def test_halves_and_what_is_refused(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle)
    exchange = session.exchange("decode")
    x, ids, weights = inputs(2)
    with pytest.raises(UsageError, match="outside a step"):
        exchange.dispatch(0, x, ids, weights)
    with session.step(2) as step:
        exchange.dispatch_send(0, x, ids, weights)
        recv = exchange.dispatch_recv()
        assert (recv.arrived, recv.tokens, recv.layer) == (-1, (), 0)
        exchange.combine_send(0, recv)
        out = torch.empty(2, HIDDEN)
        assert exchange.combine_recv(out) is out
        with pytest.raises(TensorError, match="device meta"):
            exchange.dispatch(0, x.to("meta"), ids, weights)
        with pytest.raises(CapExceeded):
            exchange.dispatch(0, *inputs(CAP + 1))
    assert step.complete
    halves = ["dispatch send", "receive", "combine send", "combine receive"]
    assert [call for call in handle.calls if call in halves] == halves


def test_what_nobody_looks_at_is_not_worked_out(make: Callable[..., Any]) -> None:
    handle = Handle()
    handle.lose = [1]
    session = make(handle)
    exchange = session.exchange("decode")
    x, ids, weights = inputs(3)
    ids[:] = torch.tensor([[0, 1], [-1, 1], [3, 1]])
    found = []
    for looks in (0, 1, 3):
        with session.step(3):
            recv = exchange.dispatch(0, x, ids, weights, global_scale=0.5)
            found += [recv.counts for _ in range(looks)]
            assert recv.source_tokens.tolist() == [3]
            assert recv.source_scales.tolist() == [0.5]
            exchange.combine(0, recv)
    assert handle.calls.count("count slots") == 2  # once in each step in which somebody looked
    assert len({id(counts) for counts in found}) == 1  # the same memory every time
    assert found[0].tolist() == [1, 3, 0, 1]
    assert recv.counts is found[0]
    assert handle.calls.count("count slots") == 2
    assert recv.token_ok is recv.token_ok


@pytest.mark.parametrize("looks", [False, True])
def test_a_compiled_dispatch_counts_only_what_is_looked_at(
    make: Callable[..., Any], looks: bool
) -> None:
    from torch._dynamo.backends.common import aot_autograd

    exchange = make(Handle()).exchange("decode")
    seen = []

    def compiler(graph: Any, _: Any) -> Any:
        seen.append(str(graph.code))
        return graph

    def model(x: Any, ids: Any, weights: Any) -> Any:
        recv = exchange.dispatch(0, x, ids, weights)
        return recv.counts if looks else recv.source_tokens

    whole = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    with pytest.raises(RuntimeError, match="not open"):  # there is no native rank behind it
        whole(*inputs(2))
    assert "exchange_dispatch" in seen[0]
    assert ("scatter" in seen[0]) == looks


@pytest.mark.parametrize("preset", ["ROUTED", "NORMAL"])
def test_compiled_experts_of_an_eager_dispatch_look_at_counts(
    make: Callable[..., Any], preset: str
) -> None:
    """In operations that a compiler knows: a graph cannot call the data plane."""
    handle = Handle()
    handle.lose = [1]
    full = {"dispatch_dtype": "fp32", "combine_dtype": "fp32", "max_tokens": CAP}
    session = make(handle, exchanges=(("decode", ExchangeSpec.preset(preset, **full)),))
    exchange = session.exchange("decode")
    x, ids, weights = inputs(2)
    ids[:] = torch.tensor([[3, 1], [3, 0]])

    def experts(recv: Any) -> Any:
        return recv.counts + 0, recv.token_ok & True, recv.source_tokens + 0

    with session.step(2):
        recv = exchange.dispatch(0, x, ids, weights)
        told = torch.compile(experts, backend="aot_eager", fullgraph=True)(recv)
        exchange.combine(0, recv)
    assert [each.tolist() for each in told] == [[1, 1, 0, 2], [True, False], [2]]
    assert "count slots" not in handle.calls
    assert recv.counts.tolist() == [1, 1, 0, 2]


def test_slots_are_counted_by_a_compiler_as_by_the_kernel() -> None:
    from elasticep.client.cuda_received import slot_counts

    seed = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, 5, (40, 3), generator=seed, dtype=torch.int32)
    for tensor in (ids, torch.full((4, 3), -1, dtype=torch.int32), ids[:0]):
        want = torch.bincount(tensor[tensor >= 0], minlength=6).int()
        assert torch.equal(slot_counts(tensor, 6), want)


def test_counts_of_a_detached_session_are_refused() -> None:
    from elasticep.client.cuda_handle import CudaHandle

    handle: Any = CudaHandle.__new__(CudaHandle)
    handle._session = None
    with pytest.raises(UsageError, match="is detached"):
        handle.count_slots(0, 0, 8)


def test_an_exact_count_is_waited_for(make: Callable[..., Any]) -> None:
    handle = Handle()
    spec = ExchangeSpec.preset(
        "NORMAL", dispatch_dtype="fp32", combine_dtype="fp32", max_tokens=CAP
    )
    session = make(handle, exchanges=(("exact", spec),))
    exchange = session.exchange("exact")
    with session.step(3) as step:
        recv = exchange.dispatch(0, *inputs(3))
        assert (recv.arrived, len(recv.rows), len(recv.ids), len(recv.out)) == (2, 2, 2, 2)
        exchange.combine(0, recv)
    assert step.complete
    handle.torn, handle.complete = 1, False
    with session.step(3) as step:
        exchange.dispatch(0, *inputs(3))
        pytest.fail("a torn step goes on")
    assert step.complete is False
    assert step.why == "step 2 is torn: a rank left it before its end; it must be repeated"


def test_agreed_works(make: Callable[..., Any]) -> None:
    handle = Handle()
    session = make(handle, completion=Completion.AGREED)
    run = forward(session)

    def batch_of(work: int) -> int | None:
        return work if work <= 2 else None

    def one(step: Any, batch: int) -> int:
        run(step, None)
        return 10 * batch

    doomed = [True, False, True, True]  # whether the next barriers let no step run

    def begin(tokens: int, timeout_ms: int) -> None:
        handle.begun += 1
        runs = not (doomed and doomed.pop(0))
        handle.status = StepStatus.RUN if runs else StepStatus.DOOMED
        handle.work += runs
        handle.settled = handle.work - 1

    handle.begin = begin  # type: ignore[method-assign]
    assert list(session.works(one, batch_of)) == [(1, 10), (2, 20)]


def test_an_exchange_takes_the_sms_that_its_spec_says(make: Callable[..., Any]) -> None:
    handle = Handle()
    wire = {"dispatch_dtype": "fp32", "combine_dtype": "fp32", "max_tokens": CAP}
    few = ExchangeSpec.preset("ROUTED", num_sms=6, **wire)
    session = make(handle, exchanges=(("few", few), ("all", ExchangeSpec.preset("ROUTED", **wire))))
    with session.step(2):
        for name, sms in (("few", 6), ("all", 0), ("few", 6)):
            exchange = session.exchange(name)
            recv = exchange.dispatch(0, *inputs(2))
            assert handle.sms == sms
            exchange.combine(0, recv)
            assert handle.sms == sms
