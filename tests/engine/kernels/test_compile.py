from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HOPPER = "90"
SMALLEST_SHARED = 99 << 10  # of the GPUs that we mean to run on


@pytest.mark.slow
def test_every_kernel_compiles_for_a_gpu_and_fits_it(device: torch.device, tmp_path: Path) -> None:
    """The interpreter takes what the compiler would refuse; a process of its own has the compiler."""
    del device  # skips where there is no triton
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.engine.compiled", HOPPER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 8
    assert all(int(shared) <= SMALLEST_SHARED for *_, shared in lines), done.stdout
