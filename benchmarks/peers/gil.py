"""How much of the time somebody in another process holds its GIL, seen from outside.

CPython keeps that in a word somewhere in `_PyRuntime`. Which one, shows by itself: it is 1 whenever the process
computes in Python and 0 whenever it waits for us. Then the word is sampled while the process works. Needs the right to
read its memory (root, or the kernel's ptrace_scope 0).
"""

from __future__ import annotations

import os
import time

from benchmarks.peers.link import PeerMissing, Worker

SPAN = 256 << 10  # bytes after the start of _PyRuntime to look at; it may be shorter
PAGE = 4096
LOOKS = 12
SAMPLE_S = 0.0005


class GilMeter:
    """Of a worker that is an `Initiator`. PeerMissing where it cannot be had."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        try:
            self._memory = os.open(f"/proc/{worker.process.pid}/mem", os.O_RDONLY)
        except OSError as err:
            raise PeerMissing(f"the GIL cannot be watched: {err}") from err
        self._at = self._find(worker.call("runtime_address"))

    def _find(self, start: int) -> int:
        fitting: set[int] | None = None
        for look in range(LOOKS):
            busy = look % 2
            if busy:
                self._worker.ask("spin", seconds=0.05)
            time.sleep(0.02)  # it must have got there
            image = self._image(start)
            words = {at for at in range(0, len(image), 4) if image[at : at + 4] == bytes((busy, 0, 0, 0))}
            fitting = words if fitting is None else fitting & words
            if busy:
                self._worker.answer("spin")
        if not fitting:
            raise PeerMissing("the GIL's word was not found")
        return start + min(fitting)

    def _image(self, start: int) -> bytes:
        found = b""
        while len(found) < SPAN:
            try:
                found += os.pread(self._memory, PAGE, start + len(found))
            except OSError:
                break
        return found

    def share(self, samples: list[int]) -> float:
        return sum(samples) / max(len(samples), 1)

    def sample(self) -> int:
        return os.pread(self._memory, 4, self._at)[0]

    def close(self) -> None:
        os.close(self._memory)


def watch(source: Worker, target: Worker, op: str, count: int, length: int, seconds: float) -> tuple[float, float]:
    """Shares of the time in which the GIL is held at the initiator and at the target while rows are moved."""
    meters = [GilMeter(source), GilMeter(target)]
    try:
        seen: list[list[int]] = [[], []]
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            source.ask("run", op=op, count=count, length=length, threads=1)
            while not source.answered(SAMPLE_S):
                for samples, meter in zip(seen, meters, strict=True):
                    samples.append(meter.sample())
            source.answer("run")
        shares = [meter.share(samples) for meter, samples in zip(meters, seen, strict=True)]
        return shares[0], shares[1]
    finally:
        for meter in meters:
            meter.close()
