"""Ranks that share contexts, real processes: each keeps a part of every block, and all say what one rank says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmesh.engine.axes import Axes
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import shard_layout
from kvmesh.errors import ConfigError
from kvmesh.ranks import protocol as m
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.stepper import Stepper
from tests.support.rank_driver import BLOCK, GREEDY, ranks

TOKENS, CHUNK = 20, 21
PROMPT = [(7 * i * i + 3 * i) % 250 for i in range(75)]


def model(name: str, folder: Path) -> Path:
    """Latents; 8 heads over 2 KV heads."""
    if name == "mla":
        return make_checkpoint(folder / name, **FAMILY_ZOO["deepseek_v3"])
    return make_checkpoint(folder / name, family="llama", num_attention_heads=8, num_key_value_heads=2)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name"), [("cp=2", "gqa"), ("tp=2,dcp=2", "mla")])
async def test_they_say_what_one_rank_says(mesh: str, name: str, tmp_path: Path) -> None:
    """A prompt in chunks that end within blocks, decoded; the row preempted in the middle, whose pages go to the host
    and come back elsewhere; a prefix of whole blocks that another request left. It takes 8 blocks: a rank that shares
    no contexts has room for 6."""
    path = model(name, tmp_path)
    expected = Stepper(path).answer(PROMPT, 2 * TOKENS)
    alone = shard_layout(open_checkpoint(path).config, "float32", BLOCK, Axes(tp=Axes.parse(mesh).tp))
    room = {"pages": 0, "memory_bytes": 6 * alone.shard_bytes}
    async with ranks("shared", path, 2, tmp_path, mesh=mesh, **room) as both:
        shards = [ready.shard for ready in both.readies]
        assert [(shard.turn, shard.turns, shard.tokens) for shard in shards if shard] == [(0, 2, 8), (1, 2, 8)]
        sizes = [(ready.num_pages, ready.num_extents, ready.max_context_tokens) for ready in both.readies]
        assert sizes == [(12, 12, 12 * BLOCK)] * 2

        async def prefill(handle: int, table: tuple[int, ...], start: int) -> int:
            for at in range(start, len(PROMPT), CHUNK):
                end = min(at + CHUNK, len(PROMPT))
                last, own = GREEDY if end == len(PROMPT) else None, table[: -(-end // BLOCK)]
                item = m.PrefillItem(handle, tuple(PROMPT[at:end]), at, own, last, False)
                both.send(m.PrefillStep(100 * handle + at, (item,)))
                done = await both.take(m.PrefillStepDone)
            return done.sampled[0].token_id

        async def decode(handle: int, answer: list[int], until: int) -> None:
            while len(answer) < until:
                done = await both.take(m.DecodeStepDone)
                answer += [token.token_id for token in done.tokens if token.handle == handle]

        pages, extents, moved = (3, 2, 9, 4, 5, 6, 7, 8), tuple(range(2, 10)), tuple(range(11, 3, -1))
        answer = [await prefill(1, pages, 0)]
        both.send(m.Join(1, pages, len(PROMPT), answer[0], 0, TOKENS, 0, (), GREEDY))
        await decode(1, answer, TOKENS)
        both.send(m.CopyOut(1, pages, extents))
        await both.take(m.Copied)
        both.send(m.CopyIn(1, extents, moved))
        await both.take(m.Copied)
        context = len(PROMPT) + TOKENS - 1
        both.send(m.Join(1, moved, context, answer[-1], TOKENS - 1, 2 * TOKENS, 0, (), GREEDY))
        await decode(1, answer, 2 * TOKENS)
        assert answer == expected
        table = (*moved[:3], 0, 1, 2)
        again = [await prefill(2, table, 3 * BLOCK)]
        both.send(m.Join(2, table, len(PROMPT), again[0], 0, 9, 0, (), GREEDY))
        await decode(2, again, 9)
        assert again == expected[:9]
        await asyncio.gather(*(driver.client.close() for driver in both.drivers))


async def test_contexts_that_layers_see_a_part_of_are_refused_by_the_ranks(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "windows", **FAMILY_ZOO["gemma2"])
    with pytest.raises(ConfigError, match="cp=2: layers with a window or chunks are not shared by context"):
        async with ranks("two", path, 2, tmp_path, mesh="cp=2", cache_groups=True):
            pass
