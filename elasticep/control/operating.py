"""What operators ask about balance: a plan to look at, a rebalance, a placement of their own."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from typing import Final

import numpy as np

from elasticep.control.background import Ask, Background, Pause, Resume
from elasticep.control.placement import EMPTY, InvalidPlacement, Placement, PlanPolicy
from elasticep.control.planfile import import_json
from elasticep.control.planning import PlanJob, Planned
from elasticep.control.records import check_import
from elasticep.control.status import rebalance_status
from elasticep.control.term import Term
from elasticep.control.views import View
from elasticep.errors import ConfigError, NotLeader, UsageError
from elasticep.group import GroupConfig
from elasticep.proto import controller_pb2

MAX_REASON: Final = 256  # of what operators say
_LOOK_S: Final = 0.1


async def rebalance(
    term: Term, request: controller_pb2.RebalanceRequest
) -> controller_pb2.RebalanceResponse:
    """Do what a request says; what is acknowledged is in the store.

    Raises:
        UnknownGroup, UsageError: no such group, or no view; a rebalance of a group that is paused.
        ConfigError: fields that do not go together.
        PlacementError: an import that is not a placement of this group, or cannot be reached.
    """
    term.cluster.membership(request.group)
    background = term.cluster.background[request.group]
    _check(request)
    if request.action == controller_pb2.REBALANCE_ACTION_PAUSE:
        await term.rebalance(request.group, Pause(request.reason[:MAX_REASON]))
        return _answer(term, background, None, "", accepted=True)
    if request.action == controller_pb2.REBALANCE_ACTION_RESUME:
        await term.rebalance(request.group, Resume())
        return _answer(term, background, None, "", accepted=True)
    ask, job = await _wanted(background, request)
    paused = background.rebalancer.paused
    if ask is not None and paused:
        raise UsageError(
            f"group {request.group!r} is paused ({paused}), so nothing would be moved; resume it "
            f"first: elasticep rebalance {request.group} --resume"
        )
    planned = await term.plan(job)
    if planned.error and ask is not None and ask.what == "import":
        raise InvalidPlacement(planned.error)
    go, reason = planned.verdict()
    dry = request.action == controller_pb2.REBALANCE_ACTION_DRY_RUN
    # What is imported is kept from now on, also if it is in place already.
    go = go or (ask is not None and ask.what == "import")
    if go and ask is not None:
        await term.rebalance(request.group, ask)
    answer = _answer(term, background, planned, reason, accepted=go and not dry)
    if planned.plan is not None:
        answer.placement = await asyncio.to_thread(planned.plan.placement.to_bytes)
    return answer


def _check(request: controller_pb2.RebalanceRequest) -> None:
    if request.action not in controller_pb2.RebalanceAction.values():
        raise ConfigError(f"action {request.action} is not known to this controller")
    imports = request.action == controller_pb2.REBALANCE_ACTION_IMPORT
    if bool(request.plan_json) is not imports:
        raise ConfigError("plan_json goes with the action IMPORT, and only with that")
    dry = request.action == controller_pb2.REBALANCE_ACTION_DRY_RUN
    if request.for_engines and not dry:
        raise ConfigError("for_engines goes with the action DRY_RUN: our own exchange has weights")


async def _wanted(
    background: Background, request: controller_pb2.RebalanceRequest
) -> tuple[Ask | None, PlanJob]:
    """What is to be asked of the background when the plan is worth it, and the plan to make.

    The largest plans take a second to read: beside everything else.
    """
    action = request.action
    if action == controller_pb2.REBALANCE_ACTION_IMPORT:
        job = background.job(asked="import")
        placement = await asyncio.to_thread(
            read_plan, request.plan_json, job.around.config, job.view
        )
        return Ask("import", placement), dataclasses.replace(job, wanted=placement)
    if action == controller_pb2.REBALANCE_ACTION_DRY_RUN:
        policy = PlanPolicy(weighted=False, fill=True) if request.for_engines else None
        return None, background.job(policy)
    forced = action == controller_pb2.REBALANCE_ACTION_FORCE
    return Ask("force"), background.job(asked="force" if forced else "")


def read_plan(text: str, config: GroupConfig, view: View) -> Placement:
    """A placement for a view's members from JSON in any form.

    Raises:
        InvalidPlacement, ExpertsLost: it is none, breaks a rule, or is too large for the store.
    """
    geometry = config.geometry
    found = import_json(text, geometry.experts, len(view.ranks), geometry.layers)
    shape = (geometry.layers, geometry.max_ranks, geometry.slots_per_rank)
    if found.slot_expert.shape != shape:
        if found.max_ranks != len(view.ranks) or found.slots_per_rank > geometry.slots_per_rank:
            raise InvalidPlacement(
                f"the plan has {found.slots_per_rank} slots on {found.max_ranks} ranks; the group "
                f"has {geometry.slots_per_rank} on {len(view.ranks)} members"
            )
        expert = np.full(shape, EMPTY, np.int32)
        weight = np.zeros(shape, np.uint32)
        ranks = list(view.ranks)
        expert[:, ranks, : found.slots_per_rank] = found.slot_expert
        weight[:, ranks, : found.slots_per_rank] = found.slot_weight
        found = Placement(experts=geometry.experts, slot_expert=expert, slot_weight=weight)
    found.validate(geometry, view.ranks)
    check_import(found)
    return found


def _answer(
    term: Term, background: Background, planned: Planned | None, reason: str, *, accepted: bool
) -> controller_pb2.RebalanceResponse:
    answer = controller_pb2.RebalanceResponse(
        accepted=accepted,
        reason=reason,
        status=rebalance_status(background.rebalancer, term.now_ms()),
    )
    if planned is not None:
        answer.plan.CopyFrom(summary(planned))
        answer.members.extend(planned.job.view.ranks)
    return answer


def summary(planned: Planned) -> controller_pb2.PlanSummary:
    """A plan in figures."""
    report = planned.plan.report if planned.plan is not None else None
    return controller_pb2.PlanSummary(
        imbalance_before=planned.before.mean,
        imbalance_after=planned.after.mean,
        worst_before=planned.before.worst,
        worst_after=planned.after.worst,
        bound=report.bound if report else 0.0,
        moves=report.moves if report else 0,
        move_bytes=report.move_bytes if report else 0,
        stages=len(planned.path),
        single_before=planned.before.single,
        single_after=planned.after.single,
        lost_before=planned.before.lost,
        lost_after=planned.after.lost,
        reason=report.reason if report else planned.error,
        layers=[
            controller_pb2.LayerPlan(
                imbalance_before=layer.imbalance_before or 0.0,
                imbalance_after=layer.imbalance_after,
                bound=layer.bound,
                moves=layer.moves,
                method=layer.method,
            )
            for layer in (report.layers if report else ())
        ],
    )


async def watch(term: Term, group: str) -> AsyncGenerator[controller_pb2.RebalanceStatus, None]:
    """The background's status, then again after every change."""
    term.cluster.membership(group)
    told: controller_pb2.RebalanceStatus | None = None
    while not term.over:
        term.cluster.membership(group)  # it may have been deleted
        status = rebalance_status(term.cluster.background[group].rebalancer, term.now_ms())
        if told is None or _changed(told, status):
            told = status
            yield status
        await asyncio.sleep(_LOOK_S)
    raise NotLeader("this controller does not lead any more; ask the next leader")


def _changed(old: controller_pb2.RebalanceStatus, new: controller_pb2.RebalanceStatus) -> bool:
    """Whether anything but an age differs."""
    parts = []
    for status in (old, new):
        part = controller_pb2.RebalanceStatus()
        part.CopyFrom(status)
        part.progress_ms_ago = part.looked_ms_ago = part.last.ended_ms_ago = 0
        parts.append(part)
    return bool(parts[0] != parts[1])
