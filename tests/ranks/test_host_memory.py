"""What a process may take of the host's memory, within the control groups that it is in."""

from __future__ import annotations

from pathlib import Path

import psutil

from kvmesh.ranks.host_memory import available_bytes

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {32 << 20} kB\nMemAvailable: {20 << 20} kB\n"}


def test_without_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert available_bytes(tree(tmp_path, MACHINE)) == 20 * GIB


def test_the_tightest_group_above_a_process_counts(tmp_path: Path) -> None:
    def group(name: str, most: str, used: int, files: int) -> dict[str, str]:
        return {
            f"sys/fs/cgroup{name}/memory.max": f"{most}\n",
            f"sys/fs/cgroup{name}/memory.current": f"{used}\n",
            f"sys/fs/cgroup{name}/memory.stat": f"anon 5\ninactive_file {files}\n",
        }

    files = MACHINE | {"proc/self/cgroup": "0::/pods/one/a\n"}
    files |= group("/pods/one/a", "max", 7 * GIB, 0) | group("/pods/one", str(8 * GIB), 7 * GIB, 2 * GIB)
    assert available_bytes(tree(tmp_path, files | group("/pods", str(30 * GIB), 20 * GIB, 0))) == 3 * GIB
    assert available_bytes(tree(tmp_path, group("/pods", str(30 * GIB), 29 * GIB, 0))) == GIB
    assert available_bytes(tree(tmp_path, group("/pods", str(30 * GIB), 31 * GIB, 0))) == 0


def test_in_a_container_the_root_is_its_own_group(tmp_path: Path) -> None:
    files = MACHINE | {
        "proc/self/cgroup": "5:cpu:/docker/77\n4:memory:/docker/77\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}\n",
    }
    assert available_bytes(tree(tmp_path, files)) == 2 * GIB


def test_this_machine() -> None:
    assert 0 < available_bytes() <= psutil.virtual_memory().total
