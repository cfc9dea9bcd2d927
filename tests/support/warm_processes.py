"""Ranks and services of tests are forked from one process that has imported all they need, torch among it: each would
else take seconds of CPU to come up. They are children of who asks for them, as if it had started them.

Where services are forked, each instance's front gets a process of its own that ranks are forked from. What tests start
by a command (`kvmesh up`) comes up as in the product, and so does a rank whose environment must be its own from its
first instruction (`streaming`)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import psutil

from kvmesh.cli.up import mesh
from kvmesh.ranks import client

SUBREAPER, DEATH_SIGNAL, NAME = 36, 1, 15  # of prctl
MESSAGE_BYTES, MOST_FDS = 1 << 18, 32
START_S = 120.0
COLD, COLD_SERVICE = client.start_process, mesh.start_service
SERVE = ["-m", "kvmesh.cli", "serve"]
FRONTS = {"prefill", "decode", "coupled", "ranks"}  # services that start ranks
FORKING = "forks-ranks"  # what the kernel calls a process that others are forked from; at most 15 characters


def children(pid: int | None = None) -> list[psutil.Process]:
    """Processes that this one (or `pid`) has started: all its children but those from which others are forked."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() != FORKING:
                found.append(child)
    return found


@contextlib.contextmanager
def warm_ranks() -> Iterator[None]:
    """Meanwhile ranks of this process are forked."""
    with _forker("ranks") as forker:
        client.start_process = forker.rank
        try:
            yield
        finally:
            client.start_process = COLD


@contextlib.contextmanager
def warm_services() -> Iterator[None]:
    """Meanwhile services that a `Mesh` of this process starts are forked, and so are their ranks."""
    with _forker("services") as forker:
        mesh.start_service = forker.service
        try:
            yield
        finally:
            mesh.start_service = COLD_SERVICE


@contextlib.contextmanager
def _forker(what: str) -> Iterator[_Forker]:
    ours, theirs = _sockets()
    command = [sys.executable, "-m", "tests.support.warm_processes", what, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    try:
        yield _Forker(ours)
    finally:
        ours.close()
        process.wait(START_S)


def _sockets() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
    pair[0].settimeout(START_S)
    return pair


class _Forker:
    """Has the end of the socket at which processes are asked for. Thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def rank(self, filenos: Sequence[int], env: Mapping[str, str]) -> client.RankProcess:
        """As `kvmesh.ranks.client.start_process`."""
        if client.TUNABLES in env:
            return COLD(filenos, env)
        return self._fork({"env": dict(env)}, [1, 2, *filenos])

    def service(self, argv: Sequence[str], env: Mapping[str, str], out: IO[bytes]) -> mesh.ServiceProcess:
        """As `kvmesh.cli.up.mesh.start_service`."""
        if list(argv[1:4]) != SERVE:  # Redis
            return COLD_SERVICE(argv, env, out)
        return self._fork({"env": dict(env), "argv": list(argv[3:])}, [out.fileno(), out.fileno()])

    def _fork(self, wanted: dict[str, Any], filenos: Sequence[int]) -> _Forked:
        told = json.dumps({**wanted, "cwd": os.getcwd(), "parent": os.getpid()}).encode()
        with self._lock:
            _prctl(SUBREAPER, 1)  # who is left by its parent becomes ours
            try:
                socket.send_fds(self._sock, [told], list(filenos))
                return _Forked(int(self._sock.recv(64)))
            finally:
                _prctl(SUBREAPER, 0)


class _Forked:
    """What `subprocess.Popen` is of a child that this process has not started itself. Thread-safe."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has waited for it
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        until = time.monotonic() + (timeout or 0.0)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.002)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ── the process that forks ───────────────────────────────────────────────────────────────────────────────


def main() -> None:
    _prctl(DEATH_SIGNAL, signal.SIGKILL)
    what, fileno = sys.argv[1:]
    sock = socket.socket(fileno=int(fileno))
    gc.disable()
    import kvmesh.ranks.worker.pool_worker
    import kvmesh.ranks.worker.worker  # noqa: F401

    if what == "services":
        _import_services()
    gc.freeze()
    gc.enable()
    _fork_others(sock)


def _import_services() -> None:
    import kvmesh.cli.app
    import kvmesh.rpc.pb
    from kvmesh.cli.serve import SERVICES

    for service in SERVICES.values():
        importlib.import_module(service.main)
    for module in pkgutil.iter_modules(kvmesh.rpc.pb.__path__, "kvmesh.rpc.pb."):
        importlib.import_module(module.name)


def _fork_others(sock: socket.socket) -> None:
    """Forks what is asked for at the socket, until nobody is at its other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(NAME, ctypes.c_char_p(FORKING.encode()))
    while True:
        told, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, MOST_FDS)
        if not told:
            return
        between, end = os.pipe()
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid:
                os.write(end, str(pid).encode())
                os._exit(0)
            os.close(between)
            os.close(end)
            sock.close()
            _become(json.loads(told), fds)
        os.waitpid(middle, 0)
        sock.send(os.read(between, 64))
        for fd in (between, end, *fds):
            os.close(fd)


def _become(told: dict[str, Any], fds: list[int]) -> None:
    """Never returns."""
    code = 1
    try:
        _prctl(NAME, ctypes.c_char_p(b"python"))
        while os.getppid() != told["parent"]:
            time.sleep(0.001)
        out, err, *filenos = fds
        for fd, standard in ((out, 1), (err, 2)):
            os.dup2(fd, standard)
        for fd in {out, err}:
            os.close(fd)
        os.environ.clear()
        os.environ.update(told["env"])
        os.chdir(told["cwd"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _service(told["argv"])() if "argv" in told else _rank(filenos)()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _rank(filenos: Sequence[int]) -> Callable[[], None]:
    from kvmesh.ranks import rank

    sys.argv = ["rank", *map(str, filenos)]
    return rank.main


def _service(argv: list[str]) -> Callable[[], None]:
    from kvmesh.cli import app

    os.setpgid(0, 0)
    if argv[1] in FRONTS:
        ours, theirs = _sockets()
        if os.fork() == 0:
            try:
                ours.close()
                _prctl(DEATH_SIGNAL, signal.SIGKILL)
                _fork_others(theirs)
            finally:
                os._exit(0)
        theirs.close()
        client.start_process = _Forker(ours).rank
    sys.argv = ["kvmesh", *argv]
    return app.main


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
