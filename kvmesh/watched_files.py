"""What is made of files, and made anew when they have changed: certificates are renewed without a restart."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from kvmesh.errors import KvmeshError

log = logging.getLogger(__name__)

LOOK_S = 1.0  # how often files are looked at, at most

T = TypeVar("T")
FileState = tuple[int, int, int, int]


class WatchedFiles(Generic[T]):
    """What `read` returned when the files were last of use. Thread-safe; nothing of it runs between calls.

    `read` raises KvmeshError or OSError when the files cannot be used, perhaps because one of them is not replaced yet.
    That is one line in the log, in which `what` names them, and what was goes on.
    """

    def __init__(self, what: str, paths: Iterable[str], read: Callable[[], T]) -> None:
        """Reads the files. Raises what `read` raises."""
        self.paths = tuple(path for path in paths if path)
        self._what = what
        self._read = read
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._seen = self._states()  # before they are read: a change meanwhile is seen later
        self._refused: list[FileState | None] = []
        self._value = read()

    def value(self) -> T:
        """Returns the newest; the same object while nothing has changed. The files are looked at once in `LOOK_S` at
        most."""
        now = time.monotonic()
        with self._lock:
            if now - self._looked >= LOOK_S:
                self._looked = now
                states = self._states()
                if states != self._seen:
                    self._renew(states)
            return self._value

    def _renew(self, states: list[FileState | None]) -> None:
        try:
            self._value = self._read()
        except (KvmeshError, OSError) as err:
            if states != self._refused:  # it is tried again each time, and said once
                log.warning("%s are not renewed: %s", self._what, err)
                self._refused = states
        else:
            log.info("%s are renewed: %s", self._what, ", ".join(self.paths))
            self._seen = states

    def _states(self) -> list[FileState | None]:
        return [_state(path) for path in self.paths]


def _state(path: str) -> FileState | None:
    """Returns what changes with a file's content, through links (Kubernetes replaces a link); None without a file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
