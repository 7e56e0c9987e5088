"""What we are held against, in the same run: gloo (torch.distributed) and MPI (mpi4py).

gloo: all-gather of every row with its ids and weights, reduce-scatter of partial sums. MPI: rows
packed per target rank, counts exchanged, all-to-all-v there and back; the sum over a token's rows
is left out, which is in MPI's favour. `bare` times the two all-to-all-v alone, `by_expert` adds
what an expert kernel with a run of rows per expert needs: a copy of each row for each of its
experts, grouped.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from elasticep.bench import ranks
from elasticep.bench.case import Case

GLOO: Final = "elasticep.bench.peers:GlooRank"
MPI: Final = "elasticep.bench.peers:MpiRank"
NAMES: Final = ("gloo", "mpi")


def absent(name: str) -> str | None:
    """Why a peer cannot be measured here, or None."""
    if name == "gloo":
        return None if importlib.util.find_spec("torch") else "torch is not installed"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    return None if mpi_launcher() else "no mpiexec on PATH"


def mpi_launcher() -> str | None:
    """Path of an MPI launcher, Open MPI's first: it yields when ranks outnumber cores."""
    return shutil.which("mpiexec.openmpi") or shutil.which("mpiexec")


def start(name: str, count: int) -> ranks.RankSet:
    """The rank processes of `gloo` or `mpi`; raises `ranks.BenchError` when they do not start."""
    why = absent(name)
    if why:
        raise ranks.BenchError(why)
    if name == "gloo":
        return ranks.RankSet(
            GLOO, count, launch=lambda words: [words], env={"ELASTICEP_BENCH_RANKS": str(count)}
        )
    launcher = mpi_launcher()
    assert launcher is not None
    options = ["-n", str(count)]
    openmpi = "open" in _first_line(launcher).lower()
    if openmpi:
        options += ["--oversubscribe", "--bind-to", "none", "--mca", "btl", "vader,self"]
        if os.geteuid() == 0:
            options.append("--allow-run-as-root")
    return ranks.RankSet(MPI, count, launch=lambda words: [[launcher, *options, *words]])


def _first_line(launcher: str) -> str:
    done = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).split("\n", 1)[0]


class GlooRank:
    """One process imports torch once and forks the ranks."""

    def __init__(self, rank: int, count: int, store: str) -> None:
        import torch
        import torch.distributed as dist

        self.rank = rank
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)

    @classmethod
    def start(cls, path: str, _rank: int) -> None:
        """Fork the ranks, each of which connects and serves."""
        import torch  # noqa: F401  the children must not import it again

        count = int(os.environ["ELASTICEP_BENCH_RANKS"])
        store = os.path.join(os.path.dirname(path), "gloo-store")  # goes with the socket's folder
        children = []
        for rank in range(count):
            child = os.fork()
            if not child:
                code = 1
                try:
                    connection = ranks.connect(path, rank)
                    ranks.serve(cls(rank, count, store), connection)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)  # gloo's threads are not worth waiting for
            children.append(child)
        for child in children:
            os.waitpid(child, 0)

    def on_prepare(self, case: dict[str, Any]) -> dict[str, str]:
        """Make inputs and outputs."""
        import torch

        self.case = sizes = Case.from_dict(case)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[sizes.dtype]
        width = sizes.row_bytes + sizes.tail_bytes
        self.sent = torch.ones(sizes.tokens, width, dtype=torch.uint8)
        self.gathered = torch.empty(sizes.ranks * sizes.tokens, width, dtype=torch.uint8)
        self.partial = torch.ones(sizes.ranks * sizes.tokens, sizes.hidden, dtype=dtype)
        self.result = torch.empty(sizes.tokens, sizes.hidden, dtype=dtype)
        return {"version": f"torch {torch.__version__} gloo"}

    def on_run(self, runs: int, repeat: int) -> dict[str, list[int]]:
        """All-gather of rows with tails, reduce-scatter of partial sums: ns per exchange."""
        import torch.distributed as dist

        spent = []
        for _ in range(runs):
            dist.barrier()
            start = time.monotonic_ns()
            for _ in range(repeat):
                dist.all_gather_into_tensor(self.gathered, self.sent)
                dist.reduce_scatter_tensor(self.result, self.partial)
            spent.append((time.monotonic_ns() - start) // repeat)
        return {"ns": ranks.times(spent)}

    def on_leave(self) -> None:
        """Drop the buffers."""
        del self.sent, self.gathered, self.partial, self.result


class MpiRank:
    """One MPI rank; its process is started by mpiexec."""

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.threads = False
        import mpi4py.MPI

        self.mpi = mpi4py.MPI
        self.comm = mpi4py.MPI.COMM_WORLD
        self.rank = int(self.comm.Get_rank())

    @classmethod
    def start(cls, path: str, _rank: int) -> None:
        """Connect and serve."""
        rank = cls()
        ranks.serve(rank, ranks.connect(path, rank.rank))

    def on_prepare(self, case: dict[str, Any]) -> dict[str, str]:
        """Make inputs and buffers. The engine keeps room for a row's tail behind each row."""
        self.case = sizes = Case.from_dict(case)
        width = sizes.row_bytes + sizes.tail_bytes
        self.ids = sizes.ids(self.rank)
        self.rows = np.ones((sizes.tokens, width), np.uint8)
        self.rows[:, : sizes.row_bytes] = sizes.rows(self.rank).view(np.uint8)
        room = sizes.ranks * sizes.tokens
        self.packed = np.zeros((room, width), np.uint8)
        self.arrived = np.zeros((room, width), np.uint8)
        self.outputs = np.ones((room, sizes.row_bytes), np.uint8)
        self.returned = np.zeros((room, sizes.row_bytes), np.uint8)
        self.grouped = np.zeros((room * sizes.topk, width), np.uint8)
        self.plan = self._pack()
        return {"version": self.mpi.Get_library_version().split(",")[0].strip()}

    def _pack(self) -> tuple[Any, Any]:
        """Layout and counts: rows grouped by target rank, and how many come from each."""
        sizes = self.case
        needed = np.zeros((sizes.ranks, sizes.tokens), bool)
        needed[self.ids % sizes.ranks, np.arange(sizes.tokens)[:, None]] = True
        token = np.nonzero(needed)[1]
        send = needed.sum(axis=1, dtype=np.int32)
        tails = self.rows[:, sizes.row_bytes :].view(np.int32)
        tails[:, : sizes.topk] = self.ids
        np.take(self.rows, token, axis=0, out=self.packed[: len(token)], mode="clip")
        receive = np.empty_like(send)
        self.comm.Alltoall(send, receive)
        return send, receive

    def _all_to_all(
        self, plan: tuple[Any, Any], between: Callable[[int], None] | None = None
    ) -> None:
        send, receive = plan
        byte, width, row = self.mpi.BYTE, self.rows.shape[1], self.case.row_bytes
        self.comm.Alltoallv(
            [self.packed, (send * width, _before(send) * width), byte],
            [self.arrived, (receive * width, _before(receive) * width), byte],
        )
        if between is not None:
            between(int(receive.sum()))
        self.comm.Alltoallv(
            [self.outputs, (receive * row, _before(receive) * row), byte],
            [self.returned, (send * row, _before(send) * row), byte],
        )

    def on_run(self, runs: int, repeat: int) -> dict[str, list[int]]:
        """Pack, counts, all-to-all-v there and back: ns per exchange."""
        return self._timed(runs, repeat, lambda: self._all_to_all(self._pack()))

    def on_bare(self, runs: int, repeat: int) -> dict[str, list[int]]:
        """Only the two all-to-all-v, of rows that are packed and counted already."""
        return self._timed(runs, repeat, lambda: self._all_to_all(self.plan))

    def on_by_expert(self, runs: int, repeat: int) -> dict[str, list[int]]:
        """As `on_run`, with rows grouped by expert between the two all-to-all-v."""

        def once() -> None:
            self._all_to_all(self._pack(), self._group)

        return self._timed(runs, repeat, once)

    def _group(self, rows: int) -> None:
        sizes = self.case
        ids = self.arrived[:rows, sizes.row_bytes :].view(np.int32)[:, : sizes.topk]
        row, choice = np.nonzero(ids % sizes.ranks == self.rank)
        order = np.argsort(ids[row, choice], kind="stable")
        target = self.grouped[: len(order)]
        np.take(self.arrived, row[order], axis=0, out=target, mode="clip")

    def _timed(self, runs: int, repeat: int, once: Any) -> dict[str, list[int]]:
        spent = []
        for _ in range(runs):
            self.comm.Barrier()
            start = time.monotonic_ns()
            for _ in range(repeat):
                once()
            spent.append((time.monotonic_ns() - start) // repeat)
        return {"ns": ranks.times(spent)}

    def on_leave(self) -> None:
        """Drop the buffers."""
        self.packed = self.arrived = self.outputs = self.returned = np.zeros((0, 0), np.uint8)
        self.grouped = self.packed


def _before(counts: Any) -> Any:
    return np.cumsum(counts) - counts
