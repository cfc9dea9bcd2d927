"""One service process: an event loop, signals that stop it, and an end together with its parent."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from types import FrameType

import uvloop

from kvmesh.loading import rare_collections
from kvmesh.telemetry import readiness

# Set by a supervisor to its pid: the process dies with it, whatever kills it.
PARENT_ENV = "KVMESH_PARENT_PID"

MAX_DESCRIPTORS = 1 << 16

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int | None = None) -> None:
    """Has the kernel SIGKILL this process when the thread that started it ends (on Linux; elsewhere it does nothing).

    `parent_pid` is the expected parent; when it is already gone the process exits at once.
    """
    try:
        prctl = ctypes.CDLL(None, use_errno=True).prctl
    except (OSError, AttributeError):
        return
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os._exit(1)  # it died before the call above


def follow_supervisor() -> None:
    """Calls `die_with_parent` if a supervisor started this process (environment `KVMESH_PARENT_PID`)."""
    pid = os.environ.pop(PARENT_ENV, "")
    if pid.isdigit():
        die_with_parent(int(pid))


def widen_descriptors() -> None:
    """Raises the limit of open files to what this user may have, MAX_DESCRIPTORS at most. A thousand instances hold
    four connections each to the store master, where shells allow 1,024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run(main: Callable[[asyncio.Event], Awaitable[None]], *, stop_s: float = 20.0) -> None:
    """Runs `main(stop)` on uvloop to its end.

    SIGINT or SIGTERM sets `stop`; a second signal, or `stop_s` seconds without an end, exits at once.
    """
    faulthandler.enable()
    widen_descriptors()
    with rare_collections(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_until_stopped(main, stop_s))


async def _until_stopped(main: Callable[[asyncio.Event], Awaitable[None]], stop_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        # A handler of C level from here on: it answers even when the loop hangs in its shutdown.
        signal.signal(signal.SIGALRM, _give_up)
        signal.setitimer(signal.ITIMER_REAL, stop_s)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    beating = loop.create_task(readiness.beats(), name="beats")
    try:
        await main(stop)
    finally:
        beating.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _give_up(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback()
    os._exit(1)
