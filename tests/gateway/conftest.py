"""A gateway running on real sockets, in front of a scripted conductor and scripted decode instances."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import gateway_pb2, gateway_pb2_grpc
from kvmesh.services.gateway import main
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from tests.support.gateway import tokenizers_made
from tests.support.gateway.documented import documented
from tests.support.gateway.scripted import MODEL, Conductor, Decode, Run, Script

TURN_S = 60.0


class Mesh:
    """The gateway under test and what stands behind it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.load(folder)
        self.eos = self.tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
        self.conductor = Conductor()
        self.conductor.card.eos_token_ids.append(self.eos)
        self.decodes = self.conductor.decodes
        self.told: dict[str, Any] = {}
        self.url = ""
        self.http: httpx.AsyncClient
        self.client: openai.AsyncOpenAI
        self.stub: gateway_pb2_grpc.GatewayAsyncStub
        self.stop: Callable[[], Awaitable[None]]

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def says(self, text: str, *, eos: bool = True) -> Script:
        """A script that answers `text`."""
        tokens = self.ids(text) + ([self.eos] if eos else [])

        async def script(run: Run) -> None:
            await run.answer(tokens)

        return script

    async def status(self) -> gateway_pb2.GetGatewayStatusResponse:
        return await self.stub.GetGatewayStatus(gateway_pb2.GetGatewayStatusRequest(), timeout=30)

    async def quiet(self) -> None:
        """Returns once no request is in flight at the gateway."""
        await until(lambda: self.status(), lambda status: status.requests == 0)


async def until(look: Callable[[], Awaitable[Any]], good: Callable[[Any], bool]) -> Any:
    """Look again until it is `good`; what cannot be waited for by an event."""
    async with asyncio.timeout(TURN_S):
        while not good(found := await look()):  # noqa: ASYNC110 (a status over RPC tells no events)
            await asyncio.sleep(0.01)
    return found


async def seen(what: Callable[[], Any]) -> Any:
    """Wait until `what()` is truthy."""

    async def look() -> Any:
        return what()

    return await until(look, bool)


MeshMaker = Callable[..., Awaitable[Mesh]]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizers_made.save(tokenizers_made.byte_level(), tmp_path_factory.mktemp("models") / MODEL)


@pytest.fixture
async def make_mesh(checkpoint: Path) -> AsyncIterator[MeshMaker]:
    """`await make_mesh(decodes=1, wait_ready=True, also=further models, http_ca=of HTTPS, **config)`."""
    closing: list[Callable[[], Awaitable[None]]] = []

    async def make(
        decodes: int = 1,
        *,
        wait_ready: bool = True,
        folder: Path | None = None,
        also: dict[str, bool] | None = None,
        http_ca: Path | None = None,
        **config: Any,
    ) -> Mesh:
        mesh = Mesh(folder or checkpoint)
        mesh.conductor.also = also or {}
        await mesh.conductor.server.start()
        closing.append(lambda: mesh.conductor.stop())
        for index in range(decodes):
            decode = Decode(f"decode-{index}", mesh.says("Hello, world"))
            await decode.start()
            closing.append(lambda decode=decode: decode.server.stop(0))  # type: ignore[misc]
            mesh.decodes.append(decode)
        settings = GatewayConfig(
            port=0, http_port=0, model=str(mesh.folder), served_name=MODEL, conductor=mesh.conductor.server.address
        )
        stop, up = asyncio.Event(), asyncio.Event()

        def started(told: dict[str, object]) -> None:
            mesh.told = told
            up.set()

        running = asyncio.create_task(main.run(dataclasses.replace(settings, **config), stop, started))
        waiting = asyncio.create_task(up.wait())
        await asyncio.wait((running, waiting), timeout=TURN_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if running.done():
            running.result()

        async def end() -> None:
            stop.set()
            async with asyncio.timeout(TURN_S):
                await running

        closing.append(end)
        mesh.stop = end
        mesh.url = f"{mesh.told['scheme']}://{mesh.told['http']}"
        verify: Any = ssl.create_default_context(cafile=http_ca) if http_ca else True
        hooks: Any = {"response": [documented]}
        mesh.http = httpx.AsyncClient(base_url=mesh.url, timeout=TURN_S, verify=verify, event_hooks=hooks)
        closing.append(mesh.http.aclose)
        mesh.client = openai.AsyncOpenAI(
            base_url=f"{mesh.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=TURN_S,
        )
        closing.append(mesh.client.close)
        channel = connect(str(mesh.told["address"]))
        mesh.stub = gateway_pb2_grpc.GatewayStub(channel)
        closing.append(channel.close)
        if wait_ready:
            await until(mesh.status, lambda status: status.ready)
        return mesh

    yield make
    for close in reversed(closing):
        await close()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task() and _ours(task)]
    assert not left, f"tasks left behind: {left}"


def _ours(task: asyncio.Task[Any]) -> bool:
    """Whether the gateway's code made it."""
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and "/services/gateway/" in code.co_filename


@pytest.fixture
async def mesh(make_mesh: MeshMaker) -> Mesh:
    return await make_mesh()
