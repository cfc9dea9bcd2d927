"""A gateway that asks for API keys: both doors, what each tenant sees, a file that changes, secrets that stay so."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.errors import ConfigError, InvalidRequest, ModelNotFound, Unauthorized
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import gateway_pb2
from kvmesh.rpc.status import from_rpc_error
from kvmesh.services.gateway import key_file as key_file_module
from kvmesh.services.gateway.api_keys import make_entry
from kvmesh.services.gateway.key_file import KeyFile
from kvmesh.telemetry import setup
from tests.gateway.conftest import Mesh, MeshMaker, until
from tests.support.gateway.scripted import MODEL

OTHER = "other"
ALICE, ALICE_ENTRY = make_entry("alice")
BOB, BOB_ENTRY = make_entry("bob")
CAROL, CAROL_ENTRY = make_entry("carol")
FILE = ALICE_ENTRY + BOB_ENTRY + f'models = ["{OTHER}"]\n' + CAROL_ENTRY + "disabled = true\n"
PROMPT = list(range(40))


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
async def guarded(make_mesh: MeshMaker, key_file: Path, checkpoint: Path) -> Mesh:
    return await make_mesh(api_keys=str(key_file), models=(f"{OTHER}={checkpoint}",), also={OTHER: True})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def complete(mesh: Mesh, key: str, model: str = MODEL, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 3, **more}
    return await mesh.http.post("/v1/completions", json=body, headers=bearer(key))


async def generate(mesh: Mesh, key: str, **fields: Any) -> list[gateway_pb2.GenerateResponse]:
    request = gateway_pb2.GenerateRequest(text="Hi", max_tokens=3, **fields)
    return [part async for part in mesh.stub.Generate(request, timeout=15, metadata=tuple(bearer(key).items()))]


# ── the doors ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("key", ["", "sk-wrong", ALICE[:-1], CAROL])
async def test_without_a_valid_key_there_is_no_answer(guarded: Mesh, key: str) -> None:
    body = {"model": MODEL, "prompt": "Hi"}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    for response in (
        await guarded.http.post("/v1/completions", json=body, headers=bearer(key)),
        await guarded.http.post("/v1/chat/completions", json=chat, headers=bearer(key)),
        await guarded.http.get("/v1/models", headers=bearer(key)),
        await guarded.http.get(f"/v1/models/{MODEL}", headers=bearer(key)),
        await guarded.http.get("/v1/models/unknown", headers=bearer(key)),
        await guarded.http.post("/v1/completions", content=b"no JSON", headers=bearer(key)),
    ):
        assert response.status_code == 401
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert response.headers["www-authenticate"] == "Bearer"
        assert "retry-after" not in response.headers
        assert not key or key not in response.text
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(guarded, key)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert isinstance(from_rpc_error(caught.value), Unauthorized)
    assert not guarded.conductor.asked
    assert not key or key not in str(caught.value)


async def test_the_openai_client_says_so(guarded: Mesh) -> None:
    with pytest.raises(openai.AuthenticationError, match="incorrect API key"):
        await guarded.client.completions.create(model=MODEL, prompt="Hi")
    ours = guarded.client.with_options(api_key=ALICE)
    answer = await ours.completions.create(model=MODEL, prompt="Hi", max_tokens=3)
    assert answer.choices[0].text


async def test_a_long_body_of_a_stranger_gets_its_answer(guarded: Mesh) -> None:
    """It is not read, yet the client must hear why; the connection serves the next request."""
    for _ in range(2):
        response = await guarded.http.post("/v1/completions", content=b"x" * (6 << 20), headers=bearer("sk-wrong"))
        assert response.status_code == 401
    assert (await complete(guarded, ALICE)).status_code == 200


async def test_what_is_open_to_all(guarded: Mesh) -> None:
    for path in ("/health", "/ready", "/metrics", "/docs", "/openapi.json"):
        assert (await guarded.http.get(path)).status_code == 200, path
    status = await guarded.status()
    assert status.ready
    async with connect(str(guarded.told["address"])) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    schema = (await guarded.http.get("/openapi.json")).json()
    assert schema["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert schema["paths"]["/v1/completions"]["post"]["security"] == [{"key": []}]
    assert "security" not in schema["paths"]["/health"]["get"]


async def test_a_gateway_without_keys_takes_any(mesh: Mesh) -> None:
    assert (await complete(mesh, "sk-whatever")).status_code == 200
    assert "securitySchemes" not in (await mesh.http.get("/openapi.json")).json()["components"]


async def test_refused_calls_are_counted(guarded: Mesh) -> None:
    def count(text: str) -> dict[str, float]:
        lines = [line for line in text.splitlines() if line.startswith("kvmesh_gateway_unauthorized_total{")]
        return {line.split('"')[1]: float(line.split()[-1]) for line in lines}

    before = count((await guarded.http.get("/metrics")).text)
    await complete(guarded, "sk-wrong")
    await complete(guarded, ALICE)
    await guarded.http.get("/v1/models")
    with pytest.raises(grpc.aio.AioRpcError):
        await generate(guarded, "")
    after = count((await guarded.http.get("/metrics")).text)
    grown = {route: after[route] - before.get(route, 0) for route in after if after[route] > before.get(route, 0)}
    assert grown == {"completions": 1, "models": 1, "grpc": 1}


# ── tenants ───────────────────────────────────────────────────────────────────────────────────────


async def test_two_tenants_with_equal_prompts_ask_for_other_blocks(guarded: Mesh) -> None:
    for key in (ALICE, BOB, ALICE):
        assert (await complete(guarded, key, OTHER)).status_code == 200
    assert (await complete(guarded, BOB, OTHER, cache_salt="alice")).status_code == 200
    assert (await complete(guarded, ALICE, OTHER, cache_salt="alice")).status_code == 200
    await generate(guarded, ALICE, model=OTHER)
    await generate(guarded, BOB, model=OTHER)
    keys = [asked.block_keys for asked in guarded.conductor.asked[:5]]
    assert all(len(one) == 32 for one in keys)
    assert keys[0] == keys[2]
    assert len(set(keys)) == 4
    digests = [run.start.chain_digest for run in guarded.decodes[0].runs]
    assert len(set(digests[:5])) == 4
    assert digests[5] != digests[6], "the answer's blocks, and prompts shorter than a block"


async def test_a_key_may_be_for_some_models_only(guarded: Mesh) -> None:
    listed = (await guarded.http.get("/v1/models", headers=bearer(BOB))).json()["data"]
    assert [card["id"] for card in listed] == [OTHER]
    for response in (
        await complete(guarded, BOB, MODEL),
        await guarded.http.get(f"/v1/models/{MODEL}", headers=bearer(BOB)),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["message"] == f"model={MODEL!r}: not served here; served: {OTHER}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(guarded, BOB, model=MODEL)
    assert isinstance(from_rpc_error(caught.value), ModelNotFound)
    assert await generate(guarded, BOB), "the one model that this key is for"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(guarded, ALICE)
    assert isinstance(from_rpc_error(caught.value), InvalidRequest)
    assert (await complete(guarded, ALICE, OTHER)).status_code == 200


async def test_the_key_is_nowhere_but_in_the_request(
    make_mesh: MeshMaker, key_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    traces = tmp_path / "traces"
    telemetry = setup.start("gateway", "g", trace_dir=str(traces), otlp_endpoint="", log_level="debug")
    wrong = "sk-kvmesh-almost-right"
    try:
        mesh = await make_mesh(api_keys=str(key_file))
        for key in (ALICE, wrong):
            await complete(mesh, key)
            await complete(mesh, key, model="unknown")
            await complete(mesh, key, prompt=[], n=3)
            for send in (generate(mesh, key), generate(mesh, key, model="unknown")):
                await asyncio.gather(send, return_exceptions=True)
        assert mesh.conductor.asked
        passed_on = str(mesh.conductor.asked) + str(mesh.conductor.metadata) + str(mesh.decodes[0].runs)
        metrics = (await mesh.http.get("/metrics")).text
        await mesh.quiet()
        await asyncio.to_thread(telemetry.flush)
    finally:
        await asyncio.to_thread(telemetry.shutdown)
    written = "".join(path.read_text() for path in traces.iterdir())
    assert '"kvmesh.tenant":"alice"' in written.replace(": ", ":")
    for key in (ALICE, wrong):
        for secret in (key, key[10:]):
            for where in (written, caplog.text, metrics, passed_on):
                assert secret not in where


# ── the file ──────────────────────────────────────────────────────────────────────────────────────


def rewrite(path: Path, text: str) -> None:
    """With another time, however fast the test is."""
    told = path.stat().st_mtime_ns + 1_000_000_000 if path.exists() else None
    path.write_text(text)
    if told is not None:
        os.utime(path, ns=(told, told))


async def test_a_running_gateway_follows_its_file(make_mesh: MeshMaker, key_file: Path) -> None:
    mesh = await make_mesh(api_keys=str(key_file))
    key, entry = make_entry("dave")
    assert (await complete(mesh, key)).status_code == 401
    rewrite(key_file, entry)
    await until(lambda: complete(mesh, key), lambda response: response.status_code == 200)
    assert (await complete(mesh, ALICE)).status_code == 401


def test_a_file_that_becomes_bad_changes_nothing(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = KeyFile(str(key_file))
    keys.load()
    ring = keys.ring
    keys.check()
    assert keys.ring is ring, "not read again without need"

    def refused(words: str) -> None:
        caplog.clear()
        for _ in range(3):
            keys.check()
        assert keys.ring is ring
        assert keys.tenant(f"Bearer {ALICE}".encode(), "chat").name == "alice"
        assert [words in record.message for record in caplog.records] == [True], "told once"
        assert caplog.records[0].message.endswith("; the keys of before stay")

    rewrite(key_file, FILE + "[[key]]\n")
    refused("name is missing")
    rewrite(key_file, "")
    refused("holds 0 keys")
    key_file.write_bytes(b"\xff")
    refused("is not UTF-8")
    key_file.unlink()
    refused("No such file")
    key_file.mkdir()
    refused("Is a directory")
    key_file.rmdir()
    key_file.write_text(BOB_ENTRY)
    keys.check()
    assert keys.tenant(f"Bearer {BOB}".encode(), "chat").name == "bob"
    with pytest.raises(Unauthorized):
        keys.tenant(f"Bearer {ALICE}".encode(), "chat")


def test_a_file_that_could_not_be_opened_is_read_when_it_can(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions are mended without a new modification time, and descriptors run out for a moment."""
    keys = KeyFile(str(key_file))
    keys.load()
    rewrite(key_file, BOB_ENTRY)
    with monkeypatch.context() as patch:

        def denied(*args: object, **more: object) -> None:
            raise PermissionError(13, "Permission denied")

        patch.setattr(Path, "open", denied)
        keys.check()
        assert keys.tenant(f"Bearer {ALICE}".encode(), "chat").name == "alice"
    keys.check()
    with pytest.raises(Unauthorized):
        keys.tenant(f"Bearer {ALICE}".encode(), "chat")


def test_a_change_within_one_tick_of_the_clock_is_seen(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one size, written so soon after each other that their times are equal."""
    key_file.write_text(ALICE_ENTRY)
    version = key_file_module._version(os.stat(key_file))
    monkeypatch.setattr(key_file_module, "_version", lambda found: version)
    keys = KeyFile(str(key_file))
    keys.load()
    key_file.write_text(ALICE_ENTRY.replace(ALICE_ENTRY[-10:-2], "0" * 8))
    keys.check()
    with pytest.raises(Unauthorized):
        keys.tenant(f"Bearer {ALICE}".encode(), "chat")


def test_a_bad_file_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    for text, words in ((None, "No such file"), ("x", "not TOML"), ("", "holds 0 keys")):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=words) as caught:
            KeyFile(str(path)).load()
        assert caught.value.field == "api_keys"
        assert str(path) in caught.value.message
