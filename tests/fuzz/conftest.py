"""Noise at every entry point, for FUZZ_S seconds each (1; `make soak`: 60).

FUZZ_SEED=N runs one again. What was sent when a check failed is kept under tests/fuzz/seeds/ENTRY/ and is sent
first by every later run: commit it with the mend. (Services take variables that begin with KVMESH_ for settings.)"""

from __future__ import annotations

import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SEEDS = Path(__file__).parent / "seeds"
_LENGTH = struct.Struct("<I")


class Noise:
    """One run at one entry point: its randomness, its time, and the inputs that have failed here before."""

    def __init__(self, entry: str) -> None:
        self.seconds = float(os.environ.get("FUZZ_S", "1"))
        self.seed = int(os.environ.get("FUZZ_SEED", "1"))
        self.rng = random.Random(f"{entry} {self.seed}")
        self.sent = 0
        self._folder = SEEDS / entry
        self._until = time.monotonic() + self.seconds

    def goes_on(self) -> bool:
        """Is there time for one more input? The first hundred are sent whatever it takes."""
        self.sent += 1
        return self.sent <= 100 or time.monotonic() < self._until

    def kept(self) -> list[list[bytes]]:
        """The inputs that failed before, each a list of messages."""
        return [_unpacked(path.read_bytes()) for path in sorted(self._folder.glob("*.bin"))]

    def keep(self, messages: list[bytes]) -> Path:
        """Write an input that failed; returns where."""
        self._folder.mkdir(parents=True, exist_ok=True)
        data = b"".join(_LENGTH.pack(len(part)) + part for part in messages)
        path = self._folder / f"{self.seed}-{self.sent}-{len(list(self._folder.iterdir()))}.bin"
        path.write_bytes(data)
        return path


def _unpacked(data: bytes) -> list[bytes]:
    found = []
    while data:
        (length,) = _LENGTH.unpack_from(data)
        found.append(data[_LENGTH.size : _LENGTH.size + length])
        data = data[_LENGTH.size + length :]
    return found


@pytest.fixture
def noise(request: pytest.FixtureRequest) -> Iterator[Noise]:
    made = Noise(request.node.name.replace("/", "_"))
    yield made
    print(f"{request.node.name}: {made.sent} inputs, seed {made.seed}")
