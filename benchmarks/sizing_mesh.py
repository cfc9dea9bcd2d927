"""A running mesh whose CPU time and counters are read: part of benchmarks/sizing.py."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.sizing_solve import Window
from kvmesh.cli.up import plan
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from tests.support.mesh.client import gateway_status, until

READY_S = 180.0
HTTP_S = 10.0
# Events by the counter that tells them: service, metric, what its labels must hold.
COUNTERS = {
    "conductor_beats": ("conductor", "kvmesh_conductor_heartbeats_total", ""),
    "store_beats": ("store", "kvmesh_store_beats_total", ""),
    "announcements": ("store", "kvmesh_store_announcements_total", ""),
    "relayed": ("store", "kvmesh_store_announcements_total", 'verdict="applied"'),
    "keys": ("store", "kvmesh_store_announced_keys_total", ""),
    "requests": ("gateway", "kvmesh_gateway_requests_total", ""),
    "prompt_tokens": ("gateway", "kvmesh_gateway_prompt_tokens_total", ""),
    "tokens": ("gateway", "kvmesh_gateway_output_tokens_total", ""),
    "steps": ("decode", "kvmesh_decode_step_seconds_count", ""),
    "chunks": ("prefill", "kvmesh_prefill_step_seconds_count", ""),
}
_LINE = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)", re.MULTILINE)


class Clocks:
    """CPU clocks of processes, in nanoseconds: user and system time of all threads, also of those that have ended."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def read(self, pid: int) -> float:
        """Seconds so far; OSError: no such process."""
        clock = ctypes.c_int()
        if error := self._libc.clock_getcpuclockid(pid, ctypes.byref(clock)):
            raise OSError(error, f"no CPU clock of process {pid}")
        return time.clock_gettime(clock.value)


class Measured:
    """One running mesh. `block_tokens` and instance counts are those it was started with."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._clocks = Clocks()
        self._ranks = {
            name: [child.pid for child in psutil.Process(one.pid).children()] for name, one in mesh.processes.items()
        }

    def of(self, service: str) -> list[str]:
        """Names of its processes."""
        return [name for name, one in self.mesh.processes.items() if one.spec.service == service]

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far by process, ranks apart from their fronts, and "client": this process."""
        found = {name: self._clocks.read(one.pid) for name, one in self.mesh.processes.items()}
        for name, pids in self._ranks.items():
            if pids:
                found[f"{name} rank"] = sum(self._clocks.read(pid) for pid in pids)
        return found | {"client": time.process_time()}

    def counts(self) -> dict[str, float]:
        """Every counter of COUNTERS so far, summed over the processes of its service."""
        texts = {name: self._scrape(one.spec) for name, one in self.mesh.processes.items() if one.spec.metrics}
        found: dict[str, float] = {}
        for event, (service, metric, label) in COUNTERS.items():
            found[event] = sum(total(texts[name], metric, label) for name in self.of(service))
        return found

    def _scrape(self, spec: plan.ProcessSpec) -> str:
        with urllib.request.urlopen(f"http://{spec.metrics}/metrics", timeout=HTTP_S) as answer:
            return str(answer.read().decode())


def total(text: str, metric: str, label: str) -> float:
    """The sum of a metric's samples whose labels hold `label`, of a scrape in Prometheus' text format."""
    return sum(
        float(value) for name, labels, value in _LINE.findall(text) if name == metric and label in (labels or "")
    )


@dataclasses.dataclass
class Reading:
    """Filled when `watched` ends."""

    seconds: float = 0.0
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    processes: dict[str, float] = dataclasses.field(default_factory=dict)  # CPU seconds
    others_cores: float = 0.0  # cores that processes outside the mesh and this one had meanwhile


@contextmanager
def watched(measured: Measured) -> Iterator[Reading]:
    """CPU and counters of what happens inside. Counters are read outside of the timed part: reading costs CPU, too."""
    reading = Reading()
    counts = measured.counts()
    busy, cpu, began = _busy(), measured.cpu(), time.monotonic()
    yield reading
    reading.seconds = time.monotonic() - began
    after = measured.cpu()
    busy = _busy() - busy
    reading.processes = {name: value - cpu[name] for name, value in after.items()}
    reading.others_cores = max(0.0, busy - sum(reading.processes.values())) / reading.seconds
    reading.counts = {event: value - counts[event] for event, value in measured.counts().items()}


def _busy() -> float:
    """CPU seconds that this machine's cores have worked."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def window(measured: Measured, reading: Reading, group: str, repeat: int, more: Mapping[str, float]) -> Window:
    """The reading by service: of instances the mean of their fronts; heartbeats and announcements of an instance are
    the mean, too (`own_...`). `more`: events that no counter tells."""
    fronts = [*measured.of("prefill"), *measured.of("decode")]
    counts = {"seconds": reading.seconds, **reading.counts, **more}
    for event in ("conductor_beats", "store_beats", "announcements"):
        counts[f"own_{event}"] = counts[event] / len(fronts)
    cpu = {}
    for service in ("gateway", "conductor", "store", "prefill", "decode"):
        names = measured.of(service)
        cpu[service] = sum(reading.processes[name] for name in names) / len(names)
        if any(f"{name} rank" in reading.processes for name in names):
            cpu[f"{service} rank"] = sum(reading.processes[f"{name} rank"] for name in names) / len(names)
    cpu["client"] = reading.processes["client"]
    return Window(group, repeat, counts, cpu)


async def serving(measured: Measured) -> None:
    """All gateways have an instance of each role."""

    async def ready() -> bool:
        return all([(await gateway_status(measured.mesh.addresses[name])).ready for name in measured.of("gateway")])

    await until(ready, "the gateways", READY_S)


@contextmanager
def started(
    model: Path, run_dir: Path, *, gateways: int = 1, flags: Mapping[str, Mapping[str, Any]] | None = None, **more: Any
) -> Iterator[Measured]:
    """A mesh of its own, all ready; nothing is left of it afterwards. Nothing is refused for an SLO."""
    own = {"conductor": {"slo_ttft_ms": 600_000, "slo_tbt_ms": 600_000}}
    for name, some in (flags or {}).items():
        own[name] = {**own.get(name, {}), **some}
    settings = MeshSettings(
        model=str(model), served_name="m", http_port=0, grpc_port=0, run_dir=str(run_dir), threads=1,
        log_level="warning", flags=own, **more,
    )  # fmt: skip
    ports = plan.Ports()
    specs = plan.plan(settings, run_dir, ports)
    (gateway,) = (spec for spec in specs if spec.service == "gateway")
    specs += [another(gateway, f"gateway-{i}", ports) for i in range(1, gateways)]
    with Mesh(settings, specs) as mesh:
        mesh.wait_ready(READY_S)
        yield Measured(mesh)


def another(spec: plan.ProcessSpec, name: str, ports: plan.Ports) -> plan.ProcessSpec:
    """The same gateway once more, at ports and with files of its own."""
    host = spec.address.rpartition(":")[0]
    port, http, metrics = ports.take(host), ports.take(host), ports.take(host)
    ready_file, log = spec.ready_file.with_name(f"{name}.json"), spec.log.with_name(f"{name}.log")
    own: dict[str, object] = {"--port": port, "--http-port": http, "--metrics-port": metrics}
    own |= {"--ready-file": ready_file, "--instance-id": name}
    argv = []
    for word in spec.argv:
        flag, equals, _ = word.partition("=")
        argv.append(f"{flag}={own[flag]}" if equals and flag in own else word)
    return dataclasses.replace(
        spec, name=name, address=f"{host}:{port}", http=f"{host}:{http}", metrics=f"{host}:{metrics}",
        argv=tuple(argv), log=log, ready_file=ready_file,
    )  # fmt: skip
