"""Who hangs, judged by who waits for whom. Pure.

Every rank waits for at most one other at a time, so the standing reports form chains. A chain ends
at a root, a rank that is waited for and waits for nobody, or in a cycle, which is a broken link
(two ranks, each waiting for the other) or a longer one of the same kind. Of a chain only the root
is blamed; of a cycle exactly one rank: the one whose removal frees most others, of equals the one
that has waited longest (one that is stopped in the middle of a wait keeps a report that is not true
any more), then the highest. Expelling more would punish both ends of a link.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from elasticep.control.seats import JUDGED, Seat


@dataclass(frozen=True, slots=True)
class Verdict:
    """A rank that is to be expelled, and why."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """Ranks under suspicion, and those whose time is up."""

    suspected: frozenset[int]
    expelled: tuple[Verdict, ...]


def judge(
    seats: Mapping[int, Seat],
    fresh: Iterable[str],
    *,
    hang_ms: int,
    first_step_ms: int,
    first_step_progress: int,
    now_ms: int,
) -> Judgement:
    """Follow the standing wait reports to their roots.

    Args:
        seats: rank -> seat.
        fresh: nodes that are connected; reports about and from ranks of others prove nothing.
        hang_ms: a root that made no progress and is waited for this long is expelled.
        first_step_ms: the same for a rank in its first step, which may be compiling.
        first_step_progress: the counter of a rank beyond its first step has at least this.
        now_ms: the time.
    """
    nodes = set(fresh)
    judged = {r: s for r, s in seats.items() if s.phase in JUDGED and s.node in nodes}
    edges = {
        rank: seat.wait.target
        for rank, seat in judged.items()
        if seat.wait is not None and seat.wait.target in judged and seat.wait.target != rank
    }
    suspected: set[int] = set()
    expelled: list[Verdict] = []
    waiters = _waiters(edges)
    excused = _excused(seats, judged, hang_ms, now_ms)
    for root in sorted(set(edges.values()) - set(edges) - excused):
        if judged[root].warmup:
            continue
        suspected.add(root)
        held_ms = max(now_ms - _since(judged[w]) for w in waiters[root])
        still_ms = now_ms - judged[root].moved_ms
        limit_ms = hang_ms if judged[root].progress >= first_step_progress else first_step_ms
        if min(held_ms, still_ms) >= limit_ms:
            who = ", ".join(str(rank) for rank in waiters[root])
            expelled.append(
                Verdict(
                    root,
                    f"rank {root} hangs: it waits for nobody, made no progress for {still_ms} ms, "
                    f"and ranks {who} wait for it ({_phase(judged, waiters[root])})",
                )
            )
    for cycle in _cycles(edges):
        if any(judged[rank].warmup for rank in cycle):
            continue
        suspected.update(cycle)
        held_ms = min(now_ms - max(_since(judged[r]), judged[r].moved_ms) for r in cycle)
        if held_ms >= hang_ms:
            freed = {rank: _reach(rank, cycle, waiters) for rank in cycle}
            worst = max(cycle, key=lambda rank: (freed[rank], -_since(judged[rank]), rank))
            ring = " -> ".join(str(rank) for rank in (*cycle, cycle[0]))
            expelled.append(
                Verdict(
                    worst,
                    f"ranks {ring} have waited for each other in a ring for {held_ms} ms, a "
                    f"broken link; without rank {worst} most of the others can go on",
                )
            )
    return Judgement(frozenset(suspected), tuple(expelled))


def _excused(
    seats: Mapping[int, Seat], judged: Mapping[int, Seat], hang_ms: int, now_ms: int
) -> set[int]:
    """Ranks that wait for somebody who is not judged: expelled just now, or on a silent node.

    Without this the next in a chain would be blamed as soon as its root is expelled. They have as
    long as anybody to let go of that wait.
    """
    found: set[int] = set()
    for rank, seat in judged.items():
        target = seats.get(seat.wait.target) if seat.wait is not None else None
        if target is None or target.rank in judged:
            continue
        if target.live or now_ms - target.over_ms < hang_ms:
            found.add(rank)
    return found


def _since(seat: Seat) -> int:
    assert seat.wait is not None
    return seat.wait.since_ms


def _phase(judged: Mapping[int, Seat], ranks: list[int]) -> str:
    phases = {seat.wait.phase for rank in ranks if (seat := judged[rank]).wait is not None}
    return ", ".join(sorted(phases))


def _waiters(edges: Mapping[int, int]) -> dict[int, list[int]]:
    waiters: dict[int, list[int]] = {}
    for rank in sorted(edges):
        waiters.setdefault(edges[rank], []).append(rank)
    return waiters


def _cycles(edges: Mapping[int, int]) -> list[list[int]]:
    """Every cycle once, beginning with its lowest rank."""
    found: list[list[int]] = []
    done: set[int] = set()
    for start in sorted(edges):
        path: list[int] = []
        rank = start
        while rank in edges and rank not in done:
            done.add(rank)
            path.append(rank)
            rank = edges[rank]
        if rank in path:
            cycle = path[path.index(rank) :]
            lowest = cycle.index(min(cycle))
            found.append(cycle[lowest:] + cycle[:lowest])
    return found


def _reach(rank: int, cycle: list[int], waiters: Mapping[int, list[int]]) -> int:
    """How many ranks outside the cycle wait for `rank`, directly or over others."""
    count, todo = 0, [rank]
    while todo:
        behind = [r for r in waiters.get(todo.pop(), ()) if r not in cycle]
        count += len(behind)
        todo += behind
    return count
