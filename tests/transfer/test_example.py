"""The example of the engine by itself runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT
from tests.transfer.conftest import over

EXAMPLE = ROOT / "examples" / "transfer.py"


@over("shm", "tcp")
def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    wrote, read = done.stdout.splitlines()
    assert wrote.startswith("wrote 2097152 bytes, verified")
    assert read.startswith("read 4194304 bytes, verified")
    assert "shm.read_bytes" in read
