"""External engines in a mesh: what they say over HTTP is what the engine says alone, whoever dies or freezes meanwhile.

The engines are gateways of the same mesh, which speak what vLLM speaks; behind them is the mesh's own coupled instance.
So one mesh has both: `demo-model` served by that instance, `others` by external instances that ask the gateways for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvmesh.cli.up import plan
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from tests.support.mesh.client import until
from tests.support.mesh.harness import READY_S, Running

# CI has tests/external/test_instance.py: the same service between a real conductor and an engine by script.
pytestmark = [
    pytest.mark.long,
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

MODEL, OTHERS = "demo-model", "others"
ENGINES = ("engine-0", "engine-1", "engine-2")
BLOCK = 16
TIMINGS = {"x-kvmesh-timings": "1"}
PROMPT = [5 + (i * i * 31 + i * 17) % 1900 for i in range(100)]


class Streamed:
    """`ids` yields token ids as they come; `told` are all that have come, `stages` what the last event tells."""

    def __init__(self, answer: httpx.Response) -> None:
        self._lines = answer.aiter_lines()
        self.told: list[int] = []
        self.stages: dict[str, Any] = {}
        self.ids = self._read()

    async def _read(self) -> AsyncIterator[int]:
        async for line in self._lines:
            data = line.removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            self.stages = event.get("kvmesh", self.stages)
            for choice in event["choices"]:
                for token in choice["token_ids"]:
                    self.told.append(token)
                    yield token


class Others:
    """The mesh, and what it is asked."""

    def __init__(self, running: Running, http: httpx.AsyncClient, file: Path, urls: dict[str, str]) -> None:
        self.running, self.http, self.file, self.urls = running, http, file, urls

    def write(self, *names: str) -> None:
        """Has these engines in the file of endpoints."""
        write(self.file, {name: self.urls[name] for name in names})

    async def told(self) -> dict[str, conductor_pb2.InstanceStatus]:
        """What the conductor knows of external instances."""
        async with connect(self.running.mesh.addresses["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            told = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)
        return {one.instance.instance_id: one for one in told.instances if one.http_url}

    async def ready(self, *names: str) -> None:
        """These engines, and no others, get work."""

        async def so() -> bool:
            return {name for name, one in (await self.told()).items() if one.ready} == set(names)

        await until(so, f"work for {names} alone", READY_S)

    async def complete(self, model: str, prompt: list[int] = PROMPT, **asked: Any) -> dict[str, Any]:
        """A whole answer, with its token ids and what the gateway says of it."""
        body = {"model": model, "prompt": prompt, "max_tokens": 48, "temperature": 0, "return_token_ids": True} | asked
        answer = await self.http.post("/v1/completions", json=body, headers=TIMINGS)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    async def explained(self, request_id: str) -> conductor_pb2.ExplainResponse:
        async with connect(self.running.mesh.addresses["conductor"]) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            return await stub.Explain(conductor_pb2.ExplainRequest(request_id=request_id), timeout=30)

    @contextlib.asynccontextmanager
    async def streamed(self, model: str, prompt: list[int] = PROMPT, **asked: Any) -> AsyncIterator[Streamed]:
        """An answer as it comes."""
        body = {"model": model, "prompt": prompt, "temperature": 0, "return_token_ids": True, "stream": True} | asked
        async with self.http.stream("POST", "/v1/completions", json=body, headers=TIMINGS) as answer:
            assert answer.status_code == 200
            yield Streamed(answer)

    async def ids(self, model: str, **asked: Any) -> list[int]:
        found: list[int] = (await self.complete(model, **asked))["choices"][0]["token_ids"]
        return found


def write(file: Path, urls: Mapping[str, str]) -> None:
    """Has these engines in a file of endpoints."""
    listed = [{"url": url, "name": name, "engine_model": MODEL} for name, url in urls.items()]
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"endpoints": listed}))
    part.replace(file)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Others]:
    folder = tmp_path_factory.mktemp("external")
    file = folder / "endpoints.json"
    flags = {
        "conductor": {"slo_ttft_ms": 60_000, "slo_tbt_ms": 60_000},  # on a busy machine, too
        "external": {"poll_ms": 200, "engine_timeout_ms": 1_000, "engine_silence_ms": 2_000},
    }
    settings = MeshSettings(
        model=str(demo_path),
        prefill=0,
        decode=0,
        coupled=1,
        external_file=str(file),
        external_name=OTHERS,
        http_port=0,
        grpc_port=0,
        block_tokens=BLOCK,
        memory_mb=64,
        dtype="float32",
        run_dir=str(folder / "run"),
        flags=flags,
    )
    ports = plan.Ports()
    specs = plan.plan(settings, folder / "run", ports)
    engines = [_engine(specs[-1], name, ports) for name in ENGINES]
    urls = {spec.name: f"http://{spec.http}" for spec in engines}
    write(file, urls)
    made = Mesh(settings, [*specs, *engines])
    made.url = f"http://{specs[-1].http}"
    made.start()
    try:
        await asyncio.to_thread(made.wait_ready, READY_S)
        running = Running(made)
        async with httpx.AsyncClient(base_url=made.url, timeout=120) as http:
            found = Others(running, http, file, urls)
            await found.ready(*ENGINES)
            yield found
        await running.client.close()
    finally:
        await asyncio.to_thread(made.stop)


def _engine(gateway: plan.ProcessSpec, name: str, ports: plan.Ports) -> plan.ProcessSpec:
    """Returns another gateway of the mesh."""
    own = {key: ports.take() for key in ("port", "http-port", "metrics-port")}
    ready = gateway.ready_file.with_name(f"{name}.json")
    told = {**{key: str(value) for key, value in own.items()}, "ready-file": str(ready)}
    argv = [part for part in gateway.argv if part.partition("=")[0].removeprefix("--") not in told]
    return dataclasses.replace(
        gateway,
        name=name,
        address=f"127.0.0.1:{own['port']}",
        http=f"127.0.0.1:{own['http-port']}",
        metrics=f"127.0.0.1:{own['metrics-port']}",
        argv=(*argv, *(f"--{key}={value}" for key, value in told.items())),
        log=gateway.log.with_name(f"{name}.log"),
        ready_file=ready,
    )


async def test_answers_are_the_engines_own(mesh: Others) -> None:
    asked: dict[str, Any] = {"max_tokens": 16, "logprobs": 2}
    own, others = await asyncio.gather(mesh.complete(MODEL, **asked), mesh.complete(OTHERS, **asked))
    [one], [other] = own["choices"], others["choices"]
    assert one["token_ids"] == other["token_ids"] and one["text"] == other["text"]
    for scores in (one["logprobs"], other["logprobs"]):
        assert [len(top) for top in scores["top_logprobs"]] == [2] * 16
    told = other["logprobs"]["token_logprobs"]
    assert told == pytest.approx(one["logprobs"]["token_logprobs"], abs=1e-3)
    sampled = {"temperature": 0.8, "seed": 11}
    assert await mesh.ids(MODEL, **sampled) == await mesh.ids(OTHERS, **sampled)


async def test_the_conductor_tells_what_it_knows_and_sends_prompts_back(mesh: Others) -> None:
    prompt = [5 + (i * i * 37 + i) % 1900 for i in range(1_500)]
    first = await mesh.complete(OTHERS, prompt, max_tokens=1)
    home = first["kvmesh"]["choices"][0]["decode_instance"]

    async def believed() -> bool:
        return (await mesh.told())[home].indexed_blocks >= len(prompt) // BLOCK

    await until(believed, f"the conductor knows what {home} is believed to hold")
    again = await mesh.complete(OTHERS, prompt, max_tokens=1)
    assert again["kvmesh"]["choices"][0]["decode_instance"] == home
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) // BLOCK * BLOCK - BLOCK
    told = (await mesh.told())[home]
    assert (told.http_url, told.knowledge) == (mesh.urls[home], conductor_pb2.BLOCK_KNOWLEDGE_FALLBACK)
    assert told.card.block_tokens == BLOCK and told.capacity_blocks > 0
    why = await mesh.explained(again["id"].removeprefix("cmpl-"))
    assert {one.decode.instance_id for one in why.kinds} == set(ENGINES) and not why.candidates  # never in pairs
    [kind] = [one for one in why.kinds if one.chosen]
    assert (kind.kind, kind.prefill.instance_id, kind.decode.instance_id) == ("coupled", home, home)
    assert why.placement.predicted_cached_tokens > 0


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_an_answer_goes_on_at_another_engine(mesh: Others, sig: signal.Signals) -> None:
    """With the same tokens: a frozen engine is found out by its silence."""
    lost, others = ENGINES[0], ENGINES[1:]
    asked: dict[str, Any] = {"max_tokens": 160, "ignore_eos": True}
    whole = asyncio.create_task(mesh.ids(MODEL, **asked))
    await mesh.running.cordon(*others)
    async with mesh.streamed(OTHERS, **asked) as answer:
        assert await anext(answer.ids)
        await mesh.running.cordon(*others, keep=False)
        pid = mesh.running.pid(lost)
        mesh.running.kill(lost, sig)
        try:
            async for _ in answer.ids:
                pass
        finally:
            if sig is signal.SIGSTOP:
                mesh.running.kill(lost, signal.SIGCONT)
    assert answer.told == await whole
    [choice] = answer.stages["choices"]
    assert choice["migrations"] >= 1 and choice["exact"] and choice["decode_instance"] in others
    if sig is signal.SIGKILL:
        await mesh.running.reborn(lost, pid)
    await mesh.ready(*ENGINES)


async def test_endpoints_join_and_leave_while_they_work(mesh: Others) -> None:
    leaves, stays = ENGINES[2], ENGINES[:2]
    asked: dict[str, Any] = {"max_tokens": 160, "ignore_eos": True}
    await mesh.running.cordon(*stays)
    async with mesh.streamed(OTHERS, **asked) as answer:
        assert await anext(answer.ids)
        await mesh.running.cordon(*stays, keep=False)
        mesh.write(*stays)
        await mesh.ready(*stays)
        assert "leaving" in (await mesh.told())[leaves].not_ready_reason
        async for _ in answer.ids:
            pass
    assert len(answer.told) == 160
    [choice] = answer.stages["choices"]
    assert choice["migrations"] == 0 and choice["decode_instance"] == leaves  # it was left to its end
    mesh.file.write_text('{"endpoints": ["not a url"]}')
    log = mesh.running.mesh.processes["external"].spec.log

    async def refused() -> bool:
        return "endpoints[0]='not a url': must be http://HOST:PORT" in await asyncio.to_thread(log.read_text)

    await until(refused, "one clear error")
    await mesh.ready(*stays)
    assert len(await mesh.ids(OTHERS)) > 0
    mesh.write(*ENGINES)
    await mesh.ready(*ENGINES)
