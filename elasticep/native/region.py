"""Memory, headers and banks of the native core, with Python types and typed errors."""

import ctypes
import os
from dataclasses import dataclass, fields
from typing import Any, Self

from elasticep.errors import NativeError
from elasticep.native import abi


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes in bytes of a rank's two regions and of one bank image, and their digest.

    Two processes with the same digest agree on every offset.
    """

    digest: int
    header_bytes: int
    data_bytes: int
    bank_bytes: int


@dataclass(frozen=True, slots=True)
class HeaderStatus:
    """What a rank's header says; the fields of `ep_status`, pids 0 = lock not held."""

    rank: int
    incarnation: int
    runner_pid: int
    engine_pid: int
    fenced: int
    wait_phase: int
    wait_exchange: int
    wait_rank: int
    wait_since_ns: int
    progress: int
    epoch: int
    step: int
    torn_steps: int
    complete_steps: int
    warmup: bool
    staged: tuple[int, ...]


def layout(geometry: abi.Geometry) -> Layout:
    """Sizes that follow from a group's geometry.

    Raises:
        ConfigError: the core cannot do this geometry; the message names the number.
    """
    info = abi.LayoutInfo()
    abi.check(abi.api().ep_layout(geometry, info), "")
    return Layout(info.digest, info.header_bytes, info.data_bytes, info.bank_bytes)


def loads_offset(geometry: abi.Geometry) -> int:
    """Where a rank's load counters lie in its data region: uint64 [layers, experts]."""
    offset = ctypes.c_uint64(0)
    abi.check(abi.api().ep_layout_loads(geometry, offset), "")
    return offset.value


def header_loads_offset(geometry: abi.Geometry) -> int:
    """Where their copy lies in the header of a rank whose data region is on a GPU."""
    offset = ctypes.c_uint64(0)
    abi.check(abi.api().ep_layout_header_loads(geometry, offset), "")
    return offset.value


def create_memory(name: str, size: int) -> int:
    """A sealed memfd of `size` bytes with every page reserved; the caller closes it.

    Raises:
        MemoryShort: names the bytes asked for and available.
    """
    return abi.check(abi.api().ep_memory_create(name.encode(), size), "")


def memory_fence() -> None:
    """Order memory shared with other processes, which Python does not: what this thread read or
    wrote before, it does before what comes after, also on hosts with weakly ordered memory.
    """
    abi.api().ep_memory_fence()


def format_header(fd: int, geometry: abi.Geometry, rank: int, timeouts: abi.Timeouts) -> None:
    """Write magic, digest, rank and timeouts into a fresh header memfd."""
    abi.check(abi.api().ep_header_format(fd, geometry, rank, timeouts), "formatting a header")


def view_digest(geometry: abi.Geometry, view: abi.View) -> int:
    """Digest of a view's epoch, members and placement, as the native core computes it."""
    digest = ctypes.c_uint64(0)
    abi.check(abi.api().ep_view_digest(geometry, view, digest), "")
    return digest.value


def write_bank(name: str, size: int, geometry: abi.Geometry, view: abi.View) -> int:
    """A memfd with the bank image of a view; the caller closes it.

    Raises:
        MemoryShort: no room for `size` bytes.
        ConfigError: the tables contradict the geometry.
    """
    fd = create_memory(name, size)
    code = abi.api().ep_bank_write(fd, geometry, view)
    if code < 0:
        error = abi.error_of(code, f"view {view.epoch}")
        os.close(fd)
        raise error
    return fd


class Header:
    """A mapped header memfd. The descriptor stays the caller's; `close` only unmaps.

    Args:
        fd: header memfd.
        digest: layout digest that it must have.

    Raises:
        NativeError: it is no header, or of another layout or version.
    """

    def __init__(self, fd: int, digest: int) -> None:
        self.address: int = abi.api().ep_header_open(fd, digest) or 0
        if not self.address:
            raise NativeError(abi.error_text(abi.Error.EMISMATCH))

    def status(self) -> HeaderStatus:
        """The header's words, read one by one (they may belong to different moments)."""
        raw = abi.Status()
        abi.check(abi.api().ep_header_status(self._mapped(), raw), "")
        plain: dict[str, Any] = {name: getattr(raw, name) for name in _FIELDS}
        plain |= {"warmup": bool(raw.warmup), "staged": tuple(raw.staged)}
        return HeaderStatus(**plain)

    def grant(self, incarnation: int) -> None:
        """Give the seat to a new incarnation; the old one must be confirmed gone.

        Raises:
            UsageError: a process still holds one of the seat's locks.
            ConfigError: the incarnation is not above the present one.
        """
        abi.check(abi.api().ep_header_grant(self._mapped(), incarnation), "")

    def mark_dead(self, rank: int, incarnation: int) -> None:
        """Raise the dead word of a rank; everyone who waits on this header looks again."""
        abi.check(abi.api().ep_header_mark_dead(self._mapped(), rank, incarnation), "")

    def set_policy(self, *, serve: bool, renormalise: bool) -> None:
        """Say what the runner does about tokens that need a lost expert: raise, or flag them; and
        whether the weights of what is left of such a token grow to make up for it.
        """
        flags = 1 * serve + 2 * renormalise
        abi.check(abi.api().ep_header_policy(self._mapped(), flags), "")

    def fence(self, incarnation: int, epoch: int, text: str) -> None:
        """Expel this header's own incarnation; its engine reads epoch and text."""
        abi.check(abi.api().ep_header_fence(self._mapped(), incarnation, epoch, cut_text(text)), "")

    def close(self) -> None:
        """Unmap; further calls raise."""
        if self.address:
            abi.api().ep_header_close(self.address)
            self.address = 0

    def _mapped(self) -> int:
        if not self.address:
            raise NativeError("this header is closed")
        return self.address

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_FIELDS = tuple(field.name for field in fields(HeaderStatus))


def cut_text(text: str) -> bytes:
    """UTF-8 of a text, cut at a whole character so that it fits with its end into 256 bytes."""
    return text.encode()[: abi.TEXT_BYTES - 1].decode("utf-8", "ignore").encode()
