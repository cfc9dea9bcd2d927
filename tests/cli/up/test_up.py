"""`kvmesh up` for real: five services, the demo model, and the commands that look at them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvmesh.cli.models import demo_model
from kvmesh.cli.trace import find_trace, read_spans
from kvmesh.errors import InvalidRequest

pytestmark = pytest.mark.mesh

KVMESH = (sys.executable, "-m", "kvmesh.cli")


@dataclass
class Up:
    """A running `kvmesh up` and what it has printed."""

    process: subprocess.Popen[str]
    env: dict[str, str]
    run_dir: Path
    printed: list[str]

    def until(self, text: str) -> str:
        """Read lines up to one with `text`."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.printed.append(line.rstrip("\n"))
            if text in line:
                return line
        raise AssertionError("it ended: " + "\n".join(self.printed))

    def call(self, *args: str) -> str:
        done = subprocess.run([*KVMESH, *args], env=self.env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    @property
    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "mesh.json").read_text())
        return found


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("up")
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
    command = [*KVMESH, "up", "--http-port=0", "--grpc-port=0", "--memory-mb=64", f"--run-dir={folder / 'run'}"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    one = Up(process, env, folder / "run", [])
    try:
        one.until("Ctrl-C stops everything.")
        yield one
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_it_tells_progress_answers_and_shows_how_to_go_on(mesh: Up) -> None:
    text = "\n".join(mesh.printed)
    order = [
        r"^starting \.\.\.$",
        r"^store is ready \(\d+\.\d s\)$", r"5 services are up", r"^user  .*\?$", r"^assistant  \S+",
        r"^TTFT \d+ ms.* tokens; 0 of \d+ prompt tokens came from the cache$", r"^The mesh is up  http://127\.0\.0\.1:\d+/v1",
        r"^  curl http://127", r"^  from openai import OpenAI$", r"^  client = OpenAI\(", r"^  print\(client\.chat",
        r"^Logs  ", r"^Traces  ", r"^Ctrl-C stops everything\.$",
    ]  # fmt: skip
    at = 0
    for pattern in order:
        found = re.compile(pattern, re.M | re.S if "user" in pattern else re.M).search(text, at)
        assert found, f"{pattern} is not in its place:\n{text}"
        at = found.start()


def test_the_curl_line_works_as_printed(mesh: Up) -> None:
    line = next(line for line in mesh.printed if line.startswith("  curl "))
    done = subprocess.run(["bash", "-c", f"{line} --silent"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"


def test_the_python_snippet_works_as_printed(mesh: Up) -> None:
    start = mesh.printed.index("  from openai import OpenAI")
    code = "\n".join(line.strip() for line in mesh.printed[start : start + 3])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def same_answer(mesh: Up) -> bool:
    """Does `kvmesh chat` get the answer that `kvmesh up` printed, to the question that it asked?"""
    messages = json.loads((demo_model() / "demo_prompt.json").read_text())["messages"]
    system, user = (message["content"] for message in messages)
    printed = next(line.removeprefix("assistant").strip() for line in mesh.printed if line.startswith("assistant"))
    assert printed
    return mesh.call("chat", "--system", system, "-m", user, "--max-tokens", "64").strip() == printed


def test_chat_answers_as_up_did(mesh: Up) -> None:
    assert same_answer(mesh)


def test_status_shows_every_service_and_full_pools(mesh: Up) -> None:
    found = json.loads(mesh.call("status", "--json"))
    instances = {one["instance"]["instance_id"]: one for one in found["conductor"]["instances"]}
    assert set(instances) == {"prefill-0", "decode-0"}
    assert all(one["ready"] and "error" not in one["pools"] for one in instances.values())
    assert found["gateway"]["ready"] is True
    assert len(found["store"]["members"]) == 2
    screen = mesh.call("status")
    for name in ("gateway", "conductor", "store", "prefill-0", "decode-0"):
        assert re.search(rf"^{name} .* ready ", screen, re.M), screen


def test_the_last_trace_reaches_from_the_gateway_to_the_transfer(mesh: Up) -> None:
    answer = httpx.post(
        f"{mesh.told['url']}/v1/chat/completions",
        json={"model": "demo-model", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8},
        timeout=60,
    ).json()
    wanted = {
        "kvmesh.tokenize",
        "kvmesh.schedule",
        "kvmesh.place",
        "kvmesh.request",
        "kvmesh.prefill",
        "kvmesh.transfer",
    }
    found: set[str] = set()
    deadline = time.monotonic() + 30
    while not wanted <= found and time.monotonic() < deadline:  # each service writes its spans on its own
        spans = list(read_spans(mesh.run_dir / "traces"))
        with contextlib.suppress(InvalidRequest):
            found = {span["name"] for span in find_trace(spans, answer["id"])}
    assert wanted <= found
    screen = mesh.call("trace", answer["id"])
    assert all(name in screen for name in wanted)


def test_a_killed_instance_comes_back_and_the_mesh_answers_again(mesh: Up) -> None:
    before = mesh.told["services"]["decode-0"]["pid"]
    os.kill(before, signal.SIGKILL)
    assert "decode-0 died (killed by SIGKILL)" in mesh.until("decode-0 died")
    mesh.until("decode-0 is up again")
    assert mesh.told["services"]["decode-0"]["pid"] != before
    assert same_answer(mesh)


def test_ctrl_c_stops_everything(mesh: Up) -> None:
    """Last of this file: it ends the mesh."""
    running = psutil.Process(mesh.process.pid).children(recursive=True)
    assert len(running) >= 7, "five services and two ranks"
    mesh.process.send_signal(signal.SIGINT)
    assert mesh.process.wait(60) == 0
    assert mesh.process.stdout
    assert "nothing is left running" in mesh.process.stdout.read()
    assert not [one for one in running if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_broken_checkpoint_ends_the_start_with_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "mamba", "architectures": ["MambaForCausalLM"]}')
    done = subprocess.run(
        [*KVMESH, "up", "--model", str(model), "--http-port=0", "--grpc-port=0", "--run-dir", str(tmp_path / "r")],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert re.match(r"error: ((prefill-0|decode-0|gateway): )?", lines[0]) and str(model) in lines[0], lines[0]
