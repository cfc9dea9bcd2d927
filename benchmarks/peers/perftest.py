"""ib_write_bw and ib_read_bw, timed from outside: their own figures need the CPU's clock rate, which guests do not say.

A run of few and a run of many operations: the difference is the operations, without the start of two processes.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import time
from pathlib import Path

from benchmarks.peers.link import LIMIT_S, PeerMissing
from benchmarks.transfer_contest import Turn

FEW = 5  # perftest's least number of operations
DEPTH = 128  # operations outstanding, perftest's own choice
LISTENS = "0A"  # in /proc/net/tcp


class Perftest:
    """A rival for `compete`. Server on `far`, client on `near`, one queue pair, the same buffer each time. `sleeps`: it
    waits for events instead of polling all the time, which on a single CPU takes time from those who move the bytes;
    perftest can do that for reads only."""

    def __init__(self, near: str, far: str, *, sleeps: bool) -> None:
        for tool in ("ib_write_bw", "ib_read_bw"):
            if shutil.which(tool) is None:
                raise PeerMissing(f"no {tool}: install perftest")
        self.title = "perftest -e" if sleeps else "perftest"
        self._options = ["-F", *(["-e"] if sleeps else [])]
        self._near = near
        self._far = far
        self._port = 20000 + os.getpid() % 10000

    def turn(self, op: str, count: int, length: int, threads: int) -> Turn:
        """`threads` means nothing to it."""
        return self.moved(op, count, length, DEPTH)

    def check(self, op: str, count: int, length: int, threads: int, seed: int) -> None:
        """It verifies nothing."""
        self._run(op, FEW, length, DEPTH)

    def moved(self, op: str, count: int, length: int, depth: int) -> Turn:
        few, many = self._run(op, FEW, length, depth), self._run(op, FEW + count, length, depth)
        return max(many[0] - few[0], 1e-9), max(many[1] - few[1], 0.0)

    def latency(self, op: str, length: int, times: int) -> float:
        """Mean seconds of one operation at a time; median of three runs."""
        return statistics.median(self.moved(op, times, length, 1)[0] for _ in range(3)) / times

    def _run(self, op: str, count: int, length: int, depth: int) -> Turn:
        self._port += 1
        words = [*self._options, "-s", str(length), "-n", str(count), "-t", str(depth), "-p", str(self._port)]
        tool = f"ib_{op}_bw"
        before = _children_cpu()
        server = subprocess.Popen(
            [tool, "-d", self._far, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _until_listening(self._port, server)
            start = time.perf_counter()
            client = subprocess.run(
                [tool, "-d", self._near, *words, "127.0.0.1"], capture_output=True, text=True, timeout=LIMIT_S
            )
            wall = time.perf_counter() - start
            server.wait(10)
        finally:
            if server.poll() is None:
                server.kill()
            _, said = server.communicate()
        if client.returncode or server.returncode:
            last = (client.stderr + said).strip().splitlines() or [f"exit status {client.returncode}"]
            raise PeerMissing(f"{tool} -s {length} -n {count} -t {depth}: {last[-1]}")
        return wall, _children_cpu() - before


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _until_listening(port: int, server: subprocess.Popen[str]) -> None:
    mark = f":{port:04X}"
    deadline = time.monotonic() + LIMIT_S
    while server.poll() is None and time.monotonic() < deadline:
        for table in ("tcp", "tcp6"):
            for line in Path("/proc/net", table).read_text().splitlines():
                words = line.split()
                if words[1].endswith(mark) and words[3] == LISTENS:
                    return
        time.sleep(0.005)
    raise PeerMissing(f"perftest's server does not listen: {server.poll()}")
