"""Starts worker processes."""

import os
import subprocess
import sys

from elasticep.runtime.liveness.process import Process

TICKET_VARIABLE = "ELASTICEP_TICKET"
ORPHAN_VARIABLE = "ELASTICEP_ORPHAN_AFTER_MS"
WORKER = "elasticep.runtime.worker"
ALLOCATOR = "elasticep.runtime.allocator"


def spawn_worker(
    fd_socket: str, ticket: str, label: str, orphan_after_s: float, module: str = WORKER
) -> Process:
    """Start `python -m elasticep.runtime.worker`, or another module of the same arguments.

    It is in a session of its own and outlives this daemon, so that a restart of the daemon does
    not disturb serving. The ticket goes through the environment, where other users cannot read it.

    Args:
        fd_socket: where the worker says hello.
        ticket: to be shown there once.
        label: "group/rank", for process listings.
        orphan_after_s: a worker without daemon and engine leaves after this.
        module: what is started.

    Raises:
        OSError: the process cannot be started.
    """
    environment = {
        **os.environ,
        TICKET_VARIABLE: ticket,
        ORPHAN_VARIABLE: str(max(1, round(orphan_after_s * 1000))),
    }
    # These belong to the daemon alone; systemd would take a worker's word for the daemon's.
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        environment.pop(name, None)
    child = subprocess.Popen(
        [sys.executable, "-m", module, "--socket", fd_socket, label],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    return Process.open(child.pid, child)
