"""Daemons that keep expert weights, for tests: groups, views with given slots, arenas to look at.

with WeightsLab(layers=2, experts=4) as lab:
    lab.start({"n0": [0], "n1": [1]})
    lab.run(1, {0: [0, 1], 1: [2, 3]})     # rank -> experts in its slots, the same in every layer
    lab.check(0, [0, 1])
"""

import contextlib
import mmap
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from elasticep.arena import Arena, SlotState
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.handover import fetch_arena
from elasticep.proto import controller_pb2, node_pb2, types_pb2
from elasticep.testing.checkpoints import Family, WrittenCheckpoint, write_checkpoint
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, EngineProcess, wait_for
from elasticep.testing.placements import equal_weights
from elasticep.weights import unit_checksum

GROUP: Final = "g"
Slots = Mapping[int, Sequence[int]]
"""Rank -> the expert in each of its slots, -1 = empty; the same in every layer."""


def one_tensor(size: int) -> Family:
    """A family whose experts are `size` bytes in one tensor."""
    return Family(
        "model.layers.{layer}.mlp.experts.{expert}.{tensor}",
        {"down_proj.weight": ("w2", "int8", (size // 64, 64))},
    )


class WeightsLab(Lab):
    """A lab for one group with weights, with a checkpoint in its folder.

    Args:
        layers, experts, slots: of the group.
        unit: bytes of an expert, a multiple of 64.
        changes: further fields of the group's config.
    """

    def __init__(
        self,
        *,
        layers: int = 2,
        experts: int = 4,
        slots: int = 4,
        unit: int = 4096,
        **changes: Any,
    ) -> None:
        super().__init__()
        self.written: WrittenCheckpoint = write_checkpoint(
            self.folder / "checkpoint", one_tensor(unit), layers=layers, experts=experts, shards=1
        )
        geometry = GroupGeometry(
            layers=layers, experts=experts, topk=2, hidden=32, slots_per_rank=slots, max_ranks=4
        )
        self.spec = self.written.family.spec()
        self.group: GroupConfig = small_config(
            GROUP, geometry=geometry, weights=self.spec, **changes
        )
        self.nodes: dict[str, DaemonProcess] = {}
        self.ranks: dict[int, EngineProcess] = {}
        self.incarnation: dict[int, int] = {}
        self.views: dict[int, types_pb2.View] = {}

    def _end(self, *, check: bool) -> None:
        for path in sorted((self.folder / "checkpoint").glob("*")):
            path.unlink()
        super()._end(check=check)

    # ---- what a test starts

    def start(
        self,
        seats: Mapping[str, Sequence[int]],
        *flags: str,
        checkpoint: bool = True,
        **more: Sequence[str],
    ) -> None:
        """A daemon for each node, and an engine for each of its ranks.

        Args:
            seats: node -> ranks.
            flags: further flags of every daemon.
            checkpoint: whether they know where the checkpoint is.
            more: node -> further flags of its daemon.
        """
        self.create(self.group)
        path = ("--checkpoint", str(self.written.path)) if checkpoint else ()
        for node, ranks in seats.items():
            offered = f"{GROUP}:{','.join(map(str, ranks))}"
            self.nodes[node] = self.daemon(
                node, offered, "--metrics-port", "0", *path, *flags, *more.get(node, ())
            )
        for ranks in seats.values():
            for rank in ranks:
                self.open(rank)

    def open(self, rank: int, incarnation: int = 1) -> EngineProcess:
        """An engine takes a rank, under this incarnation of its seat."""
        self.ready(rank, incarnation)
        engine = self.engine(self.daemon_of(rank), GROUP, rank).up()
        self.ranks[rank], self.incarnation[rank] = engine, incarnation
        return engine

    def daemon_of(self, rank: int) -> DaemonProcess:
        """The daemon that offers a rank."""
        return self.nodes[self.controller.node_of(GROUP, rank)]

    # ---- views

    def propose(
        self,
        epoch: int,
        slots: Slots,
        *,
        previous: int | None = None,
        expelled: Sequence[int] = (),
        stage: Sequence[int] | None = None,
        nodes: Sequence[str] | None = None,
    ) -> types_pb2.View:
        """Propose a view whose members are the ranks in `slots`.

        Args:
            epoch: its number.
            slots: who holds what.
            previous: the epoch before; None: one less.
            expelled: ranks whose present incarnation it expels.
            stage: ranks that stage it; None: all.
            nodes: which daemons hear of it; None: all.
        """
        table = self.table(slots)
        weight = equal_weights(table, sorted(slots))
        where = {rank: self.controller.node_of(GROUP, rank) for rank in slots}
        view = types_pb2.View(
            group=GROUP,
            epoch=epoch,
            previous_epoch=epoch - 1 if previous is None else previous,
            members=[
                types_pb2.Member(rank=r, incarnation=self.incarnation[r], node=where[r])
                for r in sorted(slots)
            ],
            expelled=[types_pb2.Member(rank=r, incarnation=self.incarnation[r]) for r in expelled],
            placement=types_pb2.Placement(
                slot_expert=table.tobytes(), slot_weight=weight.tobytes()
            ),
            digest=epoch * 1000 + len(slots),
            reason="a test says so",
        )
        self.views[epoch] = view
        staging: dict[str, list[int]] = {}
        for rank in slots if stage is None else stage:
            staging.setdefault(where[rank], []).append(rank)
        for node in self.nodes if nodes is None else nodes:
            self.controller.order(
                node,
                controller_pb2.ControllerMessage(
                    proposal=controller_pb2.Proposal(
                        view=view,
                        nodes=list(self.controller.endpoints.values()),
                        stage_ranks=staging.get(node, []),
                    )
                ),
            )
        return view

    def table(self, slots: Slots) -> npt.NDArray[np.int32]:
        """int32 [layers, max_ranks, slots]."""
        g = self.group.geometry
        table = np.full((g.layers, g.max_ranks, g.slots_per_rank), -1, np.int32)
        for rank, experts in slots.items():
            table[:, rank, : len(experts)] = experts
        return table

    def run(self, epoch: int, slots: Slots, **more: Any) -> types_pb2.View:
        """Propose a view, wait until all its members staged it, and let them step in it."""
        # Members that run step; a joiner's first step waits for its view.
        before = [self.ranks[rank] for rank in slots]
        if epoch == 1 or more.get("previous") == 0:
            for engine in before:
                engine.say("step")
        view = self.propose(epoch, slots, **more)
        for rank in slots:
            answer = self.staged(rank, epoch)
            assert not answer.error, answer.error
        if not (epoch == 1 or more.get("previous") == 0):
            for engine in before:
                engine.say("step")
        answers = [engine.hear().split() for engine in before]
        assert [answer[:2] for answer in answers] == [["stepped", str(epoch)]] * len(before), (
            answers
        )
        return view

    # ---- arenas

    @contextlib.contextmanager
    def arena(self, rank: int, *, write: bool = False) -> Iterator[Arena]:
        """A rank's arena; `write` is for doing harm."""
        layout = self.group.arena_layout()
        assert layout is not None
        got = fetch_arena(self.daemon_of(rank).fd_socket, GROUP, rank)
        fd = got.fd
        if write:
            fd = os.open(f"/proc/self/fd/{got.fd}", os.O_RDWR)
            os.close(got.fd)
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        with contextlib.closing(mmap.mmap(fd, layout.total_bytes, prot=prot)) as mapping:
            os.close(fd)
            arena = Arena(mapping, layout)
            try:
                yield arena
            finally:
                arena.release()

    def check(self, rank: int, experts: Sequence[int]) -> None:
        """Assert that slots 0, 1, ... of every layer hold these experts as the checkpoint has
        them (-1: any), and that every valid slot is what its label says.
        """
        with self.arena(rank) as arena:
            for layer in range(self.group.geometry.layers):
                for slot, expert in enumerate(experts):
                    if expert >= 0:
                        data, _ = arena.read(layer, slot, expert)
                        assert data == self.bytes_of(layer, expert), (rank, layer, slot)
            assert not wrong_labels(arena)

    def bytes_of(self, layer: int, expert: int) -> bytes:
        """An expert as it is in the checkpoint."""
        unit = self.written.units[layer, expert]
        return b"".join(unit[tensor.name] for tensor in self.spec.tensors)

    def flip(self, rank: int, expert: int, *, relabel: bool = False) -> None:
        """Change a byte of an expert in a rank's arena behind its daemon's back.

        Args:
            rank: whose arena.
            expert: in every layer in which the rank holds it.
            relabel: also make the label agree with the bytes, as a liar would.
        """
        with self.arena(rank, write=True) as arena:
            for layer, slot, label in list(arena.all_labels()):
                if label.holds(expert):
                    data = bytearray(b"".join(arena.pieces(layer, slot)))
                    data[len(data) // 2] ^= 0x40
                    if relabel:
                        arena.write(layer, slot, expert, bytes(data))
                    else:
                        arena.pieces(layer, slot)[0][:] = data

    # ---- what daemons say

    def moved(self, node: str) -> dict[str, int]:
        """Experts that a node has put in place, by source."""
        daemon = self.nodes[node]
        port = daemon.events("daemon.ready")[-1]["metrics_port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as page:
            text = page.read().decode()
        found: dict[str, int] = {}
        pattern = r'^elasticep_weights_experts_moved_total\{.*source="(\w+)".*\} (\S+)$'
        for source, number in re.findall(pattern, text, re.MULTILINE):
            found[source] = found.get(source, 0) + int(float(number))
        return found

    def backup(self, node: str) -> node_pb2.ArenaStatus:
        """What a node says of its backup; empty when it has none."""
        for arena in self.nodes[node].status().arenas:
            if arena.backup:
                return arena
        return node_pb2.ArenaStatus()

    def backed_up(self) -> None:
        """Wait until every node holds the backup that it is to hold."""
        for node in self.nodes:
            wait_for(
                lambda node=node: (  # type: ignore[misc]
                    self.nodes[node].events("backup.complete")
                ),
                f"the backup on {node}",
            )

    def failures(self, node: str, failure: str) -> list[dict[str, Any]]:
        """Events of sources that failed in a way."""
        found = self.nodes[node].events("weights.source_failed")
        return [event for event in found if event["failure"] == failure]


def wrong_labels(arena: Arena) -> list[tuple[int, int]]:
    """(layer, slot) of every valid label whose checksum is not that of the bytes."""
    return [
        (layer, slot)
        for layer, slot, label in arena.all_labels()
        if label.state is SlotState.VALID
        and unit_checksum(layer, label.expert, arena.pieces(layer, slot)) != label.checksum
    ]


def leave_no_checkpoint(path: Path) -> None:
    """Take the tensors of a checkpoint away: nothing can be restored from disk any more. (A folder
    without anything in it would be taken for one that is not mounted.)
    """
    for file in sorted(path.glob("*")):
        if file.name != "config.json":
            file.unlink()
