"""The processes of a storm: each in its place, with a log, and dead when this process is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from kvmesh.cli.up.plan import Ports
from kvmesh.rpc.process import PARENT_ENV
from tests.chaos.network import Loopback

PORTS = Ports()  # nobody else is given one of these while a process is still starting, or is dead for a while
READY_S = 60.0
END_S = 10.0

# What is no service of ours is wrapped: it dies with its parent too.
WRAPPED = (
    "import os,sys; from kvmesh.rpc.process import die_with_parent as d; d(int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


class Process:
    """One program under one name; may be killed, frozen and started again. Start it on the main thread: it dies with
    the thread that started it."""

    def __init__(self, name: str, net: Loopback, port: int, argv: Sequence[str], folder: Path) -> None:
        self.name = name
        self.net = net
        self.port = port
        self.argv = list(argv)
        self.log = folder / f"{name}.log"
        self.ready_file = folder / f"{name}.ready"
        self.lives = 0
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.net.address(self.name)}:{self.port}"

    @property
    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already"
        self.ready_file.unlink(missing_ok=True)
        self.lives += 1
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVMESH_")}  # settings, too
        env = {**inherited, PARENT_ENV: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            log.write(f"--- life {self.lives} at {time.monotonic():.3f}\n".encode())
            log.flush()
            self._popen = subprocess.Popen(
                [*self.net.inside(self.name), *self.argv],
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """It and its children."""
        assert self._popen is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            me = psutil.Process(self._popen.pid)
            return [me.pid, *(child.pid for child in me.children(recursive=True))]
        return []

    def signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def kill(self, *, rank_only: bool = False) -> None:
        """SIGKILL; returns when nothing of it is left. `rank_only`: its children alone; it then ends by itself."""
        if not self.alive:
            return
        pids = self.pids()
        self.signal(signal.SIGKILL, pids[1:] if rank_only and len(pids) > 1 else pids[:1])
        assert self._popen is not None
        await _until(lambda: self._popen.poll() is not None, END_S, f"{self.name} ends")  # type: ignore[union-attr]
        await _until(lambda: not any(map(_runs, pids)), END_S, f"children of {self.name} end")

    async def ready(self, timeout_s: float = READY_S) -> None:
        """Until it accepts calls. AssertionError with the end of its log when it ends or takes too long."""

        def there() -> bool:
            assert self.alive, f"{self.name} has ended:\n{self.tail()}"
            return self.ready_file.exists()

        await _until(there, timeout_s, f"{self.name} is ready", self.tail)

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def end(self) -> None:
        """At once, whatever state it is in."""
        if self._popen is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(END_S)


def service(kind: str, name: str, net: Loopback, port: int, folder: Path, flags: dict[str, object]) -> Process:
    """`kvmesh serve KIND` under this name."""
    argv = [sys.executable, "-m", "kvmesh.cli", "serve", kind]
    made = Process(name, net, port, argv, folder)
    for key, value in {"host": net.address(name), "port": port, "ready_file": made.ready_file, **flags}.items():
        made.argv += [f"--{key.replace('_', '-')}", str(value)]
    return made


class Redis(Process):
    """A real server whose data survives its restart."""

    def __init__(self, name: str, net: Loopback, port: int, folder: Path) -> None:
        data = folder / name
        data.mkdir()
        options = {
            "bind": net.address(name), "port": port, "dir": data, "appendonly": "yes", "appendfsync": "always",
            "save": "", "protected-mode": "no",
        }  # fmt: skip
        argv = [sys.executable, "-c", WRAPPED, str(os.getpid()), "redis-server"]
        for key, value in options.items():
            argv += [f"--{key}", str(value)]
        super().__init__(name, net, port, argv, folder)

    async def ready(self, timeout_s: float = READY_S) -> None:
        def there() -> bool:
            assert self.alive, f"{self.name} has ended:\n{self.tail()}"
            with contextlib.suppress(OSError), socket.create_connection(self.address.rsplit(":", 1), timeout=0.2):  # type: ignore[arg-type]
                return True
            return False

        await _until(there, timeout_s, f"{self.name} is ready", self.tail)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def _until(what, timeout_s: float, words: str, more=lambda: "") -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {words}\n{more()}"
        await asyncio.sleep(0.02)
