"""What docs/transfer.md says under "Using it" runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvmesh.transfer.transports import wire
from tests.support.paths import ROOT
from tests.transfer.conftest import over

PAGE = (ROOT / "docs" / "transfer.md").read_text(encoding="utf-8")


@over("shm", "tcp")
def test_using_it_runs(tmp_path: Path) -> None:
    section = re.search(r"^## Using it\n(.*?)^## ", PAGE, re.M | re.S)
    assert section is not None
    blocks = re.findall(r"^```python\n(.*?)^```", section[1], re.M | re.S)
    assert len(blocks) == 5
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "TransferState.COMPLETED" in done.stdout


def test_the_causes_of_the_page_are_those_that_peers_answer() -> None:
    for cause in wire.CAUSES[1:]:
        assert f"| {cause} |" in PAGE, cause


@over("shm", "tcp")
def test_it_needs_neither_torch_nor_grpc_nor_what_serves_models() -> None:
    """Only numpy and msgspec beside the standard library."""
    code = """if True:
        import sys
        import kvmesh.transfer
        roots = {name.partition(".")[0] for name in sys.modules}
        third = {
            name for name in roots
            if "site-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")
            and name != "kvmesh" and not name.startswith(("_", "a1_"))
        }
        print(sorted(third - {"msgspec", "numpy", "typing_extensions"}))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "[]"
