"""What a watcher tells of locks that changed more than once between two of its looks."""

import mmap
import os
import select
import signal
import subprocess
import sys

from elasticep.native import abi
from elasticep.native.region import Header
from elasticep.native.watcher import Watcher
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.processes import stop
from elasticep.testing.small import exchange, geometry

_DEADLINE_S = 60.0
_WATCH = """
import select
import sys
from elasticep.native.region import Header
from elasticep.native.watcher import Watcher

watcher = Watcher()
watcher.watch(1, 1, Header(int(sys.argv[1]), int(sys.argv[2])))
while True:
    select.select([watcher.fd], [], [])
    for event in watcher.events():
        print(event.kind.name, event.holder.name, event.incarnation, flush=True)
"""


class Watching:
    """A process that watches a rank's locks, as a daemon does."""

    def __init__(self, header_fd: int, digest: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WATCH, str(header_fd), str(digest)],
            stdout=subprocess.PIPE,
            pass_fds=[header_fd],
        )
        assert self.process.stdout is not None
        self._out = self.process.stdout.fileno()
        self._text = b""

    def until(self, *lines: str) -> list[str]:
        """Everything told so far, when these lines are among it; an unbuffered writer's line comes
        in pieces, and counts with its end.
        """
        while not set(lines) <= set(told := self._text.decode().split("\n")[:-1]):
            ready, _, _ = select.select([self._out], [], [], _DEADLINE_S)
            assert ready, f"{lines} are not told within {_DEADLINE_S} s, but {told}"
            self._text += os.read(self._out, 4096)
        self._text = self._text.rpartition(b"\n")[2]
        return told

    def stop(self) -> None:
        """Let it look no more for a while."""
        stop(self.process.pid)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate()


def test_a_lock_that_was_let_go_and_taken_anew_meanwhile_is_told_of() -> None:
    """A watcher that does not get the processor sees the next incarnation's holder only: it tells
    of both, or the seat would stay without its engine for good.
    """
    g = geometry(1, exchange(), launch=abi.Launch.INLINE)
    with LocalGroup(g) as group:
        watching = Watching(group.header_fd(0), group.layout.digest)
        try:
            first = group.session(0)
            watching.until("HELD RUNNER 1", "HELD ENGINE 1")
            watching.stop()
            first.close()
            group.open_seat(0)
            second = group.session(0)
            watching.process.send_signal(signal.SIGCONT)
            told = watching.until("HELD RUNNER 2", "HELD ENGINE 2")
            for holder in ("RUNNER", "ENGINE"):
                assert told.index(f"RELEASED {holder} 1") < told.index(f"HELD {holder} 2")
            second.close()
            assert sorted(watching.until("RELEASED RUNNER 2", "RELEASED ENGINE 2")) == [
                "RELEASED ENGINE 2",
                "RELEASED RUNNER 2",
            ]
        finally:
            watching.close()


def make_deaf(header_fd: int, pid: int) -> None:
    """Let the kernel wake nobody when this process, which holds locks of the header, dies."""
    waiters = 1 << 31
    held = {waiters | int(thread) for thread in os.listdir(f"/proc/{pid}/task")}
    with mmap.mmap(header_fd, 0) as memory, memoryview(memory).cast("I") as words:
        found = [i for i in range(len(words)) if words[i] in held]
        for i in found:
            words[i] &= ~waiters
    assert found


def test_who_has_another_sign_of_a_death_looks_at_the_locks_itself() -> None:
    """The watcher's thread sleeps, for a second at most where it is not woken; the dead word and
    the event are there as soon as somebody looks.
    """
    with LocalGroup(geometry(1, exchange(), launch=abi.Launch.SERVICE)) as group:
        header, watcher = Header(group.header_fd(0), group.layout.digest), Watcher()
        try:
            watcher.watch(1, 1, header)
            kinds: list[abi.EventKind] = []
            while abi.EventKind.HELD not in kinds:
                assert select.select([watcher.fd], [], [], _DEADLINE_S)[0]
                kinds += [event.kind for event in watcher.events()]
            make_deaf(group.header_fd(0), group.worker_pid(0))
            group.kill_worker(0)
            watcher.look()
            assert [event.kind for event in watcher.events()] == [abi.EventKind.DIED]
            assert header.status().fenced
        finally:
            watcher.close()
            header.close()
