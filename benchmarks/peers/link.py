"""Two ends of a contender, each a process of its own, told over a pipe what to do. Standard library only: the Mooncake
worker runs in another environment.

    benchmark ── {"do": "run", ...} ─▶ initiator ══ bytes ══▶ target ◀─ {"do": "digest", ...} ── benchmark

A row is `count` pieces of `length` bytes, `GAP` apart on both sides, so that nobody can merge neighbours. Several
submitting threads get equal shares of the pieces; one piece for many threads is cut into equal parts.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import random
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GAP = 4096  # bytes between pieces
TILE = (1 << 20) - 3  # bytes after which the test pattern repeats: odd, so that a misplaced piece shows
LIMIT_S = 120.0  # for one call of a worker
Piece = tuple[int, int]  # offset, length


class PeerMissing(Exception):
    """A contender cannot be had here; says why in one line."""


def pieces(count: int, length: int) -> list[Piece]:
    stride = length + GAP if count > 1 else length
    return [(i * stride, length) for i in range(count)]


def room(count: int, length: int) -> int:
    """Bytes that the pieces of a row span."""
    return count * (length + GAP)


def shares(row: Sequence[Piece], threads: int) -> list[list[Piece]]:
    """What each of the submitting threads moves."""
    if len(row) < threads:
        row = [(at + k * (n // threads), n // threads) for at, n in row for k in range(threads)]
    return [list(row[t::threads]) for t in range(threads)]


class Memory:
    """Anonymous memory with an address; the test pattern; checksums."""

    def __init__(self, nbytes: int, view: memoryview | None = None, address: int = 0) -> None:
        if view is None:
            self._map = mmap.mmap(-1, nbytes)
            view = memoryview(self._map)
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = view
        self.address = address
        self.nbytes = nbytes

    def fill(self, seed: int) -> None:
        """Seed 0: zeros."""
        tile = random.Random(seed).randbytes(TILE) if seed else bytes(TILE)
        for at in range(0, self.nbytes, TILE):
            n = min(TILE, self.nbytes - at)
            self.view[at : at + n] = tile[:n]

    def digest(self, row: Sequence[Piece]) -> int:
        crc = 0
        for at, n in row:
            crc = zlib.crc32(self.view[at : at + n], crc)
        return crc


class Crew:
    """Threads that stay, so that a run does not pay for their start."""

    def __init__(self) -> None:
        self._inboxes: list[queue.SimpleQueue[Callable[[], None]]] = []
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def run(self, jobs: Sequence[Callable[[], None]]) -> None:
        """All jobs at once, the last one in this thread."""
        while len(self._inboxes) < len(jobs) - 1:
            inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), daemon=True).start()
            self._inboxes.append(inbox)
        for inbox, job in zip(self._inboxes, jobs[:-1], strict=False):
            inbox.put(job)
        jobs[-1]()
        for _ in jobs[:-1]:
            failed = self._done.get(timeout=LIMIT_S)
            if failed is not None:
                raise failed

    def _work(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            job = inbox.get()
            try:
                job()
                self._done.put(None)
            except BaseException as err:
                self._done.put(err)


class Worker:
    """The benchmark's handle of a process."""

    def __init__(self, module: str, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        mine, its = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115  (closed in close)
        with its:
            self.process = subprocess.Popen(
                [python, "-m", module, str(its.fileno())],
                pass_fds=[its.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
                stdout=self._log,
                stderr=self._log,
            )
        self.module = module
        mine.settimeout(LIMIT_S)
        self._socket = mine
        self._pipe = mine.makefile("rwb")

    def call(self, do: str, **words: Any) -> Any:
        self.ask(do, **words)
        return self.answer(do)

    def ask(self, do: str, **words: Any) -> None:
        """To be followed by `answer`."""
        try:
            self._pipe.write(json.dumps({"do": do, **words}).encode() + b"\n")
            self._pipe.flush()
        except OSError as err:
            raise PeerMissing(f"{self.module} ended: {self._last_words()}") from err

    def answered(self, timeout_s: float) -> bool:
        """Whether `answer` would return at once; waits so long for it."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def answer(self, do: str) -> Any:
        try:
            line = self._pipe.readline()
        except TimeoutError as err:
            raise PeerMissing(f"{self.module}: no answer to {do} in {LIMIT_S:.0f} s") from err
        except OSError:
            line = b""
        if not line:
            raise PeerMissing(f"{self.module} ended: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerMissing(f"{self.module}: {do}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        try:
            self._pipe.close()
        except OSError:
            pass
        self._socket.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._log.close()

    def _last_words(self) -> str:
        self.process.wait(10)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:160] if lines else f"exit status {self.process.poll()}"


class End:
    """Base of the workers' objects; for both of them."""

    memory: Memory

    def fill(self, seed: int) -> None:
        self.memory.fill(seed)

    def digest(self, count: int, length: int) -> int:
        return self.memory.digest(pieces(count, length))

    def cpu(self) -> float:
        return time.process_time()

    def runtime_address(self) -> int:
        """Of CPython's `_PyRuntime`."""
        return ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))

    def spin(self, seconds: float) -> None:
        """Computes in Python."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    def close(self) -> None:
        return


class Initiator(End):
    """`jobs` makes what each submitting thread does; `run` times it."""

    def __init__(self) -> None:
        self.crew = Crew()

    def jobs(self, op: str, row: Sequence[Piece], threads: int) -> list[Callable[[], None]]:
        raise NotImplementedError

    def run(self, op: str, count: int, length: int, threads: int) -> tuple[float, float]:
        """Wall and CPU seconds of this process."""
        jobs = self.jobs(op, pieces(count, length), threads)
        cpu = time.process_time()
        start = time.perf_counter()
        self.crew.run(jobs)
        wall = time.perf_counter() - start
        return wall, time.process_time() - cpu

    def latency(self, op: str, length: int, times: int) -> list[float]:
        """Seconds of each of so many operations, one after the other."""
        job = self.jobs(op, pieces(1, length), 1)[0]
        seconds = []
        for _ in range(times):
            start = time.perf_counter()
            job()
            seconds.append(time.perf_counter() - start)
        return seconds


def serve(ends: Mapping[str, Callable[..., End]]) -> None:
    """The worker's loop; the first thing it is told is which end to be."""
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        pipe = sock.makefile("rwb")
        end: End | None = None
        for line in pipe:
            words = json.loads(line)
            do = words.pop("do")
            try:
                if end is None:
                    end = ends[do](**words)
                    value = getattr(end, "told", None)
                else:
                    value = getattr(end, do)(**words)
                answer = {"value": value}
            except Exception as err:
                answer = {"error": f"{type(err).__name__}: {err}"}
            pipe.write(json.dumps(answer).encode() + b"\n")
            pipe.flush()
        if end is not None:
            end.close()
    sys.stdout.flush()
    os._exit(0)  # threads of a foreign engine may not end
