"""`kvmesh scale`: what is wanted, as a table and as JSON, and one line when nobody answers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvmesh.cli import scale
from kvmesh.cli.app import app
from kvmesh.rpc.pb import common_pb2, conductor_pb2

HINTS = [
    conductor_pb2.ScaleHint(
        model="demo", role=common_pb2.ROLE_PREFILL, instances=2, change=3, load=1.25, reason="work for 3.10 of them"
    ),
    conductor_pb2.ScaleHint(model="demo", role=common_pb2.ROLE_DECODE, instances=0, change=1, load=float("inf")),
]


def call(*args: str) -> str:
    done = CliRunner().invoke(app, ["scale", "--conductor", "127.0.0.1:7001", *args])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[conductor_pb2.ScaleHint]:
    found = list(HINTS)

    async def answer(conductor: str) -> list[conductor_pb2.ScaleHint]:
        assert conductor == "127.0.0.1:7001"
        return found

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(scale, "scale_hints", answer)
    return found


def test_a_table(hints: list[conductor_pb2.ScaleHint]) -> None:
    lines = [line.split() for line in call().splitlines()]
    assert lines[0] == ["model", "role", "instances", "load", "change"]
    assert lines[1][:5] == ["demo", "prefill", "2", "1.25", "+3"]
    assert lines[1][5:] == ["work", "for", "3.10", "of", "them"]
    assert lines[2] == ["demo", "decode", "0", "-", "+1"]
    hints.clear()
    assert call() == "No instance gets work now.\n"


def test_json(hints: list[conductor_pb2.ScaleHint]) -> None:
    told = json.loads(call("--json"))
    assert told[0] == {
        "model": "demo", "role": "prefill", "instances": 2, "change": 3, "load": 1.25,
        "reason": "work for 3.10 of them",
    }  # fmt: skip
    assert told[1]["load"] is None


def test_nobody_answers() -> None:
    done = CliRunner().invoke(app, ["scale", "--conductor", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "127.0.0.1:1" in done.output
    assert len(done.output.strip().splitlines()) == 1
