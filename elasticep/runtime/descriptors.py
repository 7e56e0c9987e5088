"""File descriptors of this process: as many as it may have, and an error before they run out.

A daemon holds two for every rank of its domain (header and data) and up to eight for a seat of its
own: its memory, arena and backup, its processes and their connections. The usual soft limit of
1024 is for programs that call `select`, which nothing here does.
"""

import os
import resource
import sys
from collections.abc import Iterable
from typing import Final

from elasticep.errors import ConfigError, DescriptorsShort

PER_SEAT: Final = 8
PER_PEER: Final = 2
_PER_GROUP: Final = 8  # tables of views on their way
_ALWAYS: Final = 64  # sockets of the daemon, controllers, peer daemons, files; room to spare
_SPARE: Final = 32  # of these, what may be opened at any time


def raise_limit() -> int:
    """Take the hard limit for the soft one; the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def check_offer(ranks: Iterable[int]) -> None:
    """Refuse what can never be served.

    Args:
        ranks: how many seats are offered in each group.

    Raises:
        ConfigError: they need more descriptors than this process may have.
    """
    offered = list(ranks)
    limit = _limit()
    needed = _ALWAYS + sum(_PER_GROUP + PER_SEAT * count for count in offered)
    if needed > limit:
        raise ConfigError(
            f"{sum(offered)} seats in {len(offered)} groups need {needed} file descriptors and "
            f"this process may have {limit}; raise its hard limit (ulimit -Hn, LimitNOFILE=) or "
            "offer fewer"
        )


def used_up(what: str) -> DescriptorsShort:
    """The error for what could not be opened, when there is no descriptor left at all."""
    return DescriptorsShort(
        f"{what} needs file descriptors and this process has all of its {_limit()} in use; end "
        "what keeps connections to it, or raise its hard limit (ulimit -Hn, LimitNOFILE=) and "
        "restart it"
    )


def require(count: int, what: str) -> None:
    """Raise before descriptors run out in the middle of something.

    Args:
        count: how many are about to be opened.
        what: for what, for the message.

    Raises:
        DescriptorsShort: fewer are left, with some to spare.
    """
    limit = _limit()
    try:
        held = len(os.listdir("/proc/self/fd"))
    except OSError:  # for which one descriptor is needed, too
        raise used_up(what) from None
    if held + count + _SPARE > limit:
        raise DescriptorsShort(
            f"{what} needs {count} file descriptors; this process has {held} of {limit}, and keeps "
            f"{_SPARE} to spare. Raise its hard limit (ulimit -Hn, LimitNOFILE=) and restart it, "
            "or offer fewer seats"
        )
