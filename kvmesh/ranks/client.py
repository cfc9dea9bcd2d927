"""The front's side of one rank starts the process, sends without blocking, and dispatches the rank's messages on the
event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvmesh.errors import BY_CODE, InternalError, KvmeshError
from kvmesh.ranks import expert_metrics, transfer_metrics
from kvmesh.ranks import protocol as m
from kvmesh.ranks.front_port import FrontPort
from kvmesh.ranks.ipc import RankFrames, frame

log = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES = 4 << 20
EXIT_GRACE_S = 2.0
REAP_S = 0.2
TUNABLES = "GLIBC_TUNABLES"
STREAMING = "glibc.cpu.x86_non_temporal_threshold"
STREAMING_BYTES = 512 << 10  # below a piece of the transfer engine's copies (1 MiB)


def streaming_copies(env: Mapping[str, str]) -> str:
    """Returns the value of GLIBC_TUNABLES with which memmove of STREAMING_BYTES and more stores past the cache, and
    does not read first what it overwrites: right for a process that only stores. What the user has set stays; other C
    libraries ignore it."""
    known = env.get(TUNABLES, "")
    return known if STREAMING in known else ":".join(filter(None, (known, f"{STREAMING}={STREAMING_BYTES:#x}")))


class RankProcess(Protocol):
    """A rank's process, with the methods of `subprocess.Popen` that are needed here."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...

    def kill(self) -> None: ...


def start_process(filenos: Sequence[int], env: Mapping[str, str]) -> RankProcess:
    """Starts `python -m kvmesh.ranks.rank` with these file descriptors."""
    command = [sys.executable, "-m", "kvmesh.ranks.rank", *map(str, filenos)]
    return subprocess.Popen(command, pass_fds=filenos, stdin=subprocess.DEVNULL, env=env)


def rank_env(threads: int, streaming: bool = False) -> dict[str, str]:
    """Returns the environment of a rank's process. With `streaming` its large copies go past the cache."""
    env = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        env[name] = str(threads)
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if streaming:
        env[TUNABLES] = streaming_copies(env)
    return env


def rank_socket() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a socket between this process and a rank's."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return ours, theirs


class RankLink(Protocol):
    """Carries the messages of ranks on another host (`kvmesh.instance.host_link`)."""

    address: str

    def send(self, rank: int, message: m.ToRank) -> None: ...

    async def end(self, rank: int, grace_s: float) -> None: ...


class RankClient:
    """Owns one rank process and the socket to it, or speaks to one on another host over a link. All methods belong to
    the event loop that called `spawn` or `attach`."""

    def __init__(
        self, rank: int, on_message: Callable[[int, m.ToFront], None], on_lost: Callable[[int, str], None]
    ) -> None:
        self.rank = rank
        self._on_message = on_message
        self._on_lost = on_lost
        self._frames = RankFrames(m.ToFront)
        self._port: FrontPort | None = None
        self._process: RankProcess | None = None
        self._link: RankLink | None = None
        self._remote = (0, "")  # process and host, where there is a link
        self._ready: asyncio.Future[m.Ready] | None = None
        self._closing = False
        self._refused = False  # whether the rank has reported why it cannot start, and ends
        self._nonce = 0
        self.last_pong = 0.0
        self.cpu_seconds = 0.0
        self._experts = expert_metrics.ExpertMetrics()

    @property
    def ready(self) -> m.Ready:
        """The rank's Ready message. Raises InternalError before the rank is configured."""
        if self._ready is None or not self._ready.done():
            raise InternalError(f"rank {self.rank} is not configured yet")
        return self._ready.result()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else self._remote[0]

    @property
    def _name(self) -> str:
        where = f" on {self._remote[1]}" if self._remote[1] else ""
        return f"rank {self.rank} (pid {self.pid}{where})"

    def spawn(self, threads: int, streaming: bool = False, peers: Sequence[socket.socket] = ()) -> None:
        """Starts the process (never by fork: the front has threads of its own). With `streaming` its large copies go
        past the cache, see `streaming_copies`. `peers` are the process's ends of the sockets between leader and
        followers."""
        self._ready = asyncio.get_running_loop().create_future()
        ours, theirs = rank_socket()
        filenos = [sock.fileno() for sock in (theirs, *peers)]
        try:
            self._process = start_process(filenos, rank_env(threads, streaming))
        finally:
            theirs.close()
        self._port = FrontPort(ours, self._came, self._lost)

    def attach(self, link: RankLink, pid: int) -> None:
        """Speaks to a rank that runs as `pid` at the other end of `link`, which calls `received` and `lost`."""
        self._ready = asyncio.get_running_loop().create_future()
        self._link, self._remote = link, (pid, link.address)

    def received(self, message: m.ToFront) -> None:
        """Takes a message that came over the link."""
        self.last_pong = time.monotonic()
        self._dispatch(message)

    def lost(self, cause: str) -> None:
        """Takes the end of a rank at the other end of the link, or of the link."""
        if self._link is not None:
            self._lost(cause)

    async def configure(self, configure: m.Configure, timeout_s: float) -> m.Ready:
        """Sends Configure and waits for Ready. Raises what the rank answered (CheckpointError, ConfigError ...), or
        InternalError when it does not answer in time."""
        assert self._ready is not None
        self.send(configure)
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except TimeoutError:
            raise InternalError(f"rank {self.rank} did not get ready within {timeout_s:.0f} s") from None

    def moved(self, ready: m.Ready) -> None:
        """Takes note that the rank's memory lies elsewhere than its Ready has said."""
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.set_result(ready)

    def send(self, message: m.ToRank) -> None:
        """Sends a message without blocking: what the socket does not take now follows when it can."""
        if self._link is not None:
            self._link.send(self.rank, message)
            return
        if self._port is not None:
            self._port.send(frame(message))

    def ping(self) -> None:
        self._nonce += 1
        self.send(m.Ping(self._nonce))

    def silent_s(self, now: float) -> float:
        """Returns the seconds since the rank last sent anything."""
        return now - self.last_pong if self.last_pong else 0.0

    def _came(self, data: bytes) -> None:
        self.last_pong = time.monotonic()
        for message in self._frames.feed(data):
            self._dispatch(message)

    def _dispatch(self, message: m.ToFront) -> None:
        assert self._ready is not None
        match message:
            case m.Ready():
                if not self._ready.done():
                    self._ready.set_result(message)
            case m.InitFailed(code, text):
                self._refused = True
                if self._link is not None:
                    text = f"{text} (rank {self.rank} on {self._remote[1]})"
                if not self._ready.done():
                    self._ready.set_exception(BY_CODE.get(code, InternalError)(text))
            case m.RankFailed(text):
                self._lost(text)  # at once: the other ranks, which wait for this one, fail next and are not the cause
            case m.Pong(_, cpu_seconds, transfer, experts):
                self.cpu_seconds = cpu_seconds
                if transfer is not None:
                    transfer_metrics.tell(self, self.rank, transfer)
                if experts is not None:
                    self._experts.tell(self, experts)
            case _:
                try:
                    self._on_message(self.rank, message)
                except Exception:
                    # One bad message must not stop those behind it: the loop's reader would swallow them.
                    log.exception("handling %s of rank %d failed", type(message).__name__, self.rank)

    def _lost(self, cause: str = "") -> None:
        self._detach()
        if self._closing or self._refused:  # an expected end, which is reported elsewhere
            return
        text = f"{self._name} {cause or self._end()}"
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(KvmeshError(text))
        self._on_lost(self.rank, text)

    def _end(self) -> str:
        """Returns how the process behind a closed socket ended. The kernel closes the socket a moment before the
        process is gone."""
        try:
            code = self._process.wait(REAP_S) if self._process else 0
        except subprocess.TimeoutExpired:
            return "closed its socket"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

    def killed(self) -> str:
        """Returns which signal has killed the rank's process, as a cause; "" while it runs, and when it ended by
        itself."""
        code = self._process.poll() if self._process else None
        return f"{self._name} {self._end()}" if code is not None and code < 0 else ""

    def _detach(self) -> None:
        if not self._closing:
            self._link = None  # nothing of it is wanted any more, and its end is waited for no longer
        if self._port is not None:
            self._port.close()
            self._port = None

    async def close(self) -> None:
        """Asks the rank to end, then kills it. It takes at most twice the grace; a rank ignores SIGTERM."""
        transfer_metrics.forget(self)
        expert_metrics.forget(self)
        self.send(m.Shutdown())
        self._closing = True
        if self._link is not None:
            await self._link.end(self.rank, EXIT_GRACE_S)
        process = self._process
        if process is not None:
            for stop_signal in (0, signal.SIGKILL):
                process.send_signal(stop_signal)  # 0: only look; the Shutdown message is the first request
                if await self._exited(process):
                    break
        self._detach()
        if self._ready is not None and self._ready.done() and not self._ready.cancelled():
            self._ready.exception()  # retrieved: never "exception was never retrieved"

    @staticmethod
    async def _exited(process: RankProcess) -> bool:
        deadline = time.monotonic() + EXIT_GRACE_S
        while process.poll() is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.01)
        return True
