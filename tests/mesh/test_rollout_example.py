"""examples/rollout.py runs as it says, on a mesh of its own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(400)]


def test_two_steps_of_the_example() -> None:
    command = [sys.executable, "examples/rollout.py", "--steps", "2", "--samples", "2", "--tokens", "6"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    steps = re.findall(r"^step +(\d)  reward (\d\.\d+)  .* the mesh was paused for (\d+\.\d+) s", ran.stdout, re.M)
    assert [step for step, _, _ in steps] == ["0", "1"], ran.stdout
    assert re.search(r"^reward \d\.\d+ -> \d\.\d+$", ran.stdout, re.M)
