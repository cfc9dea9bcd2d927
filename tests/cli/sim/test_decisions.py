"""`kvmesh sim --decisions`: a log decided again, a log that was changed, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvmesh.cli.app import app
from tests.conductor.records.test_journal import Lines, live, recorded


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, ["sim", *map(str, args)], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def log(tmp_path: Path) -> Path:
    lines = Lines()
    assert live(recorded(lines), 1, requests=60) > 10
    file = tmp_path / "decisions.jsonl"
    file.write_bytes(b"".join(lines.lines))
    return file


def test_a_log_comes_out_as_it_was_written(log: Path) -> None:
    result = invoke("--decisions", log)
    assert result.exit_code == 0, result.output
    assert "60 decisions among" in result.stdout and "0 came out otherwise" in result.stdout
    told = json.loads(invoke("--decisions", log, "--json").stdout)
    assert (told["decisions"], told["placed"] + told["refused"], told["differences"]) == (60, 60, [])


def test_what_came_out_otherwise_is_shown_and_fails(log: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"placed"' in line)
    answer = json.loads(lines[at])

    def wrong(told: object) -> object:
        """Every time a second later."""
        if isinstance(told, dict):
            return {key: wrong(value) for key, value in told.items()}
        return told + 1.0 if isinstance(told, float) else told

    key = next(key for key, value in answer.items() if isinstance(value, dict) and "placed" in value)
    lines[at] = json.dumps({**answer, key: wrong(answer[key])}) + "\n"
    log.write_text("".join(lines))
    result = invoke("--decisions", log)
    assert result.exit_code == 1
    assert "1 came out otherwise" in result.stdout and f"line {at + 1}, request" in result.stdout
    assert "logged" in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--decisions", "gone"), "decisions='gone': No such file"),
        (("--json",), "give a file, or a command"),
        (("--decisions", "x", "cache", "y"), "decisions='x': not with cache"),
    ],
)
def test_a_mistake_is_one_line(args: tuple[str, ...], words: str) -> None:
    result = invoke(*args)
    assert (result.exit_code, result.stdout) == (2, "") and words in result.stderr


def test_a_file_that_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}\n")
    result = invoke("--decisions", tmp_path / "x")
    assert result.exit_code == 2 and "decision log" in result.stderr
