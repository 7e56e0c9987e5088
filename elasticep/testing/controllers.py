"""Real controllers on one store, and groups of fake nodes, over gRPC: for tests.

    run_scenario(None, scenario)   # on a store in memory
    run_scenario(etcd, scenario)   # on a real one

where a scenario is `async def scenario(bench: Bench) -> None`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import grpc.aio

from elasticep.config import ControllerConfig
from elasticep.control import records
from elasticep.control.clocks import Clocks
from elasticep.control.controller import Controller
from elasticep.control.store import Delete, MemoryBackend, MemoryStore, Store
from elasticep.control.store.etcd import EtcdStore
from elasticep.group import GroupConfig, Timeouts
from elasticep.proto import controller_pb2, controller_pb2_grpc
from elasticep.rpc import CLIENT_OPTIONS, typed_error
from elasticep.testing import membership
from elasticep.testing.etcd import LocalEtcd
from elasticep.testing.nodes import FakeNodes

LIMIT_S = 150.0
CALL_S = 60.0
"""Deadline of a call that is answered at once where nobody else wants the processor."""
# Of a leader that is stopped the lease is given back, so nobody waits for its end; but a machine
# that is busy for so long would depose one in the middle of a test.
_LEASE_S = 20
TWO_NODES = {"a": [0, 1], "b": [2, 3]}
Stub = controller_pb2_grpc.ControllerServiceStub


class Bench:
    """Controllers on one store, started and ended by the test."""

    def __init__(self, etcd: LocalEtcd | None) -> None:
        self.etcd = etcd
        self.memory = MemoryBackend()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def store(self) -> Store:
        """Another client of the store."""
        return EtcdStore(self.etcd.endpoints) if self.etcd else MemoryStore(self.memory)

    async def controller(
        self, name: str = "c0", store: Store | None = None, clocks: Clocks | None = None
    ) -> Controller:
        """A controller that listens; it may lead or not."""
        config = ControllerConfig(
            listen="127.0.0.1:0", store="memory", metrics_port=0, lease_ttl_s=_LEASE_S, name=name
        )
        controller = Controller(config, store or self.store(), clocks=clocks)
        listening = asyncio.Event()
        task = asyncio.create_task(controller.run(lambda _: listening.set()))
        self._tasks[id(controller)] = task
        waiting = asyncio.ensure_future(listening.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
        return controller

    async def leader(
        self, name: str = "c0", store: Store | None = None, clocks: Clocks | None = None
    ) -> Controller:
        """A controller that leads."""
        controller = await self.controller(name, store, clocks)
        await until(lambda: controller.term is not None, "it leads")
        return controller

    async def stop(self, controller: Controller) -> None:
        """End a controller."""
        task = self._tasks.pop(id(controller), None)
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def close(self) -> None:
        """End them all."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def until(condition: Callable[[], bool], what: str, wait_s: float = 60.0) -> None:
    """Wait for a condition that no event tells of."""
    end = time.monotonic() + wait_s
    turn = asyncio.Event()
    while not condition():
        assert time.monotonic() < end, f"not within {wait_s} s: {what}"
        with suppress(TimeoutError):
            await asyncio.wait_for(turn.wait(), 0.01)


@asynccontextmanager
async def client(address: str) -> AsyncIterator["controller_pb2_grpc.ControllerServiceAsyncStub"]:
    """A stub that speaks to one controller."""
    async with grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS) as channel:
        yield Stub(channel)


async def create(address: str, config: GroupConfig) -> bool:
    """Create a group; whether it is new."""
    async with client(address) as stub:
        request = controller_pb2.CreateGroupRequest(config=config.to_proto())
        return (await stub.CreateGroup(request, timeout=CALL_S)).created


async def cluster(address: str) -> controller_pb2.GetClusterResponse:
    """What `elasticep status` asks."""
    async with client(address) as stub:
        return await stub.GetCluster(controller_pb2.GetClusterRequest(), timeout=CALL_S)


async def refused(call: Awaitable[object]) -> Exception:
    """The typed error that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return typed_error(error, "the call")
    raise AssertionError("the call was not refused")


def group_config(**changes: object) -> GroupConfig:
    """A small group whose nodes may be silent for as long as a busy machine keeps them so.

    Args:
        changes: as for `testing.membership.group_config`.
    """
    patient = Timeouts(node_timeout_ms=30_000)
    return membership.group_config(**{"timeouts": patient, **changes})  # type: ignore[arg-type]


Scenario = Callable[[Bench], Awaitable[None]]
Run = Callable[[Scenario], None]


def run_scenario(etcd: LocalEtcd | None, scenario: Scenario) -> None:
    """Run a scenario on an empty store: in memory, or etcd."""

    async def limited() -> None:
        bench = Bench(etcd)
        if etcd is not None:
            store = bench.store()
            keys = [item.key for item in (await store.list(records.PREFIX)).items]
            for first in range(0, len(keys), 100):
                await store.transact((), [Delete(key) for key in keys[first : first + 100]])
            await store.close()
        try:
            async with asyncio.timeout(LIMIT_S):
                await scenario(bench)
        finally:
            await bench.close()

    asyncio.run(limited())


@asynccontextmanager
async def formed(
    bench: Bench, config: GroupConfig | None = None, *controllers: Controller
) -> AsyncIterator[tuple[Controller, FakeNodes]]:
    """A leader, and a group of four ranks on two nodes that runs in epoch 1."""
    config = config or group_config(flap_limit=0)
    leader = controllers[0] if controllers else await bench.leader()
    addresses = [c.address for c in controllers] or [leader.address]
    await create(leader.address, config)
    async with FakeNodes(addresses, TWO_NODES, config.name) as nodes:
        await nodes.until(lambda: nodes.epoch == 1, "the first view")
        await nodes.meet()
        await until(lambda: adopted(leader) == 1, "epoch 1 is adopted")
        yield leader, nodes


def orders(nodes: FakeNodes, rank: int, kind: str) -> list[controller_pb2.ControllerMessage]:
    """What a rank's node was ordered to do, of one kind."""
    return [order for order in nodes.of(rank).orders if order.WhichOneof("body") == kind]


def adopted(controller: Controller) -> int:
    """The adopted epoch of group "g", 0 if the controller does not lead."""
    return controller.term.cluster.groups["g"].adopted_epoch if controller.term else 0
