"""`kvmesh sim fit`: from a log to a file that `kvmesh sim run --times` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.cli.sim.build import config_of
from kvmesh.cli.sim.options import Options
from kvmesh.sim.fitting.mesh_fit import read_fit
from tests.sim.test_calibrate import ALONE, machine, requests
from tests.support.sim.recorded import record


def test_a_log_becomes_a_file_that_a_run_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "fit.json"
    lines, _ = record(monkeypatch, machine(), requests(60, seed=1))
    log.write_bytes(b"".join(lines))
    done = CliRunner().invoke(
        app, ["sim", "fit", str(log), "--out", str(out), "--cores", "2", "--rounds", "1", "--passes", "0"]
    )
    assert done.exit_code == 0, done.output
    assert "shared       2 cores" in done.output and "mean TTFT" in done.output
    found = read_fit(out)
    assert found.host is not None and found.host.cores == 2 and found.told["requests"] > 30
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}))
    config = config_of(Options(trace=trace, times=out, prefill=2, decode=2))
    assert config.host == found.host and config.prefill[0].times.decode_s(1, 10) == found.costs.decode_step.at(1, 10)


def test_without_cores_it_is_step_times_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, out = tmp_path / "log.jsonl", tmp_path / "fit.json"
    lines, _ = record(monkeypatch, machine(), requests(60, seed=1))
    log.write_bytes(b"".join(lines))
    done = CliRunner().invoke(app, ["sim", "fit", str(log), "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = read_fit(out)
    assert found.host is None and found.costs.prefill.b > ALONE.prefill.b / 2


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        (None, [], "No such file"),
        ("", [], "decision log: is empty"),
        ('{"kind": "log"}\n', [], "must be kind='log', version=1"),
    ],
)
def test_what_is_wrong_is_named(text: str | None, arguments: list[str], words: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    if text is not None:
        log.write_text(text)
    done = CliRunner().invoke(app, ["sim", "fit", str(log), "--out", str(tmp_path / "fit.json"), *arguments])
    assert done.exit_code != 0 and words in done.output


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    from kvmesh.errors import ConfigError

    for told, words in (
        ({"kvmesh_fit": 2}, "kvmesh_fit=2: must be 1"),
        ({"kvmesh_fit": 1}, "costs=None: must be an object"),
        ({"kvmesh_fit": 1, "costs": {"kvmesh_costs": 1}, "hosts": {}}, "hosts: no such part"),
        ({"kvmesh_fit": 1, "costs": {"kvmesh_costs": 1}, "host": {"cores": -1}}, "host.cores=-1.0: must be"),
    ):
        file = tmp_path / "fit.json"
        file.write_text(json.dumps(told))
        with pytest.raises(ConfigError) as caught:
            read_fit(file)
        assert words in caught.value.message and str(file) in caught.value.message
