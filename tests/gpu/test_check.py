"""The check of a GPU: its stages on a CPU, and what its supervisor does with stages that hang or crash."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu import check
from tests.support.paths import ROOT


def python(code: str) -> check.Callable[[bool], tuple[str, ...]]:
    return lambda dry: (sys.executable, "-c", code)


def test_a_stage_that_hangs_or_crashes_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "LEAST_S", 0.1)
    told = "import json, os; json.dump({'lines': ['halfway']}, open(os.environ['GPU_STAGE_RESULT'], 'w'))"
    stages = [
        check.Stage("hangs", "", 1.0, python(f"{told}; import time; time.sleep(60)"), alone=False),
        check.Stage("crashes", "", 30.0, python("import os; print('last words', flush=True); os.abort()"), alone=False),
        check.Stage("lacks", "", 30.0, python(""), needs="no-such-program"),
        check.Stage("well", "", 30.0, python(told)),
        check.Stage("late", "", 0.01, python(told)),
    ]
    found = {one["stage"]: (one["status"], one["lines"]) for one in check.run(stages, tmp_path, 60.0, dry=False)}
    assert found == {
        "hangs": ("timeout", ["halfway"]),
        "crashes": ("failed", ["last words"]),
        "lacks": ("missing", ["no-such-program is not installed"]),
        "well": ("passed", ["halfway"]),
        "late": ("no time", []),
    }


def test_the_table_is_of_sixty_lines_and_every_stage_is_in_it() -> None:
    stages = [check.described(stage) | {"lines": [f"{stage.name} {i}" for i in range(20)]} for stage in check.STAGES]
    lines = check.table(stages)
    assert len(lines) == check.TABLE_LINES
    for stage in check.STAGES:
        assert any(line.startswith(f"{stage.name:<12} ") for line in lines)
        assert f"    {stage.name} 0" in lines


def test_an_unknown_stage_is_named() -> None:
    with pytest.raises(SystemExit, match="'nothing' is none of environment, kernels"):
        check.chosen("decode,nothing")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_stage_runs_dry(tmp_path: Path) -> None:
    """A minute of two cores: what measures a GPU must not have rotted when there is one."""
    command = [sys.executable, "-m", "scripts.gpu.check", "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "check.json").read_text())
    assert [one["status"] for one in found["stages"]] == ["passed"] * len(check.STAGES)
