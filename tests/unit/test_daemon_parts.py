"""Parts of the daemon that need no daemon: tickets, waits, messages, the state file, systemd."""

import array
import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from elasticep.config import DaemonConfig
from elasticep.errors import ConfigError, GroupMismatch, NativeError
from elasticep.geometry import GroupGeometry
from elasticep.group import GroupConfig
from elasticep.native import abi, convert, region
from elasticep.native.region import HeaderStatus
from elasticep.native.structs import MessageType, Role
from elasticep.runtime.limits import Limits
from elasticep.runtime.liveness.process import Process, start_time
from elasticep.runtime.liveness.waits import Wait, describe, overdue, should_report
from elasticep.runtime.regions.keep import (
    FdStore,
    KeptGroup,
    KeptProcess,
    KeptSeat,
    StateFile,
)
from elasticep.runtime.regions.memory import SeatMemory
from elasticep.runtime.regions.peers import Endpoint
from elasticep.runtime.sockets import SocketDir
from elasticep.runtime.systemd import Notifier, take_stored_fds
from elasticep.runtime.tickets import TicketOffice
from elasticep.runtime.transport.messages import HEAD_BYTES, BadMessage, Message, unpack
from elasticep.spec import ExchangeSpec


def config(name: str = "g", hidden: int = 32) -> GroupConfig:
    return GroupConfig(
        name=name,
        geometry=GroupGeometry(
            layers=1, experts=4, topk=2, hidden=hidden, slots_per_rank=2, max_ranks=2
        ),
        exchanges=(("decode", ExchangeSpec.preset("ROUTED", max_tokens=8)),),
        initial_ranks=2,
    )


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# ---- tickets


def test_a_ticket_is_good_once_for_its_role_and_process() -> None:
    clock = Clock()
    office: TicketOffice[str] = TicketOffice(10.0, clock)
    text = office.issue("seat", Role.ENGINE, 3)
    ticket = office.take(text, Role.ENGINE, 1234)
    assert ticket is not None
    assert (ticket.owner, ticket.incarnation) == ("seat", 3)
    assert office.take(text, Role.ENGINE, 1234) is None
    for role, pid in ((Role.WORKER, 7), (Role.ENGINE, 8)):
        text = office.issue("seat", Role.ENGINE, 3, pid=7)
        assert office.take(text, role, pid) is None
        assert office.take(text, Role.ENGINE, 7) is None  # a wrong try has spent it
    text = office.issue("seat", Role.ENGINE, 3)
    assert office.outstanding("seat", Role.ENGINE, 3)
    assert not office.outstanding("seat", Role.ENGINE, 4)
    clock.now += 10.0
    assert not office.outstanding("seat", Role.ENGINE, 3)
    assert office.take(text, Role.ENGINE, 1) is None


def test_a_new_ticket_voids_the_earlier_one_of_the_same_seat() -> None:
    office: TicketOffice[str] = TicketOffice(10.0, Clock())
    old = office.issue("seat", Role.ENGINE, 1)
    other = office.issue("another", Role.ENGINE, 1)
    new = office.issue("seat", Role.ENGINE, 2)
    assert office.take(old, Role.ENGINE, 1) is None
    assert office.take(new, Role.ENGINE, 1) is not None
    assert office.take(other, Role.ENGINE, 1) is not None


# ---- waits


def status(**changes: object) -> HeaderStatus:
    plain: dict[str, object] = dict.fromkeys(HeaderStatus.__dataclass_fields__, 0)
    plain |= {"warmup": False, "staged": (0, 0, 0, 0), "rank": 1, **changes}
    return HeaderStatus(**plain)  # type: ignore[arg-type]


def test_a_wait_is_reported_when_it_lasts_too_long() -> None:
    waiting = status(
        wait_phase=2, wait_exchange=3, wait_rank=0, wait_since_ns=1_000_000_000, progress=9
    )
    assert overdue(waiting, 1_499_000_000, 500) is None
    assert overdue(waiting, 1_500_000_000, 500) == Wait(0, "dispatch", 1_000_000_000, 500, 9)
    assert overdue(status(wait_since_ns=1), 10**12, 500) is None  # phase 0: it does not wait
    joining = status(wait_phase=1, wait_rank=1, wait_since_ns=1)
    assert overdue(joining, 10**12, 500) is None  # for itself: it waits for its first view
    assert describe(waiting, 1_012_000_000) == "dispatch of exchange 3 for rank 0, 12 ms"
    assert describe(status(), 5) == ""


def test_a_standing_wait_is_said_again_now_and_then() -> None:
    wait = Wait(0, "barrier", 5, 500, 9)
    assert should_report(None, wait, 100)
    assert not should_report(wait, Wait(0, "barrier", 5, 599, 9), 100)
    assert should_report(wait, Wait(0, "barrier", 5, 600, 9), 100)
    assert should_report(wait, Wait(0, "barrier", 5, 510, 10), 100)  # it made progress
    assert should_report(wait, Wait(2, "barrier", 5, 510, 9), 100)  # for somebody else
    assert should_report(wait, Wait(0, "barrier", 6, 510, 9), 100)  # another wait


# ---- messages


def test_messages_cross_as_the_c_structure() -> None:
    message = Message(
        kind=MessageType.STAGE, rank=3, status=-5, a=2**63, b=2, c=3, d=4, text="g", body=b"xy"
    )
    data = message.pack()
    assert len(data) == HEAD_BYTES + 2
    raw = abi.Message.from_buffer_copy(data[:HEAD_BYTES])
    assert (raw.magic, raw.type, raw.status, raw.rank) == (abi.MESSAGE_MAGIC, 4, -5, 3)
    assert (raw.a, raw.b, raw.c, raw.d, raw.text) == (2**63, 2, 3, 4, b"g")
    assert unpack(data) == message


def test_long_texts_are_cut_at_a_character() -> None:
    text = unpack(Message(kind=MessageType.REFUSED, text="ä" * 200).pack()).text
    assert text == "ä" * 127


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "0 bytes"),
        (b"x" * (HEAD_BYTES - 1), "at least 304"),
        (b"x" * HEAD_BYTES, "magic 0x78787878"),
        (
            Message(kind=MessageType.HELLO).pack()[:4] + b"\xff" * (HEAD_BYTES - 4),
            "type 4294967295",
        ),
    ],
)
def test_garbage_is_refused(data: bytes, what: str) -> None:
    with pytest.raises(BadMessage, match=what):
        unpack(data)


# ---- memory


def test_memory_of_a_seat_can_be_handed_on_and_nothing_else_can() -> None:
    geometry = convert.geometry_struct(config())
    sizes = region.layout(geometry)
    timeouts = convert.timeouts_struct(config().timeouts)
    before = len(os.listdir("/proc/self/fd"))
    memory = SeatMemory.create("g", 1, geometry, sizes, timeouts)
    memory.header.grant(4)
    fds = [os.dup(fd) for fd in memory.fds]
    again = SeatMemory.adopt(*fds, 1, sizes)
    assert again.identity == memory.identity
    assert again.header.status().incarnation == 4
    again.close()
    plain = os.memfd_create("x")
    os.truncate(plain, sizes.header_bytes)
    unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, sizes.header_bytes)
    zero, small = region.create_memory("z", sizes.header_bytes), region.create_memory("z", 4096)
    pipe_read, pipe_write = os.pipe()
    os.close(pipe_write)
    for header_fd, kind, match in (
        (pipe_read, NativeError, "no memfd"),
        (plain, NativeError, "can still change its size"),
        (unsealed, NativeError, "can still change its size"),
        (small, GroupMismatch, "4096 bytes"),
        (zero, NativeError, "ABI 0"),
    ):
        with pytest.raises(kind, match=match):
            SeatMemory.adopt(header_fd, os.dup(memory.data_fd), 1, sizes)
    with pytest.raises(GroupMismatch, match="rank 0 is that of rank 1"):
        SeatMemory.adopt(*(os.dup(fd) for fd in memory.fds), 0, sizes)
    other = region.layout(convert.geometry_struct(config(hidden=64)))
    with pytest.raises(GroupMismatch, match="install one version"):
        SeatMemory.adopt(*(os.dup(fd) for fd in memory.fds), 1, other)
    memory.close()
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the state file


def kept(name: str = "g") -> KeptGroup:
    return KeptGroup(
        config=config(name),
        seats=(
            KeptSeat(0, 3, True, 77, KeptProcess(10, 20), KeptProcess(11, 21)),
            KeptSeat(1, 0, False),
        ),
        members={0: (3, "n0"), 1: (2, "n1")},
        nodes=(Endpoint("n0", "d", "unix:///a", "/b"),),
    )


def test_the_state_file_gives_back_what_was_written(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "daemon.state")
    assert state.read() == []
    state.write([kept("g"), kept("h")])
    assert state.read() == [kept("g"), kept("h")]
    assert (tmp_path / "daemon.state").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["daemon.state"]
    state.remove()
    assert state.read() == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"version":2,"groups":[]}',
        b'{"version":1,"groups":[{"config":"AAAA"}]}',
        b'{"version":1,"groups":[{"config":"//8=","seats":[],"members":[],"nodes":[]}]}',
        b'{"version":1,"groups":[{"config":"","seats":[],"members":[],"nodes":[]}]}',
    ],
)
def test_a_state_file_that_cannot_be_used_is_a_typed_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "daemon.state"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"daemon\.state cannot be used"):
        StateFile(path).read()


# ---- systemd


@pytest.fixture
def supervisor(tmp_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.settimeout(60)
    return sock


def test_notifications_and_stored_descriptors(supervisor: socket.socket) -> None:
    address = supervisor.getsockname()
    with supervisor:
        environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "3000000"}
        notifier = Notifier(environment)
        assert notifier.watchdog_s == 3.0
        assert Notifier({**environment, "WATCHDOG_PID": "1"}).watchdog_s == 0.0
        notifier.ready("fine")
        assert supervisor.recv(1000) == b"READY=1\nSTATUS=fine"
        store = FdStore(notifier, {})
        read_fd, write_fd = os.pipe()
        store.put("my-group", 3, (read_fd, write_fd))
        for name, fd in (("header-3-my-group", read_fd), ("data-3-my-group", write_fd)):
            text, ancillary, _, _ = supervisor.recvmsg(1000, socket.CMSG_SPACE(4))
            assert text.decode() == f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0"
            (received,) = array.array("i", ancillary[0][2])
            assert os.path.sameopenfile(received, fd)
            os.close(received)
        store.remove("my-group", 3)
        assert supervisor.recv(1000) == b"FDSTOREREMOVE=1\nFDNAME=header-3-my-group"
    os.close(read_fd)
    os.close(write_fd)
    assert not notifier.notify("READY=1")  # nobody listens any more
    assert not Notifier({}).notify("READY=1")


def test_descriptors_of_the_last_daemon_come_back_by_name() -> None:
    code = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.executable, [sys.executable, "-c", '''
import os
from elasticep.runtime.regions.keep import FdStore
from elasticep.runtime.systemd import Notifier, take_stored_fds
store = FdStore(Notifier({}), take_stored_fds(os.environ))
print(store.take("g", 0), store.take("g", 1), store.take("g", 0), os.get_inheritable(3))
print(store.close_rest(), sorted(k for k in os.environ if k.startswith("LISTEN")))
'''])
"""
    fds = [os.memfd_create(str(i)) for i in range(5)]
    script = "".join(f"import os; os.dup2({fd}, {3 + i});" for i, fd in enumerate(fds)) + code
    environment = {
        **os.environ,
        "LISTEN_FDS": "5",
        "LISTEN_FDNAMES": "data-0-g:header-0-g:header-1-g:x:x",  # the store's order is reversed
    }
    keep = tuple({*fds, *range(3, 8)})
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        pass_fds=[fd for fd in keep if fd in fds],
        capture_output=True,
        text=True,
        timeout=120,
    )
    for fd in fds:
        os.close(fd)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["(4, 3) None None False", "['header-1-g', 'x'] []"]
    assert take_stored_fds({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) == {}


# ---- the socket directory


def test_one_daemon_per_directory(tmp_path: Path) -> None:
    settings = DaemonConfig(node="n", socket_dir=str(tmp_path / "run" / "e"))
    first, second = SocketDir(settings), SocketDir(settings)
    first.take()
    Path(settings.fd_socket).touch()
    with pytest.raises(ConfigError, match="another daemon runs in"):
        second.take()
    first.release(keep_state=False)
    assert not (tmp_path / "run" / "e").exists()
    second.take()
    second.state_path.write_text("x")
    second.release(keep_state=True)
    assert second.state_path.exists()


def test_stale_sockets_are_removed_and_live_ones_are_not(tmp_path: Path) -> None:
    settings = DaemonConfig(node="n", socket_dir=str(tmp_path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(settings.fd_socket)
    directory = SocketDir(settings)
    directory.take()
    assert not Path(settings.fd_socket).exists()
    directory.release(keep_state=False)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as live:
        live.bind(settings.grpc_socket)
        live.listen()
        with pytest.raises(ConfigError, match=r"another program listens on .*daemon\.sock"):
            directory.take()
        assert Path(settings.grpc_socket).exists()


def test_a_directory_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    directory = SocketDir(DaemonConfig(node="n", socket_dir=str(tmp_path / "file")))
    with pytest.raises(ConfigError, match="cannot use the socket directory"):
        directory.take()


# ---- processes


def test_a_process_is_told_of_when_it_is_gone() -> None:
    async def scenario() -> None:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        process = Process.open(child.pid, child)
        assert process.started == start_time(child.pid) > 0
        found = Process.find(child.pid, process.started)
        assert found is not None
        found.close()
        assert Process.find(child.pid, process.started + 1) is None
        gone = asyncio.get_running_loop().create_future()
        process.watch(gone.set_result)
        process.kill()
        assert await asyncio.wait_for(gone, 60) is process
        assert (process.exited, process.how) == (True, "killed by SIGKILL")
        assert Process.find(child.pid, process.started) is None
        process.kill()  # of no effect, and no error
        assert child.stdin is not None
        child.stdin.close()

    asyncio.run(scenario())


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="orphan_after_s is 0"):
        Limits(orphan_after_s=0)
