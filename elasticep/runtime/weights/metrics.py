"""What a daemon counts of expert weights."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from elasticep.runtime.weights.messages import Kind

STATES = ("valid", "filling", "empty")


class WeightsMetrics:
    """All of one daemon; shown once they are registered."""

    def __init__(self) -> None:
        self.bytes = Counter(
            "elasticep_weights_moved_bytes",
            "Bytes of expert weights that arrived, by where they came from",
            ("source",),
            registry=None,
        )
        self.units = Counter(
            "elasticep_weights_experts_moved",
            "Experts put in place and verified",
            ("group", "source"),
            registry=None,
        )
        self.failures = Counter(
            "elasticep_weights_source_failures",
            "Copies that did not come about, by source and in which way",
            ("source", "failure"),
            registry=None,
        )
        self.slots = Gauge(
            "elasticep_weights_slots",
            "Slots of this node's arenas by state",
            ("group", "rank", "state"),
            registry=None,
        )
        self.gpu = Gauge(
            "elasticep_weights_gpu_copy_bytes",
            "Bytes that a rank copies to its GPU for the view being staged, and has copied",
            ("group", "rank", "state"),
            registry=None,
        )
        self.backup = Gauge(
            "elasticep_weights_backup_experts",
            "Experts of the group that this node is to hold a backup of, and those it holds",
            ("group", "state"),
            registry=None,
        )
        self.mover_age = Gauge(
            "elasticep_weights_mover_heartbeat_age_seconds",
            "Since the mover was last heard of; 0 when none runs",
            registry=None,
        )
        self.mover_restarts = Counter(
            "elasticep_weights_mover_ends",
            "Movers that ended, or were killed because they hung",
            ("why",),
            registry=None,
        )
        for kind in Kind:
            self.bytes.labels(kind.value)

    @property
    def by_group(self) -> tuple[Counter | Gauge, ...]:
        """Those that have a label `group`."""
        return self.units, self.slots, self.gpu, self.backup

    def register(self, registry: CollectorRegistry) -> None:
        """Show them on a daemon's page."""
        for metric in (
            *(self.bytes, self.units, self.failures, self.slots),
            *(self.gpu, self.backup, self.mover_age, self.mover_restarts),
        ):
            registry.register(metric)
