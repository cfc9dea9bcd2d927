"""Which engines there are: URLs from flags, and from a file that may change while the service runs. Pure, but for
reading that file.

The file is JSON, or YAML where PyYAML is installed:

    {"endpoints": [
        "http://10.0.0.5:8000",
        {"url": "http://10.0.0.6:8000", "name": "left", "engine_model": "Qwen/Qwen3-0.6B", "max_running": 64,
         "kv_events": "tcp://10.0.0.6:5557", "kv_replay": "tcp://10.0.0.6:5558"}
    ]}
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvmesh.errors import ConfigError
from kvmesh.external.kv_event_reader import KvEventsAddress

MAX_FILE_BYTES = 1 << 20
MAX_ENDPOINTS = 256  # of one service
MAX_URL = 256  # characters
MAX_RUNNING = 65_536
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}\Z")
_KEYS = ("url", "name", "engine_model", "max_running", "kv_events", "kv_replay")


@dataclass(frozen=True, slots=True)
class EngineEndpoint:
    """One engine. `name` is the instance's in the mesh, `engine_model` the engine's name for the model ("": the first
    that it serves), `max_running` how many requests it is given at once, `kv_events` where it publishes which blocks it
    holds (None: nowhere)."""

    url: str
    name: str
    engine_model: str = ""
    max_running: int = 0
    kv_events: KvEventsAddress | None = None


def endpoint(url: str, *, field: str, prefix: str = "external") -> EngineEndpoint:
    """Returns an endpoint whose name is made of its host and port. Raises ConfigError naming `field`."""
    url = checked_url(url, field)
    parts = urlsplit(url)
    where = f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}{parts.path.replace('/', '-')}"
    return EngineEndpoint(url, f"{prefix}-{where}"[:100])


def checked_url(url: str, field: str) -> str:
    """Returns the URL without a slash at its end. Raises ConfigError unless it is http(s)://HOST[:PORT][/PATH]."""
    why = ""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            why = "must be http://HOST:PORT or https://HOST:PORT"
        elif parts.username or parts.password or parts.query or parts.fragment:
            why = "must hold no user, password, query or fragment (a key goes into KVMESH_ENGINE_API_KEY)"
        elif parts.port == 0:
            why = "must have a port in 1..65535"
    except ValueError as err:
        why = str(err)
    if not why and (len(url) > MAX_URL or not url.isprintable() or " " in url):
        why = f"must have at most {MAX_URL} printable characters, without spaces"
    if why:
        shown = url if len(url) <= 80 else url[:77] + "..."
        raise ConfigError(f"{field}={shown!r}: {why}", field=field)
    return url.rstrip("/")


def of_urls(text: str) -> tuple[EngineEndpoint, ...]:
    """Returns the endpoints of a comma-separated list. Raises ConfigError naming `url`."""
    found = [endpoint(one.strip(), field="url") for one in text.split(",") if one.strip()]
    return checked(found, "url")


def of_file(path: str) -> tuple[EngineEndpoint, ...]:
    """Reads the file. Raises ConfigError naming the file, and the place and value in it."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as err:
        raise ConfigError(f"endpoints_file={path!r}: {err.strerror}", field="endpoints_file") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"endpoints_file={path!r}: has more than {MAX_FILE_BYTES} bytes", field="endpoints_file")
    try:
        return of_told(_parsed(raw, path))
    except ConfigError as err:
        raise ConfigError(f"endpoints_file={path!r}: {err.message}", field="endpoints_file") from None


def _parsed(raw: bytes, path: str) -> Any:
    if Path(path).suffix in (".yaml", ".yml"):
        try:
            yaml: Any = importlib.import_module("yaml")
        except ImportError:
            raise ConfigError("YAML needs PyYAML, which is not installed; write the same as JSON") from None
        try:
            return yaml.safe_load(raw)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as err:
            raise ConfigError(f"is not YAML: {' '.join(str(err).split())[:200]}") from None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"is not JSON: {str(err)[:200]}") from None


def of_told(told: Any) -> tuple[EngineEndpoint, ...]:
    """Reads what the file holds: {"endpoints": [...]}. Raises ConfigError naming place and value."""
    if not isinstance(told, dict) or set(told) != {"endpoints"} or not isinstance(told["endpoints"], list):
        raise ConfigError("must be an object with one key, `endpoints`, which is a list")
    listed = told["endpoints"]
    if len(listed) > MAX_ENDPOINTS:
        raise ConfigError(f"endpoints: {len(listed)} of them; at most {MAX_ENDPOINTS} are served by one process")
    return checked([_entry(one, f"endpoints[{at}]") for at, one in enumerate(listed)], "endpoints")


def _entry(told: Any, place: str) -> EngineEndpoint:
    if isinstance(told, str):
        return endpoint(told, field=place)
    if not isinstance(told, dict):
        raise ConfigError(f"{place}={_shown(told)}: must be a URL, or an object with a url")
    if strange := [str(key) for key in told if key not in _KEYS]:
        raise ConfigError(f"{place}.{strange[0][:80]}: is no key; there are {', '.join(_KEYS)}")
    url = told.get("url")
    if not isinstance(url, str):
        raise ConfigError(f"{place}.url={_shown(url)}: must be a text")
    usual = endpoint(url, field=f"{place}.url")
    name = told.get("name", usual.name)
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError(f"{place}.name={_shown(name)}: must be at most 100 letters, digits, and _ . : -")
    model = told.get("engine_model", "")
    if not isinstance(model, str) or len(model) > MAX_URL:
        raise ConfigError(f"{place}.engine_model={_shown(model)}: must be a text of at most {MAX_URL} characters")
    running = told.get("max_running", 0)
    if type(running) is not int or not 0 <= running <= MAX_RUNNING:
        raise ConfigError(f"{place}.max_running={_shown(running)}: must be a whole number in 0..{MAX_RUNNING}")
    return EngineEndpoint(usual.url, name, model, running, _kv_events(told, place))


def _kv_events(told: Mapping[str, Any], place: str) -> KvEventsAddress | None:
    events = _socket(told.get("kv_events"), f"{place}.kv_events")
    replay = _socket(told.get("kv_replay"), f"{place}.kv_replay")
    if events is None:
        if replay is not None:
            raise ConfigError(f"{place}.kv_replay={_shown(told['kv_replay'])}: is of no use without kv_events")
        return None
    return KvEventsAddress(*events, *(replay or ("", 0)))


def _socket(told: Any, place: str) -> tuple[str, int] | None:
    """Reads tcp://HOST:PORT."""
    if told is None:
        return None
    port: int | None = None
    if isinstance(told, str) and len(told) <= MAX_URL:
        with contextlib.suppress(ValueError):
            parts = urlsplit(told)
            rest = parts.username or parts.password or parts.path or parts.query or parts.fragment
            port = parts.port if parts.scheme == "tcp" and parts.hostname and not rest else None
            if port and parts.hostname and parts.hostname != "*":
                return parts.hostname, port
    raise ConfigError(f"{place}={_shown(told)}: must be tcp://HOST:PORT, as other machines reach it")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def checked(endpoints: Sequence[EngineEndpoint], field: str) -> tuple[EngineEndpoint, ...]:
    """Returns the endpoints if no two have one name or one URL. Raises ConfigError."""
    for what in ("name", "url"):
        seen: set[str] = set()
        for one in endpoints:
            value = getattr(one, what)
            if value in seen:
                raise ConfigError(f"{field}: two endpoints have the {what} {value!r}", field=field)
            seen.add(value)
    return tuple(endpoints)


@dataclass(frozen=True, slots=True)
class EndpointChanges:
    """What is to be started, and the names of what is to leave. One that has changed leaves and is started anew."""

    join: tuple[EngineEndpoint, ...]
    leave: tuple[str, ...]


def changes(running: Mapping[str, EngineEndpoint], wanted: Iterable[EngineEndpoint]) -> EndpointChanges:
    """Returns how to come from the endpoints that run, by name, to those that are wanted."""
    new = {one.name: one for one in wanted}
    leave = tuple(name for name, one in running.items() if new.get(name) != one)
    return EndpointChanges(tuple(one for name, one in new.items() if running.get(name) != one), leave)
