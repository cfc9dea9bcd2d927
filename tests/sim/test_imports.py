"""What a simulation does not need, it does not wait for."""

from __future__ import annotations

import subprocess
import sys

from kvmesh.kvcache.sources import PREFETCH
from kvmesh.transfer import TrafficClass


def test_a_simulation_imports_no_transfer_engine() -> None:
    told = "import sys, kvmesh.sim.run; print('kvmesh.transfer' in sys.modules, 'asyncio' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.split() == ["False", "False"]


def test_what_brains_call_a_prefetch_is_one_to_the_engine() -> None:
    assert PREFETCH == TrafficClass.PREFETCH
