"""The mesh of README's "A mesh of many" without `kvmesh up`: its very lines, each a process, on other ports."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from kvmesh.cli.up.plan import Ports
from tests.support.mesh.client import until
from tests.support.paths import ROOT

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

KVMESH = (sys.executable, "-m", "kvmesh.cli")
READY_S = 120.0


@dataclass
class ByHand:
    """Where it answers; `status`: README's last line."""

    url: str
    status: list[str]
    conductor: str
    env: dict[str, str]

    def call(self, *args: str) -> str:
        done = subprocess.run(
            [*KVMESH, *args], env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout


def recipe() -> list[str]:
    """The lines of the code block that starts services, in README's order."""
    blocks = (ROOT / "README.md").read_text().split("\n```")
    (block,) = [one for one in blocks if one.startswith("\nkvmesh serve ")]
    return block.strip().splitlines()


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    lines, ports = recipe(), Ports()
    chosen = {old: str(ports.take()) for old in sorted(set(re.findall(r"\b[78]0\d\d\b", "\n".join(lines))))}
    text = re.sub(r"\b[78]0\d\d\b", lambda found: chosen[found[0]], "\n".join(lines))
    *services, status = [shlex.split(line)[1:] for line in text.splitlines()]
    told = ["store", "conductor", "prefill", "prefill", "decode", "coupled", "pool", "gateway"]
    assert [line[1] for line in services] == told
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "KVMESH_MEMORY_MB": "16"}
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("w"))
        for line in reversed(services):  # "in any order"
            line = [word for word in line if word not in ("--memory-mb", "512")]
            process = subprocess.Popen([*KVMESH, *line], env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            stack.callback(end, process)
        yield ByHand(f"http://127.0.0.1:{chosen['8000']}", status, f"127.0.0.1:{chosen['7001']}", env)


async def test_the_lines_of_the_readme_are_a_mesh(by_hand: ByHand) -> None:
    async with httpx.AsyncClient(base_url=by_hand.url, timeout=60) as http:

        async def ready() -> bool:
            try:
                return (await http.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready, "the gateway", READY_S)
        body = {"model": "demo-model", "prompt": list(range(10, 310)), "max_tokens": 4, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    shown = by_hand.call(*by_hand.status)  # leaves with 1 when anything named there does not answer
    assert re.search(r"^pool-\S+-\d+ +pool +0 in 16 MiB ", shown, re.M), shown
    assert "1 pool node" in shown and re.search(r"^coupled-\S+-\d+ ", shown, re.M), shown
    assert "300 tokens, 4 blocks" in by_hand.call("explain", answer.json()["id"], "--conductor", by_hand.conductor)
    assert "2 answered" in by_hand.call("bench", "--url", by_hand.url, "--requests", "2", "--input-tokens", "64")
