"""`kvmesh up --set PROCESS.KEY=VALUE`: anything that a service can be told, for a service, one process, or all."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence

from kvmesh.cli.serve import config_class
from kvmesh.config import checked
from kvmesh.errors import ConfigError

EVERYBODY = "*"
FIXED = ("config", "host", "port", "http_port", "metrics_port", "ready_file", "instance_id", "store", "conductor")


def chosen(texts: Iterable[str], processes: Sequence[tuple[str, str]]) -> dict[str, dict[str, str | bool]]:
    """Values by process or service, then by key; of one told twice the last. `processes`: names and services of the
    mesh. ConfigError names the text and what there is: a process, a key of its service (its own ports and addresses
    are the mesh's to choose), a value."""
    found: dict[str, dict[str, str | bool]] = {}
    for text in texts:
        left, equals, value = text.partition("=")
        name, _, key = left.strip().rpartition(".")
        key = key.replace("-", "_")
        if not (equals and name and key and value):
            raise _bad(text, "must be PROCESS.KEY=VALUE, as in conductor.policy=least_loaded")
        services = _services(text, name, processes)
        keys = sorted({field.name for one in services for field in _fields(one)} - set(FIXED))
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; see kvmesh serve {services[0]} --help"
            raise _bad(text, f"{name} has no key {key!r} that can be set{hint}")
        values = [checked(config_class(one), key, value.strip(), f"--set {text}") for one in services if _has(one, key)]
        found.setdefault(name, {})[key] = values[0] if isinstance(values[0], bool) else value.strip()
    return found


def merged(*some: Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """All of them; the last one that names a key decides."""
    found: dict[str, dict[str, object]] = {}
    for one in some:
        for name, values in one.items():
            found.setdefault(name, {}).update(values)
    return found


def _services(text: str, name: str, processes: Sequence[tuple[str, str]]) -> list[str]:
    """Whose configuration is meant."""
    ours = [(process, service) for process, service in processes if service != "redis"]
    services = list(dict.fromkeys(service for process, service in ours if name in (process, service, EVERYBODY)))
    if not services:
        names = list(dict.fromkeys([*(service for _, service in ours), *(process for process, _ in ours), EVERYBODY]))
        raise _bad(text, f"this mesh has no {name!r}; there are {', '.join(names)}")
    return services


def _fields(service: str) -> Iterable[dataclasses.Field[object]]:
    return (field for field in dataclasses.fields(config_class(service)) if not field.metadata.get("internal"))


def _has(service: str, key: str) -> bool:
    return any(field.name == key for field in _fields(service))


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(f"set={text!r}: {why}", field="set")
