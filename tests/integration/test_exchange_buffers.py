"""Rows written and results read where the exchange has them: no copy, the same bits."""

from typing import Any

import numpy as np
import pytest

from elasticep.client.session import Session
from elasticep.errors import CapExceeded, TensorError, UsageError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig, Launch
from elasticep.native import abi
from elasticep.native.convert import geometry_struct
from elasticep.spec import ExchangeSpec
from elasticep.testing.clients import attach_to, on_all
from elasticep.testing.local_group import LocalGroup, spread
from elasticep.testing.raw import RawSession
from elasticep.testing.world import World, exchange_config, make_batch

torch = pytest.importorskip("torch")

RANKS, EXPERTS, TOPK, HIDDEN, CAP = 2, 6, 2, 128, 12
SPECS = {
    "allgather": ExchangeSpec.preset("ALLGATHER", max_tokens=CAP),
    "replicated": ExchangeSpec.preset("ALLGATHER", max_tokens=CAP, replicated_input=True),
    "normal": ExchangeSpec.preset("NORMAL", max_tokens=CAP),
    "low_latency": ExchangeSpec.preset("LOW_LATENCY", max_tokens=CAP, dispatch_dtype="fp8"),
    "expand": ExchangeSpec.preset("EXPAND", max_tokens=CAP, channels=2),
    "expand_sync": ExchangeSpec.preset("EXPAND_SYNC", max_tokens=CAP, combine_dtype="fp8"),
    "routed": ExchangeSpec.preset("ROUTED", max_tokens=CAP),
    "auto": ExchangeSpec.preset("AUTO", max_tokens=CAP),
}


def config(launch: Launch) -> GroupConfig:
    return GroupConfig(
        name="buffers",
        geometry=GroupGeometry(
            layers=2,
            experts=EXPERTS,
            topk=TOPK,
            hidden=HIDDEN,
            slots_per_rank=3,
            max_ranks=RANKS,
        ),
        exchanges=tuple((name, spec) for name, spec in SPECS.items() if name != "replicated"),
        initial_ranks=RANKS,
        launch=launch,
    )


def with_group(group_config: GroupConfig, work: Any) -> None:
    with LocalGroup(geometry_struct(group_config)) as group:
        sessions = [attach_to(group, group_config, rank) for rank in range(RANKS)]
        group.stage(1, 0, range(RANKS), spread(group.geometry, range(RANKS)))
        on_all(sessions, lambda session: work(group, session))
        for session in sessions:
            session.detach()


def batch(rank: int, tokens: int = CAP) -> tuple[Any, Any, Any]:
    draw = torch.Generator().manual_seed(rank)
    x = torch.randint(-8, 9, (tokens, HIDDEN), generator=draw).to(torch.bfloat16)
    ids = torch.rand((tokens, EXPERTS), generator=draw).argsort(1)[:, :TOPK].contiguous()
    return x, ids, torch.rand((tokens, TOPK), generator=draw)


def trip(session: Session, name: str, rows: Any, given: Any, out: Any, layers: int = 2) -> Any:
    """Two layers, so that memory that is used again holds what the layer before left."""
    exchange = session.exchange(name)
    _, ids, weights = given
    with session.step(len(rows)) as step:
        for layer in range(layers):
            recv = exchange.dispatch(layer, rows, ids, weights)
            recv.out.zero_()
            if recv.places is None:
                recv.out.copy_(recv.rows.float() * recv.weights.sum(1, keepdim=True))
            else:
                rows_here = recv.places[recv.places >= 0].long()
                flat = recv.rows.reshape(-1, HIDDEN)[rows_here].float()
                recv.out.view(-1, HIDDEN)[rows_here] = flat.to(torch.bfloat16)
            result = exchange.combine(layer, recv, out(exchange) if out else None)
    assert step.complete
    return result


@pytest.mark.parametrize("launch", list(Launch))
def test_in_place_gives_the_same_bits(launch: Launch) -> None:
    names = [name for name in SPECS if name not in ("replicated", "auto")]

    def work(_group: LocalGroup, session: Session) -> None:
        for name in names:
            given = batch(session.rank)
            expected = trip(session, name, given[0], given, None)
            exchange = session.exchange(name)
            rows = exchange.input(CAP)
            rows.copy_(given[0])
            result = trip(session, name, rows, given, lambda e: e.output(CAP))
            assert torch.equal(result, expected), name
            assert torch.equal(rows, given[0]), name  # only the engine writes there
            assert result.data_ptr() == exchange.output(CAP).data_ptr()
            assert rows.data_ptr() == exchange.input(1).data_ptr()
            # Rows that overlap the place they are copied to, which moves them.
            late = exchange.input(CAP)[3:]
            part = tuple(tensor[3:].contiguous() for tensor in given)
            assert torch.equal(trip(session, name, late, part, None, 1), expected[3:]), name

    with_group(config(launch), work)


def test_they_are_the_memory_of_the_rank() -> None:
    """Taken away by a copy in between, these would not be seen in the region."""

    def work(group: LocalGroup, session: Session) -> None:
        given = batch(session.rank)
        region = group.data(session.rank)
        for name in ("routed", "expand", "normal", "allgather"):
            exchange = session.exchange(name)
            for tensor in (exchange.input(CAP), exchange.output(CAP)):
                tensor[5].fill_(1.0)
                before = region.copy()
                tensor[5].fill_(3.0)
                assert (region != before).sum() >= HIDDEN
            exchange.input(CAP).copy_(given[0])
            before = region.copy()
            result = trip(session, name, exchange.input(CAP), given, lambda e: e.output(CAP))
            assert result.float().abs().sum() > 0

    with_group(config(Launch.SERVICE), work)


def test_replicated_rows_in_place() -> None:
    plain = config(Launch.SERVICE)
    group_config = GroupConfig(
        name="same",
        geometry=plain.geometry,
        exchanges=(("replicated", SPECS["replicated"]),),
        initial_ranks=RANKS,
    )

    def work(_group: LocalGroup, session: Session) -> None:
        given = batch(7)
        expected = trip(session, "replicated", given[0], given, None)
        rows = session.exchange("replicated").input(CAP)
        rows.copy_(given[0])
        result = trip(session, "replicated", rows, given, lambda e: e.output(CAP))
        assert torch.equal(result, expected)

    with_group(group_config, work)


def test_channels_and_parts_have_their_own() -> None:
    def work(_group: LocalGroup, session: Session) -> None:
        expand, auto = session.exchange("expand"), session.exchange("auto")
        places = {expand.input(1, channel=c).data_ptr() for c in range(2)}
        places |= {expand.output(1, channel=c).data_ptr() for c in range(2)}
        assert len(places) == 4
        for prompt in (False, True):
            with session.step(0, prompt=prompt):
                part = auto.prefill if prompt else auto.decode
                assert auto.input(2).data_ptr() == part.input(2).data_ptr()
                assert auto.output(2).data_ptr() == part.output(2).data_ptr()

    with_group(config(Launch.SERVICE), work)


def test_what_does_not_fit_is_refused() -> None:
    def work(_group: LocalGroup, session: Session) -> None:
        routed, quantised = session.exchange("routed"), session.exchange("low_latency")
        with pytest.raises(CapExceeded, match="13 tokens for exchange 'routed'"):
            routed.input(CAP + 1)
        with pytest.raises(CapExceeded):
            routed.output(CAP + 1)
        with pytest.raises(UsageError, match="no channel 1; it has 1"):
            routed.input(1, channel=1)
        with pytest.raises(TensorError, match=r"float32 are not .* takes; use torch\.bfloat16"):
            routed.input(1, torch.float32)
        with pytest.raises(TensorError, match=r"results cannot be torch\.int8"):
            routed.output(1, torch.int8)
        assert quantised.input(2, torch.float8_e4m3fn).shape == (2, HIDDEN)
        assert quantised.input(2, torch.float16).dtype == torch.float16

    with_group(config(Launch.INLINE), work)


@pytest.mark.parametrize("launch", list(abi.Launch))
@pytest.mark.parametrize("layout", [abi.RowLayout.MASKED, abi.RowLayout.ROUTED])
def test_rows_under_way_are_not_overwritten_by_a_dispatch_out_of_order(
    layout: int, launch: int
) -> None:
    """Others read a rank's rows until its combine: a second dispatch is refused untouched."""
    g = abi.Geometry(
        layers=1,
        experts=EXPERTS,
        topk=TOPK,
        hidden=HIDDEN,
        slots=EXPERTS,
        max_ranks=RANKS,
        exchanges=1,
        launch=launch,
    )
    g.exchange[0] = exchange_config(CAP, layout=layout)
    with World(g) as world:

        def run(rank: int, session: RawSession) -> None:
            b, other = make_batch(g, CAP, [1, rank]), make_batch(g, CAP, [2, rank])
            step = session.begin(CAP).step
            session.dispatch_send(0, 0, b.x, b.ids, b.weights)
            with pytest.raises(UsageError, match="before the combine of its last exchange"):
                session.dispatch_send(0, 0, other.x, other.ids, other.weights)
            got = session.dispatch_recv(0)
            world.compute(got, 0, rank, 0)
            out = session.combine(0, CAP)
            assert session.end()
            np.testing.assert_array_equal(out, world.expected(0, b, rank, 0, step))

        world.each(run)
