"""The test's side of a process that is put to sleep."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.support.paths import ROOT

Slept = Literal["suspended", "paused"]  # CLOCK_BOOTTIME goes on, or no clock does

SITE = Path(__file__).parent / "site"
WAIT_S = 60.0


class Sleeper:
    """One process, which reads a line of JSON and answers with one; its children sleep with it."""

    def __init__(self, process: asyncio.subprocess.Process, clocks: Path) -> None:
        self._process = process
        self._clocks = clocks
        self._slept_ns = 0

    async def hear(self) -> Any:
        """What it says next."""
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), WAIT_S)
        assert line, "it has ended"
        return json.loads(line)

    def tell(self, **words: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")

    def sleep(self) -> None:
        """It stands still from now on."""
        self._slept_ns = time.monotonic_ns()
        self._all(signal.SIGSTOP)

    def wake(self, slept: Slept) -> None:
        """It goes on, and its clocks as if no time had passed."""
        lag = time.monotonic_ns() - self._slept_ns
        with self._clocks.open("r+b") as file:
            file.write(struct.pack("<qq", lag, lag if slept == "paused" else 0))
        self._all(signal.SIGCONT)

    def _all(self, number: signal.Signals) -> None:
        for pid in (self._process.pid, *(one.pid for one in psutil.Process(self._process.pid).children(True))):
            os.kill(pid, number)


@asynccontextmanager
async def sleeper(module: str, folder: Path) -> AsyncIterator[Sleeper]:
    """`python -m tests.audit.sleepers.<module>`."""
    clocks = folder / "clocks"
    clocks.write_bytes(bytes(16))
    env = {**os.environ, "TEST_CLOCKS": str(clocks), "PYTHONPATH": f"{SITE}:{ROOT}"}
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-m", f"tests.audit.sleepers.{module}")
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, env=env, cwd=ROOT)
    found = Sleeper(process, clocks)
    try:
        yield found
        assert process.stdin is not None
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    finally:
        if process.returncode is None:
            found._all(signal.SIGKILL)
            await process.wait()
