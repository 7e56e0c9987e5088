"""The planner as the controller asks it: a group's config and members in, a placement out. Pure.

Without load figures all experts count alike. A group's `staging_slots` are kept empty by counting
filled slots, not by position: before planning each rank's filled slots are moved to the front, and
back afterwards, so the slot that a move frees is the next one that is kept free.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from elasticep.control.joining import fill_joiners
from elasticep.control.placement import (
    EMPTY,
    Placement,
    Plan,
    PlanPolicy,
    RankInfo,
    plan,
    resplit,
)
from elasticep.control.repair import cover_single, keep, lost_mask
from elasticep.control.tables import BoolArray, Int32Array, Int64Array
from elasticep.control.views import Member
from elasticep.group import GroupConfig


@dataclass(frozen=True, slots=True)
class Around:
    """What placements of a group depend on, besides its members.

    Attributes:
        config: the group's config.
        domains: node -> domain; a node that is missing is a domain of its own.
        loads: int64 [layers, experts], the tokens to plan for; None: not known.
        refused: bool [layers, experts], what some node found nobody to supply: nobody is given it
            while it is lost. None: nothing.
        cannot_load: ranks that no plan gives anything new.
    """

    config: GroupConfig
    domains: Mapping[str, str]
    loads: Int64Array | None = None
    refused: BoolArray | None = None
    cannot_load: AbstractSet[int] = frozenset()

    @property
    def tokens(self) -> Int64Array:
        """The loads to plan for."""
        if self.loads is not None:
            return self.loads
        geometry = self.config.geometry
        return np.ones((geometry.layers, geometry.experts), np.int64)

    def infos(
        self, members: Iterable[Member], draining: Collection[int] = (), *, whole: bool = False
    ) -> tuple[RankInfo, ...]:
        """The members as the planner takes them; `whole`: with their staging slots."""
        members = tuple(members)
        geometry = self.config.geometry
        slots = geometry.slots_per_rank - (0 if whole else self.config.staging_slots)
        if (len(members) - len(draining)) * slots < geometry.experts:
            slots = geometry.slots_per_rank  # better no place to pass than experts without any
        return tuple(
            RankInfo(
                member.rank,
                member.node,
                self.domains.get(member.node, member.node),
                slots,
                member.rank in draining,
            )
            for member in members
        )


def plan_policy(config: GroupConfig) -> PlanPolicy:
    """What a group's config asks of the planner."""
    policy = config.rebalance
    return PlanPolicy(
        target=policy.target,
        min_gain=policy.min_gain,
        cover=config.spare_copies >= 1,
        fill=config.spare_copies >= 2,
        groups=policy.groups,
        expert_bytes=expert_bytes(config),
    )


def expert_bytes(config: GroupConfig) -> int:
    """Bytes of one expert of one layer; 0 when engines keep the weights."""
    return config.weights.unit_bytes if config.weights is not None else 0


def first_placement(around: Around, members: Collection[Member]) -> Placement:
    """For a group whose members hold nothing yet.

    Raises:
        SlotShortage: the members have fewer slots than there are experts.
    """
    geometry = around.config.geometry
    made = plan(
        around.tokens,
        around.infos(members),
        policy=plan_policy(around.config),
        max_ranks=geometry.max_ranks,
        slots_per_rank=geometry.slots_per_rank,
    )
    return made.placement


def split(
    around: Around, table: Int32Array, members: Collection[Member], before: Placement | None = None
) -> Placement:
    """Split tokens over the copies of a slot table as well as they allow; moves nothing.

    Args:
        around: the group.
        table: the slots.
        members: who is there.
        before: a placement whose split is where to begin: little is to do when most of it stays.
    """
    weight = np.zeros(table.shape, np.uint32)
    if before is not None:
        same = (table == before.slot_expert) & (table != EMPTY)
        weight[same] = before.slot_weight[same]
    held = Placement(experts=around.config.geometry.experts, slot_expert=table, slot_weight=weight)
    infos = around.infos(members, whole=True)
    return resplit(around.tokens, infos, held, plan_policy(around.config)).placement


def admit(
    around: Around,
    table: Int32Array,
    joiners: Collection[int],
    members: Collection[Member],
    draining: Collection[int],
) -> Int32Array:
    """The table with the joiners' slots filled (see `fill_joiners`).

    Slots of members that stay are not touched: what a plan would do better follows in the
    background, when the joiners serve.

    Args:
        around: the group.
        table: slots of the view before.
        joiners: ranks that come in; whatever the table says of them does not count.
        members: of the new view, joiners and draining ones included.
        draining: ranks that are about to leave.
    """
    others = {member.rank for member in members} - set(joiners)
    policy = plan_policy(around.config)
    return fill_joiners(
        keep(table, others),
        around.tokens,
        {i.rank: i.slots for i in around.infos(members, draining) if i.rank in joiners},
        {member.rank: member.node for member in members},
        sorted(others - set(draining)),
        cover=policy.cover,
        fill=policy.fill,
        refused=around.refused,
    )


def target(
    around: Around,
    placement: Placement,
    members: Collection[Member],
    draining: Collection[int] = (),
    *,
    policy: PlanPolicy | None = None,
) -> Plan:
    """Plan from a placement in force. `Plan.previous` and `.placement` have their slots where they
    are; the report is the planner's.

    Raises:
        SlotShortage: members that stay have fewer slots than there are experts.
    """
    policy = policy or plan_policy(around.config)
    order = np.argsort(placement.slot_expert == EMPTY, axis=2, kind="stable")
    packed = Placement(
        experts=placement.experts,
        slot_expert=np.take_along_axis(placement.slot_expert, order, axis=2),
        slot_weight=np.take_along_axis(placement.slot_weight, order, axis=2),
    )
    most = (packed.slot_expert != EMPTY).sum(axis=2).max(axis=0)
    infos = tuple(
        replace(i, slots=min(i.slots, int(most[i.rank]))) if i.rank in around.cannot_load else i
        for i in around.infos(members, draining)
    )
    made = plan(around.tokens, infos, packed, policy)
    previous = _unpacked(packed, order)
    after = _into_free(previous, _unpacked(made.placement, order))
    if around.refused is not None:
        after = _without(after, lost_mask(previous.slot_expert, after.experts) & around.refused)
    alive = {member.rank for member in members}
    if len(alive) < placement.max_ranks:
        previous = split(around, keep(previous.slot_expert, alive), members, previous)
    if around.cannot_load:
        table = _around_who_cannot_load(around, previous, after, members)
        after = split(around, table, members, after)
    moves = _moves(previous.slot_expert, after.slot_expert)
    report = replace(made.report, moves=moves, move_bytes=moves * expert_bytes(around.config))
    return replace(made, placement=after, previous=previous, report=report)


def _unpacked(packed: Placement, order: NDArray[np.int64]) -> Placement:
    expert, weight = np.empty_like(packed.slot_expert), np.empty_like(packed.slot_weight)
    np.put_along_axis(expert, order, packed.slot_expert, axis=2)
    np.put_along_axis(weight, order, packed.slot_weight, axis=2)
    return Placement(experts=packed.experts, slot_expert=expert, slot_weight=weight)


def _without(after: Placement, left_out: BoolArray) -> Placement:
    """The plan without any copy of some experts; bool [layers, experts]."""
    expert, weight = after.slot_expert.copy(), after.slot_weight.copy()
    layers = np.arange(len(expert))[:, None, None]
    out = (expert != EMPTY) & left_out[layers, np.maximum(expert, 0)]
    expert[out], weight[out] = EMPTY, 0
    return Placement(experts=after.experts, slot_expert=expert, slot_weight=weight)


def _around_who_cannot_load(
    around: Around, previous: Placement, after: Placement, members: Collection[Member]
) -> Int32Array:
    """The plan's slots without new ones of some ranks; second copies go to others instead."""
    table = _unmoved(previous, after, around.cannot_load)
    left_out = _moves(previous.slot_expert, after.slot_expert) - _moves(previous.slot_expert, table)
    if not plan_policy(around.config).cover or left_out <= 0:
        return table
    others = {member.rank for member in members} - around.cannot_load
    staging = around.config.staging_slots
    return cover_single(table, others, after.experts, staging, left_out)


def _moves(before: Int32Array, after: Int32Array) -> int:
    return int(((after != EMPTY) & (after != before)).sum())


def _unmoved(previous: Placement, after: Placement, ranks: AbstractSet[int]) -> Int32Array:
    """The plan's slots with those of some ranks as they are; layers where an expert would be left
    without a copy by that stay as they are whole.
    """
    now, table = previous.slot_expert, after.slot_expert.copy()
    table[:, list(ranks)] = now[:, list(ranks)]
    held = ~lost_mask(now, previous.experts)
    broken = (held & lost_mask(table, previous.experts)).any(axis=1)
    table[broken] = now[broken]
    return table


def _into_free(previous: Placement, after: Placement) -> Placement:
    """New content goes into slots that are free now rather than over what lies there."""
    now = previous.slot_expert
    expert, weight = after.slot_expert.copy(), after.slot_weight.copy()
    replaced = (expert >= 0) & (now >= 0) & (expert != now)
    free = (expert == EMPTY) & (now == EMPTY)
    for layer, rank in np.argwhere(replaced.any(axis=2) & free.any(axis=2)).tolist():
        slots, places = np.flatnonzero(replaced[layer, rank]), np.flatnonzero(free[layer, rank])
        for slot, place in zip(slots.tolist(), places.tolist(), strict=False):
            expert[layer, rank, place], expert[layer, rank, slot] = expert[layer, rank, slot], EMPTY
            weight[layer, rank, place], weight[layer, rank, slot] = weight[layer, rank, slot], 0
    return Placement(experts=after.experts, slot_expert=expert, slot_weight=weight)
