"""Attaching in a process that has no room for the threads and the memory of a session."""

import subprocess
import sys

import pytest

from elasticep.native import abi
from elasticep.testing.local_group import LocalGroup
from elasticep.testing.small import exchange, geometry

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
        tickets = [group.ticket(0) for _ in range(64)]
        ran = subprocess.run(
            [sys.executable, "-c", _ATTACH, group.socket_path, *tickets],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert int(ran.stdout) >= 1
