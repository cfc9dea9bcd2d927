"""Two tenants with equal prompts share nothing; without a key there is no answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.support.mesh.harness import Running, running_mesh
from tests.support.services import until

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

KEYS = {name: f"sk-{name}-0123456789abcdef" for name in ("alice", "bob", "carol")}
MORE = {"carol": "requests_per_minute = 2\nprompt_tokens_per_minute = 1000\nweight = 0.01\n"}


def key_file(folder: Path) -> Path:
    path = folder / "keys.toml"
    path.write_text(
        "".join(
            f'[[key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\n{MORE.get(name, "")}'
            for name, key in KEYS.items()
        )
    )
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("tenants")
    flags = {"gateway": {"api_keys": str(key_file(folder))}, "conductor": {"fetch": "always"}}
    async with running_mesh(demo_path, folder / "run", prefill=2, decode=1, flags=flags) as running:
        yield running


async def complete(running: Running, who: str, prompt: list[int], **more: object) -> httpx.Response:
    body = {"model": running.mesh.settings.model_name, "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}
    headers = {"authorization": f"Bearer {KEYS.get(who, who)}"} if who else {}
    async with httpx.AsyncClient(base_url=running.http, timeout=60) as client:
        return await client.post("/v1/completions", json=body, headers=headers)


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


async def finds(running: Running, who: str, prompt: list[int], tokens: int) -> bool:
    """The conductor may still place it where nothing lies: so small a prompt costs next to nothing to compute."""
    return cached(await complete(running, who, prompt)) == tokens


async def test_equal_prompts_of_two_tenants(guarded: Running) -> None:
    prompt = [(i * 37 + i * i) % 200 + 20 for i in range(200)]
    assert cached(await complete(guarded, "alice", prompt)) == 0
    await until(lambda: finds(guarded, "alice", prompt, 192))
    assert cached(await complete(guarded, "bob", prompt)) == 0
    await until(lambda: finds(guarded, "bob", prompt, 192))
    # A salt that a client names stays within its tenant, whoever's name it is.
    assert cached(await complete(guarded, "bob", prompt, cache_salt="alice")) == 0
    assert cached(await complete(guarded, "alice", prompt, cache_salt="alice")) == 0


@pytest.mark.parametrize("who", ["", "sk-nobody", "alice", KEYS["bob"][:-1], KEYS["bob"] + "0"])
async def test_without_a_valid_key(who: str, guarded: Running) -> None:
    headers = {"authorization": f"Bearer {who}"} if who else {}
    async with httpx.AsyncClient(base_url=guarded.http, timeout=60) as client:
        response = await client.post(
            "/v1/completions",
            json={"model": guarded.mesh.settings.model_name, "prompt": [30, 31], "max_tokens": 1},
            headers=headers,
        )
    assert response.status_code == 401
    error = response.json()["error"]
    assert error["code"] == "invalid_api_key"
    assert who == "" or who not in response.text or len(who) < 8


async def test_quotas(guarded: Running) -> None:
    """A key over its quota is refused, and no other; its weight reaches prefill beside others' prompts."""
    prompt = [(i * 41) % 200 + 20 for i in range(400)]
    answers = await asyncio.gather(*(complete(guarded, who, prompt) for who in ("carol", "alice", "bob", "carol")))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert "x-ratelimit-limit-requests" not in answers[1].headers
    refused = await complete(guarded, "carol", prompt)
    assert refused.status_code == 429 and refused.json()["error"]["param"] == "requests_per_minute"
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert (await complete(guarded, "alice", prompt)).status_code == 200
