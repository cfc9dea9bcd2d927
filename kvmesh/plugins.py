"""Parts of kvmesh that installed packages may add to: a name stands for an entry point of a group.

kvmesh's own are written down as entry points too, so that they are known without an installed distribution. Built-in
ones and others are named, loaded and refused in the same way. A module is imported when it is first used.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvmesh.errors import ConfigError, KvmeshError


class Plugins(Collection[str]):
    """The names of one entry-point group, built-in ones first. A package that is installed while a process runs is
    seen."""

    def __init__(
        self,
        group: str,
        built_in: Mapping[str, str],
        *,
        own_first: bool = False,
        error: type[KvmeshError] = ConfigError,
    ) -> None:
        """`built_in` maps a name to MODULE:ATTRIBUTE. With `own_first` no package can replace a built-in one; else a
        name that is offered twice is refused. `error` is the class that is raised."""
        self.group = group
        self._own_first = own_first
        self._error = error
        self._built_in = [EntryPoint(name, value, group) for name, value in built_in.items()]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(point.name for point in self._points()))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return any(name == point.name for point in self._built_in) or any(name == known for known in self)

    def find(self, name: str, field: str) -> EntryPoint:
        """Returns the entry point `name`. Raises `error`, which names `field`, when there is none (the message lists
        the known ones) or when two packages offer one of this name."""
        found = {point.value: point for point in self._built_in if point.name == name}
        if not (found and self._own_first):
            found = {point.value: point for point in self._points() if point.name == name}
        if not found:
            raise self._error(f"{field}={name!r}: choose one of {', '.join(self)}", field=field)
        if len(found) > 1:
            raise self._error(f"{field}={name!r}: {' and '.join(found)} have this name", field=field)
        (point,) = found.values()
        return point

    def load(self, name: str, field: str) -> Any:
        """What the entry point of that name stands for. Raises `error` as `find` does, and when it does not load."""
        return load(self.find(name, field), field, self._error)

    def _points(self) -> list[EntryPoint]:
        """Lists the entry points by their metadata alone; no other package is imported."""
        return [*self._built_in, *installed(self.group)]


def load(point: EntryPoint, field: str, error: type[KvmeshError] = ConfigError) -> Any:
    """What an entry point stands for. Raises `error` naming `field` when the module or the name in it is not there, or
    the module raises as it is imported."""
    try:
        return point.load()
    except Exception as err:
        why = f"{point.value} does not load: {type(err).__name__}: {err}"
        raise error(f"{field}={point.name!r}: {why}", field=field) from err


def installed(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group by name. All installed packages are read once, some tens of milliseconds, and again
    when a folder of the path has changed: that costs a look at each."""
    return _read(group, tuple((folder, _changed_ns(folder or ".")) for folder in sys.path))


@functools.lru_cache(maxsize=16)
def _read(group: str, path: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=group), key=lambda point: point.name))


def _changed_ns(folder: str) -> int:
    """When a package was last put there or taken away; 0: there is no such folder."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0
