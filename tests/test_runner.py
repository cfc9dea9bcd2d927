"""What `make test` and `make test-rest` make of tests that fail, and which tests each of them runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import run_tests
from tests.support.paths import ROOT

ONCE = """
from pathlib import Path

def test_fails_once():
    mark = Path(__file__).with_name("been here")
    seen = mark.exists()
    mark.touch()
    assert seen

def test_passes():
    assert True
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none is needed, and they take seconds to import
    return tmp_path


def outcome_of(root: Path, text: str) -> run_tests.Outcome:
    (root / "test_made.py").write_text(text)
    outcome = run_tests.Outcome()
    run_tests.run([("made", ["test_made.py"])], 1, outcome)
    return outcome


@pytest.mark.parametrize("text", ["import nothing_of_that_name\n", "import os\n\ndef test_crash():\n    os.abort()\n"])
def test_a_crash_fails(root: Path, text: str) -> None:
    outcome = outcome_of(root, text)
    assert outcome.bad and outcome.told


@pytest.mark.parametrize("speed", [run_tests.QUICK, run_tests.REST])
def test_nothing_has_a_second_chance(
    speed: str, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    (root / "test_made.py").write_text(ONCE)
    monkeypatch.setattr(run_tests, "stages", lambda speed: [([("made", ["test_made.py"])], 1)])
    monkeypatch.setattr(sys, "argv", ["run_tests.py", speed])
    assert run_tests.main() == 1
    assert capsys.readouterr().out.count("1 failed, 1 passed") == 1


def test_what_failed_is_told_last_in_ten_lines(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    many = "".join(f"def test_{n}():\n    assert {n} < 0, 'why {n} fails'\n" for n in range(12))
    (root / "test_made.py").write_text(many)
    monkeypatch.setattr(sys, "argv", ["run_tests.py", run_tests.QUICK])
    monkeypatch.setattr(run_tests, "stages", lambda speed: [([("made", ["test_made.py"])], 1)])
    assert run_tests.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert said[-10].startswith("── failed: 12")
    assert said[-9].startswith("FAILED test_made.py::test_0 - AssertionError: why 0 fails") and "FAILED in" in said[-1]


def collected(speed: str) -> set[str]:
    """Tests of a few folders, with all three kinds among them: plain, slow, properties."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        *speed.split(),
        "tests/conductor/admission/test_batch_lane.py",
        "tests/test_pacing.py",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return {line for line in ran.stdout.splitlines() if "::" in line}


@pytest.mark.slow
def test_quick_and_rest_leave_nothing_out() -> None:
    everything, quick, rest = collected(""), collected(run_tests.QUICK), collected(run_tests.REST)
    assert quick | rest == everything and quick < everything
    twice = quick & rest
    assert "tests/test_pacing.py::TestBrain::runTest" in twice, "properties run quickly, and then with more examples"
    assert "tests/conductor/admission/test_batch_lane.py::test_how_much_slower_is_what_was_set" in rest - quick
    assert len(twice) < len(quick) / 4


@pytest.mark.parametrize(
    ("speed", "examples"), [(run_tests.QUICK, 20), (run_tests.REST, 66), (run_tests.PROPERTIES, 200)]
)
def test_quick_and_rest_try_fewer_examples(speed: str, examples: int, tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(
        "import hypothesis as h\nfrom hypothesis import strategies as st\nfrom pathlib import Path\n"
        "@h.settings(max_examples=200, database=None)\n@h.given(st.integers())\ndef test_counts(n):\n"
        "    with Path(__file__).with_name('count').open('a') as out:\n        out.write('x')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        speed,
        "-p",
        "_hypothesis_pytestplugin",
        f"--rootdir={tmp_path}",
        "-c",
    ]
    root = ROOT
    where = {"cwd": root, "capture_output": True, "timeout": 60, "check": True}
    where["env"] = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    subprocess.run([*command, str(tmp_path / "pytest.ini"), str(tmp_path)], **where)  # type: ignore[call-overload]
    assert len((tmp_path / "count").read_text()) == examples
