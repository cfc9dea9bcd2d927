"""Folders in shared memory, for what nodes keep over a kill -9: gone with the storm, or with the next one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

SHARED = Path("/dev/shm")


def folder() -> Path:
    """A new one; those of processes that are no more are deleted."""
    root = SHARED if SHARED.is_dir() else Path(tempfile.gettempdir())
    for old in root.glob("kvc-*-*"):
        pid = old.name.split("-")[1]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            drop(old)
    return Path(tempfile.mkdtemp(prefix=f"kvc-{os.getpid()}-", dir=root))


def drop(made: Path) -> None:
    shutil.rmtree(made, ignore_errors=True)
