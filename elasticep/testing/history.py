"""Who saw which epoch when: recorded from outside, and checked for linearizability.

The view of a group is a register: the leader writes epochs 1, 2, ..., everybody else reads it. As
every value is written once and in a known order, a history can be linearized exactly if nobody sees
less than what was seen, by whomever, before he began to look; and if nobody saw an epoch before it
was asked for. So the check takes one pass, where the general problem is NP-complete (Gibbons and
Korach, "Testing Shared Memories", 1997).
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import grpc

from elasticep.proto import controller_pb2, controller_pb2_grpc, types_pb2

_CALL_S: Final = 2.0
_RETRY_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One observation.

    Attributes:
        who: saw it.
        epoch: the newest one that it saw.
        begun_ns: when it began to look, monotonic nanoseconds.
        at_ns: when it had seen it.
        digest: of the view, 0 where it is not told.
        caused: whether the operation wrote this epoch itself, so that nobody saw it before
            `begun_ns`.
        fresh: whether it is a read, which must return the newest; False: news, which may be late.
    """

    who: str
    epoch: int
    begun_ns: int
    at_ns: int
    digest: int = 0
    caused: bool = False
    fresh: bool = True


def violations(history: Iterable[Seen]) -> list[str]:
    """Sentences that say why a history is not linearizable; none: it is."""
    history = list(history)
    seen = sorted(history, key=lambda s: s.begun_ns)
    found = [*_digests(seen), *_order(seen)]
    by_end = sorted(seen, key=lambda s: s.at_ns)
    newest: Seen | None = None
    done = 0
    for look in seen:
        while done < len(by_end) and by_end[done].at_ns < look.begun_ns:
            if newest is None or by_end[done].epoch > newest.epoch:
                newest = by_end[done]
            done += 1
        if newest is None:
            continue
        if look.fresh and look.epoch < newest.epoch:
            found.append(f"{look} came after {newest}")
        if look.caused and newest.epoch >= look.epoch:
            found.append(f"{newest} came before what wrote it: {look}")
    return found


def _digests(seen: Sequence[Seen]) -> list[str]:
    views: dict[int, Seen] = {}
    return [
        f"epoch {look.epoch} is two views: {views[look.epoch]} and {look}"
        for look in seen
        if look.digest and views.setdefault(look.epoch, look).digest != look.digest
    ]


def _order(seen: Sequence[Seen]) -> list[str]:
    """Nobody is told of an older epoch after a newer one."""
    last: dict[str, Seen] = {}
    found = []
    for look in sorted(seen, key=lambda s: s.at_ns):
        before = last.get(look.who)
        if before is not None and before.epoch > look.epoch:
            found.append(f"{look.who} went back: {before}, then {look}")
        last[look.who] = look
    return found


class Recorder:
    """Watches and reads the views of a group through every controller until it is closed.

    Args:
        addresses: of the controllers.
        group: whose views.
        watchers: streams of `WatchView` to each controller; each is opened again when it ends.
        readers: loops of `GetCluster`, which ask one controller after the other.
    """

    def __init__(
        self, addresses: Sequence[str], group: str, *, watchers: int = 2, readers: int = 2
    ) -> None:
        self._addresses = addresses
        self._group = group
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._history: list[Seen] = []
        self._streams: dict[str, Any] = {}
        names = [(f"watcher-{n}-{i}", a) for n in range(watchers) for i, a in enumerate(addresses)]
        self._threads = [
            *(threading.Thread(target=self._watch, args=pair, daemon=True) for pair in names),
            *(
                threading.Thread(target=self._read, args=(f"reader-{n}",), daemon=True)
                for n in range(readers)
            ),
        ]
        for thread in self._threads:
            thread.start()

    def add(self, seen: Seen) -> None:
        """Add an observation that somebody else made."""
        with self._lock:
            self._history.append(seen)

    @property
    def history(self) -> list[Seen]:
        """All so far."""
        with self._lock:
            return list(self._history)

    def _watch(self, who: str, address: str) -> None:
        request = controller_pb2.WatchViewRequest(group=self._group)
        while not self._stop.is_set():
            with grpc.insecure_channel(address) as channel:
                begun_ns = time.monotonic_ns()
                stream = controller_pb2_grpc.ControllerServiceStub(channel).WatchView(request)
                with self._lock:
                    self._streams[who] = stream
                try:
                    # The first message of a stream is a read; what follows is news.
                    fresh = True
                    for view in stream:
                        self._note(who, view, begun_ns, fresh)
                        fresh = False
                except grpc.RpcError:
                    self._stop.wait(_RETRY_S)
                finally:
                    stream.cancel()

    def _note(self, who: str, view: types_pb2.View, begun_ns: int, fresh: bool) -> None:
        at_ns = time.monotonic_ns()
        self.add(
            Seen(
                who=who,
                epoch=view.epoch,
                begun_ns=begun_ns if fresh else at_ns,
                at_ns=at_ns,
                digest=view.digest,
                fresh=fresh,
            )
        )

    def _read(self, who: str) -> None:
        request = controller_pb2.GetClusterRequest(group=self._group)
        channels = [grpc.insecure_channel(address) for address in self._addresses]
        try:
            while not self._stop.is_set():
                for channel in channels:
                    begun_ns = time.monotonic_ns()
                    stub = controller_pb2_grpc.ControllerServiceStub(channel)
                    try:
                        groups = stub.GetCluster(request, timeout=_CALL_S).groups
                    except grpc.RpcError:
                        continue
                    if groups and groups[0].view.epoch:
                        self._note(who, groups[0].view, begun_ns, True)
                self._stop.wait(_RETRY_S)
        finally:
            for channel in channels:
                channel.close()

    def close(self) -> None:
        """End all streams and threads."""
        self._stop.set()
        for thread in self._threads:
            while thread.is_alive():  # a stream that was opened just now is cancelled next time
                with self._lock:
                    streams = list(self._streams.values())
                for stream in streams:
                    stream.cancel()
                thread.join(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
