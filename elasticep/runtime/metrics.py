"""A daemon's counters, in a registry of their own, and the `/metrics` page."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from errno import EADDRNOTAVAIL
from socket import gaierror
from threading import Thread
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticep import __version__
from elasticep.errors import ConfigError
from elasticep.runtime.weights.metrics import WeightsMetrics
from elasticep.series import drop_groups

_MS: Final = 1e-3
# From a tenth of a millisecond, what a robust futex takes, up to what only a timeout finds.
_DETECT_BUCKETS: Final = tuple(
    ms * _MS for ms in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 500, 1000, 5000)
)
STATES: Final = ("empty", "starting", "ready", "attached", "ending")


@dataclass(frozen=True, slots=True)
class StepCounts:
    """Steps of one seat since its memory was made."""

    group: str
    rank: int
    complete: int
    torn: int


class _Steps(Collector):
    """Reads the step counters when somebody asks; they are kept by the kernels, not here."""

    def __init__(self, read: Callable[[], Iterable[StepCounts]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        labels = ("group", "rank")
        complete = CounterMetricFamily(
            "elasticep_steps_complete", "Steps that counted", labels=labels
        )
        torn = CounterMetricFamily(
            "elasticep_steps_torn", "Steps that were torn and repeated", labels=labels
        )
        for counts in self._read():
            values = (counts.group, str(counts.rank))
            complete.add_metric(values, counts.complete)
            torn.add_metric(values, counts.torn)
        return (complete, torn)


class Metrics:
    """All metrics of one daemon."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        Gauge(
            "elasticep_build_info", "1, with the version that runs", ("version",), registry=registry
        ).labels(__version__).set(1)
        self.deaths = Counter(
            "elasticep_daemon_deaths",
            "Incarnations that ended",
            ("group", "cause"),
            registry=registry,
        )
        self.detect = Histogram(
            "elasticep_daemon_detect_seconds",
            "From an injected kill to the dead words",
            buckets=_DETECT_BUCKETS,
            registry=registry,
        )
        self.report = Histogram(
            "elasticep_daemon_report_seconds",
            "From the dead words to the report to the controller",
            buckets=_DETECT_BUCKETS,
            registry=registry,
        )
        self.staged = Counter(
            "elasticep_daemon_staged",
            "Answers to proposed views",
            ("group", "result"),
            registry=registry,
        )
        self.adopted = Counter(
            "elasticep_daemon_adopted", "Views adopted", ("group",), registry=registry
        )
        self.workers = Counter(
            "elasticep_daemon_workers_started", "Workers started", registry=registry
        )
        self.killed = Counter(
            "elasticep_daemon_processes_killed", "Processes killed", ("role",), registry=registry
        )
        self.refused = Counter(
            "elasticep_daemon_connections_refused", "Connections turned away", registry=registry
        )
        self.seats = Gauge(
            "elasticep_daemon_seats", "Seats by state", ("state",), registry=registry
        )
        self.waits = Gauge(
            "elasticep_daemon_waits", "Ranks that wait longer than they should", registry=registry
        )
        self.connected = Gauge(
            "elasticep_daemon_controller_connected",
            "1 while a controller answers",
            registry=registry,
        )
        self.weights = WeightsMetrics()
        self.weights.register(registry)
        for state in STATES:
            self.seats.labels(state).set(0)

    def forget(self, group: str) -> None:
        """Show nothing of a group any more."""
        by_group = (self.deaths, self.staged, self.adopted, *self.weights.by_group)
        drop_groups(by_group, lambda name: name == group)

    def read_steps(self, read: Callable[[], Iterable[StepCounts]]) -> None:
        """Where the step counters come from."""
        self.registry.register(_Steps(read))


class MetricsPage:
    """The HTTP server of `/metrics`.

    Args:
        metrics: what it shows.
        host: interface.
        port: 0 = any free one.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        try:
            started: tuple[WSGIServer, Thread] = start_http_server(port, host, metrics.registry)
        except (OSError, UnicodeError) as error:  # the second: no name of a host
            name = not isinstance(error, OSError) or isinstance(error, gaierror)
            remedy = "metrics_port to another port, 0 for any free one"
            if name or getattr(error, "errno", 0) == EADDRNOTAVAIL:
                remedy = "metrics_host to an address of this host"
            raise ConfigError(
                f"cannot serve /metrics on {host}:{port}: "
                f"{getattr(error, 'strerror', None) or error}; set {remedy}, or metrics_port to -1 "
                "for none"
            ) from None
        self._server, self._thread = started
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
