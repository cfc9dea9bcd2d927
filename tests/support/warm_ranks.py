"""Rank processes of tests are forked from one that has imported all they need, torch among it: each would else take a
second or two of CPU to come up. They are children of pytest as if it had started them.

A rank whose environment must be its own from its first instruction (`streaming`) is started as in the product."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence

import psutil

from kvmesh.ranks import client

SUBREAPER, DEATH_SIGNAL = 36, 1  # of prctl
MESSAGE_BYTES, MOST_FDS = 1 << 18, 32
START_S = 60.0
COLD = client.start_process
_started: list[subprocess.Popen[bytes]] = []


def children() -> list[psutil.Process]:
    """Processes that tests have started: all of this one but that from which ranks are forked."""
    forking = {one.pid for one in _started}
    return [child for child in psutil.Process().children() if child.pid not in forking]


@contextlib.contextmanager
def warm_ranks() -> Iterator[None]:
    """Meanwhile ranks of this process are forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
    ours.settimeout(START_S)
    command = [sys.executable, "-m", "tests.support.warm_ranks", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def start(filenos: Sequence[int], env: Mapping[str, str]) -> client.RankProcess:
        return COLD(filenos, env) if client.TUNABLES in env else _Forked(_fork(ours, filenos, env))

    _started.append(process)
    client.start_process = start
    try:
        yield
    finally:
        client.start_process = COLD
        ours.close()
        process.wait(START_S)
        _started.remove(process)


def _fork(sock: socket.socket, filenos: Sequence[int], env: Mapping[str, str]) -> int:
    told = json.dumps({"env": dict(env), "cwd": os.getcwd(), "parent": os.getpid()}).encode()
    _prctl(SUBREAPER, 1)  # who is left by its parent becomes ours
    try:
        socket.send_fds(sock, [told], [1, 2, *filenos])
        return int(sock.recv(64))
    finally:
        _prctl(SUBREAPER, 0)


class _Forked:
    """What `subprocess.Popen` is of a child that this process has not started itself."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout if timeout is not None else 1e9)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    import kvmesh.ranks.worker.pool_worker
    import kvmesh.ranks.worker.worker  # noqa: F401

    gc.freeze()
    gc.enable()
    while True:
        told, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, MOST_FDS)
        if not told:
            return
        between, end = os.pipe()
        middle = os.fork()
        if middle == 0:
            rank = os.fork()
            if rank:
                os.write(end, str(rank).encode())
                os._exit(0)
            os.close(between)
            os.close(end)
            sock.close()
            _become_a_rank(json.loads(told), fds)
        os.waitpid(middle, 0)
        sock.send(os.read(between, 64))
        for fd in (between, end, *fds):
            os.close(fd)


def _become_a_rank(told: dict[str, object], fds: list[int]) -> None:
    """Never returns."""
    from kvmesh.ranks import rank

    code = 1
    try:
        while os.getppid() != told["parent"]:
            time.sleep(0.001)
        out, err, *filenos = fds
        for fd, standard in ((out, 1), (err, 2)):
            os.dup2(fd, standard)
            os.close(fd)
        os.environ.clear()
        os.environ.update(told["env"])  # type: ignore[call-overload]
        os.chdir(str(told["cwd"]))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.argv = ["rank", *map(str, filenos)]
        rank.main()
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


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
