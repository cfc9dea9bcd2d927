"""`kvmesh sim cache`: the table, its definition, JSON, progress, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvmesh.cli.app import app
from kvmesh.cli.sim import command as sim

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    return lambda *args: CliRunner().invoke(app, ["sim", "cache", *map(str, args)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """[1 2] twice, then [3 4], then [1 2] again: see tests/sim/test_cache.py."""
    file = tmp_path / "t.jsonl"
    made = [
        {"timestamp": at, "input_length": 700, "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate([[1, 2], [1, 2], [3, 4], [1, 2]])
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in made))
    return file


def test_the_table_says_what_it_counts(invoke: Invoke, trace: Path) -> None:
    result = invoke(trace, "--policy", "lru,lfu", "--capacity", "3,1000,inf")
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert "4 requests, 8 blocks of 512 tokens, 4 distinct" in result.stdout
    assert ["hit", "rate", "3", "1,000", "inf"] in rows
    assert ["lru", "0.2500", "0.5000", "0.5000"] in rows
    assert ["lfu", "0.5000", "0.5000", "0.5000"] in rows
    assert "whole trace, in file order" in result.stdout and "longest cached prefix" in result.stdout
    assert result.stderr == ""


def test_json_holds_the_same_and_the_definition(invoke: Invoke, trace: Path) -> None:
    told = json.loads(invoke(trace, "--policy", "length", "--capacity", "inf,2", "--json").stdout)
    assert [(one["policy"], one["capacity_blocks"], one["hit_rate"], one["hit_blocks"]) for one in told["runs"]] == [
        ("length", None, 0.5, 4),
        ("length", 2, 0.25, 2),
    ]
    assert (told["requests"], told["blocks"], told["distinct_blocks"]) == (4, 8, 4)
    assert "touched from head to tail" in told["definitions"]["hit_rate"]


def test_help_states_the_definition(invoke: Invoke) -> None:
    words = " ".join(invoke("--help").stdout.split())
    assert "in file order" in words and "longest cached prefix" in words and "touched from head to tail" in words


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "lru,fifo"], "policy='fifo': choose among lru, lfu, length"),
        (["--policy", "lru,lru"], "policy='lru': stands twice"),
        (["--policy", ""], "policy='': choose among"),
        (["--capacity", "10,0"], "capacity='0': must be a number of blocks, at least 1, or inf"),
        (["--capacity", "1e3"], "capacity='1e3': must be a number of blocks"),
        (["--capacity", "-5"], "capacity='-5': must be"),
        (["--capacity", "5,5"], "capacity='5': stands twice"),
        (["--block-tokens", "256"], "2 ids do not fit input_length=700 in blocks of 256"),
    ],
)
def test_a_mistake_is_one_line(invoke: Invoke, trace: Path, args: list[str], words: str) -> None:
    result = invoke(trace, *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr


def test_a_trace_that_is_none_is_named(invoke: Invoke, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "holds no request" in invoke(empty).stderr
    gone = invoke(tmp_path / "gone.jsonl")
    assert (gone.exit_code, "No such file" in gone.stderr) == (2, True)


def test_a_bad_line_is_named_and_the_order_is_the_files(invoke: Invoke, trace: Path) -> None:
    """A hit rate goes by the order of the lines, whatever times they bear."""
    good = trace.read_text()
    lines = good.splitlines()
    trace.write_text("\n".join(line.replace('"timestamp": ', '"timestamp": 9') for line in lines[:2]))
    with trace.open("a") as file:
        file.write("\n" + "\n".join(lines[2:]) + "\n")
    rows = [line.split() for line in invoke(trace, "--policy", "lfu", "--capacity", "3").stdout.splitlines()]
    assert ["lfu", "0.5000"] in rows
    for bad, words in (("[" * 100_000, "is not JSON"), ('{"timestamp": 1}', "input_length=None: must be a number")):
        trace.write_text(good + bad + "\n")
        result = invoke(trace)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "trace line 5: " in result.stderr and words in result.stderr and "Traceback" not in result.stderr


def test_progress_waits_for_two_seconds_and_goes_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(sim.time, "monotonic", lambda: clock[0])
    shown = sim.CacheProgress(200)

    def tell(now: float) -> None:
        clock[0] = now
        shown.tell(int(now), "lru, 5 blocks")

    tell(100.0)
    tell(101.9)
    assert capsys.readouterr() == ("", "")
    for now in (102.1, 102.2, 104.0, 108.0):
        tell(now)
    shown.clear()
    assert capsys.readouterr() == ("", " 51%  lru, 5 blocks\n 54%  lru, 5 blocks\n")
