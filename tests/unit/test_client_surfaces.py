"""An engine that was written for CPUs finds the same names on a GPU, with the same signatures, and
the other way round; what only one plane has is listed here, with its reason.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticep.client.session import Session
from tests.unit import client_double, cuda_double

torch = pytest.importorskip("torch")

ONLY_ON_GPUS = {
    "CudaSession": {
        "replay": "graphs are CUDA's",
        "run_graph": "graphs are CUDA's",
        "weights_copied": "on the CPU weights are read where the daemon has them",
    },
    "CudaStep": {"captured": "graphs are CUDA's"},
    "CudaExchange": {},
}
ONLY_OF_TWO = {
    "decode": "one of the two exchanges",
    "prefill": "the other",
    "current": "the one of the running step",
}


def public(thing: object) -> dict[str, Any]:
    """Names of a class and of this instance: a signature for methods, else None."""
    names = {
        name
        for name in (*dir(type(thing)), *getattr(thing, "__dict__", ()))
        if not name.startswith("_")
    }
    found: dict[str, Any] = {}
    for name in names:
        value = inspect.getattr_static(type(thing), name, None)
        callable_ = inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod))
        found[name] = inspect.signature(getattr(type(thing), name)) if callable_ else None
    return found


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> tuple[Session, Any]:
    cuda_double.patch(monkeypatch)
    of_cpu = Session(client_double.DoubleHandle(), client_double.config(), rank=0, incarnation=1)
    return of_cpu, cuda_double.session_of(cuda_double.Handle())


def session(one: Any) -> Any:
    return one


def step(one: Any) -> Any:
    return one.step(2)


def exchange(one: Any) -> Any:
    return one.exchange("decode")


@pytest.mark.parametrize("of", [session, step, exchange])
def test_both_planes_have_one_public_surface(
    sessions: tuple[Session, Any], of: Callable[[Any], Any]
) -> None:
    here, there = (of(each) for each in sessions)
    assert type(here) is not type(there)
    only = ONLY_ON_GPUS[type(there).__name__]
    cpu, gpu = public(here), public(there)
    assert set(gpu) - set(cpu) == set(only)
    assert set(cpu) - set(gpu) == set()
    assert {name: gpu[name] for name in cpu} == cpu
    page = (Path(__file__).parent.parent.parent / "docs" / "cuda.md").read_text()
    assert [name for name in only if name not in page] == []


def test_an_exchange_of_two_has_the_calls_of_one(sessions: tuple[Session, Any]) -> None:
    from elasticep.client.auto import AutoExchange
    from elasticep.spec import ExchangeSpec

    one = exchange(sessions[0])
    two = AutoExchange(sessions[0], "both", ExchangeSpec.preset("AUTO"), (0, 1))
    plain, both = public(one), public(two)
    assert set(both) - set(plain) == set(ONLY_OF_TWO)
    assert {name: both[name] for name in plain} == plain


def test_what_is_received_is_of_one_class(sessions: tuple[Session, Any]) -> None:
    """Every field of it has a value there: none is left out on one plane."""
    from elasticep.client.received import Received

    for one, batch in zip(sessions, (client_double.batch(2), cuda_double.inputs(2)), strict=True):
        with one.step(2):
            recv = exchange(one).dispatch(0, *batch)
            assert type(recv) is Received
            for name in public(recv):
                getattr(recv, name)
            assert recv.counts.shape == (one.config.geometry.slots_per_rank,)
            assert recv.source_tokens.shape == (one.config.geometry.max_ranks,)
            assert recv.source_scales.shape == recv.source_tokens.shape
            exchange(one).combine(0, recv)


def test_the_table_of_slots_stays_and_changes_with_the_view() -> None:
    handle = client_double.DoubleHandle()
    one = Session(handle, client_double.config(), rank=1, incarnation=3)
    table = one.slot_table
    assert one.device == table.device
    assert bool((table == -1).all())
    for epoch, slots in ((1, (1, 3, -1)), (2, (-1, 0, 3))):
        handle.epoch, handle.placement[:, 1] = epoch, slots
        with one.step():
            assert one.slot_table is table
            assert table.tolist() == [list(slots)] * client_double.LAYERS
            assert one.slots(0) == slots
    late = Session(handle, client_double.config(), rank=0, incarnation=1)
    with late.step():
        assert late.slot_table.tolist() == [[0, 2, -1]] * client_double.LAYERS
