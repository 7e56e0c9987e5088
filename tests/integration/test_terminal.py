"""Processes that serve, on a terminal: it is closed under them, or nohup keeps them going."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

_SOON_S: Final = 60.0
# Takes the terminal on its standard input for its own, as a shell's child has one.
_ON_TERMINAL: Final = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "elasticep.cli.main", *sys.argv[2:]])
"""


class OnTerminal:
    """`elasticep` with arguments, leader of a session on a terminal of its own."""

    def __init__(self, *arguments: str, nohup: bool = False) -> None:
        self.terminal, its = os.openpty()
        how = "nohup" if nohup else "plain"
        self.process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, how, *arguments],
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
        )
        os.close(its)
        self.said = b""

    def until_said(self, words: bytes) -> None:
        end = time.monotonic() + _SOON_S
        while words not in self.said:
            left = end - time.monotonic()
            ready = left > 0 and select.select([self.terminal], [], [], left)[0]
            assert ready, self.said.decode()
            self.said += os.read(self.terminal, 65_536)

    def close_terminal(self) -> None:
        if self.terminal >= 0:
            os.close(self.terminal)
            self.terminal = -1

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.close_terminal()


@pytest.fixture(params=["daemon", "controller"])
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    if request.param == "daemon":
        yield ("daemon", "--socket-dir", str(tmp_path / "d"), "--seats", "g:0-1")
    else:
        yield ("controller", "--store", "memory", "--listen", f"unix://{tmp_path}/c.sock")


def sockets(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_socket()]


def test_a_terminal_that_is_closed_ends_it_as_sigterm_does(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Its log cannot be written any more, which keeps it from nothing."""
    started = OnTerminal(*arguments)
    try:
        started.until_said(b".listening")
        assert sockets(tmp_path)
        started.close_terminal()
        assert started.process.wait(_SOON_S) == 0
        assert sockets(tmp_path) == []
    finally:
        started.end()


def test_under_nohup_it_does_not_mind(arguments: tuple[str, ...], tmp_path: Path) -> None:
    started = OnTerminal(*arguments, nohup=True)
    try:
        started.until_said(b".listening")
        status = Path(f"/proc/{started.process.pid}/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
        assert int(ignored.split()[1], 16) & 1 << (signal.SIGHUP - 1)
        started.process.send_signal(signal.SIGTERM)
        assert started.process.wait(_SOON_S) == 0
    finally:
        started.end()
