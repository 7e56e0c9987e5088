"""What systemd does for a daemon, for tests: it keeps descriptors for the next start."""

import array
import os
import socket
import sys
import threading
from pathlib import Path

from elasticep.testing.node import DaemonProcess


class Systemd:
    """Keeps descriptors like systemd, and starts daemons with them.

    Args:
        folder: for its socket.

    Attributes:
        lines: what daemons said to it.
        stored: name -> descriptor.
    """

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "notify.sock")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(self._address)
        self.lines: list[str] = []
        self.stored: dict[str, int] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            text, ancillary, _, _ = self._sock.recvmsg(4096, socket.CMSG_SPACE(64))
            lines = text.decode().splitlines()
            if lines == ["quit"]:
                return
            values = dict(line.split("=", 1) for line in lines)
            fds = [fd for *_, data in ancillary for fd in array.array("i", data)]
            with self._changed:
                self.lines += lines
                if "FDSTORE" in values:
                    (self.stored[values["FDNAME"]],) = fds
                elif "FDSTOREREMOVE" in values and values["FDNAME"] in self.stored:
                    os.close(self.stored.pop(values["FDNAME"]))

    def wrap(self, daemon: DaemonProcess) -> None:
        """Let the daemon's next start get what is stored, as sd_listen_fds says."""
        names = sorted(self.stored, reverse=True)
        code = (
            "import os, sys; names = sys.argv[1].split(':') if sys.argv[1] else [];"
            "fds = [os.dup(int(x)) for x in sys.argv[2].split(',') if x];"
            "high = [os.open('/proc/self/fd/%d' % fd, os.O_RDWR) for fd in fds];"
            "moved = [os.dup2(fd, 100 + i) for i, fd in enumerate(fds)];"
            "[os.dup2(100 + i, 3 + i) for i in range(len(fds))];"
            "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)),"
            " LISTEN_FDNAMES=':'.join(names)) if names else None;"
            "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])"
        )
        for fd in self.stored.values():
            os.set_inheritable(fd, True)
        daemon.environment["NOTIFY_SOCKET"] = self._address
        daemon.environment["WATCHDOG_USEC"] = "400000"
        daemon.pass_fds = tuple(self.stored.values())
        numbers = ",".join(str(self.stored[name]) for name in names)
        daemon.wrapper = (sys.executable, "-c", code, ":".join(names), numbers)

    def close(self) -> None:
        """Stop, and let go of what is stored."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"quit", self._address)
        self._thread.join(10)
        self._sock.close()
        for fd in self.stored.values():
            os.close(fd)
