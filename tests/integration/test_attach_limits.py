"""Attaching in a process that has no room for the threads, memory and files of a session."""

import subprocess
import sys

import pytest

from elasticep.native import abi
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.small import exchange, geometry


def told_by(program: str, group: LocalGroup, tickets: int) -> int:
    """What an engine prints that gets so many tickets for rank 0."""
    words = [group.socket_path, *(group.ticket(0) for _ in range(tickets))]
    ran = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return int(ran.stdout)


_ATTACH = """
import resource
import signal
import sys
from elasticep.errors import MemoryShort, NativeError
from elasticep.native import abi
from elasticep.testing.raw import RawSession

abi.api()
pages = int(open("/proc/self/statm").read().split()[0])
path, *tickets = sys.argv[1:]
unlimited = resource.getrlimit(resource.RLIMIT_AS)
mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
short = 0
for more, ticket in enumerate(tickets):  # a thread's stack takes eight megabytes
    bound = pages * resource.getpagesize() + (more << 20)
    resource.setrlimit(resource.RLIMIT_AS, (bound, unlimited[1]))
    try:
        session = RawSession(path, ticket)
    except (MemoryShort, NativeError) as error:
        short += isinstance(error, MemoryShort) and "ulimit" in str(error)
        continue
    finally:
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
    session.close()
    break
else:
    sys.exit("never opened")
print(short)
"""


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_an_engine_without_room_for_a_thread_gets_an_error_and_goes_on(launch: int) -> None:
    """Wherever it runs short on the way, nothing ends the process or stays behind in it."""
    with LocalGroup(geometry(1, exchange(), launch=launch)) as group:
        assert told_by(_ATTACH, group, tickets=64) >= 1


_FILES = """
import os
import resource
import sys
import elasticep
from elasticep.client.attach import _release
from elasticep.config import ClientConfig
from elasticep.errors import DescriptorsShort
from elasticep.handover import fetch_arena
from elasticep.native import abi
from elasticep.testing.raw import RawSession

abi.api()
path, *tickets = sys.argv[1:]
held = len(os.listdir("/proc/self/fd")) - 1
unlimited = resource.getrlimit(resource.RLIMIT_NOFILE)

def short(call):
    try:
        call()
    except DescriptorsShort as error:
        assert "ulimit -n" in str(error), error
        return True
    return False

settings = ClientConfig(socket=path, group="any", rank=0)
for more, ticket in enumerate(tickets):
    if more == 4:  # what gRPC needs to look around; with none left it would end the process
        assert short(lambda: elasticep.attach(settings.group, settings.rank, path))
        _release(settings, 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (held + more, unlimited[1]))
    if more == 0:
        assert short(lambda: fetch_arena(path, "any", 0))
    sessions = []
    if not short(lambda: sessions.append(RawSession(path, ticket))):
        break
else:
    sys.exit("never opened")
resource.setrlimit(resource.RLIMIT_NOFILE, unlimited)
sessions[0].close()
print(more)
"""


@pytest.mark.parametrize("launch", list(abi.Launch))
def test_an_engine_that_may_open_no_more_files_is_told_so(launch: int) -> None:
    """A socket, or descriptors that come over it: the daemon is not to blame."""
    with LocalGroup(geometry(1, exchange(), launch=launch)) as group:
        assert told_by(_FILES, group, tickets=16) >= 3
