"""The demo of latent attention and experts through a mesh: from one prefill instance, and pulled by another."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx
import pytest

from kvmesh.cli.models import resolve
from tests.support.mesh.client import prompt, until
from tests.support.mesh.direct import Direct, lookup
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

BLOCK = 16


async def test_its_latent_pages_are_handed_off_and_pulled(
    mesh: Callable[..., AbstractAsyncContextManager[Running]],
) -> None:
    path = resolve("demo-moe")
    async with mesh(path, prefill=2, block_tokens=BLOCK, memory_mb=16) as running:
        for name in running.instances():
            await running.ready(name)
        told = json.loads((path / "demo_prompt.json").read_text(encoding="utf-8"))
        body = {"model": "demo-moe", "messages": told["messages"], "max_tokens": 32, "temperature": 0}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = (await client.post(f"{running.http}/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == told["expected"]
        direct, tokens = await Direct.of(running), prompt(3, 9 * BLOCK + 5, 2040)
        first = await direct.generate(tokens, 8, prefill="prefill-0", decode="decode-0")
        assert first.error is None, first.error
        assert_matches_reference(path, tokens, first.tokens)
        keys = direct.keys(tokens)

        async def known() -> bool:
            return all("prefill-0" in holders for holders in await lookup(running, keys))

        await until(known, "the blocks of prefill-0")
        again = await direct.generate(
            tokens, 8, prefill="prefill-1", decode="decode-0", pulls=[("prefill-0", 0, len(keys))]
        )
        assert (again.error, again.tokens, again.cached_tokens) == (None, first.tokens, 9 * BLOCK)
        await running.settled()
