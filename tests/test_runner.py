"""What `make test` makes of tests that fail: broken ones, and those that only fail beside others."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import run_tests

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
BROKEN = "def test_always():\n    assert False\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    return tmp_path


def outcome_of(root: Path, text: str) -> run_tests.Outcome:
    (root / "test_made.py").write_text(text)
    outcome = run_tests.Outcome()
    run_tests.run([("made", ["test_made.py"])], 1, outcome)
    return outcome


def test_what_fails_once_is_named_and_passes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = outcome_of(root, ONCE)
    assert outcome.bad == [1] and [test.split("::")[1] for test in outcome.failed] == ["test_fails_once"]
    assert outcome.may_be_unsteady() and run_tests.unsteady(outcome.failed)
    said = capsys.readouterr().out
    assert said.count("\n1 passed in") == run_tests.TRIES and "test_fails_once failed beside others" in said


def test_what_is_broken_fails_again(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = outcome_of(root, BROKEN)
    assert outcome.may_be_unsteady() and not run_tests.unsteady(outcome.failed)
    assert "unsteady:" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["import nothing_of_that_name\n", "import os\n\ndef test_crash():\n    os.abort()\n"])
def test_a_crash_is_not_tried_again(root: Path, text: str) -> None:
    outcome = outcome_of(root, text)
    assert outcome.bad and not outcome.may_be_unsteady()


def test_many_failures_are_not_tried_again() -> None:
    assert run_tests.Outcome([1, 1], [f"tests/a.py::test_{n}" for n in range(run_tests.UNSTEADY)]).may_be_unsteady()
    assert not run_tests.Outcome(
        [1, 1], [f"tests/a.py::test_{n}" for n in range(run_tests.UNSTEADY + 1)]
    ).may_be_unsteady()
