"""A second host on this one: a network namespace behind a pair of virtual interfaces.

    with Namespace() as host:
        subprocess.run([*host.command, "ping", "-c1", host.outside])
        host.cut()

Needs root and `ip`. Files, and so Unix sockets and shared memory, are the same inside and outside.
"""

import itertools
import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

_numbers = itertools.count()


def missing() -> str:
    """Why namespaces cannot be made here; "": they can."""
    ip = shutil.which("ip")
    if ip is None:
        return "there is no `ip` (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"eep-try-{os.getpid()}"
    if subprocess.run([ip, "netns", "add", name], capture_output=True).returncode:
        return "network namespaces cannot be made here"
    subprocess.run([ip, "netns", "del", name], check=True)
    return ""


class Namespace:
    """A network namespace that reaches this one, and nothing else.

    Attributes:
        outside: address of this namespace on the link.
        inside: that of the other end.
        command: put before a command, runs it inside.
    """

    def __init__(self) -> None:
        number = next(_numbers)
        ip = shutil.which("ip")
        assert ip is not None, missing()
        self._ip = ip
        self._name = f"eep-{os.getpid()}-{number}"
        self._link = f"eep{os.getpid() % 100_000}-{number}"  # at most 15 characters
        network = f"169.254.{os.getpid() % 200 + 1}"
        self.outside = f"{network}.{4 * number % 240 + 1}"
        self.inside = f"{network}.{4 * number % 240 + 2}"
        self.command = (ip, "netns", "exec", self._name)
        self._run("netns", "add", self._name)
        try:
            self._run(
                *("link", "add", self._link, "type", "veth"),
                *("peer", "name", "eth0", "netns", self._name),
            )
            self._run("address", "add", f"{self.outside}/30", "dev", self._link)
            self._run("-n", self._name, "address", "add", f"{self.inside}/30", "dev", "eth0")
            self._run("-n", self._name, "link", "set", "lo", "up")
            self._run("-n", self._name, "link", "set", "eth0", "up")
            self.heal()
        except BaseException:
            self.close()
            raise

    def _run(self, *words: str) -> None:
        subprocess.run([self._ip, *words], check=True, capture_output=True)

    def cut(self) -> None:
        """Take the link down: what is sent is lost, without a word."""
        self._run("link", "set", self._link, "down")

    def heal(self) -> None:
        """Take the link up."""
        self._run("link", "set", self._link, "up")

    def close(self) -> None:
        """Remove it; processes inside lose their link."""
        subprocess.run([self._ip, "link", "del", self._link], capture_output=True)
        self._run("netns", "del", self._name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
