"""Logs: what a process writes for one event."""

import json
import os
import socket
import subprocess
import sys

import pytest

_TELL = """
from elasticep.runtime.logs import open_log
log = open_log("json", "info", node="n")
log.info("first", rank=1)
log.warning("second", rank=2)
"""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_one_write(unbuffered: str) -> None:
    """Or a process that is killed leaves half of one, on which its successor goes on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        subprocess.run(
            [sys.executable, "-c", _TELL],
            stderr=theirs,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=True,
            timeout=60,
        )
        theirs.shutdown(socket.SHUT_WR)
        written = []
        while piece := ours.recv(65_536):
            written.append(piece)
    assert [piece[-1:] for piece in written] == [b"\n"] * 2
    assert [json.loads(piece)["event"] for piece in written] == ["first", "second"]
