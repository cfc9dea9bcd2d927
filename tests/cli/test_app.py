"""The command line: help that teaches, options made from configurations, one line for an error."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvmesh.cli import options, stream
from kvmesh.cli.app import app
from kvmesh.cli.serve import SERVICES, config_class, known_keys
from kvmesh.config import ServiceConfig
from kvmesh.errors import InvalidRequest

Invoke = Callable[..., Result]
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0")


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Invoke:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def call(*args: str) -> Result:
        return CliRunner().invoke(app, list(args))

    return call


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["up"],
        ["serve"],
        *(["serve", name] for name in SERVICES),
        ["chat"],
        ["status"],
        ["trace"],
        ["explain"],
        ["bench"],
        ["replay"],
        ["sim"],
        ["sim", "cache"],
        ["apikey"],
        ["doctor"],
        ["version"],
    ],
    ids=" ".join,
)
def test_every_help_teaches_with_an_example(invoke: Invoke, command: list[str]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    example = rf"^ +\S.*\bkvmesh {' '.join(command) or 'up'}\b|^ +kvmesh {' '.join(command) or 'up'}\b"
    assert re.search(example, result.output, re.M), result.output


@pytest.mark.parametrize("service", SERVICES)
def test_every_key_of_a_service_is_an_option_with_help(invoke: Invoke, service: str) -> None:
    output = invoke("serve", service, "--help").output
    for field, _ in options.fields_of(config_class(service)):
        assert f"--{field.name.replace('_', '-')}" in output
        assert field.metadata.get("help"), f"{service}.{field.name} has no help"
    assert "A flag wins over the environment" in re.sub(r"\s+", " ", output)


@pytest.mark.parametrize(
    ("command", "env", "message"),
    [
        (["serve", "store", "--lease-ms", "soon"], {}, "lease_ms='soon' (from --lease-ms): must be a whole number"),
        (["serve", "store"], {"KVMESH_LEASE_MS": "-"}, "lease_ms='-' (from KVMESH_LEASE_MS): must be a whole number"),
        (["serve", "store"], {"KVMESH_LEASE": "3"}, "unknown key 'KVMESH_LEASE'"),
        (["serve", "store", "--log-level", "loud"], {}, "log_level='loud' (from --log-level): choose one of"),
        (["serve", "store", "--config", "/no/such"], {}, "config='/no/such': No such file or directory"),
        (["role", "127.0.0.1:99999", "both"], {}, "instance='127.0.0.1:99999': must be a name, or HOST:PORT"),
        (["role", ":7040", "both"], {}, "instance=':7040': must be a name, or HOST:PORT"),
        (["up", "--prefill", "0"], {}, "prefill=0: without --coupled instances at least one is needed"),
        (["up", "--block-tokens", "48"], {}, "block_tokens='48' (from --block-tokens): choose one of 16, 32"),
        (["up", "--slo-ttft", "x"], {}, "slo_ttft_ms='x' (from --slo-ttft): must be a whole number"),
        (["up", "--model", "/no/such/folder"], {}, "model='/no/such/folder': no such folder"),
        (["up", "--http-port", "9000", "--grpc-port", "9000"], {}, "is http_port too; choose another with --grpc-port"),
        (
            ["up"],
            {"KVMESH_DECODES": "3"},
            "unknown key 'KVMESH_DECODES' (from KVMESH_DECODES); did you mean KVMESH_DECODE?",
        ),
        (["up", "--pool", "-1"], {}, "pool='-1' (from --pool): must be at least 0"),
        (["up", "--pool-memory-mb", "0"], {}, "pool_memory_mb='0' (from --pool-memory-mb): must be at least 1"),
        (["up", "--model", "/m", "--add-model", "a=/x", "--add-model", "a=/y"], {}, "add_model='a': a model of this"),
        (["up", "--add-model", "=/x"], {}, "add_model='=/x': must be NAME=PATH or PATH, without commas"),
        (["up", "--add-model", "a="], {}, "add_model='a=': must be"),
        (["up", "--add-model", "a=/no/such"], {}, "add_model='/no/such': no such folder"),
        (["up", *FREE_PORTS, "--api-keys", "/no/such"], {}, "api_keys='/no/such': No such file"),
        (["up", "--tls", "--tls-cert", "c.pem"], {}, "tls_cert='c.pem': --tls makes certificates of its own"),
        (
            ["up", *FREE_PORTS, "--tls-cert", "/no/c", "--tls-key", "/no/k"],
            {},
            "tls_cert='/no/c': No such file",
        ),
        (["serve", "store", "--tls-ca", "/no/ca"], {}, "tls_ca='/no/ca': No such file"),
        (["status", "--conductor", "127.0.0.1:1"], {"KVMESH_TLS_CA": "/no/ca"}, "tls_ca='/no/ca': No such file"),
        (["explain", "x"], {}, "no mesh was started here yet"),
        (["explain", "cmpl-", "--conductor", "127.0.0.1:1"], {}, "request_id='cmpl-': names no request"),
        (["bench"], {}, "no mesh was started here yet"),
        (["status"], {}, "no mesh was started here yet: run `kvmesh up` first"),
        (["trace", "--last"], {}, "no mesh was started here yet"),
        (["trace"], {}, "name a request id, or give --last"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, command: list[str], env: dict[str, str], message: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    result = invoke(*command)
    assert result.exit_code == 2
    lines = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert "Traceback" not in result.output


def test_an_unknown_flag_is_refused(invoke: Invoke) -> None:
    result = invoke("serve", "store", "--lease", "3")
    assert result.exit_code == 2
    assert "No such option" in result.output


@pytest.mark.parametrize("command", [["up"], *(["serve", name] for name in SERVICES)], ids=" ".join)
def test_an_unknown_key_is_refused_wherever_it_comes_from(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: list[str]
) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("lees_ms = 3\n")
    by_file = invoke(*command, "--config", str(file))
    assert f"error: unknown key 'lees_ms' (in {file})" in by_file.output
    by_flag = invoke(*command, "--lees-ms", "3")
    assert "No such option: --lees-ms" in by_flag.output
    monkeypatch.setenv("KVMESH_LEES_MS", "3")
    by_environment = invoke(*command)
    assert "error: unknown key 'KVMESH_LEES_MS' (from KVMESH_LEES_MS)" in by_environment.output
    assert (by_file.exit_code, by_flag.exit_code, by_environment.exit_code) == (2, 2, 2)


def test_a_port_in_use_names_the_port_and_the_flag(invoke: Invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        first = invoke("up", "--http-port", str(port))
        second = invoke("up", "--grpc-port", str(port))
    assert f"error: http_port={port}: the port is in use on 127.0.0.1; choose another with --http-port" in first.output
    assert f"error: grpc_port={port}: the port is in use on 127.0.0.1; choose another with --grpc-port" in second.output
    assert (first.exit_code, second.exit_code) == (2, 2)


def test_chat_without_a_mesh_says_so(invoke: Invoke) -> None:
    result = invoke("chat", "-m", "hi", "--url", "http://127.0.0.1:1")
    assert result.exit_code == 1
    assert "error: nothing answers at http://127.0.0.1:1: is the mesh up?" in result.output


def test_chat_and_bench_of_a_machine_that_joined_ask_for_the_url(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run = tmp_path / "kvmesh" / "latest"
    run.mkdir(parents=True)
    joined = {"conductors": ["10.0.0.1:7001"], "masters": ["10.0.0.1:7002"]}
    (run / "mesh.json").write_text(json.dumps({"pid": os.getpid(), "url": "", "services": {}, "joined": joined}))
    for args in (("chat", "-m", "hi"), ("bench", "--requests", "1")):
        result = invoke(*args)
        assert result.exit_code == 2
        assert "serves in the mesh of 10.0.0.1:7001, whose gateway is on another one: give --url" in result.output


@pytest.mark.parametrize("bias", ["5", "5=x", "5=nan"])
def test_chat_names_a_bias_that_is_none(invoke: Invoke, bias: str) -> None:
    result = invoke("chat", "-m", "hi", "--url", "http://127.0.0.1:1", "--logit-bias", bias)
    assert result.exit_code == 1
    assert f"error: logit_bias={bias!r}" in result.output


def test_version(invoke: Invoke) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", invoke("version", "--short").output)
    assert re.match(r"kvmesh \d\S*, protocol 1, Python 3", invoke("version").output)


def test_help_needs_neither_torch_nor_grpc() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kvmesh.cli.app import app;"
        "assert CliRunner().invoke(app, ['up', '--help']).exit_code == 0;"
        "print([name for name in ('torch', 'grpc', 'transformers', 'opentelemetry.sdk') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_shared_environment_holds_keys_of_every_service() -> None:
    assert {"http_port", "lease_ms", "memory_mb", "grpc_port", *ServiceConfig.__dataclass_fields__} <= known_keys()
    assert {"native", "amx", "rank_log", "namespace"} <= known_keys(), "switches that no service's configuration holds"


@pytest.mark.parametrize(
    ("text", "parameters", "words"),
    [
        ("\udcff", {}, "message: is not UTF-8 text"),
        ("hi", {"temperature": float("nan")}, "temperature=nan: must be a finite number"),
        ("hi", {"temperature": float("inf")}, "temperature=inf"),
    ],
)
def test_chat_refuses_what_no_json_can_carry(text: str, parameters: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        stream.chat("http://127.0.0.1:1", "m", [{"role": "user", "content": text}], print, **parameters)


def test_status_of_what_does_not_answer_is_a_failure(invoke: Invoke) -> None:
    result = invoke("status", "--conductor", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no answer" in result.output
    assert "registered" not in result.output
