"""A mesh on this machine: starts its services as processes, keeps them running, stops them, leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import logging
import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from kvmesh.cli import probe
from kvmesh.cli.up import checks, plan
from kvmesh.cli.up.settings import EVERY_ADDRESS, MeshSettings
from kvmesh.errors import ConfigError, Unavailable
from kvmesh.private_files import private_folder, private_opener
from kvmesh.rpc import process, security
from kvmesh.rpc.authorisation import ROLE_NAME

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.2
BACKOFF_MOST_S = 10.0
STEADY_S = 10.0  # ready for so long: the next death starts with the first back-off again
LOG_BYTES = 64 << 20  # of a process's log, in two files
CUT_S = 5.0  # between two looks at the logs' sizes
POLL_S = 0.05  # while a process is on its way up
START_ATTEMPTS = 3  # deaths before the first readiness after which the start is given up
GATEWAY_STOP_S = 3.0
STOP_S = 12.0
_CONFIG_EXIT = 2
LEVEL = re.compile(" (?:CRITICAL|ERROR) +")  # of a line that tells of a failure


class ProcessState(enum.Enum):
    """How far one service process is."""

    STARTING = "starting"
    LOADING = "loading"  # accepts calls, not ready yet
    READY = "ready"
    DOWN = "down"  # died, or was told to; comes back after the back-off
    STOPPED = "stopped"


@dataclass(frozen=True)
class Event:
    """What happened to a process; `text` is the cause of a death or the time a start took."""

    name: str
    state: ProcessState
    text: str = ""


class ServiceProcess(Protocol):
    """The process of a service, with the methods of `subprocess.Popen` that are needed here."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


def start_service(argv: Sequence[str], env: Mapping[str, str], out: IO[bytes]) -> ServiceProcess:
    """Starts a process that leads a group of its own and writes to `out`."""
    return subprocess.Popen(
        argv, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, process_group=0
    )


@dataclass
class Process:
    """One supervised process; read by others, changed only under the mesh's lock."""

    spec: plan.ProcessSpec
    state: ProcessState = ProcessState.STARTING
    pid: int = 0
    restarts: int = 0
    last_exit: str = ""
    _popen: ServiceProcess | None = field(default=None, repr=False)
    _log_start: int = 0
    _spawned_at: float = 0.0
    _ready_at: float = 0.0
    _backoff_s: float = 0.0
    _retry_at: float = 0.0
    _early_deaths: int = 0
    _fatal: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def last_words(self) -> str:
        """What tells most of how this life of the process is going: see `last_line`."""
        return last_line(self.spec.log, self._log_start)


class Mesh:
    """Supervisor of one mesh.

        mesh = Mesh(settings); mesh.start(); mesh.wait_ready(); ...; mesh.stop()

    One thread of its own spawns, watches and restarts every process, with the same ports. `settings.model` must be a
    checkpoint folder. `specs`: these processes in place of a whole mesh. Thread-safe."""

    def __init__(self, settings: MeshSettings, specs: Sequence[plan.ProcessSpec] = ()) -> None:
        if not settings.run_dir:
            raise ConfigError("run_dir='': a mesh needs a folder for its logs", field="run_dir")
        if not specs:
            checks.check_own_ports(settings)
        self.run_dir = Path(settings.run_dir)
        own_tls: Mapping[str, security.TlsFiles] = {}
        if settings.tls:
            from kvmesh.rpc.certificates import make_role_certificates

            hosts = [one for one in (settings.host, settings.advertise_host) if one not in EVERY_ADDRESS]
            wanted = plan.certificates(settings)
            made = make_role_certificates(self.run_dir / "tls", wanted, hosts)
            # All are called by one host's addresses: what tells them apart is the role.
            own_tls = {name: dataclasses.replace(one.files, tls_server_name=ROLE_NAME) for name, one in made.items()}
            # Whoever speaks to the mesh from outside is its operator.
            settings = dataclasses.replace(settings, tls=False, **dataclasses.asdict(own_tls[plan.OPERATOR]))
        self.http_ca = ""  # who vouches for the REST port, where nobody else does
        if settings.http_tls:
            from kvmesh.rpc.certificates import make_certificates

            hosts = [one for one in (settings.host, settings.advertise_host) if one not in EVERY_ADDRESS]
            own = make_certificates(self.run_dir / "http-tls", hosts)
            settings = dataclasses.replace(
                settings, http_tls=False, http_tls_cert=str(own.cert), http_tls_key=str(own.key)
            )
            self.http_ca = str(own.ca)
        security.load_pair(settings.http_tls_cert, settings.http_tls_key, "http_tls_cert", "http_tls_key")
        self.settings = settings
        self.security = security.Security.load(settings)  # what clients of this mesh use, too
        self._ports = plan.Ports()  # claimed as long as this mesh may start somebody again
        specs = specs or plan.plan(settings, self.run_dir, self._ports, own_tls)
        self.processes: dict[str, Process] = {spec.name: Process(spec) for spec in specs}
        self.addresses: dict[str, str] = {spec.name: spec.address for spec in specs}
        self.url = next((f"{'https' if spec.https else 'http'}://{spec.http}" for spec in specs if spec.http), "")
        self._on_event: Callable[[Event], None] | None = None
        self._changed = threading.Condition()
        self._inbox: queue.Queue[tuple[Process, int] | None] = queue.Queue()
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        self._cut_at = 0.0
        self._thread = threading.Thread(target=self._supervise, name="kvmesh-supervisor", daemon=True)

    # ── what callers do ───────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start every process; returns at once, see `wait_ready`."""
        try:
            for folder in (".", "logs", "traces", "ready", "redis"):
                private_folder(self.run_dir / folder)
        except OSError as err:
            raise ConfigError(f"run_dir={str(self.run_dir)!r}: {err.strerror}", field="run_dir") from None
        self._thread.start()

    def listen(self, on_event: Callable[[Event], None]) -> None:
        """Have `on_event` called, from the mesh's thread, whenever a process changes. Before `start`."""
        self._on_event = on_event

    def wait_ready(
        self,
        timeout_s: float = 180.0,
        names: Collection[str] | None = None,
        stopped: threading.Event | None = None,
    ) -> None:
        """Wait until all (or `names`) are ready, or `stopped` is set. ConfigError: one refused its
        configuration; Unavailable: one keeps dying, or time ran out."""
        wanted = [self.processes[name] for name in (names or self.processes)]
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not all(one.state is ProcessState.READY for one in wanted) and not (stopped and stopped.is_set()):
                for one in wanted:
                    if one._fatal:
                        text = one.last_exit.removeprefix(f"exit code {_CONFIG_EXIT}: ")
                        raise ConfigError(f"{one.name}: {text.removeprefix('error: ')}")
                    if one._early_deaths >= START_ATTEMPTS:
                        raise Unavailable(f"{one.name} keeps dying: {one.last_exit} (log: {one.spec.log})")
                if self._stopping.is_set():
                    raise Unavailable("the mesh is being stopped")
                left = deadline - time.monotonic()
                if left <= 0:
                    late = [one for one in wanted if one.state is not ProcessState.READY]
                    told = "; ".join(f"{one.name} is {one.state.value} ({self._last_line(one)})" for one in late)
                    raise Unavailable(f"not ready after {timeout_s:.0f} s: {told}")
                # `stopped` is set by a signal handler, which can notify nobody: hence the short turns.
                self._changed.wait(min(left, 0.25) if stopped else left)

    def kill(self, name: str, sig: int = signal.SIGKILL) -> None:
        """Send `sig` to the process `name` (of an instance: its front). After a deadly one `wait_ready`
        waits for the next life."""
        one = self.processes[name]
        with self._changed:
            if one._popen is None:
                return
            if sig in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
                one.state = ProcessState.DOWN
            one._popen.send_signal(sig)

    def stop(self) -> None:
        """Stop every process and wait for it; nothing is left running. Idempotent."""
        self._stopping.set()
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def stop_now(self) -> None:
        """Make a running `stop` kill what is still there."""
        self._hurry.set()
        self._inbox.put(None)

    def __enter__(self) -> Mesh:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # ── the supervisor's thread ───────────────────────────────────────────────────────────────────

    def _supervise(self) -> None:
        # Children die with the thread that spawned them (PR_SET_PDEATHSIG): this one outlives them all.
        try:
            for one in self.processes.values():
                self._spawn(one)
            while not self._stopping.is_set():
                self._take(self._pause())
                now = time.monotonic()
                if now >= self._cut_at:
                    self._cut_at = now + CUT_S
                    for one in self.processes.values():
                        cut_log(one.spec.log, LOG_BYTES)
                for one in self.processes.values():
                    if one._popen is None and now >= one._retry_at:
                        self._spawn(one)
                    elif one.state in (ProcessState.STARTING, ProcessState.LOADING):
                        self._look(one)
        except Exception:
            log.exception("the supervisor failed")
        finally:
            self._stopping.set()
            self._stop_all()

    def _pause(self) -> float | None:
        """Seconds until something is to be done unasked; None: nothing is."""
        waits = [max(0.0, self._cut_at - time.monotonic())]
        waits += [max(0.0, one._retry_at - time.monotonic()) for one in self.processes.values() if not one._popen]
        if any(one.state in (ProcessState.STARTING, ProcessState.LOADING) for one in self.processes.values()):
            waits.append(POLL_S)
        return min(waits, default=None)

    def _take(self, timeout_s: float | None) -> None:
        """Handle one exit, if there is one within the time."""
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=timeout_s)
            if item is not None:
                self._exited(*item)

    def _spawn(self, one: Process) -> None:
        spec = one.spec
        spec.ready_file.unlink(missing_ok=True)
        with open(spec.log, "ab", opener=private_opener) as out:
            one._log_start = out.tell()
            popen = start_service(spec.argv, {**spec.env, process.PARENT_ENV: str(os.getpid())}, out)
        with self._changed:
            one._popen, one.pid = popen, popen.pid
            one._spawned_at = time.monotonic()
        self._become(one, ProcessState.STARTING)
        threading.Thread(
            target=lambda: self._inbox.put((one, popen.wait())), name=f"wait-{one.name}", daemon=True
        ).start()

    def _look(self, one: Process) -> None:
        """Is it on its way, up or ready? (`kill` may have marked it down meanwhile.)"""
        spec = one.spec
        if one.state is ProcessState.STARTING and spec.ready_file.exists():
            self._become(one, ProcessState.LOADING, only_from=ProcessState.STARTING)
        if one.state is ProcessState.LOADING and self._is_ready(spec):
            now = time.monotonic()
            one._ready_at, one._early_deaths = now, 0
            self._become(one, ProcessState.READY, f"{now - one._spawned_at:.1f} s", only_from=ProcessState.LOADING)

    def _is_ready(self, spec: plan.ProcessSpec) -> bool:
        if spec.service == "redis":
            return probe.redis_ready(spec.address)
        return probe.ready(spec.address, spec.http, self.security, https=spec.https)

    def _exited(self, one: Process, code: int) -> None:
        popen = one._popen
        assert popen is not None, "an exit is told once"
        _kill_group(popen.pid)  # its ranks, had it not the time to end them
        cause = self._cause(one, code)
        now = time.monotonic()
        with self._changed:
            one._popen, one.pid = None, 0
            one.last_exit = cause
            if not one.restarts and not one._ready_at:
                one._fatal = code == _CONFIG_EXIT
            one._early_deaths += one.state is not ProcessState.DOWN  # DOWN: somebody asked for it
            steady = one._ready_at > one._spawned_at and now - one._ready_at >= STEADY_S
            one._backoff_s = BACKOFF_FIRST_S if steady or not one._backoff_s else one._backoff_s * 2
            one._backoff_s = min(one._backoff_s, BACKOFF_MOST_S)
            one._retry_at = now + one._backoff_s
            if not self._stopping.is_set():
                one.restarts += 1
        if self._stopping.is_set():
            self._become(one, ProcessState.STOPPED, cause)
        else:
            self._become(one, ProcessState.DOWN, cause)

    def _become(
        self, one: Process, state: ProcessState, text: str = "", *, only_from: ProcessState | None = None
    ) -> None:
        with self._changed:
            if only_from not in (None, one.state):
                return
            one.state = state
            self._changed.notify_all()
        self._write_state()
        if self._on_event:
            try:
                self._on_event(Event(one.name, state, text))
            except Exception:
                log.exception("the listener of events failed")

    # ── stopping ──────────────────────────────────────────────────────────────────────────────────

    def _stop_all(self) -> None:
        # The gateway first: it ends its clients' streams while those who feed them still live.
        everyone = list(self.processes.values())
        gateways = [one for one in everyone if one.spec.service == "gateway"]
        self._terminate(gateways, GATEWAY_STOP_S)
        self._terminate(everyone, STOP_S)
        for one in everyone:
            if one._popen is not None:
                why = "was told twice to stop" if self._hurry.is_set() else "did not stop in time"
                log.warning("%s %s, killing it", one.name, why)
                _kill_group(one._popen.pid)
        while any(one._popen is not None for one in everyone):
            self._take(None)
        with self._changed:
            for one in everyone:
                one.state = ProcessState.STOPPED
            self._changed.notify_all()
        self._write_state()

    def _terminate(self, group: list[Process], timeout_s: float) -> None:
        for one in group:
            if one._popen is not None:
                one._popen.send_signal(signal.SIGTERM)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one._popen.pid, signal.SIGCONT)  # a stopped process answers no SIGTERM
        deadline = time.monotonic() + timeout_s
        while any(one._popen is not None for one in group) and not self._hurry.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._take(left)

    # ── what is told ──────────────────────────────────────────────────────────────────────────────

    def _last_line(self, one: Process) -> str:
        return one.last_words or "its log is empty"

    def _cause(self, one: Process, code: int) -> str:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        line = one.last_words
        return f"{how}: {line}" if line and code >= 0 else how

    def _write_state(self) -> None:
        """Keep `mesh.json` true; readers see all of it or the previous one."""
        with self._changed:
            services: dict[str, Any] = {
                one.name: {
                    "service": one.spec.service,
                    "state": one.state.value,
                    "pid": one.pid,
                    "restarts": one.restarts,
                    "address": one.spec.address,
                    "metrics": one.spec.metrics,
                    "log": str(one.spec.log),
                }
                for one in self.processes.values()
            }
            told = {
                "pid": os.getpid(),
                "run_dir": str(self.run_dir),
                "model": self.settings.first_model,
                "model_path": self.settings.model,
                "models": {self.settings.first_model: self.settings.model, **self.settings.further_models},
                "url": self.url,
                "http_ca": self.http_ca,
                "tls": {key: getattr(self.settings, key) for key in security.FIELDS},
                "api_keys": self.settings.api_keys,
                "grpc": self.addresses.get("gateway", ""),
                "services": services,
                "joined": dataclasses.asdict(self.settings.joined) if self.settings.joined else None,
            }
            part = self.run_dir / ".mesh.json.part"
            with open(part, "w", encoding="utf-8", opener=private_opener) as file:
                file.write(json.dumps(told, indent=1))
            part.replace(self.run_dir / "mesh.json")


def _kill_group(pid: int) -> None:
    """SIGKILL whatever is left of the process group that `pid` led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def cut_log(path: Path, most_bytes: int) -> bool:
    """Copy a log that has half of `most_bytes` to NAME.1 and empty it: whoever writes it, ranks too, appends. A line
    that comes between the two steps is lost. False: it is shorter, or cannot be cut."""
    with contextlib.suppress(OSError):
        if path.stat().st_size >= most_bytes // 2:
            shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)
            return True
    return False


def last_line(path: Path, start: int = 0) -> str:
    """What tells most about an end: the message of the last error in a log after byte `start`, else the last line."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(start if start <= size else 0, size - 16_384))  # it may have been cut since
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        return ""
    errors = [line for line in lines if LEVEL.search(line) or line.startswith("error: ")]
    told, _, raised = LEVEL.split((errors or lines or [""])[-1])[-1].partition(" | ")
    twice = raised.partition(": ")[2].startswith(told.partition(": ")[2] or told)
    return (told if twice or not raised else f"{told} | {raised}")[:400]
