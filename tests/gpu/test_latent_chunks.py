"""The sizes of programs that compute chunks of latent attention, over one and several pieces of a context."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu import NEEDS_GPU
from tests.support.paths import ROOT

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("sizes", ["64x64x4x1", "64x32x4x1"])  # those that serve in two bytes
def test_chunks_equal_float64(sizes: str) -> None:
    command = [sys.executable, "-m", "tests.support.engine.latent_chunks", *sizes.split("x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
