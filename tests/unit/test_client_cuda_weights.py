"""Expert weights on a GPU through a CUDA session, against a double of its handle."""

from collections.abc import Callable
from typing import Any

import pytest

from elasticep.errors import SlotInvalid, UsageError
from elasticep.native.cuda_structs import StepStatus
from elasticep.weights import TensorSpec, WeightSpec
from tests.unit.cuda_double import LAYERS, SLOTS, Handle, patch, session_of

torch = pytest.importorskip("torch")

SPEC = WeightSpec(
    (TensorSpec.of("w13", "fp8_e4m3", (6, 4)), TensorSpec.of("w13_scale", "fp32", (2,)))
)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    patch(monkeypatch)
    return session_of


def test_weights_are_the_same_tensors_always_and_wait_for_nothing_before_a_step(
    make: Callable[..., Any],
) -> None:
    handle = Handle()
    session = make(handle, weights=SPEC)
    layout = session.config.arena_layout()
    first, second = session.weights(0), session.weights(1)
    assert {n: (tuple(t.shape), t.dtype) for n, t in first.items()} == {
        "w13": ((SLOTS, 6, 4), torch.float8_e4m3fn),
        "w13_scale": ((SLOTS, 2), torch.float32),
    }
    handle.mirror[layout.layer_bytes + layout.tensor_offsets[1]] = 7  # layer 1, second tensor
    assert second["w13_scale"].view(torch.uint8)[0, 0] == 7
    with session.step() as step:
        assert session.weights(0) is first
    assert step.complete
    assert session.weights(0) is first
    assert [call for call in handle.calls if call.startswith("held")] == ["held 0"]
    with pytest.raises(UsageError, match="layer 2 is outside"):
        session.weights(LAYERS)
    with pytest.raises(UsageError, match="daemons of group 'double' keep"):
        session.register_weights(lambda layer, slots: None)
    session.detach()
    with pytest.raises(UsageError, match="detached"):
        session.weights(0)


def test_an_eager_step_is_not_given_weights_that_are_not_those_of_its_view(
    make: Callable[..., Any],
) -> None:
    handle = Handle()
    session = make(handle, weights=SPEC)
    handle.held[2] = 1
    with session.step(), pytest.raises(SlotInvalid, match="slot 2 of rank 0 holds expert 1 on the"):
        session.weights(1)
    handle.held[2] = -1
    with session.step(), pytest.raises(SlotInvalid, match="holds nothing whole on the GPU, not"):
        session.weights(1)
    handle.status = StepStatus.DOOMED  # no step runs, so nobody computes with them
    with session.step():
        assert session.weights(1)
    assert session.weights(1)  # outside of a step nothing is said about slots


def test_a_capture_is_given_weights_without_a_word_of_slots(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = Handle()
    session = make(handle, weights=SPEC)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with session.step(3):
        assert session.weights(0) is session.weights(0)
    assert not [call for call in handle.calls if call.startswith(("held", "wait"))]


def test_an_engine_that_keeps_its_own_weights_on_a_gpu_registers_a_callback(
    make: Callable[..., Any],
) -> None:
    session = make(Handle())
    session.register_weights(lambda layer, slots: (layer, slots))
    with session.step():
        assert session.weights(1) == (1, (0, 1, 2, 3))
