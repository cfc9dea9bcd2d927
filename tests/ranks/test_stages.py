"""Two stages of a pipeline, real ranks: all chunks of a prompt are with them at once, rows decode beside chunks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmesh.errors import ConfigError
from kvmesh.ranks import protocol as m
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.rank_driver import BLOCK, GREEDY, AllRanks, ranks
from tests.support.reference import assert_matches_reference

TOKENS, CHUNK = 24, 32
PROMPTS = [[(7 * i * i + k * i) % 250 for i in range(75)] for k in (3, 4)]


def chunks(handle: int, pages: tuple[int, ...]) -> list[m.PrefillStep]:
    prompt = PROMPTS[handle - 1]
    steps: list[m.PrefillStep] = []
    for start in range(0, len(prompt), CHUNK):
        end = min(start + CHUNK, len(prompt))
        last, own = GREEDY if end == len(prompt) else None, pages[: -(-end // BLOCK)]
        item = m.PrefillItem(handle, tuple(prompt[start:end]), start, own, last, False)
        steps.append(m.PrefillStep(10 * handle + len(steps), (item,)))
    return steps


async def first_token(both: AllRanks, steps: list[m.PrefillStep]) -> int:
    for step in steps:  # every rank answers every step, the last one with the token
        before, done = [await driver.take(m.PrefillStepDone) for driver in both.drivers]
        assert before.step_id == done.step_id == step.step_id
        # The last stage waits for what the first one sends, when that has computed its layers.
        assert before.start_ns <= before.busy_from_ns < before.busy_until_ns <= before.end_ns
        assert before.busy_until_ns < done.busy_from_ns < done.busy_until_ns <= done.end_ns
    [sampled] = done.sampled
    return sampled.token_id


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3"])
async def test_stages_say_what_one_rank_says(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / name, **FAMILY_ZOO[name] | {"num_hidden_layers": 4})
    tables = [tuple(range(2, 12)), tuple(range(13, 23))]
    async with ranks("two", path, 2, tmp_path, mesh="pp=2") as both:
        assert [(ready.shard.first_layer, ready.shard.layers) for ready in both.readies if ready.shard] == [
            (0, 2), (2, 2)
        ]  # fmt: skip
        for step in chunks(1, tables[0]):
            both.client.send(step)
        first = await first_token(both, chunks(1, tables[0]))
        both.client.send(m.Join(1, tables[0], len(PROMPTS[0]), first, 0, TOKENS, 0, (), GREEDY))
        for step in chunks(2, tables[1]):
            both.client.send(step)
        answers = {1: [first], 2: [await first_token(both, chunks(2, tables[1]))]}
        # The other has no room for its whole answer at first: it stalls at every stage, and goes on at every stage.
        few = tables[1][: -(-len(PROMPTS[1]) // BLOCK)]
        both.client.send(m.Join(2, few, len(PROMPTS[1]), answers[2][0], 0, TOKENS, 0, (), GREEDY))
        while min(map(len, answers.values())) < TOKENS:
            said = await both.take((m.DecodeStepDone, m.Stalled))
            if isinstance(said, m.Stalled):
                both.client.send(m.Grant(said.handle, tables[1][len(few) :]))
            elif isinstance(said, m.DecodeStepDone):
                for token in said.tokens:
                    answers[token.handle].append(token.token_id)
        assert not any(isinstance(message, m.DecodeStepDone) for message in both.drivers[0].inbox)
        both.client.send(m.Join(3, tables[0], len(PROMPTS[0]), first, 0, 1000, 0, (), GREEDY))
        both.client.send(m.Leave(3))
        assert (await both.take(m.Left)).handle == 3
        await asyncio.gather(*(driver.client.close() for driver in both.drivers))
    for prompt, answer in zip(PROMPTS, answers.values(), strict=True):
        assert_matches_reference(path, prompt, answer)


async def test_stages_that_do_not_divide_are_refused_by_the_ranks(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "odd", **FAMILY_ZOO["gemma2"])
    with pytest.raises(ConfigError, match="pp=2: must divide the model's 3 layers"):
        async with ranks("two", path, 2, tmp_path, mesh="pp=2"):
            pass
