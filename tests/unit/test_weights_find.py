"""Who has experts, how they come from there, and what of others' answers is believed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import numpy as np
import pytest
import structlog

from elasticep.arena import Arena
from elasticep.config import DaemonConfig, TlsConfig
from elasticep.errors import Busy, ElasticEPError, WeightsError
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.rpc import abort
from elasticep.runtime.limits import Limits
from elasticep.runtime.regions.peers import Endpoint
from elasticep.runtime.service import NodeService
from elasticep.runtime.weights import streams
from elasticep.runtime.weights.backup import Backup
from elasticep.runtime.weights.finder import Finder, Kept, Place, Replica
from elasticep.runtime.weights.group import GroupWeights
from elasticep.runtime.weights.ledger import Ledger
from elasticep.runtime.weights.memory import ArenaMemory
from elasticep.runtime.weights.messages import Failure, Kind, Source
from elasticep.runtime.weights.reach import Reach
from elasticep.runtime.weights.seat import SeatWeights
from elasticep.runtime.weights.serve import WeightsService
from elasticep.runtime.weights.sources import LEAST_BYTES_PER_S, SourceFailed
from elasticep.runtime.weights.views import ViewBook
from elasticep.testing.mover import LAYOUT, UNIT_BYTES, Node, arena_memory, mover_driver
from elasticep.weights import ArenaLayout, TensorSpec, WeightSpec

# ---- looking up


def group_of(memories: list[ArenaMemory], pieces: list[ArenaMemory], experts: int) -> Any:
    """What look-ups need of a group's weights."""
    return SimpleNamespace(
        name="g",
        layout=memories[0].layout,
        experts=experts,
        max_ranks=8,
        ledger=Ledger(),
        backup=SimpleNamespace(segments=pieces),
        live=lambda: iter([(rank, 1, memory) for rank, memory in enumerate(memories)]),
        endpoints={},
        nodes={"n0", "n1"},
        unit_bytes=memories[0].layout.spec.unit_bytes,
    )


def service_of(weights: Any) -> WeightsService:
    registry = SimpleNamespace(groups={"g": SimpleNamespace(weights=weights)})
    return WeightsService("n0", cast(Any, registry))


def test_many_experts_are_looked_up_without_holding_up_the_loop() -> None:
    """61 layers of 40 slots, eight ranks and a piece of backup."""
    layers, experts, slots = 61, 256, 40
    layout = ArenaLayout(layers, slots, WeightSpec((TensorSpec.of("w2", "int8", (8,)),)))
    memories = [ArenaMemory.create(layout, rank, f"rank {rank}") for rank in range(9)]
    rng = np.random.default_rng(0)
    for memory in memories:
        for layer in range(layers):
            for slot in range(slots):
                memory.note(layer, slot, int(rng.integers(experts)), b"x" * 16)
    weights = group_of(memories[:8], memories[8:], experts)
    refs = [(layer, expert) for layer in range(layers) for expert in range(slots)]
    request = node_pb2.FindExpertsRequest(
        group="g", layers=[layer for layer, _ in refs], experts=[expert for _, expert in refs]
    )
    begin = time.process_time()
    answer = asyncio.run(service_of(weights).find(request))
    assert time.process_time() - begin < 0.2
    for found in answer.found:
        layer, expert = refs[found.index]
        holding = {r for r in range(8) if expert in memories[r].held[layer]}
        assert {replica.rank for replica in found.replicas} == holding
        for replica in found.replicas:
            assert memories[replica.rank].held[layer, replica.slot] == expert
        assert found.backup == (expert in memories[8].held[layer])
    assert {found.index for found in answer.found} == {
        index
        for index, (layer, expert) in enumerate(refs)
        if any(expert in memory.held[layer] for memory in memories)
    }
    for memory in memories:
        memory.close()


class Peer:
    """Another node's daemon, which answers what it is told."""

    Attach = Detach = GetStatus = ReportDeath = InjectFault = None

    def __init__(self) -> None:
        self.answer = node_pb2.FindExpertsResponse()
        self.asked = 0
        self.silent = False
        self.chunks: list[bytes] = []
        self.pause_s = 0.0
        self.error: ElasticEPError | None = None

    async def FindExperts(  # noqa: N802
        self, request: node_pb2.FindExpertsRequest, context: Any
    ) -> node_pb2.FindExpertsResponse:
        self.asked += 1
        if self.silent:
            await asyncio.get_running_loop().create_future()
        return self.answer

    async def ReadExpert(  # noqa: N802
        self, request: node_pb2.ReadExpertRequest, context: Any
    ) -> AsyncIterator[node_pb2.ReadExpertChunk]:
        if self.error is not None:
            await abort(context, self.error)
        for index, chunk in enumerate(self.chunks):
            if self.pause_s:
                await asyncio.wait(
                    {asyncio.get_running_loop().create_future()}, timeout=self.pause_s
                )
            yield node_pb2.ReadExpertChunk(data=chunk, checksum=b"" if index else b"c" * 16)


@contextlib.asynccontextmanager
async def serve(peer: Peer, folder: Path) -> AsyncIterator[str]:
    address = f"unix:{folder}/peer.sock"
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(cast(Any, peer), server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def finder_of(weights: Any, find_s: float = 10.0) -> Finder:
    node = SimpleNamespace(
        config=DaemonConfig(node="n0"), limits=Limits(find_s=find_s), log=structlog.get_logger()
    )
    return Finder(cast(Any, node), weights)


@pytest.mark.parametrize(
    "found",
    [
        {"index": 7},
        {"index": 0, "checksum": b"x" * 40_000},
        {"index": 0, "replicas": [{"rank": 99, "incarnation": 1, "slot": 0}]},
        {"index": 0, "replicas": [{"rank": 1, "incarnation": 1, "slot": 1 << 30}]},
        {"index": 0, "replicas": [{"rank": 1, "incarnation": 1}] * 9},
        {"index": 0, "backup": True, "backup_slots": 1 << 31},
        {"index": 0, "backup": True, "backup_slots": 2, "backup_slot": 2},
        {"index": 0, "backup": True, "backup_slots": 2, "backup_piece": 1 << 20},
    ],
)
def test_an_answer_out_of_all_bounds_counts_as_none(tmp_path: Path, found: Any) -> None:
    async def run() -> None:
        peer = Peer()
        good = {"index": 1, "checksum": b"x" * 16, "replicas": [{"rank": 1, "incarnation": 1}]}
        async with serve(peer, tmp_path) as address:
            with arena_memory() as memory:
                weights = group_of([memory], [], 3)
                weights.endpoints = {"n1": Endpoint("n1", "d", address, "")}
                finder = finder_of(weights, 5.0)
                peer.answer = node_pb2.FindExpertsResponse(found=[cast(Any, good)])
                places = await finder.find([(0, 0), (0, 1)])
                assert places[0, 1].replicas == [Replica("n1", 1, 1, 0)]
                assert places[0, 0].silent == ()
                peer.answer = node_pb2.FindExpertsResponse(
                    found=[cast(Any, good), cast(Any, found)]
                )
                places = await finder.find([(0, 0), (0, 1)])
                assert [place.found for place in places.values()] == [False, False]
                assert places[0, 0].silent == ("n1",)
                with pytest.raises(WeightsError, match="n1"):
                    finder._check("n1", 2, peer.answer)
                await finder.close()

    asyncio.run(run())


def test_a_node_that_stays_silent_is_hardly_waited_for_and_forgotten_if_it_has_no_rank(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        peer = Peer()
        peer.silent = True
        async with serve(peer, tmp_path) as address:
            with arena_memory() as memory:
                weights = group_of([memory], [], 3)
                weights.endpoints = {"n1": Endpoint("n1", "d", address, "")}
                finder = finder_of(weights, 2.0)
                assert (await finder.find([(0, 0)]))[0, 0].silent == ("n1",)
                begin = time.monotonic()
                for _ in range(5):
                    assert (await finder.find([(0, 0)]))[0, 0].silent == ("n1",)
                assert time.monotonic() - begin < 8.0
                peer.silent = False
                while (await finder.find([(0, 0)]))[0, 0].silent:
                    assert time.monotonic() - begin < 60
                peer.silent = True
                weights.nodes = {"n0"}  # it has no member: what it does not say is nobody's loss
                for _ in range(3):
                    assert weights.endpoints
                    assert (await finder.find([(0, 0)]))[0, 0].silent == ()
                assert not weights.endpoints
                await finder.close()

    asyncio.run(run())


# ---- what is mapped


def test_a_piece_of_backup_that_was_replaced_is_not_read_from_its_old_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon came back without its descriptors: piece 0 is another memory now."""

    async def run() -> None:
        with arena_memory() as old, arena_memory() as new, mover_driver(tmp_path) as mover:
            current = old
            weights = group_of([old], [], 3)
            weights.checkpoint = ""
            weights.endpoints = {"n1": Endpoint("n1", "default", "unix:/nowhere", "")}
            node = SimpleNamespace(
                config=DaemonConfig(node="n0", domain="default"),
                limits=Limits(),
                log=structlog.get_logger(),
                mover=mover,
            )
            reach = Reach(cast(Any, node), weights)

            async def fetch(*_: object, **__: object) -> object:
                return SimpleNamespace(fd=current.reader_fd(), incarnation=0)

            monkeypatch.setattr(reach, "_fetch", fetch)

            async def source(kept: Kept) -> Source:
                place = Place(backups=[kept])
                (found,) = await reach.sources((0, 1), place, lambda *_: False)
                return found

            before = await source(Kept("n1", 0, old.number, 3, 0))
            assert before.arena >= 0
            assert await source(Kept("n1", 0, old.number, 3, 2)) == before.__class__(
                **{name: getattr(before, name) for name in before.__slots__ if name != "slot"},
                slot=2,
            )
            current = new
            after = await source(Kept("n1", 0, new.number, 3, 0))
            assert after.arena not in (-1, before.arena)
            # What the mapping says is gone: let go of it, and have the expert sent instead.
            sent = reach.streamed(after)
            assert sent is not None
            assert (sent.kind, sent.arena, sent.address) == (Kind.BACKUP, -1, "unix:/nowhere")
            assert reach.streamed(sent) is None
            # It was replaced between the answer and the fetch.
            reach.keep_only(())
            assert (await source(Kept("n1", 0, old.number, 3, 0))).arena == -1
            reach.drop(lambda *_: True)
            reach.keep_only(())

    asyncio.run(run())


# ---- what is streamed


def test_too_little_in_a_window_is_a_stall_whoever_waits_for_himself_is_not() -> None:
    rate = streams.Rate()
    for _ in range(100):
        rate.add(0.1, LEAST_BYTES_PER_S // 5)
    for _ in range(1000):
        rate.add(0.0001, 1)
    rate.add(1.0, 1)
    with pytest.raises(SourceFailed, match="bytes per second") as slow:
        rate.add(1.0, 1)
    assert slow.value.failure is Failure.STALLED


@pytest.mark.parametrize(
    ("chunks", "pause_s", "error", "failure"),
    [
        ([b"x"] * 1000, 0.05, None, Failure.STALLED),
        ([b""], 0.0, None, Failure.FAILED),
        ([b"x" * 1000], 0.0, None, Failure.FAILED),
        ([b"x" * UNIT_BYTES, b"x"], 0.0, None, Failure.FAILED),
        ([], 0.0, Busy("as many as it may"), Failure.BUSY),
        ([], 0.0, WeightsError("no"), Failure.FAILED),
    ],
)
def test_a_daemon_that_trickles_or_sends_nonsense_is_left(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    chunks: list[bytes],
    pause_s: float,
    error: ElasticEPError | None,
    failure: Failure,
) -> None:
    monkeypatch.setattr(streams, "_WINDOW_S", 0.5)

    async def run() -> None:
        peer = Peer()
        peer.chunks, peer.pause_s, peer.error = chunks, pause_s, error
        async with serve(peer, tmp_path) as address:
            source = Source(kind=Kind.REMOTE, address=address, group="g", node="n1", rank=1)

            def copy() -> None:
                memory = bytearray(LAYOUT.total_bytes)
                fill = Arena.format(memory, LAYOUT, 0).fill(0, 0, 1)
                streams.Daemons(TlsConfig()).copy(source, fill, lambda _: None)

            with pytest.raises(SourceFailed) as failed:
                await asyncio.wait_for(asyncio.to_thread(copy), 60)
            assert failed.value.failure is failure

    asyncio.run(run())


@pytest.mark.parametrize("limit", ["of a chunk", "of a unit"])
def test_a_reader_that_stops_reading_gives_its_place_up(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    async def run() -> None:
        with arena_memory() as memory:
            memory.note(0, 0, 1, b"x" * 16)
            monkeypatch.setattr(
                memory.arena, "require", lambda *_: SimpleNamespace(checksum=b"x" * 16)
            )
            service = service_of(group_of([memory], [], 3))
            if limit == "of a chunk":
                monkeypatch.setattr("elasticep.runtime.service.CHUNK_READ_S", 0.2)
            else:
                monkeypatch.setattr(service, "read_s", lambda _: 0.2)
            request = node_pb2.ReadExpertRequest(group="g", expert=1, incarnation=1)
            said: list[Any] = []

            async def write(_: object) -> None:
                assert service._reads == 1
                await asyncio.get_running_loop().create_future()

            async def end(code: Any, *_: object) -> None:
                said.append(code)
                raise RuntimeError("aborted")

            context = SimpleNamespace(write=write, abort=end)
            with pytest.raises(RuntimeError, match="aborted"):
                await asyncio.wait_for(
                    NodeService.ReadExpert(
                        cast(Any, SimpleNamespace(_weights=service)), request, cast(Any, context)
                    ),
                    60,
                )
            assert said == [grpc.StatusCode.UNAVAILABLE]
            assert service._reads == 0

    asyncio.run(run())


# ---- backups


def test_what_no_other_node_has_is_not_overwritten_in_a_backup(tmp_path: Path) -> None:
    async def run() -> None:
        with arena_memory() as piece, mover_driver(tmp_path) as mover:
            node = Node(mover, piece, [])
            weights = cast(Any, node)
            weights.layout, weights.experts = LAYOUT, 6
            backup = Backup(weights, weights)
            backup.segments.append(piece)
            for slot, expert in enumerate((0, 1, 2)):
                piece.note(0, slot, expert, b"x")
            backup._mask[0, [2, 3]] = True  # 3 is to come, 0 and 1 are not to be kept any more
            for places, again, free in (
                ({}, False, None),
                ({(0, 0): Place([Replica("n0", 0, 1, 0)])}, False, None),
                ({(0, 0): Place([Replica("n0", 0, 1, 0)])}, True, 0),
                ({(0, 1): Place([Replica("n1", 1, 1, 0)])}, False, 1),
                ({(0, 1): Place(backups=[Kept("n1", 0, 1, 3, 0)])}, False, 1),
                ({(0, 2): Place(backups=[Kept("n1", 0, 1, 3, 0)])}, False, None),
            ):
                node.places = cast(Any, places)
                found = backup._free(0, await backup._spare({0, 1}, again=again))
                assert found == (None if free is None else (piece, free)), places
            assert backup.held == 1
            piece.forget(0, 1)
            node.places = {}
            assert backup._free(0, await backup._spare({0}, again=False)) == (piece, 1)
            backup.segments.clear()

    asyncio.run(run())


# ---- headway


def test_who_waits_for_its_turn_makes_headway_while_the_node_copies() -> None:
    seat = SeatWeights(cast(Any, SimpleNamespace(rank=0)), ViewBook())
    seat.memory = cast(Any, object())
    mover = SimpleNamespace(headway=0, filling=lambda _: 1)
    weights = cast(Any, SimpleNamespace(seats={0: seat}, _node=SimpleNamespace(mover=mover)))
    assert GroupWeights.progress(weights, 0) == (0, 0, 0)
    seat.epoch, seat.total = 3, 1000
    seen = []
    for mover.headway in (0, 100, 100, 200, 300):
        seen.append(GroupWeights.progress(weights, 0)[1])
    assert seen == [0, 1, 1, 2, 3]
    mover.filling = lambda _: 0  # it has asked for nothing: that is no headway of its own
    mover.headway = 400
    assert GroupWeights.progress(weights, 0) == (3, 3, 1000)
    seat.done = 1000
    assert GroupWeights.progress(weights, 0) == (3, 1000, 1000)
