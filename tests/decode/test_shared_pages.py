"""Eight answers to one prompt at one real instance: the prompt's full pages are there once, and were sent once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.decode.bench import Answer, Gateway, bench
from tests.support.rank_driver import BLOCK
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

TOKENS, ANSWERS, LONG = 500, 8, 480  # so long that none has ended when the last is seen to run
FULL = TOKENS // BLOCK  # the prompt's full blocks; another one begins with its last tokens
PROMPT = [(7 * i * i + 3 * i) % 90 + 5 for i in range(TOKENS)]
SEEDED: dict[str, Any] = {"temperature": 0.9}


async def begin(gateway: Gateway, count: int, **changes: Any) -> list[int]:
    return [await gateway.start(PROMPT, count, seed=1 + one, **changes) for one in range(ANSWERS)]


async def ended(gateway: Gateway, slot: int) -> Answer:
    answer = await gateway.over(slot)
    assert not answer.failed, answer.failed
    return answer


@pytest.mark.parametrize("landing", ["auto", "host"])
async def test_eight_answers_take_one_prompt_and_eight_tails(checkpoint: Path, landing: str) -> None:
    tail = 1 + -(-LONG // BLOCK)
    memory: dict[str, Any] = {"num_pages": FULL + ANSWERS * tail, "num_extents": FULL + 2 * ANSWERS, "landing": landing}
    async with bench(checkpoint, writer_pages=FULL + 1, **memory) as mesh, mesh.gateway() as gateway:
        slots = await begin(gateway, LONG)
        for slot in slots:
            await gateway.has(slot, 2)
        assert not any(gateway.answers[slot].over for slot in slots), "all run beside each other"
        pools = await mesh.pools()
        assert FULL + ANSWERS <= pools.pages_total - pools.pages_free <= FULL + ANSWERS * tail
        found = [await ended(gateway, slot) for slot in slots]
        assert all(answer.tokens == found[0].tokens for answer in found)
        assert_matches_reference(mesh.checkpoint, PROMPT, found[0].tokens[:40])
        shard = mesh.prefill.writer.client.ready.shard_bytes
        sent = [landed.pushed_bytes // shard for landed in mesh.prefill.requests]
        assert sorted(sent) == [1] * (ANSWERS - 1) + [FULL + 1]
        await mesh.full()
        together = [await ended(gateway, slot) for slot in await begin(gateway, 12, **SEEDED)]
        for one, answer in enumerate(together):
            alone = await ended(gateway, await gateway.start(PROMPT, 12, seed=1 + one, **SEEDED))
            assert answer.tokens == alone.tokens
        assert len({tuple(answer.tokens) for answer in together}) > 1


async def test_whoever_goes_leaves_the_others_their_pages(checkpoint: Path) -> None:
    tail = 1 + -(-LONG // BLOCK)
    memory: dict[str, Any] = {"num_pages": FULL + ANSWERS * tail, "num_extents": 4}
    async with bench(checkpoint, writer_pages=FULL + 1, **memory) as mesh, mesh.gateway() as gateway:
        slots = await begin(gateway, LONG)
        for slot in slots:
            await gateway.has(slot, 2)
        gone, left = slots[:3], slots[3:]  # the first of them was sent the prompt
        for slot in gone:
            await gateway.cancel(slot)
            assert (await gateway.over(slot)).code == "cancelled"
        found = [await ended(gateway, slot) for slot in left]
        assert all(len(answer.tokens) == LONG and answer.tokens == found[0].tokens for answer in found)
        assert_matches_reference(mesh.checkpoint, PROMPT, found[0].tokens[:40])
        await mesh.full()
