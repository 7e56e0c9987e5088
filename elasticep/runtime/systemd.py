"""What a service tells systemd, and the descriptors that systemd keeps for it; no libsystemd.

Protocols: sd_notify(3) and sd_listen_fds(3). Without systemd every call does nothing.
"""

import array
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Final

_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START


class Notifier:
    """Sends to `NOTIFY_SOCKET`.

    Args:
        environment: where to look for the socket; usually `os.environ`.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        watchdog_us = environment.get("WATCHDOG_USEC", "")
        watched = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(watchdog_us) / 1e6 if watchdog_us.isdigit() and watched else 0.0

    def notify(self, text: str, fds: Sequence[int] = ()) -> bool:
        """Send "KEY=VALUE" lines, with descriptors; False when nobody listens."""
        if not self._address:
            return False
        address = self._address
        if address.startswith("@"):  # an abstract socket
            address = "\0" + address[1:]
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            try:
                sock.setblocking(False)
                sock.connect(address)
                sock.sendmsg([text.encode()], rights)
            except OSError:  # serving does not depend on the supervisor
                return False
        return True

    def ready(self, status: str) -> None:
        """The service is up."""
        self.notify(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """The service is on its way out."""
        self.notify("STOPPING=1")

    def alive(self) -> None:
        """The watchdog's ping."""
        self.notify("WATCHDOG=1")

    def store(self, name: str, fds: Sequence[int]) -> None:
        """Let systemd keep descriptors under a name (at most 255 characters, no ":")."""
        # FDPOLL=0: memory never hangs up, so systemd need not look.
        self.notify(f"FDSTORE=1\nFDNAME={name}\nFDPOLL=0", fds)

    def remove(self, name: str) -> None:
        """Let systemd close every descriptor of a name."""
        self.notify(f"FDSTOREREMOVE=1\nFDNAME={name}")


def take_stored_fds(environment: "os._Environ[str] | dict[str, str]") -> dict[str, list[int]]:
    """Descriptors that systemd kept, by name and in the order of storing; the caller's from now on.

    The variables are removed, so that no child takes them for its own.
    """
    pid = environment.pop("LISTEN_PID", "")
    count = environment.pop("LISTEN_FDS", "")
    names = environment.pop("LISTEN_FDNAMES", "").split(":")
    stored: dict[str, list[int]] = {}
    if pid != str(os.getpid()) or not count.isdigit():
        return stored
    for index in range(int(count)):
        fd = _FIRST_FD + index
        os.set_inheritable(fd, False)
        stored.setdefault(names[index] if index < len(names) else "unknown", []).append(fd)
    return stored
