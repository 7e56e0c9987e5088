"""The planner: from loads and ranks to a placement. Pure; the work is done by the native core.

The method is told in `docs/placement.md`; the sources are `csrc/placement`.
"""

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from elasticep.control.policy import PlanPolicy, RankInfo
from elasticep.control.report import METHODS, LayerReport, Plan, PlanReport, explain
from elasticep.control.tables import EMPTY, Int32Array, Placement, SlotShortage, Uint32Array
from elasticep.errors import ConfigError, NativeError
from elasticep.native import core

_PPM = 1e6
MAX_EXPERTS = MAX_RANKS = 65_536  # limits of the native core
_DEFAULT = PlanPolicy()

_REPORT = np.dtype(
    [
        ("before", np.float64),
        ("after", np.float64),
        ("bound", np.float64),
        *(
            (name, np.int32)
            for name in (
                "moves",
                "restored",
                "lost",
                "single",
                "same_node",
                "method",
                "spilled",
                "global",
            )
        ),
    ]
)


class _Problem(ctypes.Structure):
    """Mirror of `struct ep_placement_problem` in csrc/placement/placement.h."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "layers",
                "experts",
                "ranks",
                "slots",
                "groups",
                "weighted",
                "cover",
                "fill",
                "moves_allowed",
                "target_ppm",
                "gain_ppm",
                "reserved",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "loads",
                "rank_slots",
                "rank_node",
                "rank_domain",
                "rank_closed",
                "previous_expert",
                "previous_weight",
                "layer_moves",
            )
        ),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = core()
    sizes = (library.ep_placement_problem_size(), library.ep_placement_layer_size())
    if sizes != (ctypes.sizeof(_Problem), _REPORT.itemsize):
        raise NativeError(
            f"the native planner's records take {sizes} bytes, this package's "
            f"{(ctypes.sizeof(_Problem), _REPORT.itemsize)}; build it again with `make build`"
        )
    library.ep_placement_plan.restype = ctypes.c_int32
    library.ep_placement_plan.argtypes = (
        ctypes.POINTER(_Problem),
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    return library


def plan(
    loads: ArrayLike,
    ranks: Sequence[RankInfo],
    previous: Placement | None = None,
    policy: PlanPolicy = _DEFAULT,
    *,
    max_ranks: int | None = None,
    slots_per_rank: int | None = None,
) -> Plan:
    """Place every expert of every layer, starting from `previous` where there is one.

    With a previous placement tokens are first split anew over the copies that are there; only
    what that cannot mend is moved, as little as will do. Equal inputs give equal plans.

    Args:
        loads: integers [layers, experts], tokens routed to each expert in the planning window.
        ranks: the ranks that are alive, in any order. Ranks of `previous` that are not among them
            are dead: nothing is copied from them.
        previous: the placement in force, or None.
        policy: what to achieve and what it may cost.
        max_ranks: seats in the tables; default: those of `previous`, else the highest rank + 1.
        slots_per_rank: slots in the tables; default likewise.

    Raises:
        ConfigError: loads, ranks or sizes that cannot be used.
        SlotShortage: ranks that stay have fewer slots than there are experts.
    """
    tokens = _checked_loads(loads)
    infos = tuple(sorted(ranks, key=lambda info: info.rank))
    sizes = _checked_sizes(tokens, infos, previous, policy, max_ranks, slots_per_rank)
    problem = _Native(tokens, infos, previous, policy, *sizes)
    expert, weight, report = problem.solve(None)
    limit = policy.max_moves
    if limit is not None and 0 < limit < int(report["moves"].sum()):
        expert, weight, report = problem.solve(_share_out(report, limit))
    placement = problem.placement(expert, weight)
    return Plan(placement, _report(placement, report, policy), problem.alive, infos, policy)


def resplit(
    loads: ArrayLike,
    ranks: Sequence[RankInfo],
    placement: Placement,
    policy: PlanPolicy = _DEFAULT,
) -> Plan:
    """Only split tokens anew over the copies that the ranks hold; moves nothing, never fails for
    want of slots. Experts without any copy are named in `report.lost`.
    """
    return plan(loads, ranks, placement, replace(policy, max_moves=0))


class _Native:
    """One planning problem in the form that the native core takes; keeps the arrays alive."""

    def __init__(
        self,
        tokens: NDArray[np.int64],
        infos: tuple[RankInfo, ...],
        previous: Placement | None,
        policy: PlanPolicy,
        max_ranks: int,
        slots: int,
    ) -> None:
        layers, experts = tokens.shape
        self.infos, self.max_ranks, self.shape = infos, max_ranks, (layers, len(infos), slots)
        self.seats = np.array([info.rank for info in infos], np.int64)
        self.experts = experts
        self.arrays: dict[str, NDArray[Any]] = {
            "loads": tokens,
            "rank_slots": np.array([info.slots for info in infos], np.int32),
            "rank_node": _dense([info.node for info in infos]),
            "rank_domain": _dense([info.domain for info in infos]),
            "rank_closed": np.array([info.draining for info in infos], np.uint8),
        }
        self.alive: Placement | None = None
        if previous is not None:
            held, weight = self._alive_part(previous, slots)
            self.alive = self.placement(held, weight)
            self.arrays |= {"previous_expert": held, "previous_weight": weight}
        self.options = {
            "layers": layers,
            "experts": experts,
            "ranks": len(infos),
            "slots": slots,
            "groups": policy.groups,
            "weighted": policy.weighted,
            "cover": policy.cover,
            "fill": policy.fill,
            "moves_allowed": policy.max_moves != 0,
            "target_ppm": round((policy.target - 1.0) * _PPM),
            "gain_ppm": round(policy.min_gain * _PPM),
        }

    def _alive_part(self, previous: Placement, slots: int) -> tuple[Int32Array, Uint32Array]:
        """What the ranks hold in slots that they still have."""
        held = np.full(self.shape, EMPTY, np.int32)
        weight = np.zeros(self.shape, np.uint32)
        known = self.seats < previous.max_ranks
        width = min(slots, previous.slots_per_rank)
        held[:, known, :width] = previous.slot_expert[:, self.seats[known], :width]
        weight[:, known, :width] = previous.slot_weight[:, self.seats[known], :width]
        gone = np.arange(slots)[None, :] >= self.arrays["rank_slots"][:, None]
        held[:, gone] = EMPTY
        weight[:, gone] = 0
        return held, weight

    def solve(
        self, layer_moves: NDArray[np.int32] | None
    ) -> tuple[Int32Array, Uint32Array, NDArray[Any]]:
        """Tables [layers, ranks, slots] and one record per layer."""
        library = _library()
        expert = np.empty(self.shape, np.int32)
        weight = np.empty(self.shape, np.uint32)
        report = np.zeros(self.shape[0], _REPORT)
        arrays = self.arrays | ({} if layer_moves is None else {"layer_moves": layer_moves})
        pointers = {name: array.ctypes.data for name, array in arrays.items()}
        problem = _Problem(**self.options, **pointers)
        status = library.ep_placement_plan(
            ctypes.byref(problem), expert.ctypes.data, weight.ctypes.data, report.ctypes.data
        )
        if status == -2:
            stay = [info for info in self.infos if not info.draining]
            slots = sum(info.slots for info in stay)
            layers = range(self.shape[0])
            raise SlotShortage(layers, [info.rank for info in stay], slots, self.experts)
        if status == -3:
            raise ConfigError(
                "the previous placement names an expert twice on a rank, or one that the loads do "
                "not have; pass the placement of the view in force"
            )
        if status != 0:
            raise NativeError(f"the native planner refused its arguments (status {status})")
        return expert, weight, report

    def placement(self, expert: Int32Array, weight: Uint32Array) -> Placement:
        """Tables with one row per seat from tables with one row per rank alive."""
        layers, _, slots = self.shape
        slot_expert = np.full((layers, self.max_ranks, slots), EMPTY, np.int32)
        slot_weight = np.zeros((layers, self.max_ranks, slots), np.uint32)
        slot_expert[:, self.seats] = expert
        slot_weight[:, self.seats] = weight
        return Placement(experts=self.experts, slot_expert=slot_expert, slot_weight=slot_weight)


def _checked_loads(loads: ArrayLike) -> NDArray[np.int64]:
    tokens = np.asarray(loads)
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"loads are {tokens.dtype} {tokens.shape}; they must be integers [layers, experts]"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) > np.iinfo(np.int64).max:
        raise ConfigError("loads hold a negative or overlarge count; counts are 0 to 2**63 - 1")
    return np.ascontiguousarray(tokens, np.int64)


def _checked_sizes(
    tokens: NDArray[np.int64],
    infos: tuple[RankInfo, ...],
    previous: Placement | None,
    policy: PlanPolicy,
    max_ranks: int | None,
    slots_per_rank: int | None,
) -> tuple[int, int]:
    layers, experts = tokens.shape
    if not infos:
        raise SlotShortage(range(layers), (), 0, experts)
    if experts > MAX_EXPERTS or len(infos) > MAX_RANKS:
        raise ConfigError(
            f"{experts} experts on {len(infos)} ranks; the planner takes {MAX_EXPERTS} experts "
            f"and {MAX_RANKS} ranks at most"
        )
    seats = [info.rank for info in infos]
    if len(set(seats)) != len(seats):
        twice = next(a for a, b in itertools.pairwise(seats) if a == b)
        raise ConfigError(f"rank {twice} is named twice among {len(seats)}; name each rank once")
    if previous is not None and (previous.layers, previous.experts) != (layers, experts):
        raise ConfigError(
            f"the previous placement is for {previous.layers} layers of {previous.experts} "
            f"experts, the loads are for {layers} of {experts}"
        )
    if previous is None and policy.max_moves is not None:
        policy_text = f"policy.max_moves is {policy.max_moves}"
        raise ConfigError(f"{policy_text}, but without a previous placement everything moves")
    if experts % policy.groups:
        raise ConfigError(
            f"{experts} experts do not divide into {policy.groups} groups; change groups"
        )
    if not isinstance(policy.expert_bytes, int) and len(policy.expert_bytes) != layers:
        raise ConfigError(
            f"policy.expert_bytes has {len(policy.expert_bytes)} entries for {layers} layers"
        )
    most = max(info.slots for info in infos)
    max_ranks = max_ranks or (previous.max_ranks if previous else seats[-1] + 1)
    slots = slots_per_rank or (previous.slots_per_rank if previous else max(most, 1))
    if seats[-1] >= max_ranks or most > slots:
        raise ConfigError(
            f"rank {seats[-1]} and {most} slots do not fit into tables of {max_ranks} ranks with "
            f"{slots} slots; raise max_ranks or slots_per_rank"
        )
    return max_ranks, slots


def _dense(names: list[str]) -> NDArray[np.int32]:
    """Index of each name, numbered in the order in which they first appear."""
    index: dict[str, int] = {}
    return np.array([index.setdefault(name, len(index)) for name in names], np.int32)


def _share_out(report: NDArray[Any], limit: int) -> NDArray[np.int32]:
    """Moves per layer when not all may be made: lost experts first, then where a move buys most."""
    moves = report["moves"].astype(np.int64)
    granted = np.zeros(len(report), np.int64)
    gain = (report["before"] - report["after"]) / np.maximum(moves, 1)
    for wanted, order in (
        (report["restored"].astype(np.int64), np.arange(len(report))),
        (moves, np.argsort(-gain, kind="stable")),
    ):
        for layer in order.tolist():
            more = min(int(wanted[layer] - granted[layer]), limit - int(granted.sum()))
            granted[layer] += max(more, 0)
    return granted.astype(np.int32)


def _report(placement: Placement, report: NDArray[Any], policy: PlanPolicy) -> PlanReport:
    sizes = np.array([policy.bytes_of(layer) for layer in range(len(report))], np.int64)
    moved_bytes = int((report["moves"] * sizes).sum())
    warm = bool((report["before"] > 0.0).any())
    lost = np.argwhere(placement.copies() == 0) if report["lost"].any() else ()
    return PlanReport(
        imbalance_before=float(report["before"].max()) if warm else None,
        imbalance_after=float(report["after"].max()),
        mean_imbalance_after=float(report["after"].mean()),
        bound=float(report["bound"].max()),
        moves=int(report["moves"].sum()),
        restored=int(report["restored"].sum()),
        move_bytes=moved_bytes,
        lost=tuple((int(layer), int(expert)) for layer, expert in lost),
        single=int(report["single"].sum()),
        same_node=int(report["same_node"].sum()),
        spilled=int(report["spilled"].sum()),
        grouped=policy.groups > 1 and not report["global"].any(),
        reason=explain(report, policy, moved_bytes),
        layers=tuple(_layer_report(row, warm) for row in report.tolist()),
    )


def _layer_report(row: tuple[Any, ...], warm: bool) -> LayerReport:
    before, after, bound, moves, restored, lost, single, same_node, method, spilled, _ = row
    return LayerReport(
        imbalance_before=before if warm else None,
        imbalance_after=after,
        bound=bound,
        moves=moves,
        restored=restored,
        lost=lost,
        single=single,
        same_node=same_node,
        method=METHODS[method],
        spilled=spilled,
    )
