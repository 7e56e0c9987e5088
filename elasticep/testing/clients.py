"""Client sessions over a `LocalGroup`, and calls made on many sessions at once."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from elasticep.client.handle import NativeHandle
from elasticep.client.session import Session
from elasticep.group import GroupConfig
from elasticep.testing.local_group import LocalGroup

_ATTACH_MS: Final = 60_000
_CALL_S: Final = 120.0

S = TypeVar("S")
R = TypeVar("R")


def attach_to(
    group: LocalGroup, config: GroupConfig, rank: int, open_arena: Callable[[], int] | None = None
) -> Session:
    """A client session of a rank in its first incarnation; `open_arena` gives its arena."""
    handle = NativeHandle(group.socket_path, group.ticket(rank), _ATTACH_MS)
    return Session(handle, config, rank=rank, incarnation=1, open_arena=open_arena)


def on_all(sessions: Iterable[S], call: Callable[[S], R]) -> list[R]:
    """`call` on every session at once, a thread each; results in order, or the first error.

    The waits inside of `call` must have deadlines of their own: threads are joined before an
    error is raised.
    """
    each = list(sessions)
    with ThreadPoolExecutor(len(each)) as pool:
        calls = [pool.submit(call, session) for session in each]
        return [future.result(_CALL_S) for future in calls]
