"""A second host on this one: a network namespace behind a pair of virtual interfaces.

    with Namespace() as host:
        subprocess.run([*host.command, "ping", "-c1", host.outside])
        host.cut()

    with Namespace() as one, Namespace() as other, Wire(one, other) as wire:
        wire.cut(FROM)  # what `one` sends to `other` is lost

Needs root and `ip`. Files, and so Unix sockets and shared memory, are the same inside and outside.
"""

import itertools
import os
import shutil
import subprocess
from types import TracebackType
from typing import Final, Self

BOTH: Final = "both"
FROM: Final = "from"  # what it sends is lost, what is sent to it arrives
TO: Final = "to"  # the other way round
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

    def cut(self, way: str = BOTH) -> None:
        """What is sent this way is lost, without a word; `BOTH`: the link is down."""
        if way == BOTH:
            self._run("link", "set", self._link, "down")
        elif way == FROM:
            self._run("-n", self._name, "route", "add", "blackhole", f"{self.outside}/32")
        else:
            self._run("route", "add", "blackhole", f"{self.inside}/32")

    def heal(self) -> None:
        """Everything arrives again."""
        self._run("link", "set", self._link, "up")
        self._open_ways()

    def _open_ways(self) -> None:
        for words in (("-n", self._name, "route", "del"), ("route", "del")):
            address = self.outside if "-n" in words else self.inside
            command = [self._ip, *words, "blackhole", f"{address}/32"]
            subprocess.run(command, capture_output=True)

    def close(self) -> None:
        """Remove it; processes inside lose their link."""
        self._open_ways()
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


class Wire:
    """A link between two namespaces, beside those that they have to this one.

    Attributes:
        ends: addresses of the first and of the second.
    """

    def __init__(self, one: Namespace, other: Namespace) -> None:
        number = next(_numbers)
        self._hosts = (one, other)
        self._device = f"wire{number}"
        network, first = f"169.254.{os.getpid() % 200 + 1}", 4 * number % 240
        self.ends = (f"{network}.{first + 1}", f"{network}.{first + 2}")
        self._ip = one.command[0]
        names = [host.command[-1] for host in self._hosts]
        self._run(
            *("link", "add", self._device, "netns", names[0], "type", "veth"),
            *("peer", "name", self._device, "netns", names[1]),
        )
        for name, address in zip(names, self.ends, strict=True):
            self._run("-n", name, "address", "add", f"{address}/30", "dev", self._device)
            self._run("-n", name, "link", "set", self._device, "up")

    def _run(self, *words: str, check: bool = True) -> None:
        subprocess.run([self._ip, *words], check=check, capture_output=True)

    def cut(self, way: str = BOTH) -> None:
        """What the first sends to the second (`FROM`), or the other way round, is lost."""
        for index, this in enumerate((FROM, TO)):
            if way in (BOTH, this):
                name = self._hosts[index].command[-1]
                self._run("-n", name, "route", "add", "blackhole", f"{self.ends[1 - index]}/32")

    def heal(self) -> None:
        """Everything arrives again."""
        for index, host in enumerate(self._hosts):
            words = ("route", "del", "blackhole", f"{self.ends[1 - index]}/32")
            self._run("-n", host.command[-1], *words, check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """It goes with its namespaces."""
