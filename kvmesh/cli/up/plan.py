"""Which processes a mesh consists of: names, ports and command lines."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import os
import random
import shutil
import socket
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh.cli.serve import config_class
from kvmesh.cli.up.instance_groups import InstanceGroup
from kvmesh.cli.up.settings import CONDUCTOR_PORT, EVERY_ADDRESS, INSTANCES, STORE_PORT, MeshSettings, Served
from kvmesh.config import ENV_PREFIX, checked, passed_on
from kvmesh.errors import ConfigError
from kvmesh.ranks.host_memory import available_bytes
from kvmesh.ranks.sizing import CPU_SHARE, MIB
from kvmesh.rpc.authorisation import ANY_NAME, CallerRole, Identity
from kvmesh.rpc.security import TlsFiles
from kvmesh.rpc.server import check_port, join

# `kvmesh up --set PROCESS.KEY=VALUE`: anything that a service can be told, for a service, one process, or all.

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
    """Joins the values of several; of a key that more than one names the last one's value counts."""
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


LOCALHOST = "127.0.0.1"
PORT_STEP = 10  # between the fixed ports of conductors, and of masters


@dataclass(frozen=True)
class ProcessSpec:
    """One service process. `address` is its gRPC server, `http` the gateway's REST address (else ""), which speaks TLS
    where `https` says so."""

    name: str
    service: str
    address: str
    metrics: str
    http: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    ready_file: Path
    https: bool = False


class Ports:
    """Free ports of this machine, each given once.

    They lie below the range that the kernel picks client ports from: a service that restarts must find its
    port free, and no outgoing connection can have taken it. Another mesh of this machine (and network namespace)
    chooses none of them as long as this object lives, whether or not anybody listens there yet: each is claimed by
    a name in the abstract namespace of Unix sockets, which ends with its owner. Keep it while the mesh runs."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)
        self._given: set[int] = set()
        self._claims: list[int] = []
        weakref.finalize(self, _close, self._claims)
        self._high = 32_000
        try:
            low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
            self._high = min(self._high, max(low, 12_000))
        except (OSError, ValueError):
            pass

    def take(self, host: str = LOCALHOST) -> int:
        """A port on `host` that nobody listens on now."""
        for _ in range(500):
            port = self._random.randrange(10_000, self._high)
            if port in self._given or not self._claim(port):
                continue
            self._given.add(port)
            try:
                check_port(host, port)
            except ConfigError as err:
                if err.field == "host":
                    raise
                continue
            return port
        with socket.create_server((LOCALHOST, 0)) as probe:
            return int(probe.getsockname()[1])

    def _claim(self, port: int) -> bool:
        """Whether nobody else has."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as claim:
            try:
                claim.bind(f"\0kvmesh-port-{port}")
            except OSError as err:
                return err.errno != errno.EADDRINUSE  # without such names (not Linux) all can be had
            self._claims.append(claim.detach())
        return True


def _close(claims: list[int]) -> None:
    for claim in claims:
        os.close(claim)


@dataclass(frozen=True, slots=True)
class Planned:
    """A process to be: its service, and of an instance its model and the group that it is of (None: of the others)."""

    name: str
    service: str
    served: Served | None = None
    group: InstanceGroup | None = None


def processes(settings: MeshSettings) -> list[Planned]:
    """Every process, in the order of start. Instances of further models carry their model's name."""
    instances = [
        Planned(f"{served.prefix}{service}-{i}", service, served, group)
        for served in settings.served
        for service in INSTANCES
        for i, group in enumerate(group for group in settings.groups(service) for _ in range(group.count))
    ]
    externals = [Planned("external", "external")] if settings.has_external else []
    pools = [Planned(f"pool-{i}", "pool") for i in range(settings.pool)]
    if settings.lends:
        return [Planned("ranks", "ranks")]
    if settings.join:
        return [*pools, *instances, *externals]
    return [
        *([Planned("redis", "redis")] if settings.redis == "auto" else []),
        *(Planned(name, "store") for name in _names("store", settings.masters)),
        *(Planned(name, "conductor") for name in _names("conductor", settings.conductors)),
        *pools,
        *instances,
        *externals,
        Planned("gateway", "gateway"),
    ]


def identity(settings: MeshSettings, name: str) -> str:
    """What the mesh calls a process of this machine: where machines join, no two may have one name."""
    return f"{name}@{settings.node_id or socket.gethostname()}" if settings.address else name


def fixed_ports(settings: MeshSettings) -> dict[str, int]:
    """Ports of conductors and masters that are known beforehand, by name: those that were given, and where other
    machines can join the usual ones."""
    if settings.join:
        return {}
    found: dict[str, int] = {}
    for service, count, given, usual in (
        ("conductor", settings.conductors, settings.conductor_port, CONDUCTOR_PORT),
        ("store", settings.masters, settings.store_port, STORE_PORT),
    ):
        first = usual if given is None and settings.address else given
        if first:
            found |= {name: first + PORT_STEP * i for i, name in enumerate(_names(service, count))}
    return found


def _names(service: str, count: int) -> list[str]:
    return [service] if count == 1 else [f"{service}-{i}" for i in range(count)]


OPERATOR = "operator"  # whose certificate the command line has
_CERTIFIED = dict.fromkeys((*INSTANCES, "ranks", "external"), CallerRole.INSTANCE) | {
    "pool": CallerRole.STORE,
    "store": CallerRole.STORE,
    "conductor": CallerRole.CONDUCTOR,
    "gateway": CallerRole.GATEWAY,
}


def certificates(settings: MeshSettings) -> dict[str, tuple[Identity, ...]]:
    """Returns what the certificate of each process says, by the process's name, and the operator's."""
    found = {
        # One process speaks for all external instances, whose names may come from a file.
        one.name: (
            Identity(_CERTIFIED[one.service], ANY_NAME if one.service == "external" else identity(settings, one.name)),
        )
        for one in processes(settings)
        if one.service in _CERTIFIED
    }
    return {**found, OPERATOR: (Identity(CallerRole.OPERATOR, ANY_NAME), Identity(CallerRole.CLIENT, ANY_NAME))}


def plan(
    settings: MeshSettings, run_dir: Path, ports: Ports, own_tls: Mapping[str, TlsFiles] | None = None
) -> list[ProcessSpec]:
    """The processes of a mesh, every port chosen; `own_tls` has the TLS files of each, by name, where they have some of
    their own. ConfigError: what --set names does not exist."""
    wanted = processes(settings)
    told = chosen(settings.set, [(one.name, one.service) for one in wanted])
    settings = dataclasses.replace(settings, flags=merged(settings.flags, told))
    inside = _inside(settings)
    fixed = fixed_ports(settings)
    port = {one.name: fixed.get(one.name) or ports.take(inside) for one in wanted if one.service != "gateway"}
    port["gateway"] = settings.grpc_port or ports.take(settings.host)
    http_port = settings.http_port or ports.take(settings.host)
    own = _own_flags(settings, wanted, port, http_port)
    available = available_bytes()  # once: all start at once
    parts: dict[InstanceGroup, dict[str, Any]] = {
        group: {"device": group.device, "dtype": group.dtype, **memory_parts(settings, available, group.device)}
        for group in {one.group for one in wanted if one.group}
    }
    specs = []
    for one in wanted:
        if one.service == "redis":
            specs.append(_redis(settings, port[one.name], run_dir))
        else:
            flags = own[one.service] | (parts[one.group] if one.group else {})
            if own_tls:
                flags |= dataclasses.asdict(own_tls[one.name])
            specs.append(_service(settings, one, run_dir, flags, port[one.name], ports.take(inside)))
    return specs


def _service(
    settings: MeshSettings, one: Planned, run_dir: Path, own: Mapping[str, Any], port: int, metrics_port: int
) -> ProcessSpec:
    flags: dict[str, Any] = {
        **passed_on(settings, config_class(one.service)),
        **_common_flags(settings, one.name, run_dir),
        "port": port,
        "metrics_port": metrics_port,
        "advertise": join(settings.advertise_host, port) if settings.advertise_host else "",
        **own,
        **({"model": one.served.path, "served_name": one.served.name} if one.served else {}),
        **_extra(settings.flags, one.name, one.service),
    }
    return ProcessSpec(
        name=one.name,
        service=one.service,
        address=join(_reach(flags["host"]), port),
        metrics=join(_reach(flags.get("metrics_host") or flags["host"]), metrics_port),
        http=join(_reach(settings.host), own["http_port"]) if one.service == "gateway" else "",
        argv=_argv(one.service, flags),
        env=_environment(settings, one.name, one.service) | _secrets(one.service, flags),
        log=run_dir / "logs" / f"{one.name}.log",
        ready_file=Path(flags["ready_file"]),
        https=one.service == "gateway" and bool(flags["http_tls_cert"]),
    )


def _common_flags(settings: MeshSettings, name: str, run_dir: Path) -> dict[str, Any]:
    """Returns flags that every service is given; each takes those that its configuration knows."""
    return {
        "host": _inside(settings),
        "instance_id": identity(settings, name),
        "trace_dir": str(run_dir / "traces"),
        "ready_file": str(run_dir / "ready" / f"{name}.json"),
        "ssd_path": str(Path(settings.ssd_path).expanduser().absolute() / name) if settings.ssd_path else "",
        "warm_segment": str(Path(settings.warm_segment).absolute() / name) if settings.warm_segment else "",
    }


def _own_flags(
    settings: MeshSettings, wanted: Sequence[Planned], port: Mapping[str, int], http_port: int
) -> dict[str, dict[str, Any]]:
    """What the services of one kind are told beside that."""
    here = settings.address or LOCALHOST
    conductor, store = (
        ",".join(join(here, port[one.name]) for one in wanted if one.service == service)
        for service in ("conductor", "store")
    )
    if settings.joined:
        conductor, store = ",".join(settings.joined.conductors), ",".join(settings.joined.masters)
    # A Redis of the mesh's own stays on this machine: it has no password, and no other machine asks it.
    redis = f"redis://{join(LOCALHOST, port['redis'])}/0" if settings.redis == "auto" else settings.redis
    instance = {"conductor": conductor, "store": store}
    return {
        "store": {"redis": redis},
        "conductor": {"store": store, "redis": redis, "peers": conductor},
        "external": {
            "conductor": conductor,
            "url": ",".join(settings.external),
            "endpoints_file": str(Path(settings.external_file).absolute()) if settings.external_file else "",
            "model": settings.model,
            "served_name": settings.external_model,
            "advertise_host": settings.advertise_host,
        },
        "pool": {"store": store, "memory_mb": settings.pool_memory_mb},
        "ranks": {"store": store, "model": settings.model},
        **{one: {**instance, "mesh": str(settings.axes(one)), **_rank_hosts(settings, one)} for one in INSTANCES},
        "gateway": {
            "host": settings.host,
            "http_port": http_port,
            "model": settings.model,
            "served_name": settings.first_model,
            "models": ",".join(f"{name}={path}" for name, path in settings.further_models.items()),
            "conductor": conductor,
            "quota_redis": redis if settings.api_keys else "",
        },
    }


def _rank_hosts(settings: MeshSettings, service: str) -> dict[str, Any]:
    """How many further machines the ranks of an instance are on."""
    further = settings.hosts(service) - 1
    return {"rank_hosts": str(further)} if further else {"rank_network": ""}


def memory_parts(settings: MeshSettings, available: int, device: str = "") -> dict[str, int]:
    """Returns what tells each rank on `device` (empty: the mesh's) its part of the memory where nobody names
    `memory_mb`: of a GPU, how many share it (every instance on a GPU may be on the same); of the `available` host
    memory, which all would find whole as they start at once, so many MiB."""
    if settings.memory_mb or not settings.ranks:
        return {}
    if (device or settings.device).startswith("cuda"):
        on_gpus = sum(
            group.count for one in INSTANCES for group in settings.groups(one) if group.device.startswith("cuda")
        )
        return {"device_instances": len(settings.served) * on_gpus}
    room = int(available * CPU_SHARE) // MIB - settings.pool * settings.pool_memory_mb
    return {"room_mb": max(1, room // (settings.ranks_on("cpu") or settings.ranks))}


def segment_mb(settings: MeshSettings, available: int) -> int:
    """Returns the most that a rank's host segment takes, MiB; 0 on a GPU, where it is known once the pages are."""
    device = "cpu" if settings.ranks_on("cpu") else ""
    return settings.memory_mb or memory_parts(settings, available, device).get("room_mb", 0) // 2


def _redis(settings: MeshSettings, port: int, run_dir: Path) -> ProcessSpec:
    """A Redis of this mesh alone. It keeps a log of changes, so that a new start of it forgets nothing.

    ConfigError: the program is missing."""
    program = shutil.which("redis-server")
    if program is None:
        why = "redis-server is not installed (Debian, Ubuntu: apt-get install redis-server); or give a redis:// URL"
        raise ConfigError(f"redis='auto': {why}", field="redis")
    ready_file = run_dir / "ready" / "redis.pid"
    flags = {
        "bind": LOCALHOST,
        "port": port,
        "dir": run_dir / "redis",  # what must not be lost lies apart from logs and traces
        "pidfile": ready_file,
        "save": "",
        "appendonly": "yes",
        "appendfilename": "redis.aof",
    }
    # It is no service of ours: something of ours has to make it die with its supervisor, then becomes it.
    become = (
        "from kvmesh.rpc.process import follow_supervisor; follow_supervisor(); os.execv(sys.argv[1], sys.argv[1:])"
    )
    argv = [sys.executable, "-c", f"import os, sys; {become}", program]
    argv += [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    return ProcessSpec(
        name="redis",
        service="redis",
        address=join(LOCALHOST, port),
        metrics="",
        http="",
        argv=tuple(argv),
        env=_environment(settings, "redis", "redis"),
        log=run_dir / "logs" / "redis.log",
        ready_file=ready_file,
    )


def _inside(settings: MeshSettings) -> str:
    """What services other than the gateway listen on."""
    return settings.host if settings.address else LOCALHOST


def _reach(host: str) -> str:
    """Returns the host at which this machine reaches a server that listens on `host`."""
    return LOCALHOST if host in EVERY_ADDRESS else host


def _extra(by_name: Mapping[str, Mapping[str, Any]], name: str, service: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in ("*", service, name):
        found.update(by_name.get(key, {}))
    return found


def _argv(service: str, flags: Mapping[str, Any]) -> tuple[str, ...]:
    known = {field.name: field for field in dataclasses.fields(config_class(service))}
    argv = [sys.executable, "-m", "kvmesh.cli", "serve", service]
    for key, value in flags.items():
        if key not in known or value == "" or known[key].metadata.get("secret"):
            continue
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv.append(f"--{flag}={value}")
    return tuple(argv)


def _secrets(service: str, flags: Mapping[str, Any]) -> dict[str, str]:
    """What every user of the machine could read among a process's arguments goes to it by its environment."""
    return {
        f"{ENV_PREFIX}{field.name.upper()}": str(flags[field.name])
        for field in dataclasses.fields(config_class(service))
        if field.metadata.get("secret") and flags.get(field.name, "") != ""
    }


def _environment(settings: MeshSettings, name: str, service: str) -> dict[str, str]:
    """Secrets of the settings are left out: `_secrets` gives each service its own."""
    secret = {
        f"{ENV_PREFIX}{field.name.upper()}" for field in dataclasses.fields(settings) if field.metadata.get("secret")
    }
    env = {key: value for key, value in os.environ.items() if key not in secret}
    env.setdefault("OMP_NUM_THREADS", str(settings.threads))
    env["PYTHONUNBUFFERED"] = "1"
    env.update(_extra(settings.env, name, service))
    return env
