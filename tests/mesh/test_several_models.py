"""Models of two families in one mesh, and one model in two dtypes: all are answered right, and KV goes between equals
alone, even where a placement says otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import HandoffLost, ModelNotFound
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.mesh.client import Answer, prompt, until
from tests.support.mesh.direct import Direct, blocks_at, lookup
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]

BLOCK = 16
VOCAB = 331
MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


async def statuses(running: Running) -> dict[str, Any]:
    """What the conductor says of each instance."""
    async with connect(running.mesh.addresses["conductor"]) as channel:
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        found = (await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)).instances
    return {one.instance.instance_id: one for one in found}


async def registered(running: Running, names: set[str]) -> dict[str, Any]:
    async def there() -> bool:
        return names <= set(await statuses(running))

    await until(there, f"{sorted(names)} at the conductor")
    return await statuses(running)


def right(path: Path, tokens: list[int], answer: Answer) -> Answer:
    assert answer.error is None, answer.error
    assert_matches_reference(path, tokens, answer.tokens)
    return answer


async def kept(running: Running, holder: str, keys: list[bytes]) -> None:
    """The store master knows that `holder` has all of the blocks."""

    async def known() -> bool:
        return all(holder in holders for holders in await lookup(running, keys))

    await until(known, f"the blocks of {holder}")


async def test_two_families_are_both_answered_and_share_nothing(
    tmp_path: Path, demo_path: Path, mesh: MeshFactory
) -> None:
    other = make_checkpoint(tmp_path / "other", **FAMILY_ZOO["gemma3"] | {"vocab_size": VOCAB})
    paths = {"demo-model": demo_path, "gemma": other}
    async with mesh(demo_path, add_model=(f"gemma={other}",), pool=1, block_tokens=BLOCK, memory_mb=16) as running:
        await registered(running, {"prefill-0", "decode-0", "gemma-prefill-0", "gemma-decode-0"})
        for name in ("prefill-0", "decode-0", "gemma-prefill-0", "gemma-decode-0"):
            await running.ready(name)
        # The very same tokens for both: only the namespaces of their keys tell the KV of the two apart.
        sent = [prompt(seed, 6 * BLOCK + seed, VOCAB) for seed in range(1, 4)]
        jobs = [(name, tokens) for tokens in sent for name in paths]
        answers = await asyncio.gather(*(running.client.generate(tokens, 12, model=name) for name, tokens in jobs))
        for (name, tokens), answer in zip(jobs, answers, strict=True):
            assert right(paths[name], tokens, answer).cached_tokens == 0, "the other model's blocks are none of its own"
        directs = {"demo-model": await Direct.of(running, "demo-model"), "gemma": await Direct.of(running, "gemma")}
        for name, holder in (("demo-model", "prefill-0"), ("gemma", "gemma-prefill-0")):
            for tokens in sent:
                await kept(running, holder, directs[name].keys(tokens))
        for name, tokens in jobs:
            again = right(paths[name], tokens, await running.client.generate(tokens, 12, model=name))
            assert again.cached_tokens == (len(tokens) - 1) // BLOCK * BLOCK
        at = {one: await blocks_at(running.mesh.addresses[one]) for one in running.mesh.processes if "-" in one}
        for name, prefix in (("demo-model", "gemma-"), ("gemma", ("prefill", "decode"))):
            keys = {key for tokens in sent for key in directs[name].keys(tokens)}
            assert keys
            assert not any(keys & held for holder, held in at.items() if holder.startswith(prefix))
        await never_across(running, directs["demo-model"], paths["demo-model"])
        await running.settled()


async def never_across(running: Running, direct: Direct, path: Path) -> None:
    """A placement that mixes the models: blocks of the other are not found and computed instead, and its instances
    refuse the request."""
    tokens = prompt(9, 5 * BLOCK + 3, VOCAB)
    pulled = await direct.generate(tokens, 6, prefill="prefill-0", decode="decode-0", pulls=[("gemma-prefill-0", 0, 5)])
    assert right(path, tokens, pulled).cached_tokens == 0
    for prefill, decode, kind in (
        ("prefill-0", "gemma-decode-0", ModelNotFound),  # its fingerprint is not the request's
        ("gemma-prefill-0", "decode-0", HandoffLost),  # the writer's shard layout is not the reader's
    ):
        refused = await direct.generate(tokens, 6, prefill=prefill, decode=decode)
        assert refused.tokens == []
        assert isinstance(refused.error, kind), refused.error


async def test_two_dtypes_of_one_model_exchange_no_kv(tmp_path: Path, mesh: MeshFactory) -> None:
    path = make_checkpoint(tmp_path / "model", **FAMILY_ZOO["qwen3"] | {"vocab_size": VOCAB})
    wanted = {"prefill": "1@cpu:float32", "decode": "1@cpu:float32,1@cpu:bfloat16"}
    async with mesh(path, block_tokens=BLOCK, memory_mb=16, dtype="auto", **wanted) as running:
        await registered(running, {"prefill-0", "decode-0", "decode-1"})
        for name in ("prefill-0", "decode-0"):
            await running.ready(name)
        sent = [prompt(seed, 4 * BLOCK + seed, VOCAB) for seed in range(1, 7)]
        for answer, tokens in zip(
            await asyncio.gather(*(running.client.generate(tokens, 10, model="model") for tokens in sent)),
            sent,
            strict=True,
        ):
            right(path, tokens, answer)
        stranded = (await statuses(running))["decode-1"]
        assert not stranded.ready
        assert "its KV does not fit prefill-0, which has dtype='float32', this one 'bfloat16'" in (
            stranded.not_ready_reason
        )
        assert await blocks_at(running.mesh.addresses["decode-1"]) == set()
        # A placement that pairs them all the same is refused before any KV moves.
        refused = await (await Direct.of(running, "model")).generate(sent[0], 6, prefill="prefill-0", decode="decode-1")
        assert refused.tokens == []
        # What the writer says of layouts can be lost with its stream (gRPC's "Internal error from Core").
        assert isinstance(refused.error, HandoffLost), refused.error
        assert await blocks_at(running.mesh.addresses["decode-1"]) == set()
        await running.settled()
