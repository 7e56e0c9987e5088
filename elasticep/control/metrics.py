"""The controller's metrics, in a registry of their own."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from elasticep import __version__
from elasticep.control.events import Notice
from elasticep.control.views import View
from elasticep.series import drop_groups

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class ControllerMetrics:
    """Counters and gauges of one controller process.

    Attributes:
        registry: what `/metrics` shows.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._by_group: list[Counter | Gauge] = []
        Gauge(
            "elasticep_build_info",
            "1, with the version that runs.",
            ["version"],
            registry=self.registry,
        ).labels(__version__).set(1)
        self.leader = Gauge(
            "elasticep_controller_leader", "1 while this controller leads.", registry=self.registry
        )
        self.terms = Counter(
            "elasticep_controller_terms",
            "How often this controller became the leader.",
            registry=self.registry,
        )
        self.store_up = Gauge(
            "elasticep_controller_store_up",
            "1 while the store answers this controller, whether it leads or stands by.",
            registry=self.registry,
        )
        self.nodes = Gauge(
            "elasticep_controller_connected_nodes",
            "Nodes with an open session.",
            registry=self.registry,
        )
        self.proposed = self._group_counter("views_proposed", "Views proposed.")
        self.adopted = self._group_counter("views_adopted", "Views that all live members adopted.")
        self.ended = self._group_counter(
            "incarnations_ended", "Incarnations of ranks that ended, drained ones not counted."
        )
        self.suspected = self._group_counter(
            "ranks_suspected", "Times a rank came under suspicion."
        )
        self.staging_failed = self._group_counter(
            "staging_failures", "Members that could not stage a view, or not in time."
        )
        self.unknown_epochs = self._group_counter(
            "unknown_epochs", "Reports of an epoch beyond all that the store knows."
        )
        self.refused = Counter(
            "elasticep_controller_messages_refused",
            "Messages of nodes that made no sense.",
            registry=self.registry,
        )
        self.faults = Counter(
            "elasticep_controller_faults",
            "Unexpected errors after which the state was read anew from the store.",
            registry=self.registry,
        )
        self.adopt_seconds = Histogram(
            "elasticep_controller_adopt_seconds",
            "From the decision for a view until every live member ran in it.",
            ["group"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.write_seconds = Histogram(
            "elasticep_controller_store_write_seconds",
            "Transactions of the leader.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.write_waits = Gauge(
            "elasticep_controller_store_write_waits_seconds",
            "How long the leader's present write has waited for the store; 0 while none does.",
            registry=self.registry,
        )
        self.epoch = self._group_gauge("epoch", "Epoch of the latest view.")
        self.adopted_epoch = self._group_gauge("adopted_epoch", "Epoch that all live members run.")
        self.members = self._group_gauge("members", "Members of the latest view.")
        self.lost = self._group_gauge(
            "lost_experts", "(layer, expert) pairs of the latest view without a replica."
        )
        self._make_balance()

    def _make_balance(self) -> None:
        self.tokens = self._group_counter(
            "load_tokens", "Tokens x top-k over all layers, as nodes reported them."
        )
        self.imbalance = self._group_gauge(
            "imbalance", "Busiest rank's load over the mean; average over layers."
        )
        self.worst_imbalance = self._group_gauge(
            "worst_imbalance", "Busiest rank's load over the mean; worst layer."
        )
        self.cannot_load = self._group_gauge(
            "ranks_not_loading", "Members that get nothing new, because they failed to load some."
        )
        self.rebalances = Counter(
            "elasticep_controller_rebalances",
            "Rebalances that ended: done, abandoned.",
            ["group", "result"],
            registry=self.registry,
        )
        self.rebalance_moves = self._group_counter(
            "rebalance_moves", "Copies of experts that rebalances made."
        )
        self.rebalance_stuck = self._group_counter(
            "rebalance_stuck", "Rebalances without progress for too long."
        )
        self.rebalance_age = self._group_gauge(
            "rebalance_age_seconds",
            "Since the background made progress last; idle counts, a view under way does not.",
        )

    def _group_counter(self, name: str, what: str) -> Counter:
        made = Counter(f"elasticep_controller_{name}", what, ["group"], registry=self.registry)
        self._by_group.append(made)
        return made

    def _group_gauge(self, name: str, what: str) -> Gauge:
        made = Gauge(f"elasticep_controller_{name}", what, ["group"], registry=self.registry)
        self._by_group.append(made)
        return made

    def keep_only(self, groups: Collection[str]) -> None:
        """Show nothing of other groups any more: they were deleted."""
        by_group = (*self._by_group, self.adopt_seconds, self.rebalances)
        drop_groups(by_group, lambda group: group not in groups)

    def took_over(self, group: str, view: View | None, adopted: int) -> None:
        """What a new leader found in the store."""
        self.adopted_epoch.labels(group).set(adopted)
        self.epoch.labels(group).set(view.epoch if view else 0)
        self.members.labels(group).set(len(view.members) if view else 0)
        self.lost.labels(group).set(len(view.lost) if view else 0)

    def count(self, group: str, notice: Notice) -> None:
        """Take what a notice says."""
        fields = notice.fields
        if notice.event == "view.proposed":
            self.proposed.labels(group).inc()
            self.epoch.labels(group).set(fields["epoch"])
            self.members.labels(group).set(len(fields["members"]))
            self.lost.labels(group).set(fields["lost_experts"])
        elif notice.event == "view.adopted":
            self.adopted.labels(group).inc()
            self.adopted_epoch.labels(group).set(fields["epoch"])
            self.adopt_seconds.labels(group).observe(fields["took_ms"] / 1_000)
        elif notice.event == "rank.fenced" and fields["counts"]:
            self.ended.labels(group).inc()
        elif notice.event in ("seat.refused", "report.refused", "load.refused"):
            self.refused.inc()
        elif notice.event == "rank.suspected":
            self.suspected.labels(group).inc()
        elif notice.event == "staging.failed":
            self.staging_failed.labels(group).inc()
        elif notice.event == "epoch.unknown":
            self.unknown_epochs.labels(group).inc()
        elif notice.event == "load.counted":
            self.tokens.labels(group).inc(fields["tokens"])
        elif notice.event == "load.window":
            self.cannot_load.labels(group).set(fields["cannot_load"])
            if fields["known"]:
                self.imbalance.labels(group).set(fields["imbalance"])
                self.worst_imbalance.labels(group).set(fields["worst"])
        elif notice.event.startswith("rebalance."):
            self._count_rebalance(group, notice)

    def _count_rebalance(self, group: str, notice: Notice) -> None:
        result = notice.event.removeprefix("rebalance.")
        if result in ("done", "abandoned"):
            self.rebalances.labels(group, result).inc()
            self.rebalance_moves.labels(group).inc(notice.fields["moves"])
        elif result == "fault":
            self.faults.inc()
        elif result == "stuck":
            self.rebalance_stuck.labels(group).inc()
