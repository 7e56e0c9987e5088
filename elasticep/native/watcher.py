"""The native thread that waits on the robust futexes of a node's headers."""

from collections.abc import Iterator
from dataclasses import dataclass

from elasticep.errors import NativeError
from elasticep.native import abi
from elasticep.native.region import Header


@dataclass(frozen=True, slots=True)
class LockEvent:
    """What happened to one lock of one header.

    Attributes:
        key: the header's number, as given to `Watcher.watch`.
        kind: held, died or released.
        holder: runner's or engine's lock.
        pid: of the holder, in its own process namespace; 0 if not known.
        incarnation: of the holder; 0 if not known.
        at_ns: CLOCK_MONOTONIC when the watcher saw it.
    """

    key: int
    kind: abi.EventKind
    holder: abi.Holder
    pid: int
    incarnation: int
    at_ns: int


class Watcher:
    """Owns the native thread; `close` ends it. Headers must stay open while they are known here.

    Raises:
        NativeError: the kernel is too old.
    """

    def __init__(self) -> None:
        self._address: int = abi.api().ep_watcher_new() or 0
        if not self._address:
            raise NativeError(abi.error_text(abi.Error.EUSAGE))

    @property
    def fd(self) -> int:
        """An eventfd, readable when `events` has something."""
        return int(abi.api().ep_watcher_fd(self._address))

    def events(self) -> Iterator[LockEvent]:
        """Drain the queue of events."""
        raw = abi.Event()
        while abi.api().ep_watcher_next(self._address, raw) == 1:
            kind, holder = abi.EventKind(raw.kind), abi.Holder(raw.holder)
            yield LockEvent(raw.key, kind, holder, raw.pid, raw.inc, raw.at_ns)

    def watch(self, key: int, group_key: int, header: Header) -> None:
        """Watch both locks. On a death the thread itself fences the header and sets the dead word
        in every header of `group_key`.

        Raises:
            ConfigError: too many seats for one daemon.
        """
        api = abi.api()
        abi.check(api.ep_watcher_watch(self._address, key, group_key, header.address), "")

    def unwatch(self, key: int) -> None:
        """Forget a header's locks."""
        abi.check(abi.api().ep_watcher_unwatch(self._address, key), "")

    def peer_add(self, group_key: int, header: Header) -> None:
        """Let this header, own or a peer's, take the dead words of `group_key`."""
        abi.check(abi.api().ep_watcher_peer_add(self._address, group_key, header.address), "")

    def peer_remove(self, group_key: int, header: Header) -> None:
        """Forget a header; to be called before it is closed."""
        abi.check(abi.api().ep_watcher_peer_remove(self._address, group_key, header.address), "")

    def look(self) -> None:
        """Look at all locks now: a socket that closed says that a process may have died, when the
        thread has not got the processor yet. What is found is done and told as if by the thread.
        """
        abi.api().ep_watcher_look(self._address)

    def close(self) -> None:
        """End the thread."""
        if self._address:
            abi.api().ep_watcher_free(self._address)
            self._address = 0
