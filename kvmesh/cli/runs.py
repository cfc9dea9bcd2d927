"""Run folders: where `kvmesh up` keeps logs, traces and `mesh.json`, and how other commands find them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmesh.cli.console import state_dir
from kvmesh.errors import ConfigError
from kvmesh.private_files import private_folder

if TYPE_CHECKING:
    from kvmesh.rpc.security import Security, TlsFiles

KEPT_RUNS = 20
STATE_FILE = "mesh.json"


def new_run_dir() -> Path:
    """A folder for a run that begins now; the oldest runs beyond the last KEPT_RUNS are removed."""
    base = state_dir() / "runs"
    name = time.strftime("%Y%m%d-%H%M%S")
    for extra in ("", *(f".{n}" for n in range(1, 100))):
        path = base / f"{name}{extra}"
        try:
            private_folder(base)
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        except OSError as err:
            raise ConfigError(f"run_dir={str(path)!r}: {err.strerror}; choose one with --run-dir") from None
        _prune(base)
        return path
    raise ConfigError(f"run_dir={str(base)!r}: holds too many runs of this second")


def _prune(base: Path) -> None:
    runs = sorted((path for path in base.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in runs[:-KEPT_RUNS]:
        if not alive(_read(path).get("pid", 0)):
            shutil.rmtree(path, ignore_errors=True)


def point_latest(run_dir: Path) -> None:
    """Make `latest` in the state folder name this run."""
    link = state_dir() / "latest"
    part = link.with_name(f".latest.{os.getpid()}")
    with contextlib.suppress(OSError):  # a convenience: an unwritable home stops nobody
        link.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        part.symlink_to(run_dir.resolve())
        part.replace(link)


def alive(pid: int) -> bool:
    """Does a process of this number run? (0: none)"""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid > 0


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Run:
    """One run of `kvmesh up`, as its `mesh.json` tells."""

    run_dir: Path
    told: dict[str, Any]

    @property
    def running(self) -> bool:
        return alive(int(self.told.get("pid", 0)))

    @property
    def url(self) -> str:
        return str(self.told.get("url", ""))

    @property
    def http_ca(self) -> str:
        """Who vouches for its REST port; "": those whom this machine trusts anyway."""
        return str(self.told.get("http_ca", ""))

    @property
    def tls(self) -> TlsFiles:
        """How its services speak TLS, if they do."""
        from kvmesh.rpc.security import FIELDS, TlsFiles

        told = self.told.get("tls") or {}
        return TlsFiles(**{key: str(told.get(key, "")) for key in FIELDS})

    def security(self) -> Security:
        """What clients of its services use. ConfigError: a file is gone."""
        from kvmesh.rpc.security import Security

        return Security.load(self.tls)

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.told.get("services", {})
        return found


def masters(run: Run) -> str:
    """The addresses of its store masters, "a:1,b:2"."""
    return _addresses(run, "store")


def conductors(run: Run) -> str:
    """The addresses of its conductors, "a:1,b:2"."""
    return _addresses(run, "conductor")


def _addresses(run: Run, service: str) -> str:
    if joined := run.told.get("joined"):  # those of the other machines
        return ",".join(joined["masters" if service == "store" else "conductors"])
    return ",".join(one["address"] for one in run.services.values() if one["service"] == service)


def rest(run: Run) -> str:
    """The URL of its REST port. ConfigError: this machine has joined a mesh, whose gateway is on another one."""
    if not run.url:
        why = f"this machine serves in the mesh of {conductors(run)}, whose gateway is on another one"
        raise ConfigError(f"url='': {why}: give --url, as `kvmesh up` printed it there", field="url")
    return run.url


def secure(run: Run | None) -> None:
    """Have this process call services as `run` wants it, without one as KVMESH_TLS_* say. ConfigError: a bad file."""
    from kvmesh.rpc.security import TlsFiles, configure

    configure(run.tls if run and any(dataclasses.astuple(run.tls)) else TlsFiles.from_env(os.environ))


def find(run_dir: Path | None) -> Run:
    """The run in `run_dir`, by default the latest one. ConfigError: there is none."""
    path = run_dir or state_dir() / "latest"
    told = _read(path)
    if not told and run_dir is None:
        raise ConfigError("no mesh was started here yet: run `kvmesh up` first, or name its folder with --run-dir")
    if not told:
        raise ConfigError(f"run_dir={str(path)!r}: holds no {STATE_FILE} of a mesh", field="run_dir")
    return Run(path.resolve(), told)


def find_running(run_dir: Path | None) -> Run:
    """Finds a run as `find` does. ConfigError also when that mesh has stopped; it names one that runs, if there is."""
    run = find(run_dir)
    if not run.running:
        runs = [Run(path, _read(path)) for path in sorted((state_dir() / "runs").glob("*"), reverse=True)]
        other = next((one for one in runs if run_dir is None and one.running), None)
        hint = "start one with `kvmesh up`"
        if other is not None:
            hint = f"that of {other.run_dir} runs{other.url and f' at {other.url}'}: name it with --run-dir or --url"
        raise ConfigError(f"the mesh of {run.run_dir} has stopped: {hint}")
    return run
