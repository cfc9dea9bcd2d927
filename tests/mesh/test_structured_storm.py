"""Forms and calls under strikes: every answer is the undisturbed one, whole and valid.

Schemas of bounded length while decode instances die by SIGKILL and leave by SIGTERM; forced calls while their gateway
is killed, which clients ask again at another one under the same request id.

pytest -s tests/mesh/test_structured_storm.py                                       40 schemas, 24 calls
STORM_SCHEMAS=500 STORM_CALLS=100 pytest -s tests/mesh/test_structured_storm.py     as many as you like
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
import pytest_asyncio

from kvmesh.services.gateway import main
from kvmesh.services.gateway.config import GatewayConfig
from tests.support import services
from tests.support.mesh.client import gateway_status, pools
from tests.support.mesh.harness import Running, running_mesh
from tests.support.random_schemas import bounded_schema

SCHEMAS = int(os.environ.get("STORM_SCHEMAS", "40"))
CALLS = int(os.environ.get("STORM_CALLS", "24"))

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(180 + 4 * SCHEMAS + 2 * CALLS),
    pytest.mark.asyncio(loop_scope="module"),
]

LOT = max(14, SCHEMAS // 20)  # of 40: three strikes; never more than twenty-one
CALL_S = 120.0
DECODES = ("decode-0", "decode-1")
GATEWAY: dict[str, Any] = {"max_migrations": 16, "token_timeout_s": 10.0}
Validator = jsonschema.Draft202012Validator


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    flags: dict[str, dict[str, Any]] = {
        "*": {"dtype": "float32", "num_pages": 400, "num_extents": 200},
        "decode": {"stop_grace_ms": 100},
        "gateway": GATEWAY,
        "conductor": {"admission": "off"},
    }
    folder = tmp_path_factory.mktemp("storm")
    async with running_mesh(demo_path, folder, prefill=2, decode=2, block_tokens=16, flags=flags) as mesh:
        yield mesh


@dataclass
class Chat:
    """What a client has read of one streamed chat. `finish` is empty until the stream has told its end."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    names: list[str] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    arguments: str = ""
    finish: str = ""
    echoed_id: str = ""

    @property
    def content(self) -> tuple[Any, ...]:
        """All that must be equal, whoever answers: ids of calls are each answer's own."""
        return self.tokens, self.text, self.names, self.arguments, self.finish

    def read(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            self.tokens += choice.get("token_ids") or []
            self.text += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                assert call["index"] == 0, "one call was asked for"
                self.call_ids += [call["id"]] if call.get("id") else []
                self.names += [call["function"]["name"]] if call["function"].get("name") else []
                self.arguments += call["function"].get("arguments") or ""
            self.finish = choice["finish_reason"] or self.finish


async def ask(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], request_id: str, on_chunk: Callable[[Chat], None]
) -> tuple[Chat, bool]:
    """What was read, and whether that was all: False where the connection broke."""
    chat = Chat()
    asked = {"model": "demo-model", "stream": True, "return_token_ids": True} | body
    headers = {"x-request-id": request_id}
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=asked, headers=headers) as response:
            assert response.status_code == 200, (request_id, await response.aread())
            chat.echoed_id = response.headers["x-request-id"]
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return chat, True
                if line.startswith("data: "):
                    chat.read(json.loads(line.removeprefix("data: ")))
                    on_chunk(chat)
    except httpx.TransportError:
        pass
    return chat, False


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=CALL_S, limits=httpx.Limits(max_connections=None))


def draw(index: int) -> dict[str, Any]:
    """Greedy, or drawn by a seed."""
    return {"temperature": 1.0, "seed": index} if index % 2 else {"temperature": 0.0}


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────


def form(index: int, salt: str) -> dict[str, Any]:
    bounded = bounded_schema(index)
    return draw(index) | {
        "messages": [{"role": "user", "content": f"Record {index}, please."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "record", "schema": bounded.schema}},
        "max_tokens": bounded.max_bytes + 1,  # a token is a byte at least; and the one that ends the answer
        "cache_salt": salt,
    }


def meets(schema: dict[str, Any], chat: Chat) -> bool:
    try:
        value = json.loads(chat.text)
    except ValueError:
        return False
    return bool(Validator(schema, format_checker=Validator.FORMAT_CHECKER).is_valid(value))


async def migrations(running: Running) -> Counter[str]:
    """By outcome, since the gateway's start."""
    async with client() as http:
        told = (await http.get(f"http://{running.mesh.processes['gateway'].spec.metrics}/metrics")).text
    found: Counter[str] = Counter()
    for line in told.splitlines():
        if line.startswith("kvmesh_gateway_migrations_total{"):
            found[line.partition('outcome="')[2].partition('"')[0]] += int(float(line.split()[-1]))
    return found


async def fullest(running: Running) -> str:
    """The name of the decode instance that holds most requests."""
    told = await asyncio.gather(*(pools(running.mesh.addresses[name], "decode") for name in DECODES))
    return max(zip(DECODES, told, strict=True), key=lambda one: one[1].requests)[0]


async def test_bounded_schemas_are_met_whatever_dies(running: Running) -> None:
    """Some at a time, and of each lot one decode instance ends before half of the answers have: by SIGKILL and by
    SIGTERM in turn. The next lot waits until it is back, so that there always is somewhere to go."""
    rng = random.Random(20)
    strikes: Counter[str] = Counter()
    at: int
    now = asyncio.Event()

    async def one(http: httpx.AsyncClient, index: int, salt: str, on_chunk: Callable[[Chat], None]) -> Chat:
        chat, whole = await ask(http, running.http, form(index, salt), f"{salt}-{index}", on_chunk)
        assert whole, (salt, index, chat)
        return chat

    def on_chunk(chat: Chat) -> None:
        if len(chat.tokens) >= at:
            now.set()

    right: list[Chat] = []
    found: list[Chat] = []
    async with client() as http:
        before = await migrations(running)
        for first in range(0, SCHEMAS, LOT):
            lot = range(first, min(first + LOT, SCHEMAS))
            expected = await asyncio.gather(*(one(http, index, "right", lambda _: None) for index in lot))
            at = rng.randrange(2, max(3, sorted(len(chat.tokens) for chat in expected)[len(lot) // 2]))
            now.clear()
            calls = asyncio.gather(*(one(http, index, "storm", on_chunk) for index in lot))
            await now.wait()
            name, sig = await fullest(running), (signal.SIGKILL, signal.SIGTERM)[strikes.total() % 2]
            pid = running.pid(name)
            running.kill(name, sig)
            strikes[sig.name] += 1
            right += expected
            found += await calls
            await running.reborn(name, pid)
            await running.ready(name)
        moved = await migrations(running) - before
    equal = sum(chat.content == expected.content for chat, expected in zip(found, right, strict=True))
    stopped = [index for index, chat in enumerate(found) if chat.finish == "stop"]
    wrong = [(index, found[index].text) for index in stopped if not meets(bounded_schema(index).schema, found[index])]
    print(
        f"\n{SCHEMAS} schemas, {sum(len(chat.tokens) for chat in found)} tokens; strikes {dict(strikes)}, migrations "
        f"{dict(moved)}: {len(stopped)} ended by stop, {len(stopped) - len(wrong)} of them valid, {equal} equal to the "
        "undisturbed ones"
    )
    assert not wrong
    assert [chat.content for chat in found] == [chat.content for chat in right]
    assert len(stopped) >= 0.95 * SCHEMAS
    assert moved["moved"] >= strikes.total() and set(moved) == {"moved"}
    await running.settled()


# ── calls ─────────────────────────────────────────────────────────────────────────────────────────

ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "pattern": "^/[a-z/]{30,40}$"},
        "line": {"type": "integer", "minimum": 1, "maximum": 99999},
        "words": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 6, "maxItems": 9},
    },
    "required": ["path", "line", "words"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} a file.", "parameters": ARGUMENTS}}
    for name in ("read", "write", "find")
]


def forced_call(index: int, salt: str) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": "write"}}
    return draw(index) | {
        "messages": [{"role": "user", "content": f"What stands in file {index}?"}],
        "tools": TOOLS,
        "tool_choice": named if index % 4 > 1 else "required",
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "cache_salt": salt,
    }


async def test_calls_of_a_killed_gateway_are_asked_again_at_another(running: Running, demo_path: Path) -> None:
    conductor = running.mesh.addresses["conductor"]
    config = GatewayConfig(port=0, http_port=0, model=str(demo_path), conductor=conductor, **GATEWAY)
    reading: set[str] = set()  # ids of those that have some of a call's arguments, but not all
    halfway = asyncio.Event()

    async with services.running(main.run, config) as second, client() as http:
        other = f"http://{second.told['http']}"

        async def undisturbed(index: int) -> Chat:
            chat, whole = await ask(http, running.http, forced_call(index, "right"), f"right-{index}", lambda _: None)
            assert whole, index
            return chat

        async def insistent(index: int) -> tuple[Chat, Chat | None]:
            """The answer, and what was read before the gateway died."""
            request_id = f"call-{index}"

            def on_chunk(chat: Chat) -> None:
                if chat.finish:
                    reading.discard(request_id)
                elif chat.arguments:
                    reading.add(request_id)
                if len(reading) >= CALLS // 2:
                    halfway.set()

            body = forced_call(index, "killed")
            first, whole = await ask(http, running.http, body, request_id, on_chunk)
            if whole:
                return first, None
            again, whole = await ask(http, other, body, request_id, lambda _: None)
            assert whole, f"{request_id}: the other gateway lives"
            assert again.echoed_id == request_id
            return again, first

        right = await asyncio.gather(*map(undisturbed, range(CALLS)))
        calls = [asyncio.create_task(insistent(index)) for index in range(CALLS)]
        await halfway.wait()
        pid, cut = running.pid("gateway"), len(reading)
        running.kill("gateway")
        found = await asyncio.gather(*calls)
        for index, ((chat, before), expected) in enumerate(zip(found, right, strict=True)):
            assert chat.content == expected.content, index
            assert chat.finish == "tool_calls" and not chat.text and len(chat.call_ids) == len(chat.names) == 1
            assert chat.names[0] == "write" if index % 4 > 1 else chat.names[0] in ("read", "write", "find")
            Validator(ARGUMENTS).validate(json.loads(chat.arguments))
            if before is not None:  # the first try was on the way to the same answer
                assert expected.tokens[: len(before.tokens)] == before.tokens
                assert expected.arguments.startswith(before.arguments)
        again = [first for _, first in found if first is not None]
        print(
            f"\n{CALLS} calls, {sum(len(chat.tokens) for chat in right)} tokens: the gateway died when {cut} were in "
            f"their arguments; {len(again)} asked again, all have one whole and valid call, equal to the undisturbed"
        )
        assert len(again) >= cut >= CALLS // 2
        assert len({chat.call_ids[0] for chat, _ in found}) == CALLS
        assert (await gateway_status(second.address)).requests == 0
        await running.restarted("gateway", pid)
        await running.settled()
