"""What a run of the demo found out."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result, with the keys of `elasticep demo --output json`.

    Attributes:
        ranks: engines at the start.
        nodes: daemons.
        killed: worker, engine, daemon, controller or none.
        detect_ms: kill to the end of the last survivor's wait; None when nobody had to notice.
        recover_ms: kill to the first complete step on all survivors; None without a kill.
        steps_repeated: steps that a survivor had to run again.
        tokens_total: tokens answered.
        tokens_identical: whether every answer equals the single-process run's.
        requests_lost: requests without a whole answer.
        epochs: epochs in which steps were complete.
        details: more figures; which ones may change.
    """

    ranks: int
    nodes: int
    killed: str
    detect_ms: float | None
    recover_ms: float | None
    steps_repeated: int
    tokens_total: int
    tokens_identical: bool
    requests_lost: int
    epochs: list[int]
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether nothing was lost, nothing was wrong, and no step waited for weights."""
        moved = self.details.get("rebalance", {})
        whole = self.tokens_identical and self.requests_lost == 0
        return whole and not moved.get("steps_waited", False) and self._hit

    @property
    def _hit(self) -> bool:
        """Whether a kill that was to hit a migration did, and it went on while requests ran."""
        killed = self.details.get("migration")
        if killed is None:
            return True
        moved = self.details["rebalance"]
        return bool(killed["in_flight"] and moved["done"] and moved["requests_unfinished"])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """Label and value of each line of the final table."""
        return [
            ("ranks / nodes", f"{self.ranks} / {self.nodes}"),
            ("killed", self.details.get("victim", self.killed)),
            ("detection", _ms(self.detect_ms, "nothing to detect")),
            ("recovery", _ms(self.recover_ms, "-")),
            *self._restored(),
            *self._rebalanced(),
            *self._killed_moving(),
            ("steps repeated", str(self.steps_repeated)),
            ("requests lost", str(self.requests_lost)),
            ("tokens", str(self.tokens_total)),
            ("tokens identical", self._identical()),
            ("smallest top-1 margin", f"{self.details.get('min_margin', float('nan')):.5f}"),
            ("epochs", ", ".join(str(epoch) for epoch in self.epochs)),
        ]

    def _identical(self) -> str:
        if not self.tokens_identical:
            return "NO"
        other = self.details.get("logits_differing")
        if other is None:
            return "yes"
        return (
            f"yes, with other logits in {len(other)} requests" if other else "yes, all logits too"
        )

    def _rebalanced(self) -> list[tuple[str, str]]:
        figures = self.details.get("rebalance")
        if figures is None:
            return []
        before, after = figures["imbalance_before"], figures["imbalance_after"]
        planned = figures["imbalance_planned"]
        median, longest = figures["step_ms_median"], figures["step_ms_longest"]
        usual, limit = figures["step_ms_usual"], figures["step_ms_limit"]
        steps = (
            f"median {median:.1f} ms (before: {usual:.1f} ms), longest {longest:.1f} ms, "
            f"{'TOO LONG' if figures['steps_waited'] else 'within'} the limit of {limit:.1f} ms"
        )
        return [
            ("imbalance", f"{before:.3f} -> {after:.3f} (planned {planned:.3f})"),
            ("experts copied", f"{figures['moves']} in {figures['views']} views"),
            ("steps meanwhile", steps),
        ]

    def _killed_moving(self) -> list[tuple[str, str]]:
        killed = self.details.get("migration")
        if killed is None:
            return []
        if not killed["in_flight"]:
            return [("killed in mid-migration", "NO: no copy was under way; try again")]
        went_on = "yes" if self.details["rebalance"]["done"] else "NO"
        after = ", ".join(f"{count} from {kind}" for kind, count in killed["copied_after"].items())
        flight = (
            f"layer {killed['layer']} expert {killed['expert']} on its way from rank "
            f"{killed['source']} to {killed['target']}"
        )
        made = f"{killed['copies_made']} of {killed['copies_asked']} copies made"
        return [
            ("killed in mid-migration", f"yes: {made}, {flight}"),
            ("rebalance went on", f"{went_on}; copied since: {after or 'none'}"),
        ]

    def _restored(self) -> list[tuple[str, str]]:
        restored = self.details.get("restored")
        if restored is None:
            return []
        told = ", ".join(f"{count} from {source}" for source, count in restored.items())
        return [("experts restored", told or "none")]


def _ms(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.1f} ms"
