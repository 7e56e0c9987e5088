"""A rank's header and data by descriptor. Whoever holds the descriptors keeps the memory alive.

Both are memfds; on a GPU the data is memory that another process exported, and `Layout.data_bytes`
is 0: only who maps it can tell whether it fits.
"""

import fcntl
import os

from elasticep.errors import GroupMismatch, NativeError
from elasticep.native import abi
from elasticep.native.region import Header, Layout, create_memory, format_header

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK


class SeatMemory:
    """Header and data of one rank, the header mapped.

    Attributes:
        header_fd, data_fd: descriptors, owned.
        header: the mapped header.
    """

    def __init__(self, header_fd: int, data_fd: int, header: Header) -> None:
        self.header_fd = header_fd
        self.data_fd = data_fd
        self.header = header

    @classmethod
    def create(
        cls,
        group: str,
        rank: int,
        geometry: abi.Geometry,
        layout: Layout,
        timeouts: abi.Timeouts,
    ) -> "SeatMemory":
        """Reserve and format both.

        Raises:
            MemoryShort: names the bytes asked for and available. Nothing is left behind.
        """
        name = f"elasticep-{group}-{rank}"
        data_fd = create_memory(f"{name}-data", layout.data_bytes)
        return cls.around(data_fd, group, rank, geometry, layout, timeouts)

    @classmethod
    def around(
        cls,
        data_fd: int,
        group: str,
        rank: int,
        geometry: abi.Geometry,
        layout: Layout,
        timeouts: abi.Timeouts,
    ) -> "SeatMemory":
        """A new header for data that is there; `data_fd` is owned from now on.

        Raises:
            MemoryShort: names the bytes asked for and available. Nothing is left behind.
        """
        header_fd = -1
        try:
            header_fd = create_memory(f"elasticep-{group}-{rank}-header", layout.header_bytes)
            format_header(header_fd, geometry, rank, timeouts)
            return cls(header_fd, data_fd, Header(header_fd, layout.digest))
        except BaseException:
            _close(header_fd, data_fd)
            raise

    @classmethod
    def adopt(cls, header_fd: int, data_fd: int, rank: int, layout: Layout) -> "SeatMemory":
        """Take descriptors that came from elsewhere, after checking that they are what they claim.

        Raises:
            GroupMismatch, NativeError: they are not; both are closed.
        """
        try:
            for what, fd, size in (
                ("header", header_fd, layout.header_bytes),
                ("data", data_fd, layout.data_bytes),
            ):
                if size:
                    check_memory(what, fd, size)
            header = Header(header_fd, layout.digest)
        except BaseException:
            _close(header_fd, data_fd)
            raise
        found = header.status().rank
        if found != rank:
            header.close()
            _close(header_fd, data_fd)
            raise GroupMismatch(f"the memory offered for rank {rank} is that of rank {found}")
        return cls(header_fd, data_fd, header)

    @property
    def identity(self) -> tuple[int, int]:
        """Names this memory as long as it exists, whoever holds a descriptor of it."""
        return identity_of(self.header_fd)

    @property
    def fds(self) -> tuple[int, int]:
        """Header and data, in the order in which messages carry them."""
        return self.header_fd, self.data_fd

    @property
    def closed(self) -> bool:
        """Whether the descriptors are gone."""
        return self.header_fd < 0

    def close(self) -> None:
        """Unmap and let go; the memory is freed when nobody else holds it."""
        self.header.close()
        _close(self.header_fd, self.data_fd)
        self.header_fd = self.data_fd = -1


def identity_of(fd: int) -> tuple[int, int]:
    """Device and inode of a memfd."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def check_memory(what: str, fd: int, size: int) -> None:
    """Refuse a descriptor that is no sealed memory of this size: it could shrink under a reader.

    Raises:
        GroupMismatch: another size.
        NativeError: no memfd, or not sealed.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise NativeError(f"the {what} descriptor is no memfd") from None
    if seals & _SEALS != _SEALS:
        raise NativeError(f"the {what} memory can still change its size")
    found = os.fstat(fd).st_size
    if found != size:
        raise GroupMismatch(
            f"the {what} memory has {found} bytes, this group's layout {size}; install one "
            "version everywhere"
        )


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)
