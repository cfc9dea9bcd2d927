"""Attacks on the metrics and probe port of one real service: what idle connections cost it, and its probes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvmesh.quantiles import quantile

PROBES = 200
START_S = 60.0
TIMEOUT_S = 10.0


def idle_metrics_connections(n: int = 1500) -> dict[str, Any]:
    """Open `n` connections to the metrics port of a store master that say nothing; tell its threads, its resident
    memory before and after (MiB), the probes that were answered and their 99th percentile (ms)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < n + 256:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, n + 256), hard))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ready = folder / "ready.json"
        argv = [sys.executable, "-m", "kvmesh.cli", "serve", "store", "--port=0", f"--ready-file={ready}"]
        out = stack.enter_context((folder / "log").open("wb"))
        process = stack.enter_context(subprocess.Popen(argv, stdout=out, stderr=out))
        stack.callback(process.terminate)
        deadline = time.monotonic() + START_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.02)
        host, _, port = json.loads(ready.read_text())["metrics"].rpartition(":")
        address = (host, int(port))
        before = _resident_mb(process.pid)
        for _ in range(n):
            stack.enter_context(socket.create_connection(address, timeout=TIMEOUT_S))
        times = sorted(filter(None, (_probe_ms(address) for _ in range(PROBES))))
        return {
            "connections": n,
            "threads": len(os.listdir(f"/proc/{process.pid}/task")),
            "rss_before_mb": before,
            "rss_mb": _resident_mb(process.pid),
            "probes_answered": len(times),
            "probes": PROBES,
            "probe_p99_ms": quantile(times, 0.99) if times else None,
        }


def _resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / 2**20, 1)


def _probe_ms(address: tuple[str, int]) -> float | None:
    """None: it was not answered with 200."""
    begun = time.perf_counter()
    said = b""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=TIMEOUT_S) as link:
        link.sendall(b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while piece := link.recv(4096):
            said += piece
    return round((time.perf_counter() - begun) * 1000, 2) if b" 200 " in said[:16] else None


if __name__ == "__main__":
    print(json.dumps(idle_metrics_connections(), indent=1))
