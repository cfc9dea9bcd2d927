"""Processes of tests that are forked from one which has imported all they need: each would else take seconds of CPU to
come up. They are children of who asks for them, as if it had started them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SUBREAPER, DEATH_SIGNAL, NAME = 36, 1, 15  # of prctl
MESSAGE_BYTES, MOST_FDS = 1 << 18, 32
START_S = 120.0
FORKING = "forks-others"  # what the kernel calls a process that others are forked from; at most 15 characters

Message = dict[str, Any]


class Forked:
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


class Forker:
    """Has the end of the socket at which processes are asked for. Thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()

    def fork(self, wanted: Message, filenos: Sequence[int]) -> Forked:
        """A process that does what is wanted; the first two descriptors are its standard output and error."""
        told = json.dumps({**wanted, "cwd": os.getcwd(), "parent": os.getpid()}).encode()
        with self._lock:
            prctl(SUBREAPER, 1)  # who is left by its parent becomes ours
            try:
                socket.send_fds(self._sock, [told], list(filenos))
                return Forked(int(self._sock.recv(64)))
            finally:
                prctl(SUBREAPER, 0)


@contextlib.contextmanager
def forking_process(module: str, *words: str) -> Iterator[socket.socket]:
    """Meanwhile `python -m MODULE WORDS... FD` forks what is asked for at the socket."""
    ours, theirs = sockets()
    command = [sys.executable, "-m", module, *words, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.wait(START_S)


def sockets() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in pair:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES)
    pair[0].settimeout(START_S)
    return pair


def fork_others(sock: socket.socket, run: Callable[[Message, list[int]], None]) -> None:
    """Forks what is asked for at the socket, until nobody is at its other end. `run` gets the message and, of the
    descriptors, those after the first two."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prctl(NAME, ctypes.c_char_p(FORKING.encode()))
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
            _become(json.loads(told), fds, run)
        os.waitpid(middle, 0)
        sock.send(os.read(between, 64))
        for fd in (between, end, *fds):
            os.close(fd)


def _become(told: Message, fds: list[int], run: Callable[[Message, list[int]], None]) -> None:
    """Never returns."""
    code = 1
    try:
        prctl(NAME, ctypes.c_char_p(b"python"))
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
        run(told, filenos)
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


def prctl(option: int, value: int | ctypes.c_char_p) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
