"""`kvmesh up` with a pool node, two models, decode instances of two ranks, mTLS and API keys, and the commands that
measure and explain it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvmesh.cli import probe
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.mesh

KVMESH = (sys.executable, "-m", "kvmesh.cli")
BLOCK = 16
SAMPLING = {
    "temperature": 1, "top-p": 0.9, "top-k": 9, "min-p": 0.1, "presence-penalty": 1, "frequency-penalty": -1,
    "repetition-penalty": 1.1, "logit-bias": "5=-100", "seed": 3,
}  # fmt: skip


class Up:
    """A running `kvmesh up`; `call` runs another command beside it."""

    def __init__(self, process: subprocess.Popen[str], env: dict[str, str], run_dir: Path, key: str) -> None:
        self.process, self.env, self.run_dir, self.key = process, env, run_dir, key
        self.printed: list[str] = []

    @property
    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "mesh.json").read_text())
        return found

    def call(self, *args: object, code: int = 0, **env: str) -> str:
        done = subprocess.run(
            [*KVMESH, *map(str, args)], env={**self.env, "KVMESH_API_KEY": self.key, **env},
            capture_output=True, text=True, timeout=90, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout + done.stderr * bool(code)

    def complete(self, model: str, prompt: list[int]) -> dict[str, Any]:
        body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.key}"}
        answer = httpx.post(f"{self.told['url']}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("shared")
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
    make = [*KVMESH, "apikey", "alice", "--file", str(folder / "keys.toml")]
    key = subprocess.run(make, env=env, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    first = make_checkpoint(folder / "first", seed=1)
    second = make_checkpoint(folder / "second", seed=2)
    command = [
        *KVMESH, "up", f"--model={first}", "--served-name=one", f"--add-model=org/two={second}", "--pool=1", "--tls",
        "--decode-tp=2", f"--api-keys={folder / 'keys.toml'}", f"--block-tokens={BLOCK}", "--memory-mb=2",
        "--pool-memory-mb=2", "--http-port=0", "--grpc-port=0", f"--run-dir={folder / 'run'}",
    ]  # fmt: skip
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    one = Up(process, env, folder / "run", key)
    try:
        assert process.stdout
        for line in process.stdout:
            one.printed.append(line.rstrip("\n"))
            if "Ctrl-C stops everything." in line:
                break
        else:
            raise AssertionError("it ended: " + "\n".join(one.printed))
        yield one
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_up_tells_what_the_gateway_wants(mesh: Up) -> None:
    text = "\n".join(mesh.printed)
    assert "8 services are up" in text
    assert "No first request: the gateway wants an API key" in text
    assert "Authorization: Bearer $KVMESH_API_KEY" in text
    assert "api_key=os.environ['KVMESH_API_KEY']" in text
    assert set(mesh.told["services"]) == {
        "store", "conductor", "pool-0", "prefill-0", "decode-0", "org-two-prefill-0", "org-two-decode-0", "gateway",
    }  # fmt: skip
    assert list(mesh.told["models"]) == ["one", "org/two"]
    ranks = {name: len(psutil.Process(one["pid"]).children()) for name, one in mesh.told["services"].items()}
    assert [ranks[f"{model}{one}-0"] for model in ("", "org-two-") for one in ("prefill", "decode")] == [1, 2, 1, 2]


def test_both_models_answer_to_the_key_and_to_nobody_else(mesh: Up) -> None:
    prompt = list(range(20, 90))
    answers = {model: mesh.complete(model, prompt) for model in ("one", "org/two")}
    assert {model: answer["model"] for model, answer in answers.items()} == {"one": "one", "org/two": "org/two"}
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0 for answer in answers.values())
    assert httpx.get(f"{mesh.told['url']}/v1/models").status_code == 401
    refused = mesh.call("chat", "-m", "hi", code=1, KVMESH_API_KEY="")
    assert "error: " in refused
    assert "--api-key, or KVMESH_API_KEY" in refused
    sampling = [f"--{name}={value}" for name, value in SAMPLING.items()]
    assert mesh.call("chat", "-m", "hi", "--model", "org/two", "--max-tokens", 3, *sampling).strip()


def test_services_speak_tls_and_nothing_else(mesh: Up) -> None:
    for name, one in mesh.told["services"].items():
        assert probe.health(one["address"]) != "SERVING", name
    keys = list((mesh.run_dir / "tls").rglob("*key.pem"))
    assert {"gateway", "prefill-0", "operator"} <= {key.parent.name for key in keys}, "each process has its own"
    assert not any(key.stat().st_mode & 0o077 for key in keys)
    conductor = mesh.told["services"]["conductor"]["address"]
    files = {f"KVMESH_TLS_{key[4:].upper()}": path for key, path in mesh.told["tls"].items() if path}
    assert "prefill-0" in mesh.call("status", "--conductor", conductor, **files)
    assert "no answer" in mesh.call("status", "--conductor", conductor, code=1)


def test_bench_and_replay_through_the_live_mesh(mesh: Up, tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    flags = ["--requests", 6, "--concurrency", 2, "--input-tokens", 64, "--output-tokens", 3, "--prefix-share", 0.75]
    mesh.call("bench", *flags, "--warmup", 1, "--model", "org/two", "--json", target)
    told = json.loads(target.read_text())
    assert (told["model"], told["requests"]["answered"], told["tokens"]["output"]) == ("org/two", 6, 18)
    assert told["hit_rate"] == 0.75, "the warm-up left the common prefix of 48 tokens"
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 1024, [1, 2]), (1, 1536, [1, 2, 3]), (2, 1500, [1, 2, 4]), (3, 1024, [5, 6]), (4, 2048, [1, 2, 3, 7])]
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": ids})
            for at, length, ids in rows
        )
    )
    report = mesh.call("replay", trace, "--speed", "inf", "--scale-tokens", "1/32")
    told = json.loads(mesh.call("replay", trace, "--speed", "inf", "--scale-tokens", "1/32", "--json", "-"))
    hits = told["hit_rates"]
    assert told["requests"]["answered"] == 5
    assert hits["ideal"]["hit_tokens"] == 32 + 32 + 48
    assert hits["reachable"]["hit_tokens"] == hits["live"]["hit_tokens"] == 32 + 32 + 48, (
        "one at a time, nothing evicted"
    )
    assert "by blocks" in report and "unbounded cache" in report


def test_explain_names_candidates_terms_and_what_came_of_it(mesh: Up) -> None:
    prompt = list(range(30, 130))
    mesh.complete("one", prompt)
    answer = mesh.complete("one", prompt)
    told = json.loads(mesh.call("explain", answer["id"], "--json"))
    assert told["outcome"] == "placed"
    assert {one["instance"]["instance_id"] for one in told["candidates"]} == {"prefill-0", "decode-0"}
    assert told["prompt_tokens"] == 100
    screen = mesh.call("explain", answer["id"])
    for words in (
        r"^→ +prefill-0 ",
        r"^→ +decode-0 ",
        "prefill: prefill-0 was the only one",
        "^Expected: TTFT",
        "^Afterwards: ",
    ):
        assert re.search(words, screen, re.M), screen
    unknown = mesh.call("explain", "cmpl-nobody", code=1)
    assert "request_id='cmpl-nobody': no conductor knows it, or it was forgotten" in unknown


def test_status_tells_blocks_hits_and_the_map(mesh: Up) -> None:
    prompt = list(range(60, 200))
    for _ in range(2):
        mesh.complete("one", prompt)
    found = json.loads(mesh.call("status", "--json"))
    assert set(found["node_stores"]) == {"prefill-0", "decode-0", "org-two-prefill-0", "org-two-decode-0", "pool-0"}
    assert all("error" not in one for one in found["node_stores"].values())
    assert found["node_stores"]["prefill-0"]["pools"]["store_blocks"] > 0
    assert found["store"]["map"]["replicas"] >= found["store"]["map"]["blocks"] > 0
    assert 0 < found["hit_rates"]["all"] < 1
    screen = mesh.call("status")
    for words in (
        r"^prefill-0 +prefill one +ready",
        r"^org-two-decode-0 +decode +org/two +tp2 +ready",
        r"^hit rate  \d",
        "1 pool node; ",
    ):
        assert re.search(words, screen, re.M), screen
    narrow = mesh.call("status", COLUMNS="80")
    assert "node store" in narrow


def test_a_mesh_that_was_stopped_is_told(mesh: Up) -> None:
    """Last of this file: it ends the mesh."""
    mesh.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        mesh.process.communicate(timeout=60)
    for command in (["bench"], ["explain", "x"], ["status"]):
        assert "has stopped: start one with `kvmesh up`" in mesh.call(*command, code=2)
