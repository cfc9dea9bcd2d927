"""Folders and files that only their owner reads: logs, traces and whatever else tells of requests."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(path: Path) -> None:
    """Makes the folder `path` with mode 0700, or takes others' access away if it exists and is ours. Raises OSError
    when it cannot be made."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        path.chmod(0o700)


def private_opener(path: str, flags: int) -> int:
    """An opener for `open(..., opener=private_opener)`. The file gets mode 0600 if this user owns it, also where it
    existed and others could read it."""
    fd = os.open(path, flags, 0o600)
    try:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid() and found.st_mode & 0o077:
            os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        raise
    return fd
