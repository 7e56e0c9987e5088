"""How much memory may be reserved: what the machine has, and what a control group leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from elasticep.errors import MemoryShort
from elasticep.native import region
from elasticep.runtime.capacity import most_bytes


def test_what_a_node_can_hold_at_most_is_bounded_by_every_cgroup_above(tmp_path: Path) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:  4096 kB\nMemFree:  1 kB\n")
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/pods/one\n")
    assert most_bytes(tmp_path) == (4096 << 10, "the host")
    cgroup = tmp_path / "sys" / "fs" / "cgroup"
    limit(cgroup / "pods" / "one", max="max")
    limit(cgroup / "pods", max=1 << 20)
    assert most_bytes(tmp_path) == (1 << 20, "the daemon's cgroup")
    limit(cgroup / "pods" / "one", max=1 << 19)
    assert most_bytes(tmp_path) == (1 << 19, "the daemon's cgroup")


def test_memory_that_is_short_names_both_numbers() -> None:
    with pytest.raises(MemoryShort, match=r"needs 1125899906842624 bytes and \d+ are available"):
        region.create_memory("huge", 1 << 50)


RESERVE = """
import sys
from elasticep.errors import MemoryShort
from elasticep.native import region
for size in map(int, sys.argv[1:]):
    try:
        region.create_memory("room", size)
        print("reserved")
    except MemoryShort as error:
        print(error)
"""


def reserved(folder: Path, member: str, *sizes: int) -> list[str]:
    """What becomes of reserving so many bytes where `folder` is /sys/fs/cgroup, in the cgroups
    that `member` says, as /proc/self/cgroup does.
    """
    (folder / "member").write_text(member)
    mounts = f"mount --bind {folder}/member /proc/$$/cgroup && mount --bind {folder} /sys/fs/cgroup"
    asked = [sys.executable, "-c", RESERVE, *map(str, sizes)]
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mounts} && exec "$@"', "sh", *asked],
        capture_output=True,
        text=True,
        check=False,
    )
    if "reserved" not in ran.stdout and "needs" not in ran.stdout:
        pytest.skip(f"mounts of its own are not for this user: {ran.stderr.strip()[-200:]}")
    return ran.stdout.splitlines()


def limit(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_a_checkpoint_in_the_page_cache_leaves_room_in_the_cgroup(tmp_path: Path) -> None:
    """Its pages are charged to the cgroup, and given up when memory is reserved; others are not."""
    stat = "anon 1\nfile 3\ninactive_file 60000000\nactive_file 30000000\nunevictable 9"
    limit(tmp_path, max=100_000_000, current=99_000_000, stat=stat)
    first, second = reserved(tmp_path, "0::/\n", 80_000_000, 95_000_000)
    assert first == "reserved"
    assert "needs 95000000 bytes and 91000000 are available" in second


def test_the_tightest_limit_above_a_service_counts(tmp_path: Path) -> None:
    limit(tmp_path / "system.slice", max=100_000_000, current=40_000_000)
    limit(tmp_path / "system.slice/elasticep-daemon.service", max="max", current=1)
    limit(tmp_path / "other.slice", max=1, current=0)
    member = "1:name=systemd:/x\n0::/system.slice/elasticep-daemon.service\n"
    first, second = reserved(tmp_path, member, 50_000_000, 70_000_000)
    assert first == "reserved"
    assert "needs 70000000 bytes and 60000000 are available" in second


def test_limits_of_the_first_version_of_cgroups_count(tmp_path: Path) -> None:
    stat = "inactive_file 5\ntotal_inactive_file 20000000\ntotal_active_file 1000000"
    files = {"limit_in_bytes": 100_000_000, "usage_in_bytes": 61_000_000, "stat": stat}
    limit(tmp_path / "memory/pod/daemon", **files)
    limit(tmp_path / "memory", limit_in_bytes=9223372036854771712, usage_in_bytes=1 << 40)
    first, second = reserved(tmp_path, "4:memory:/pod/daemon\n0::/\n", 50_000_000, 70_000_000)
    assert first == "reserved"
    assert "needs 70000000 bytes and 60000000 are available within the limit of its" in second
    # A container sees its own cgroup as the root, under a path of the host.
    files["limit_in_bytes"] = 90_000_000
    limit(tmp_path / "memory", **files)
    (line,) = reserved(tmp_path, "4:memory:/docker/0123\n", 70_000_000)
    assert "needs 70000000 bytes and 50000000 are available" in line
