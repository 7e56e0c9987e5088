"""What a node can hold at most: a group that cannot fit is not created.

A group keeps its config, so one that is too big would only leave its name behind. What is just now
short of memory is another matter: that seat ends with the reason and is tried again.
"""

from pathlib import Path
from typing import Final

from elasticep.errors import MemoryShort
from elasticep.group import GroupConfig

_CGROUPS: Final = "sys/fs/cgroup"


def require_capacity(config: GroupConfig, region_bytes: int, seats: int, node: str) -> None:
    """Refuse a config of whose seats here not even an otherwise empty host could hold the memory.

    Args:
        config: of a group that does not exist yet.
        region_bytes: header and data of a rank in host memory.
        seats: of the group, on this node.
        node: its name.

    Raises:
        MemoryShort: names the bytes needed and those of the host, or of the daemon's cgroup.
    """
    arena = config.arena_layout()
    needed = seats * (region_bytes + (0 if arena is None else arena.total_bytes))
    most, whose = most_bytes()
    if needed > most:
        raise MemoryShort(
            f"the {seats} seats of group {config.name!r} on node {node!r} need {needed} bytes and "
            f"{whose} has {most}; lower max_tokens, max_ranks or slots_per_rank, or offer fewer "
            "seats here; the group was not created"
        )


def most_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that this process could ever have, and whose limit that is.

    Args:
        root: of the file system that is read.
    """
    lines = (root / "proc/meminfo").read_text().splitlines()
    total = next(line for line in lines if line.startswith("MemTotal:"))
    found = [(int(total.split()[1]) << 10, "the host")]
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::/"):
            folder = (root / _CGROUPS / line[4:]).resolve()
            folders = (folder, *folder.parents)
            limits = (_limit(place / "memory.max") for place in folders)
            found += [(limit, "the daemon's cgroup") for limit in limits if limit is not None]
    return min(found)


def _limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # above the root of the hierarchy, or not delegated
        return None
    return int(text) if text.isdigit() else None
