"""Decision logs of simulated meshes: what a conductor over such machines would have written."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvmesh.services.conductor.records.journal import Header, Recorder
from kvmesh.services.conductor.settings import Settings
from kvmesh.sim import brains
from kvmesh.sim.config import SimConfig
from kvmesh.sim.report.records import Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest


def record(
    monkeypatch: pytest.MonkeyPatch, config: SimConfig, requests: Sequence[SimRequest]
) -> tuple[list[bytes], list[Record]]:
    """The log, line by line, and how each request went."""
    lines: list[bytes] = []

    class Recording:
        """Stands where a brain does."""

        def __init__(self, settings: Settings, rng: random.Random, started_at: float) -> None:
            self._recorder = Recorder(Header(1, started_at, settings), self._write, 1 << 40)

        def _write(self, line: bytes) -> int:
            lines.append(line)
            return 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._recorder if name == "step" else self._recorder.state, name)

    records: list[Record] = []
    with monkeypatch.context() as patched:
        patched.setattr(brains, "ConductorState", Recording)
        run(config, requests, sink=records.append)
    return lines, records
