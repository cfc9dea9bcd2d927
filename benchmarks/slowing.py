"""Slows processes down: stops them (SIGSTOP) for most of each period, so that they run at a part of their speed.

    python -m benchmarks.slowing PID... --stopped-ms 20 --running-ms 10

Runs at real-time priority where the system allows it, so that a busy machine does not stretch its periods. On SIGTERM,
SIGINT or at the end of its standard input (its parent has died) all processes run on, and one line of JSON on standard
output tells for which share of the time they were really stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

PRIORITY = 10  # of SCHED_FIFO: above everything that is not real-time


class _Ended(Exception):
    """The time of slowness is over."""


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Sends a signal to each process that still lives."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def alternate(pids: Sequence[int], stopped_s: float, running_s: float) -> float:
    """Stops and continues the processes until the end; returns the share of the time that they were stopped."""
    stopped_total, started = 0.0, time.monotonic()
    due = started
    try:
        while True:
            stopped_at = time.monotonic()
            due += stopped_s
            try:
                send(pids, signal.SIGSTOP)
                _pause(due)
            finally:
                send(pids, signal.SIGCONT)
                stopped_total += time.monotonic() - stopped_at
            due += running_s
            _pause(due)
            due = max(due, time.monotonic() - running_s)  # after a long delay no period is made up for
    except _Ended:
        return stopped_total / max(time.monotonic() - started, 1e-9)


def _pause(due: float) -> None:
    """Waits until `due`. Raises _Ended when the parent has closed standard input."""
    if select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        raise _Ended


@dataclass
class SlowedProcesses:
    """What came of a time of slowness: `stopped` is the share of it in which the processes were stopped, known when it
    is over."""

    stopped: float = 0.0

    @property
    def speed(self) -> float:
        """The share of their usual speed that was left to the processes."""
        return 1.0 - self.stopped


@asynccontextmanager
async def slowed(pids: Sequence[int], stopped_ms: float, running_ms: float) -> AsyncIterator[SlowedProcesses]:
    """Slows the processes while the block runs, from a process of its own; they are slow when the block begins."""
    told = SlowedProcesses()
    words = [sys.executable, "-m", "benchmarks.slowing", *map(str, pids)]
    words += [f"--stopped-ms={stopped_ms}", f"--running-ms={running_ms}"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdout is not None and process.stdin is not None
    try:
        if await process.stdout.readline() != b"begun\n":
            raise RuntimeError(f"benchmarks.slowing {pids}: did not begin")
        yield told
    finally:
        process.stdin.close()
        rest = await process.stdout.read()
        await process.wait()
        with contextlib.suppress(ValueError, KeyError):
            told.stopped = float(json.loads(rest)["stopped"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pids", type=int, nargs="+", metavar="PID")
    parser.add_argument("--stopped-ms", type=float, default=20.0)
    parser.add_argument("--running-ms", type=float, default=10.0)
    args = parser.parse_args()

    def end(number: int, frame: object) -> None:
        raise _Ended

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    print("begun", flush=True)
    print(json.dumps({"stopped": alternate(args.pids, args.stopped_ms / 1000, args.running_ms / 1000)}), flush=True)


if __name__ == "__main__":
    main()
