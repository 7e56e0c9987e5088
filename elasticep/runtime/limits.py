"""Every bound and deadline of a daemon, in one place. Seconds unless a name says otherwise."""

from dataclasses import dataclass
from typing import Final

from elasticep.errors import ConfigError

MAX_CONNECTIONS: Final = 1024  # on the SEQPACKET socket
MAX_PENDING_MESSAGES: Final = 64  # per connection, when its peer does not read
MAX_ATTACH_WAIT_MS: Final = 600_000
MAX_PROPOSALS: Final = 4  # kept per group; as many as a rank has banks
MAX_OUTBOX: Final = 4096  # messages to the controller that are not written yet
MAX_EPOCH_LAG: Final = 4  # epoch x is not staged by a rank that still runs x - 4 or older


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Deadlines of a daemon; the defaults are meant for production, tests shorten them.

    Attributes:
        ticket_s: how long a ticket may be shown.
        hello_s: how long a new connection may stay silent.
        worker_start_s: a worker that does not hold its lock by then is killed.
        allocate_s: a seat whose GPU memory is not there by then ends.
        engine_grace_s: how long a fenced engine may keep its lock before it is killed.
        lock_echo_s: how long a process's exit waits for the watcher's word of its locks.
        restart_backoff_s: wait after the first start of a worker that failed; doubles each time.
        restart_backoff_max_s: longest such wait.
        reattach_wait_s: how long a restarted daemon waits for its runners before it reports.
        reattach_limit_s: processes of a seat that have not come back by then are killed.
        orphan_after_s: a worker without daemon and engine leaves after this.
        fetch_s: how long a peer daemon may take to hand over a rank's memory.
        report_s: deadline of a call to a peer daemon.
        connect_s: deadline of connecting to a controller and of its first answer.
        unreachable_s: that no controller takes this node is told of after so long.
        controller_silence_s: a controller that says nothing for this long is left.
        poll_s: interval of looking at wait records.
        staged_poll_s: interval of looking whether a joiner's engine waits in step().
        save_again_s: pause before a state file that could not be written is tried again.
        find_s: how long other nodes' daemons may take to say which experts they have.
        mover_stall_s: a mover that says nothing for this long is killed, and another one started.
        stop_s: how long a clean stop waits for workers to end and engines to let go.
    """

    ticket_s: float = 10.0
    hello_s: float = 5.0
    worker_start_s: float = 10.0
    allocate_s: float = 60.0
    engine_grace_s: float = 5.0
    lock_echo_s: float = 0.2
    restart_backoff_s: float = 0.1
    restart_backoff_max_s: float = 5.0
    reattach_wait_s: float = 0.5
    reattach_limit_s: float = 10.0
    orphan_after_s: float = 60.0
    fetch_s: float = 2.0
    report_s: float = 1.0
    connect_s: float = 2.0
    unreachable_s: float = 5.0
    controller_silence_s: float = 3.0
    poll_s: float = 0.1
    staged_poll_s: float = 0.005
    save_again_s: float = 1.0
    find_s: float = 0.5
    mover_stall_s: float = 3.0
    stop_s: float = 1.5

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if not 0 < value <= 3600:
                raise ConfigError(f"{name} is {value!r}; it must be above 0 and at most 3600 s")
