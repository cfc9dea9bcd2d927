"""Parts of kvmesh that installed packages may add to: a name stands for an entry point of a group.

kvmesh's own are written down as entry points too, so that they are known without an installed distribution. Built-in
ones and others are named, loaded and refused in the same way. A module is imported when it is first used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvmesh.errors import ConfigError


class Plugins(Collection[str]):
    """The names of one entry-point group, built-in ones first. Installed packages are looked up anew at each use."""

    def __init__(self, group: str, built_in: Mapping[str, str]) -> None:
        """`built_in` maps a name to MODULE:ATTRIBUTE."""
        self.group = group
        self._loaded: dict[str, Any] = {}
        self._built_in = [EntryPoint(name, value, group) for name, value in built_in.items()]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(point.name for point in self._points()))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __contains__(self, name: object) -> bool:
        return any(name == point.name for point in self._built_in) or any(name == known for known in self)

    def load(self, name: str, field: str) -> Any:
        """Returns the object that the entry point `name` stands for, and keeps it: looking through all installed
        packages costs tens of milliseconds. Raises ConfigError, which names `field`, when there is no such name (the
        message lists the known ones), when two packages offer it, or when it does not load."""
        if name in self._loaded:
            return self._loaded[name]
        found = {point.value: point for point in self._points() if point.name == name}
        if not found:
            raise ConfigError(f"{field}={name!r}: choose one of {', '.join(self)}", field=field)
        if len(found) > 1:
            raise ConfigError(f"{field}={name!r}: {' and '.join(found)} have this name", field=field)
        (point,) = found.values()
        try:
            self._loaded[name] = point.load()
        except Exception as error:
            why = f"{point.value} does not load: {type(error).__name__}: {error}"
            raise ConfigError(f"{field}={name!r}: {why}", field=field) from error
        return self._loaded[name]

    def _points(self) -> list[EntryPoint]:
        """Lists the entry points by their metadata alone; no other package is imported."""
        return [*self._built_in, *sorted(entry_points(group=self.group), key=lambda point: point.name)]
