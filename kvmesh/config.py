"""Service configuration: a frozen dataclass filled from flags, the environment, a TOML file and defaults."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import socket
import tomllib
import types
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kvmesh.errors import ConfigError

ENV_PREFIX = "KVMESH_"

T = TypeVar("T")

_PORT = {"min": 0, "max": 65535}


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """The settings that every service has; each service's configuration class adds its own."""

    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on."})
    port: int = field(default=0, metadata={"help": "gRPC port; 0 picks a free one.", **_PORT})
    metrics_port: int = field(default=0, metadata={"help": "Prometheus port; 0 picks a free one.", **_PORT})
    metrics_host: str = field(
        default="", metadata={"help": "Address that the metrics and probe port listens on; empty: host."}
    )
    metrics_tls: str = field(
        default="auto",
        metadata={
            "help": "auto: the metrics and probe port speaks TLS where tls_cert is set (no client certificate is asked "
            "for); off: plain HTTP.",
            "choices": ("auto", "off"),
        },
    )
    metrics_connections: int = field(
        default=128,
        metadata={"help": "Connections of the metrics port at once; beyond that the longest idle is closed.", "min": 4},
    )
    metrics_timeout_ms: int = field(
        default=5_000,
        metadata={"help": "A request to the metrics port, and its answer, take at most so long.", "min": 1},
    )
    node_id: str = field(default_factory=socket.gethostname, metadata={"help": "Name of this machine."})
    log_level: str = field(
        default="info",
        metadata={
            "help": "debug, info, warning or error.",
            "choices": ("debug", "info", "warning", "error"),
        },
    )
    trace_dir: str = field(default="", metadata={"help": "Folder for spans as JSON lines; empty: none."})
    trace_max_mb: int = field(
        default=256,
        metadata={"help": "MiB of span files of a process: two files, of which the older one goes.", "min": 1},
    )
    trace_sample: float = field(
        default=1.0,
        metadata={
            "help": "Share of new traces that are kept, 0 to 1; one that a caller began is kept as he says.",
            "min": 0.0,
            "max": 1.0,
        },
    )
    trace_slow_ms: int = field(
        default=30_000,
        metadata={
            "help": "What failed or took longer here is kept even if its trace is not; 0: only what failed.",
            "min": 0,
        },
    )
    log_file: str = field(default="", metadata={"help": "File of the log; empty: standard error."})
    log_max_mb: int = field(
        default=64, metadata={"help": "MiB of log_file: two files, of which the older one goes.", "min": 1}
    )
    min_free_mb: int = field(
        default=256,
        metadata={
            "help": "MiB that stay free on the disk (at most a tenth of it): below, no spans are written, and of the "
            "log warnings alone; 0: no floor.",
            "min": 0,
        },
    )
    otlp_endpoint: str = field(
        default="", metadata={"help": "OTLP gRPC collector, e.g. http://127.0.0.1:4317.", "secret": True}
    )
    ready_file: str = field(default="", metadata={"help": "Written as JSON once the service accepts calls."})
    tls_cert: str = field(
        default="", metadata={"help": "PEM certificate of this service; with tls_key its gRPC server speaks TLS."}
    )
    tls_key: str = field(default="", metadata={"help": "PEM private key of tls_cert, without a passphrase."})
    tls_ca: str = field(
        default="",
        metadata={
            "help": "PEM certificates of the authorities that peers must be signed by: calls go over TLS, and a TLS "
            "server asks its clients for certificates."
        },
    )
    tls_server_name: str = field(
        default="",
        metadata={
            "help": "Name that peers' certificates must hold, {role} in it for what is expected to answer "
            "({role}.kvmesh.internal); empty: the address that is called."
        },
    )


@dataclass(frozen=True, kw_only=True)
class ControlConfig(ServiceConfig):
    """What a control service, conductor or store master, can be told: one of several leads, and instances call it by
    the fast path."""

    door_connections: int = field(
        default=4096,
        metadata={
            "help": "Connections to the door at most, and no more than a quarter of the descriptors: the one that is "
            "idle longest makes room.",
            "min": 1,
        },
    )
    door_frame_ms: int = field(
        default=10_000,
        metadata={"help": "A message that is not complete after so long ends its connection to the door.", "min": 1},
    )
    door_memory_mb: int = field(
        default=16,
        metadata={"help": "MiB of all messages that have begun to arrive by the door or wait there.", "min": 2},
    )
    mesh: str = field(
        default="default",
        metadata={"help": "Name of the mesh in Redis, the same at all conductors and store masters of it."},
    )
    leader_lease_ms: int = field(
        default=2000, metadata={"help": "A leader silent for longer is replaced, in ms.", "min": 100}
    )
    advertise: str = field(
        default="", metadata={"help": "host:port at which others reach this service; empty: what it listens on."}
    )

    def check_control(self, *, redis: str) -> None:
        """Raises ConfigError naming a field here that does not fit. `redis`: empty where this one leads alone."""
        for name, least in (
            ("door_connections", 1),
            ("door_frame_ms", 1),
            ("door_memory_mb", 2),
            ("leader_lease_ms", 100),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least {least}", field=name)
        if not self.mesh or not self.mesh.isprintable() or any(letter in " :" for letter in self.mesh):
            raise ConfigError(f"mesh={self.mesh!r}: must be a name without spaces and colons", field="mesh")
        if self.advertise not in ("", "auto") and (" " in self.advertise or ":" not in self.advertise):
            raise ConfigError(f"advertise={self.advertise!r}: must be host:port, or auto", field="advertise")
        if redis and not self.advertise and self.host in ("", "0.0.0.0", "::"):
            text = f"advertise='': with redis, and listening on {self.host!r}, say at which host:port others reach this"
            raise ConfigError(text, field="advertise")


def same_as(cls: type[Any], key: str, **changes: Any) -> Any:
    """Returns a dataclass field with the default, limits and help of the field `key` of `cls`, except for `changes`. A
    program that starts the service of `cls` has such fields and hands their values on with `passed_on`."""
    (origin,) = (one for one in dataclasses.fields(cls) if one.name == key)
    default = changes.pop("default", origin.default)
    return field(default=default, metadata={**origin.metadata, **changes, "of": cls})


def passed_on(settings: Any, cls: type[Any]) -> dict[str, Any]:
    """Returns, by key, the values of those fields of `settings` that were made by `same_as` from `cls` or a base class
    of it."""
    fields = dataclasses.fields(settings)
    return {one.name: getattr(settings, one.name) for one in fields if issubclass(cls, one.metadata.get("of", ()))}


def without_password(url: str) -> str:
    """Returns `url` as it may be logged: the password before the last "@" is replaced by "***"."""
    credentials, at, rest = url.rpartition("@")
    scheme, sep, user = credentials.rpartition("://")
    return f"{scheme}{sep}{user.partition(':')[0]}:***@{rest}" if at and ":" in credentials else url


def load(
    cls: type[T],
    flags: Mapping[str, Any],
    *,
    toml: Path | None,
    env: Mapping[str, str],
    also_known: Collection[str] = (),
) -> T:
    """Builds the frozen dataclass `cls`. Of a key's origins the first counts: flag, `KVMESH_<KEY>`, TOML file, default.

    A flag that is None was not given. Field metadata may hold `min`, `max` and `choices`; an `internal` field is not a
    key. `also_known` are keys that environment variables may hold though `cls` has no such field, because all services
    of a machine share its environment. Raises ConfigError, which names key, value and origin, for an unknown key, for a
    value of the wrong type or out of range, and for what the class's `__post_init__` refuses.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and not f.metadata.get("internal")}  # type: ignore[arg-type]
    found: dict[str, tuple[Any, str]] = {}
    for key, value in _from_toml(toml).items():
        _known(key, fields, f"in {toml}")
        found[key] = value, f"in {toml}"
    for name, text in env.items():
        key = name.removeprefix(ENV_PREFIX).lower()
        if not name.startswith(ENV_PREFIX) or (key in also_known and key not in fields):
            continue
        _known(key, fields, f"from {name}", shown=name)
        found[key] = text, f"from {name}"
    for key, value in flags.items():
        _known(key, fields, f"from {flag_of(key, {})}")
        flag = f"from {flag_of(key, fields[key].metadata)}"
        if isinstance(value, list | tuple) and typing.get_origin(hints[key]) is not tuple:
            value = ",".join(value) or None  # a flag that may be given several times, for a text with commas
        if value is not None:
            found[key] = value, flag
    values = {}
    for key, (value, origin) in found.items():
        values[key] = _checked(key, value, hints[key], fields[key].metadata, origin)
    return _build(cls, values, {key: origin for key, (_, origin) in found.items()})


def flag_of(key: str, metadata: Mapping[str, Any]) -> str:
    """The command-line flag of a key: `--` and dashes, unless its metadata holds a `flag`."""
    return str(metadata.get("flag") or f"--{key.replace('_', '-')}")


def checked(cls: type[Any], key: str, value: Any, origin: str) -> Any:
    """Returns `value` converted to the type of the field `key` of `cls`. Raises ConfigError, which names `origin`, when
    the value is of another type or beyond the field's limits."""
    (field,) = (field for field in dataclasses.fields(cls) if field.name == key)
    return _checked(key, value, typing.get_type_hints(cls)[key], field.metadata, origin)


def _build(cls: type[T], values: dict[str, Any], origins: dict[str, str]) -> T:
    try:
        return cls(**values)
    except ConfigError as err:
        origin = origins.get(err.field or "", "")
        if not origin or origin in err.message:
            raise
        raise type(err)(f"{err.message} ({origin})", field=err.field) from None
    except (ValueError, TypeError) as err:
        raise ConfigError(f"{cls.__name__}: {err}") from None


def _from_toml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"config={str(path)!r}: {err.strerror}", field="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"config={str(path)!r}: not TOML ({err})", field="config") from None


def _known(key: str, fields: Mapping[str, Any], origin: str, *, shown: str = "") -> None:
    if key in fields:
        return
    near = difflib.get_close_matches(key, fields, n=1)
    hint = ""
    if near:
        hint = f"; did you mean {ENV_PREFIX + near[0].upper() if shown else near[0]}?"
    raise ConfigError(f"unknown key {shown or key!r} ({origin}){hint}", field=key)


def _checked(key: str, value: Any, hint: Any, limits: Mapping[str, Any], origin: str) -> Any:
    def refuse(why: str) -> ConfigError:
        shown = repr(without_password(value) if isinstance(value, str) else value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return ConfigError(f"{key}={shown} ({origin}): {why}", field=key)

    made = _convert(value, hint, refuse)
    if made is None:
        return None
    # Written so that NaN, which compares with nothing, is refused too.
    if "min" in limits and not made >= limits["min"]:
        raise refuse(f"must be at least {limits['min']}")
    if "max" in limits and not made <= limits["max"]:
        raise refuse(f"must be at most {limits['max']}")
    if "choices" in limits and made not in limits["choices"]:
        raise refuse(f"choose one of {', '.join(map(str, limits['choices']))}")
    return made


_TRUE = frozenset(("1", "true", "yes", "on"))
_FALSE = frozenset(("0", "false", "no", "off"))
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def _convert(value: Any, hint: Any, refuse: typing.Callable[[str], ConfigError]) -> Any:
    """Returns `value` as the annotated type `hint`: text is parsed, anything else must already be of that type."""
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [a for a in typing.get_args(hint) if a is not type(None)]
        if value is None or (value == "" and str not in options):
            return None
        for option in options[:-1]:
            with contextlib.suppress(ConfigError):
                return _convert(value, option, refuse)
        return _convert(value, options[-1], refuse)
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise refuse(f"choose one of {', '.join(map(str, choices))}")
        return value
    if origin is tuple:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple):
            raise refuse("must be a list, or text with commas")
        item = typing.get_args(hint)[0]
        return tuple(_convert(p.strip() if isinstance(p, str) else p, item, refuse) for p in parts if p != "")
    if hint not in _NAMES:
        raise TypeError(f"config fields of type {hint} are not supported")
    made = _scalar(value, hint)
    if made is None:
        raise refuse(f"must be {_NAMES[hint]}")
    return made


def _scalar(value: Any, hint: type) -> Any:
    """Returns the converted value, or None when it is of another type."""
    if hint is bool and isinstance(value, str):
        low = value.strip().lower()
        return True if low in _TRUE else False if low in _FALSE else None
    if isinstance(value, str) and hint in (int, float):
        try:
            return hint(value.strip())
        except ValueError:
            return None
    if hint is float and type(value) is int:
        return float(value)
    if hint is Path and isinstance(value, str | Path):
        return Path(value)
    return value if type(value) is hint else None
