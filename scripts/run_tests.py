"""Runs all tests, for `make test`: what needs one core in two lanes side by side, then what starts whole meshes alone.

    lane 1: tests/rdma, a guest with one CPU ──────────┐
    lane 2: tests of one process, folder by folder ────┴─▶ the rest, one after the other

The verdict of every lane is shown, failures in full, as soon as it ends. Ctrl-C and SIGTERM end them all. The exit
status is that of the first lane that failed. With arguments it is pytest with these arguments, nothing else.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
GUEST = ["tests/rdma"]
ONE_PROCESS = [
    f"tests/{name}"
    for name in ("kvcache", "sim", "conductor", "gateway", "prefill", "decode", "rpc", "telemetry", "engine")
]
POLL_S = 0.5
SIGN_OF_LIFE_S = 60.0
NO_TESTS = 5  # pytest's status


class Lane:
    """One pytest process and what it prints."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name = name
        self._started = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by `end`
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=self._output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        print(f"── {name}: pytest {' '.join(arguments)}", flush=True)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def last_line(self) -> str:
        """Of what it has printed so far."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 400))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        self._output.seek(0, os.SEEK_END)
        return lines[-1] if lines else ""

    def show(self) -> int:
        """Print all that it said; its exit status, 0 when there was nothing to run."""
        self._output.seek(0)
        sys.stdout.write(self._output.read().decode(errors="replace"))
        took = time.monotonic() - self._started
        status = self._process.returncode
        print(f"── {self.name}: exit status {status} after {took:.0f} s", flush=True)
        return 0 if status == NO_TESTS else status

    def kill(self) -> None:
        """End it as Ctrl-C would, then for good."""
        if not self.ended():
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()


def run(lanes: list[Lane]) -> int:
    """Wait for all of them, showing each as it ends; the first bad status."""
    bad, told, left = 0, time.monotonic(), list(lanes)
    try:
        while left:
            time.sleep(POLL_S)
            for lane in [lane for lane in left if lane.ended()]:
                left.remove(lane)
                bad = bad or lane.show()
            if time.monotonic() - told > SIGN_OF_LIFE_S:
                told = time.monotonic()
                for lane in left:
                    print(f"── {lane.name}: {lane.last_line()}", flush=True)
    finally:
        for lane in lanes:
            lane.kill()
    return bad


def main() -> int:
    if len(sys.argv) > 1:
        return subprocess.call([sys.executable, "-m", "pytest", "-q", *sys.argv[1:]], cwd=ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started = time.monotonic()
    first = run([Lane("rdma guest", GUEST), Lane("one process", ONE_PROCESS)])
    ignored = [f"--ignore={path}" for path in (*GUEST, *ONE_PROCESS)]
    second = run([Lane("many processes", ignored)])
    print(f"── all tests: {'passed' if not first + second else 'FAILED'} in {time.monotonic() - started:.0f} s")
    return first or second


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
