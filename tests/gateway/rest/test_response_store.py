"""Stores of responses: bounds, tenants, restarts, and what happens when they fail."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from kvmesh.errors import ConfigError
from kvmesh.leader.redis_lease import Redis
from kvmesh.services.gateway.rest import response_store
from kvmesh.services.gateway.rest.response_bounds import ResponseBounds
from kvmesh.services.gateway.rest.response_store import (
    MemoryResponses,
    RedisResponses,
    ResponseBackend,
    ResponseStore,
    ResponseStoreUnavailable,
    SqliteResponses,
    StoredResponse,
    UnknownResponse,
    open_store,
)
from kvmesh.telemetry import names
from tests.gateway.conftest import Mesh, MeshMaker
from tests.support.gateway.scripted import MODEL
from tests.support.redis_server import RedisServer, needs_redis, redis_server

BOUNDS = ResponseBounds(4, 4000, 60.0)


class Clock:
    """A time that tests move."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001  # no two uses at one time
        return self.now


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with redis_server(tmp_path_factory.mktemp("redis")) as started:
        yield started


Maker = Callable[..., Any]


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=needs_redis)])
async def make(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Maker]:
    """`await make(bounds, clock)`: a backend of each kind; Redis has a clock of its own."""
    made: list[ResponseBackend] = []

    async def backend(bounds: ResponseBounds = BOUNDS, clock: Clock | None = None) -> ResponseBackend:
        one: ResponseBackend
        if request.param == "memory":
            one = MemoryResponses(bounds, clock or Clock())
        elif request.param == "sqlite":
            one = await SqliteResponses.open(tmp_path / f"{len(made)}.db", bounds, clock or Clock())
        else:
            server: RedisServer = request.getfixturevalue("redis")
            client = Redis(server.url, f"{tmp_path.name}-{len(made)}", 5.0, "{responses}")
            one = RedisResponses(client, bounds)
        made.append(one)
        return one

    yield backend
    for one in made:
        await one.close()


async def has(backend: ResponseBackend, *ids: str, tenant: str = "t") -> list[bool]:
    """Whether each is there, without reading (which is a use) those that a test still needs as they are."""
    return [one is not None for one in await backend.items([(tenant, one) for one in ids])]


async def test_what_was_put_is_there_until_it_is_deleted(make: Maker) -> None:
    backend = await make()
    await backend.put(("t", "a"), b"head", b"items")
    await backend.put(("t", "b"), b"h", b"i")
    assert await backend.get(("t", "a")) == (b"head", b"items")
    assert await backend.items([("t", "b"), ("t", "none"), ("t", "a")]) == [b"i", None, b"items"]
    await backend.put(("t", "a"), b"other", b"more")
    assert await backend.get(("t", "a")) == (b"other", b"more")
    assert await backend.delete(("t", "a")) is True
    assert await backend.delete(("t", "a")) is False
    assert await backend.get(("t", "a")) is None


async def test_tenants_have_nothing_in_common(make: Maker) -> None:
    backend = await make()
    await backend.put(("ann", "a"), b"hers", b"x")
    await backend.put(("", "a"), b"anybody's", b"y")
    assert await backend.get(("bob", "a")) is None
    assert await backend.items([("bob", "a")]) == [None]
    assert await backend.delete(("bob", "a")) is False
    assert await backend.get(("ann", "a")) == (b"hers", b"x")
    assert await backend.get(("", "a")) == (b"anybody's", b"y")


async def test_those_used_longest_ago_go_when_there_are_too_many(make: Maker) -> None:
    backend = await make()
    for name in "abcd":
        await backend.put(("t", name), b"h", b"i")
        await asyncio.sleep(0.002)  # Redis tells times apart by milliseconds
    assert await backend.get(("t", "a")) is not None
    await asyncio.sleep(0.002)
    await backend.put(("t", "e"), b"h", b"i")
    assert await has(backend, *"abcde") == [True, False, True, True, True]


async def test_and_when_they_have_too_many_bytes(make: Maker) -> None:
    backend = await make()
    for name in "abc":
        await backend.put(("t", name), b"h" * 700, b"i" * 800)
        await asyncio.sleep(0.002)
    assert await has(backend, *"abc") == [False, True, True]
    await asyncio.sleep(0.002)
    await backend.put(("t", "b"), b"", b"i")  # it is smaller now
    await backend.put(("t", "d"), b"", b"i" * 2000)
    assert await has(backend, *"bcd") == [True, True, True]


async def test_and_when_their_time_is_up(tmp_path: Path) -> None:
    clock = Clock()
    for backend in (MemoryResponses(BOUNDS, clock), await SqliteResponses.open(tmp_path / "a.db", BOUNDS, clock)):
        for name in "ab":
            await backend.put(("t", name), b"h", b"i")
        clock.now += 40
        assert await backend.get(("t", "a")) is not None  # a use
        clock.now += 40
        assert await has(backend, *"ab") == [True, False]
        clock.now += 61
        assert await backend.delete(("t", "a")) is False
        assert await backend.get(("t", "a")) is None
        await backend.close()


@needs_redis
async def test_redis_forgets_in_time(redis: RedisServer) -> None:
    backend = RedisResponses(Redis(redis.url, "ttl", 5.0, "{responses}"), ResponseBounds(4, 4000, 0.05))
    await backend.put(("t", "a"), b"h", b"i" * 3000)
    async with asyncio.timeout(30):
        while await backend.delete(("t", "a")):  # at once gone, at a slow moment
            await backend.put(("t", "a"), b"h", b"i" * 3000)
            await asyncio.sleep(0.1)
    # What has expired counts no more.
    await backend.put(("t", "b"), b"h", b"i" * 3000)
    client = backend._redis.client
    assert int(await client.get(backend._shared[2])) == 3001
    await backend.close()


async def test_a_file_outlives_the_process_and_is_nobody_elses(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    first = await SqliteResponses.open(path, BOUNDS)
    await first.put(("t", "a"), b"head", b"items")
    second = await SqliteResponses.open(path, BOUNDS)  # two gateways of one machine
    await second.put(("t", "b"), b"h", b"i")
    assert await first.get(("t", "b")) == (b"h", b"i")
    for one in (first, second):
        await one.close()
    third = await SqliteResponses.open(path, BOUNDS)
    assert await third.get(("t", "a")) == (b"head", b"items")
    await third.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_wrong_stores_are_named_at_start(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as base:
        base.execute("CREATE TABLE other (a)")
    (tmp_path / "text.db").write_text("no database at all, " * 100)
    for where in (str(foreign), str(tmp_path / "text.db"), str(tmp_path / "none" / "x.db"), "http://x", "redis://h:x"):
        with pytest.raises(ConfigError, match="response_store") as caught:
            await open_store(where, BOUNDS, "mesh")
        assert caught.value.field == "response_store"


def stored(response_id: str, earlier: StoredResponse | None = None, text: str = "x") -> StoredResponse:
    output = [{"type": "message", "id": f"{response_id}-out", "content": text}]
    given = [{"type": "message", "id": f"{response_id}-in"}]
    return StoredResponse.after(earlier, {"id": response_id, "output": output, "instructions": "i"}, given)


async def test_a_chain_is_read_by_its_items() -> None:
    store = ResponseStore(MemoryResponses(ResponseBounds(100, 10**6, 60)), ResponseBounds(100, 10**6, 60))
    last = None
    for index in range(4):
        last = stored(f"r{index}", last)
        await store.put("t", last)
    found = await store.get("t", "r3")
    assert found == last
    assert (found.chain, found.chain_items) == (["r0", "r1", "r2"], 8)
    assert found.chain_bytes == 4 * stored("r0").chain_bytes
    assert [item["id"] for item in await store.history("t", found)] == [
        "r0-in", "r0-out", "r1-in", "r1-out", "r2-in", "r2-out", "r3-in",
    ]  # fmt: skip
    await store.delete("t", "r1")
    with pytest.raises(UnknownResponse, match="r1"):
        await store.history("t", found)


class Broken:
    """A backend that hangs, or fails."""

    def __init__(self, err: Exception | None) -> None:
        self._err = err

    async def _fails(self, *args: Any) -> Any:
        if self._err is not None:
            raise self._err
        await asyncio.Event().wait()

    put = get = items = delete = _fails

    async def close(self) -> None:
        return None


def not_stored(reason: str) -> float:
    return float(names.GATEWAY_RESPONSES_NOT_STORED.labels(reason=reason)._value.get())


@pytest.mark.parametrize("err", [None, OSError("no disk"), sqlite3.OperationalError("locked")])
async def test_a_store_that_fails(err: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(Broken(err), BOUNDS, timeout_s=0.01)
    before = not_stored("unavailable")
    await store.put("t", stored("a"))
    assert not_stored("unavailable") == before + 1
    for call in (store.get, store.delete):
        with pytest.raises(ResponseStoreUnavailable, match="response_store: "):
            await call("t", "a")
    monkeypatch.setattr(response_store, "MAX_PENDING", 2)
    hanging = ResponseStore(Broken(None), BOUNDS, timeout_s=60)
    waiting = [asyncio.create_task(hanging.get("t", "a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResponseStoreUnavailable, match="2 calls wait"):
        await hanging.get("t", "a")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    with pytest.raises(ResponseStoreUnavailable, match="no disk"):
        await ResponseStore(Broken(OSError("no disk")), BOUNDS).get("t", "a")


async def test_one_that_is_too_large_is_not_kept() -> None:
    store = ResponseStore(MemoryResponses(BOUNDS), BOUNDS)
    await store.put("t", stored("small"))
    before = not_stored("too_large")
    await store.put("t", stored("large", text="x" * 5000))
    assert not_stored("too_large") == before + 1
    assert (await store.get("t", "small")).output
    with pytest.raises(UnknownResponse):
        await store.get("t", "large")


# ── behind a gateway ──────────────────────────────────────────────────────────────────────────────


async def respond(mesh: Mesh, **more: Any) -> Any:
    return await mesh.client.responses.create(**{"model": MODEL, "input": "Hello"} | more)


async def test_a_conversation_goes_on_after_a_restart(make_mesh: MeshMaker, tmp_path: Path) -> None:
    where = str(tmp_path / "responses.db")
    first = await make_mesh(response_store=where)
    made = await respond(first)
    await first.stop()
    second = await make_mesh(response_store=where)
    assert (await second.client.responses.retrieve(made.id)) == made
    await respond(second, previous_response_id=made.id)
    assert second.decodes[0].runs[0].prompt[: len(first.decodes[0].runs[0].prompt)] == first.decodes[0].runs[0].prompt


@needs_redis
async def test_answers_come_while_redis_is_gone(make_mesh: MeshMaker, tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        mesh = await make_mesh(response_store=server.url)
        made = await respond(mesh)
        assert (await mesh.client.responses.retrieve(made.id)) == made
        server.kill()
        assert (await respond(mesh)).output_text == "Hello, world"
        for call in (mesh.client.responses.retrieve, mesh.client.responses.delete, mesh.client.responses.cancel):
            with pytest.raises(openai.InternalServerError, match="response_store") as caught:
                await call(made.id)
            assert (caught.value.status_code, caught.value.code) == (503, "response_store_unavailable")
        with pytest.raises(openai.InternalServerError, match="response_store"):
            await respond(mesh, previous_response_id=made.id)
        assert (await respond(mesh, store=False)).output_text == "Hello, world"


async def test_a_conversation_has_bounds(make_mesh: MeshMaker) -> None:
    mesh = await make_mesh(max_body_bytes=2048, max_request_memory=1 << 20)
    made = await respond(mesh, input="x " * 10)
    refusal = None
    for _ in range(12):
        try:
            made = await respond(mesh, previous_response_id=made.id, max_output_tokens=1)
        except openai.BadRequestError as err:
            refusal = err
            break
    assert refusal is not None and refusal.param == "previous_response_id" and "at most 2048" in refusal.message
