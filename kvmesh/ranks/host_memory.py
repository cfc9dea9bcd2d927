"""How much memory this process may still take: the machine's, within every control group that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")


def available_bytes(root: Path = ROOT) -> int:
    """Returns what can be taken without swapping: the kernel's estimate, and no more than each group has left (files
    that a group's processes have read count as free)."""
    return max(0, min([_machine(root), *_groups(root)]))


def _machine(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) << 10
    return int(psutil.virtual_memory().available)  # a system without /proc


def _groups(root: Path) -> Iterator[int]:
    """Yields what each control group (version 2 or 1) from this process's own up to the root has left."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, limit, used, files = root / "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            files = "total_inactive_file"
        else:
            continue
        # In a container the path may be the host's: the root of what is mounted is then the container's own group.
        own = Path(path.lstrip("/"))
        for part in (own, *own.parents) if path != "/" else (own,):
            folder = top / part
            most, now = _text(folder / limit).strip(), _text(folder / used).strip()
            if most.isdigit() and now.isdigit():
                yield int(most) - int(now) + _stat(folder / "memory.stat", files)


def _stat(path: Path, key: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
