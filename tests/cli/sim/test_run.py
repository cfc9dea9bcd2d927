"""`kvmesh sim run`: options become a simulation, results become files, mistakes are one line."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvmesh.cli.app import app
from kvmesh.cli.sim import build as sim_build
from kvmesh.cli.sim import options as sim_options
from kvmesh.cli.sim import progress as sim_progress
from kvmesh.cli.sim.options import Options, label, sweeps
from kvmesh.errors import ConfigError
from kvmesh.sim.config import MeshMode

Invoke = Callable[..., Result]
SMALL = ("--gpu", "h100", "--gpus", "1", "--model", "llama3-8b", "--prefill", "1", "--decode", "1")


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TERM", "dumb")
    return lambda *args: CliRunner().invoke(app, ["sim", "run", *map(str, args)])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve requests in six seconds; every other one has the prefix of the one before."""
    file = tmp_path / "t.jsonl"
    lines = [
        {
            "timestamp": 500 * at,
            "input_length": 1100,
            "output_length": 4,
            "hash_ids": [at // 2, at // 2 + 100, at + 200],
        }
        for at in range(12)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_run_prints_a_table_and_writes_its_files(invoke: Invoke, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    result = invoke("--trace", trace, *SMALL, "--out", out)
    assert result.exit_code == 0, result.output
    row = next(line.split() for line in result.stdout.splitlines() if line.startswith("run  ") and "12" in line)
    assert row[1:4] == ["12", "12", "0"]
    assert "≤300 ms" in result.stdout and "the share of all requests with TTFT within 30 s" in result.stdout
    assert {one.name for one in out.iterdir()} == {"requests.csv", "trace.json.gz", "summary.json", "report.html"}
    with (out / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted(int(one["index"]) for one in rows) == list(range(12))
    assert all(one["outcome"] == "done" and float(one["ttft_s"]) > 0 for one in rows)
    cached = {int(one["index"]): int(one["cached_tokens"]) for one in rows}
    assert [cached[at] for at in (0, 1)] == [0, 1024]
    told = json.loads((out / "summary.json").read_text())["runs"][0]
    assert told["summary"]["requests"] == 12 and told["summary"]["hit_rate"] == pytest.approx(
        6 * 1024 / (12 * 1100), 1e-3
    )
    assert told["setup"]["gpu"] == "h100" and told["setup"]["trace"] == str(trace)
    assert "<svg" in (out / "report.html").read_text()
    events = json.loads(gzip.decompress((out / "trace.json.gz").read_bytes()))["traceEvents"]
    assert sum(one["ph"] == "s" for one in events) == 12


def test_json_is_on_standard_output_alone(invoke: Invoke, trace: Path) -> None:
    result = invoke("--trace", trace, *SMALL, "--requests", "5", "--tbt-slos", "50,25", "--json")
    told = json.loads(result.stdout)
    assert told["runs"][0]["summary"]["requests"] == 5
    assert [one["tbt_slo_s"] for one in told["runs"][0]["summary"]["goodput"]] == [0.025, 0.05]


def test_the_same_options_give_the_same_figures(invoke: Invoke, trace: Path) -> None:
    first, again = (json.loads(invoke("--trace", trace, *SMALL, "--json").stdout) for _ in range(2))
    for told in (first, again):
        del told["runs"][0]["wall_s"]
    assert first == again


def test_a_sweep_is_a_run_for_each_combination(invoke: Invoke, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    sweep = ("--sweep", "speed=1,2", "--sweep", "policy=kvcache,random", "--table", "none", "--traced", "0")
    result = invoke("--trace", trace, *SMALL, *sweep, "--out", out)
    assert result.exit_code == 0, result.output
    runs = json.loads((out / "summary.json").read_text())["runs"]
    assert [one["name"] for one in runs] == [
        "speed=1,policy=kvcache", "speed=1,policy=random", "speed=2,policy=kvcache", "speed=2,policy=random",
    ]  # fmt: skip
    rates = [one["summary"]["requests_per_s"] for one in runs]
    assert rates == [2, 2, 4, 4]
    assert "Goodput against rate" in (out / "report.html").read_text()


@pytest.mark.slow
def test_one_queue_for_all_tenants_or_turns(invoke: Invoke, tmp_path: Path) -> None:
    load = tmp_path / "load.csv"
    load.write_text("time,input,output,tenant\n" + "0,8192,2,greedy\n" * 12 + "0.2,8192,2,modest\n")
    waits = []
    for flag in ("--tenant-fairness", "--no-tenant-fairness"):
        out = tmp_path / flag
        result = invoke("--csv", load, *SMALL, "--admission", "off", flag, "--out", out)
        assert result.exit_code == 0, result.output
        with (out / "requests.csv").open() as file:
            waits += [float(row["ttft_s"]) for row in csv.DictReader(file) if row["tenant"] == "modest"]
    assert 3 * waits[0] < waits[1]


def test_what_no_conductor_is_told_is_shown(invoke: Invoke) -> None:
    work = (
        "--synthetic",
        "rate=20,burstiness=0,system=512:0,node=512:0,user=100:0.5,output=5:0:9",
        "--requests",
        "200",
    )
    args = (*work, *SMALL[:6], "--prefill", "2", "--decode", "2", "--unknown", "--noise", "0.2")
    result = invoke(*args, "--slow", "p1:4-8:3", "--kill", "d0:6+2", "--join", "p2:9")
    assert result.exit_code == 0, result.output
    lines = {tuple(line.split()[:2]): line.split() for line in result.stdout.splitlines() if line}
    assert {("p1", "slow"), ("d0", "killed"), ("p2", "joined")} < lines.keys()
    shares = [line.split() for line in result.stdout.splitlines() if line.split()[:1] in (["p0"], ["p1"], ["p2"])]
    assert sum(int(one[1]) for one in shares if one[1].isdigit()) == 200
    told = json.loads(invoke(*args, "--kill", "d0:6", "--json").stdout)["runs"][0]
    assert told["summary"]["outcomes"] == {"done": 200}
    assert [one["what"] for one in told["summary"]["changes"]] == ["killed"]
    assert told["setup"]["kill"] == "d0:6" and "slow" not in told["setup"]


def test_clients_wait_for_answers_and_come_when_told(invoke: Invoke, trace: Path) -> None:
    told = json.loads(invoke("--trace", trace, *SMALL, "--closed", "2", "--json").stdout)["runs"][0]["summary"]
    assert told["outcomes"] == {"done": 12} and told["duration_s"] < 2
    result = invoke("--sessions", "3x4,user=600:0,think_s=0.1,start_s=1", *SMALL, "--unknown")
    assert "cached of what the turn before had: 100.0%" in result.stdout
    again = ("--slo-ttft", "1", "--obey-retry-after", "3")
    told = json.loads(invoke("--trace", trace, *SMALL, *again, "--json").stdout)["runs"][0]["summary"]
    assert told["outcomes"] == {"refused": 12} and (told["retry"]["told"], told["retry"]["came"]) == (48, 36)


@pytest.mark.parametrize("mode", ["prefill-first", "chunked"])
def test_coupled_instances_serve_alone(invoke: Invoke, trace: Path, mode: str) -> None:
    args = ("--gpu", "h100", "--gpus", "1", "--model", "llama3-8b", "--coupled", "2", "--coupled-mode", mode)
    told = json.loads(invoke("--trace", trace, *args, "--json").stdout)["runs"][0]
    assert told["summary"]["outcomes"] == {"done": 12}
    assert set(told["summary"]["pools"]) == {"coupled"}
    assert told["setup"]["coupled_mode"] == mode


def test_conductors_place_at_coupled_instances_as_at_engines_of_others(invoke: Invoke, tmp_path: Path) -> None:
    args = ("--gpu", "h100", "--gpus", "1", "--model", "llama3-8b", "--coupled", "2", "--unknown", "--out", tmp_path)
    work = ("--sessions", "3x3,user=600:0,think_s=0.1,start_s=1")
    told = json.loads(invoke(*work, *args, "--sweep", "routing=round-robin,conductor-exact", "--json").stdout)["runs"]
    turns, exact = (one["summary"] for one in told)
    assert turns["outcomes"] == exact["outcomes"] == {"done": 9}
    assert exact["left_cached"] == 1 > turns["left_cached"]
    assert exact["ttft_error"]["mean"] is not None and set(exact["pools"]) == {"coupled"}
    assert told[1]["setup"]["routing"] == "conductor-exact"
    rows = list(csv.DictReader((tmp_path / "routing=conductor-exact" / "requests.csv").read_text().splitlines()))
    assert all(row["decode"] == row["prefill"] != "" and float(row["predicted_ttft_s"]) > 0 for row in rows)


def test_tables_and_synthetic_sessions_are_served_too(invoke: Invoke, tmp_path: Path) -> None:
    table = tmp_path / "load.csv"
    table.write_text("time_ms,input,output\n" + "".join(f"{at * 100},700,3\n" for at in range(8)))
    told = json.loads(invoke("--csv", table, *SMALL, "--json").stdout)["runs"][0]
    assert (told["summary"]["outcomes"], told["summary"]["hit_rate"]) == ({"done": 8}, 0)
    work = "rate=5,turns=3,think_s=0.5,system=512:0,node=512:0,user=100:0.5,output=5:0:9"
    told = json.loads(invoke("--synthetic", work, "--requests", "40", *SMALL, "--json").stdout)["runs"][0]
    assert told["summary"]["outcomes"] == {"done": 40} and told["summary"]["hit_rate"] > 0.2
    assert told["summary"]["tokens"]["output"] == 200


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "none: give one of --trace, --csv, --synthetic and --sessions"),
        (("--policy", "fewest"), "policy='fewest': choose one of kvcache, cache_aware"),
        (("--trace", "TRACE", "--csv", "x"), "--trace and --csv: give one of"),
        (("--trace", "gone.jsonl"), "trace='gone.jsonl': No such file"),
        (("--trace", "TRACE", "--gpu", "b300"), "gpu='b300': choose one of a100"),
        (("--trace", "TRACE", "--model", "gpt9"), "model='gpt9': gpt9: No such file or directory; presets:"),
        (("--trace", "TRACE", "--gpus", "1"), "do not fit 1 x a800"),
        (("--trace", "TRACE", "--policy", "magic"), "policy='magic': choose one of kvcache, cache_aware"),
        (("--trace", "TRACE", "--admission", "x"), "admission='x': choose one of off, baseline, early, predicted"),
        (("--trace", "TRACE", "--admission-confidence", "2"), "admission_confidence=2: must be between 0 and 1"),
        (("--trace", "TRACE", "--threshold", "x"), "threshold='x': is no number"),
        (("--trace", "TRACE", "--threshold", "-1"), "threshold='-1': must be at least 0, or adaptive"),
        (("--trace", "TRACE", "--coupled", "2", "--decode", "1"), "coupled=2: not with --prefill or --decode"),
        (("--trace", "TRACE", "--coupled", "2", "--coupled-mode", "x"), "coupled_mode='x': choose one of prefill"),
        (("--trace", "TRACE", "--speed", "0"), "speed=0: must be over 0"),
        (("--trace", "TRACE", "--block-tokens", "300"), "block_tokens=300: must divide"),
        (("--trace", "TRACE", "--slo-ttft", "0"), "slo_ttft=0: must be over 0 ms"),
        (("--trace", "TRACE", "--tbt-slos", "1,x"), "tbt_slos='x': is no number"),
        (("--trace", "TRACE", "--nic-gbps", "0"), "nic_gbps=0: must be over 0"),
        (("--trace", "TRACE", "--times", "gone"), "times='gone': No such file"),
        (("--trace", "TRACE", "--table", "xls"), "table='xls': choose one of csv, parquet, none"),
        (("--trace", "TRACE", "--sweep", "speeds=1,2"), "sweep='speeds=1,2': must be NAME=VALUE,VALUE"),
        (("--trace", "TRACE", "--sweep", "speed=1,a"), "speed='a': is no number"),
        (("--trace", "TRACE", "--sweep", "prefill=1.5"), "prefill='1.5': must be a whole number"),
        (("--trace", "TRACE", "--sweep", "speed=1,1"), "a value stands twice"),
        (("--trace", "TRACE", "--sweep", "speed=1", "--sweep", "speed=2"), "speed stands twice"),
        (("--synthetic", "rates=2"), "synthetic='rates=2': must be NAME=VALUE, once, of rate"),
        (("--synthetic", "rate=0"), "rate=0: must be over 0"),
        (("--synthetic", "user=1:2:3:4"), "user='1:2:3:4': must be MEAN"),
        (("--sessions", "24"), "sessions='24': must be SESSIONSxTURNS, as 24x7"),
        (("--sessions", "2x3,thinks=1"), "sessions='thinks=1': must be NAME=VALUE, once, of start_s, think_s"),
        (("--sessions", "0x3"), "sessions=0: must be at least 1"),
        (("--sessions", "2x3", "--closed", "4"), "closed=4: not with --sessions"),
        (("--trace", "TRACE", "--noise", "-1"), "noise=-1.0: must be not negative"),
        (("--trace", "TRACE", "--noise", "9"), "noise=9.0: must be at most 3"),
        (("--trace", "TRACE", "--slow", "p1:10-30"), "slow='p1:10-30': must be NODE:FROM-UNTIL:TIMES, as p1 or d0"),
        (("--trace", "TRACE", "--slow", "p1:30-10:3"), "slow=p1:30-10:3: must be from 0 s on, until later"),
        (("--trace", "TRACE", "--slow", "p9:1-2:3"), "slow=p9:1-2:3: must be of one of d0"),
        (("--trace", "TRACE", "--freeze", "x0:1-2"), "freeze='x0:1-2': must be NODE:FROM-UNTIL"),
        (("--trace", "TRACE", "--kill", "d0:15+"), "kill='d0:15+': must be NODE:AT or NODE:AT+BACK"),
        (("--trace", "TRACE", "--prefill", "2", "--join", "p3:1"), "join='p3': the next one of 2 prefill"),
        (("--trace", "TRACE", "--leave", "p0:1,p0:2"), "leave=p0:1: must be there once for an instance"),
        (("--trace", "TRACE", "--prefill", "1", "--join", "p0:1"), "join=p0:1: must be after another prefill instance"),
        (("--trace", "TRACE", "--coupled", "2", "--noise", "0.1"), "noise=0.1: not with --coupled"),
        (("--trace", "TRACE", "--coupled", "2", "--routing", "x"), "routing='x': choose one of round-robin, least-lo"),
        (("--trace", "TRACE", "--routing", "conductor"), "routing='conductor': only with --coupled"),
        (("--trace", "TRACE", "--coupled", "2", "--policy", "random"), "policy='random': with --coupled only where"),
        (("--trace", "TRACE", "--heartbeat", "0"), "heartbeat=0: must be over 0 ms"),
        (("--trace", "TRACE", "--prefill-mesh", "np=2"), "prefill_mesh='np=2': no axis is called 'np'"),
        (("--trace", "TRACE", "--decode-mesh", "tp=3"), "tp=3: must divide the 64 attention heads"),
        (("--trace", "TRACE", "--decode-mesh", "dp=8"), "has 131 GiB of weights, and a800 room for 72"),
        (("--trace", "TRACE", "--coupled-mesh", "tp=8"), "coupled_mesh='tp=8': only with --coupled"),
        (("--trace", "TRACE", "--coupled", "2", "--decode-mesh", "tp=8"), "decode_mesh='tp=8': not with --coupled"),
        (("--trace", "TRACE", "--times", "x", "--decode-mesh", "tp=8"), "decode_mesh='tp=8': not with --times"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(invoke: Invoke, trace: Path, args: tuple[str, ...], words: str) -> None:
    result = invoke(*(str(trace) if one == "TRACE" else one for one in args))
    assert result.exit_code == 2
    assert words in result.stderr and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def test_an_empty_trace_and_a_folder_that_is_a_file(invoke: Invoke, trace: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert "empty.jsonl': holds no request" in invoke("--trace", empty, *SMALL).stderr
    assert "out=" in invoke("--trace", trace, *SMALL, "--out", trace).stderr


def test_help_teaches_by_panels_and_examples(invoke: Invoke) -> None:
    words = " ".join(invoke("--help").stdout.split())
    for one in (
        "Workload",
        "Machines",
        "What the conductor is not told",
        "Conductor",
        "--slow p1:20-50:3",
        "Output",
        "--sweep speed=1,2,3",
        "docs/operate/simulator.md",
    ):
        assert one in words


# ── what options become ───────────────────────────────────────────────────────────────────────────


def options(**changes: Any) -> Options:
    return Options(**{"trace": Path("t.jsonl"), **changes})


def test_options_become_settings_and_machines() -> None:
    config = sim_build.config_of(
        options(
            prefill=3,
            decode=2,
            policy="power-of-two",
            threshold="adaptive",
            admission="early",
            tbt_slos="300,100",
            admission_confidence=0.9,
        )
    )
    assert (config.mode, len(config.prefill), len(config.decode), config.layers) == (MeshMode.DISAGGREGATED, 3, 2, 80)
    told = config.conductor
    assert (told.policy, told.threshold_mode.value, told.admission.mode.value) == (
        "power_of_two",
        "adaptive",
        "early",
    )
    assert told.admission.confidence == 0.9
    assert (told.slo_ttft_s, told.slo_tbt_s) == (30.0, 0.3)
    assert config.load_bytes_per_s == pytest.approx(8 * 32e9 * 0.8)
    assert sim_build.config_of(options(slo_tbt=120.0, threshold="2.5")).conductor.slo_tbt_s == 0.12
    assert (len(sim_build.config_of(options(coupled=5)).coupled), config.chunk_tokens) == (5, 8192)
    assert sim_build.config_of(options(coupled=5, coupled_mode="chunked")).chunk_tokens == 512


def test_a_title_names_what_the_times_are_of() -> None:
    assert options().hardware == "a800, llama3-70b"
    fitted = options(times=Path("a/fit.json"), model="llama3-8b")
    assert fitted.hardware == "step times of fit.json, memory of a800, KV of llama3-8b"
    whole = options(times=Path("fit.json"), kv_tokens=9, dram_tokens=9)
    assert whole.hardware == "step times of fit.json, KV of llama3-70b"


def test_fitted_times_take_the_place_of_the_roofline(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(
        '{"kvmesh_costs": 1, "decode_step": {"a": 0.5, "b": 0, "c": 0}, "transfer": {"a": 0, "b": 1e-9, "c": 0}}'
    )
    spec = sim_build.node_of(options(times=file, kv_tokens=5000, dram_tokens=9000))
    assert spec.times.decode_s(3, 100) == 0.5
    assert (spec.kv_tokens, spec.dram_tokens, spec.nic_bytes_per_s) == (5000, 9000, pytest.approx(1e9))
    assert sim_build.node_of(options(times=file, nic_gbps=80.0)).nic_bytes_per_s == pytest.approx(8.7e9)


def test_axes_take_the_place_of_tensor_parallelism() -> None:
    told = options(prefill_mesh="pp=4,tp=8", decode_mesh="dp=2,tp=8", prefill=2, decode=1)
    config = sim_build.config_of(told)
    (one, _), (rows,) = config.prefill, config.decode
    assert one.pipeline is not None and (one.slots, rows.slots, rows.pipeline) == (1, 2, None)
    plain = sim_build.node_of(options())
    assert one.dram_tokens == 4 * plain.dram_tokens and one.nic_bytes_per_s == 4 * plain.nic_bytes_per_s
    assert rows.kv_tokens == pytest.approx(2 * plain.kv_tokens, rel=1e-3)
    assert config.load_bytes_per_s == pytest.approx(16 * 32e9 * 0.8)
    (both,) = sim_build.config_of(options(coupled=1, coupled_mesh="tp=8")).coupled
    assert both.kv_tokens == pytest.approx(plain.kv_tokens, rel=1e-3)


def test_sweeps_are_named_and_bounded() -> None:
    planned = list(sweeps(options(), ["slo-ttft=1;2", "model=a/b"]))
    assert [(label(chosen), one.slo_ttft, one.model) for chosen, one in planned] == [
        ("slo_ttft=1,model=a_b", 1.0, "a/b"), ("slo_ttft=2,model=a_b", 2.0, "a/b"),
    ]  # fmt: skip
    assert list(sweeps(options(), [])) == [({}, options())]
    with pytest.raises(ConfigError, match="makes 65 runs, at most 64"):
        list(sweeps(options(), ["seed=" + ",".join(map(str, range(65)))]))


def test_speed_makes_synthetic_sessions_denser() -> None:
    assert sim_options.synthetic_of("rate=2", None, 64, 1.5).rate == 3.0
    assert sim_options.synthetic_of("", 7, 64, 1.0).requests == 7


def test_progress_counts_requests_and_neither_headers_nor_empty_lines(tmp_path: Path) -> None:
    table, trace = tmp_path / "t.csv", tmp_path / "t.jsonl"
    table.write_text("time,input,output\n0,100,4\n\n1,100,4\n2,100,4")
    trace.write_text("{}\n{}\n\n")
    assert sim_build.count_of(Options(csv=table)) == 3
    assert sim_build.count_of(Options(csv=table, skip=1, requests=9)) == 2
    assert sim_build.count_of(Options(trace=trace)) == 2


def test_progress_waits_then_tells_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [100.0]
    monkeypatch.setattr(sim_progress.time, "monotonic", lambda: clock[0])
    with sim_progress.progress("speed=2", 1000, "requests") as tell:
        for at_s, done in ((101.0, 100), (102.5, 200), (105.0, 300), (113.0, 400)):
            clock[0] = at_s
            tell(done, "7 s of virtual time")
    told = capsys.readouterr().err.splitlines()
    assert told == [f"speed=2: {done} of 1,000 requests, 7 s of virtual time" for done in (200, 400)]
