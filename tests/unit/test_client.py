"""A session's view, weights and end, against a double of the native session."""

import os

import pytest

from elasticep.client.session import Session
from elasticep.errors import UsageError
from tests.unit.client_double import EXPERTS, LAYERS, DoubleHandle, batch, config

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


def test_a_forked_child_leaves_the_block_of_a_session_as_it_wants(
    session: Session, handle: DoubleHandle
) -> None:
    """Its own exit is not hidden by what it may not do, and the rank stays its parent's."""
    pid = os.fork()
    if pid == 0:
        try:
            with session:
                raise SystemExit(7)
        except SystemExit as left:
            os._exit(int(str(left)))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert handle.calls == []
    session.detach()
    assert handle.names == ["close"]


def test_a_session_says_whose_it_is(session: Session) -> None:
    assert repr(session) == f"<rank 0 of group {session.config.name!r}, incarnation 1>"
