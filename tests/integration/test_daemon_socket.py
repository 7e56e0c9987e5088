"""The SEQPACKET socket of a daemon: tickets, strangers, garbage."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

import elasticep
from elasticep.native import abi
from elasticep.proto import node_pb2, node_pb2_grpc
from elasticep.testing.lab import Lab, small_config
from elasticep.testing.node import DaemonProcess, wait_for
from elasticep.testing.processes import descriptors


def dial(daemon: DaemonProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60)
    sock.connect(daemon.fd_socket)
    return sock


def message(kind: int, **values: Any) -> bytes:
    return bytes(abi.Message(magic=abi.MESSAGE_MAGIC, type=kind, **values))


def answer_of(sock: socket.socket) -> abi.Message | None:
    """The daemon's answer, or None when it hung up."""
    data = sock.recv(65536)
    size = len(bytes(abi.Message()))
    return abi.Message.from_buffer_copy(data[:size]) if data else None


def test_a_ticket_opens_one_connection_once() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        ticket = daemon.attach("g", 0).ticket.encode()
        hello = {"a": int(abi.Role.ENGINE), "text": ticket}
        with dial(daemon) as sock:
            sock.send(message(abi.MessageType.HELLO, **hello))
            welcome = answer_of(sock)
            assert welcome is not None
            assert (welcome.type, welcome.a) == (abi.MessageType.WELCOME, 1)
            with dial(daemon) as again:
                again.send(message(abi.MessageType.HELLO, **hello))
                refusal = answer_of(again)
                assert refusal is not None
                assert refusal.type == abi.MessageType.REFUSED
                assert b"used" in refusal.text
                assert answer_of(again) is None
        # It connected and gave up before it took its lock: the seat is free again.
        fresh = wait_for(lambda: free_ticket(daemon), "the seat to be free").encode()
        for role, text in ((abi.Role.WORKER, fresh), (abi.Role.ENGINE, fresh), (9, b"x")):
            with dial(daemon) as sock:
                sock.send(message(abi.MessageType.HELLO, a=int(role), text=text))
                refusal = answer_of(sock)
                assert refusal is not None
                assert refusal.type == abi.MessageType.REFUSED
        assert lab.engine(daemon, "g", 0).up().pid


def free_ticket(daemon: DaemonProcess) -> str:
    try:
        return daemon.attach("g", 0, wait_ms=100).ticket
    except grpc.RpcError:
        return ""


def test_an_attach_whose_ticket_is_good_no_more_asks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a restart of the daemon, or when an earlier attach of the process was given up."""
    from elasticep.client.attach import _ask

    asked: list[str] = []

    def ask(*arguments: Any) -> node_pb2.AttachResponse:
        answer = _ask(*arguments)
        if not asked:
            daemon.attach("g", 0)  # the next ticket makes this one void
        asked.append(answer.ticket)
        return answer

    monkeypatch.setattr(sys.modules["elasticep.client.attach"], "_ask", ask)
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0")
        elasticep.attach("g", 0, daemon.grpc_socket).detach()
        assert len(asked) == 2


def test_garbage_on_the_socket_costs_its_sender_the_connection_and_nothing_else() -> None:
    with Lab() as lab:
        lab.create(small_config())
        daemon = lab.daemon("n0", "g:0-1")
        engines = lab.serve(daemon, [0, 1])
        read_fd, write_fd = os.pipe()
        pipe = os.readlink(f"/proc/self/fd/{read_fd}")
        garbage = [
            b"x",
            b"\0" * 304,
            b"\xff" * 60_000,
            message(77),
            message(abi.MessageType.HELLO, a=abi.Role.PEER),
            message(abi.MessageType.WELCOME),
            message(abi.MessageType.STAGED, a=1),
            message(abi.MessageType.ADOPTED, a=99, b=7),
            message(abi.MessageType.HELLO, a=abi.Role.WORKER, c=1, rank=0, text=b"g"),
            message(abi.MessageType.HELLO, a=abi.Role.ENGINE, c=9, rank=9, text=b"h"),
            message(abi.MessageType.HELLO, a=abi.Role.ENGINE, text=b"\xff" * 200),
        ]
        for data in garbage:
            with dial(daemon) as sock:
                socket.send_fds(sock, [data], [read_fd, write_fd])
                last = answer_of(sock)
                assert last is None or last.type == abi.MessageType.REFUSED, data[:16]
                assert last is None or answer_of(sock) is None
        with dial(daemon) as sock:
            sock.send(message(abi.MessageType.FETCH, rank=3, text=b"g"))
            fetched = answer_of(sock)
            assert fetched is not None
            assert (fetched.type, fetched.status) == (
                abi.MessageType.FETCHED,
                abi.Error.EINVAL,
            )
            assert b"no memory of rank 3" in fetched.text
        os.close(read_fd)
        os.close(write_fd)
        assert lab.step(engines) == ["stepped 1 2 1"] * 2
        wait_for(
            lambda: pipe not in descriptors(daemon.pid),
            "every descriptor that came with garbage to be closed",
        )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_is_turned_away() -> None:
    with Lab() as lab:
        daemon = lab.daemon("n0", "g:0")
        assert os.stat(daemon.fd_socket).st_mode & 0o777 == 0o660
        assert os.stat(daemon.grpc_socket).st_mode & 0o777 == 0o660
        lab.folder.chmod(0o755)
        daemon.folder.chmod(0o755)
        os.chmod(daemon.fd_socket, 0o666)
        code = (
            "import os, socket, sys; os.setgid(65534); os.setuid(65534);"
            "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]);"
            "print(s.recv(1000)[48:].split(bytes(1))[0].decode())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, daemon.fd_socket],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "user 65534 may not use the daemon of user 0" in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tcp_beyond_this_host_is_mutual_tls() -> None:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=lab.folder, check=True, capture_output=True)

    with Lab() as lab:
        new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
        openssl(*new, "-nodes", "-keyout", "ca.log", "-out", "ca.crt.log", "-subj", "/CN=ca")
        signed = ("-CA", "ca.crt.log", "-CAkey", "ca.log", "-subj", "/CN=n0")
        names = ("-addext", "subjectAltName=IP:127.0.0.1")
        openssl(*new, "-nodes", "-keyout", "key.log", "-out", "crt.log", *signed, *names)
        files = {name: str(lab.folder / name) for name in ("crt.log", "key.log", "ca.crt.log")}
        daemon = lab.daemon(
            *("n0", "g:0", "--listen", "127.0.0.1:0", "--tls-cert", files["crt.log"]),
            *("--tls-key", files["key.log"], "--tls-ca", files["ca.crt.log"]),
        )
        assert daemon.status().node == "n0"  # over the Unix socket as ever
        address = daemon.events("daemon.ready")[0]["grpc"]
        ca, key, cert = (
            Path(files[name]).read_bytes() for name in ("ca.crt.log", "key.log", "crt.log")
        )

        def ask(channel: grpc.Channel) -> str:
            with channel:
                stub = node_pb2_grpc.NodeServiceStub(channel)
                return str(stub.GetStatus(node_pb2.GetStatusRequest(), timeout=60).node)

        mutual = grpc.ssl_channel_credentials(ca, key, cert)
        assert ask(grpc.secure_channel(address, mutual)) == "n0"
        for stranger in (
            grpc.insecure_channel(address),
            grpc.secure_channel(address, grpc.ssl_channel_credentials(ca)),
        ):
            with pytest.raises(grpc.RpcError):
                ask(stranger)
