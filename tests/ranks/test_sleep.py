"""A rank that sleeps gives its memory back, and answers as before when it is woken: at both levels, beside a device as
on a CPU, alone and in a group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.runner import PrefillInput, Runner, SampleParams, shard_layout
from kvmesh.ranks import protocol as m
from kvmesh.ranks.devices import STAGED_CPU
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_driver import BLOCK, GREEDY, Driver, rank

PROMPT = tuple((7 * i * i + 3 * i) % 90 + 5 for i in range(61))
MIB = 1 << 20
WIDE = {"hidden_size": 256, "intermediate_size": 4096, "num_key_value_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights, and pages, of which one sees in a process's memory whether they are there."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "wide", tokenizer=False, **WIDE)


@asynccontextmanager
async def big(path: Path, device: str = "cpu") -> AsyncIterator[Driver]:
    async with rank("s", path, pages=512, device=device) as one:
        yield one


async def answer(one: Driver, handle: int) -> list[int]:
    """A prompt's first token, and nine more."""
    item = m.PrefillItem(handle, PROMPT, 0, (3, 4, 5, 6), GREEDY, push=False)
    one.client.send(m.PrefillStep(handle, (item,)))
    (first,) = (await one.take(m.PrefillStepDone)).sampled
    pages = (3, 4, 5, 6, 9)
    one.client.send(m.Join(handle, pages, len(PROMPT), first.token_id, 0, 10, 0, (), GREEDY))
    tokens = [first.token_id]
    while len(tokens) < 10:
        tokens += [token.token_id for token in (await one.take(m.DecodeStepDone)).tokens]
    return tokens


def said_by(path: Path) -> list[int]:
    """What a model says that is loaded here, and computes each token from the whole text."""
    checkpoint, tokens = open_checkpoint(path), list(PROMPT)
    pages = torch.zeros((6, *shard_layout(checkpoint.config, "float32", BLOCK).shape))
    runner = Runner(checkpoint, "float32", "cpu", BLOCK, pages)
    for _ in range(10):
        (said,) = runner.prefill([PrefillInput(tuple(tokens), 0, tuple(range(6)), SampleParams())])
        assert said is not None
        tokens.append(said.token_id)
    return tokens[len(PROMPT) :]


def resident(one: Driver) -> int:
    found: int = psutil.Process(one.client.pid).memory_info().rss
    return found


async def fall_asleep(one: Driver, keep: bool) -> m.Asleep:
    one.client.send(m.PrepareSleep(1, keep))
    assert await one.take(m.SleepPrepared) == m.SleepPrepared(1)
    one.client.send(m.FallAsleep(1, keep))
    return await one.take(m.Asleep)


async def wake(one: Driver) -> m.Ready:
    one.client.send(m.WakeUp(2))
    awake = await one.take(m.Awake)
    assert awake.ready is not None, awake.why_not
    return awake.ready


@pytest.mark.parametrize("keep", [True, False], ids=["level 1", "level 2"])
@pytest.mark.parametrize("device", ["cpu", STAGED_CPU])
async def test_memory_falls_and_the_same_tokens_come_after(wide: Path, device: str, keep: bool) -> None:
    async with big(wide, device) as one:
        before = await answer(one, 1)
        assert before == said_by(wide)
        full = resident(one)
        given = await fall_asleep(one, keep)
        assert given.page_bytes >= 30 * MIB
        # A CPU's weights are in the host's memory already: those that are kept stay where they are.
        kept_here = keep and device == "cpu"
        assert (given.weight_bytes == 0) if kept_here else (given.weight_bytes >= 25 * MIB)
        back_to_host = given.weight_bytes if keep else 0
        gone = given.page_bytes + given.weight_bytes - back_to_host
        asleep = resident(one)
        assert full - asleep >= 0.9 * gone
        old, new = one.client.ready, await wake(one)
        assert resident(one) - asleep >= 0.9 * gone
        assert (new.fingerprint, new.num_pages, new.extent_base_offset) == (
            old.fingerprint,
            old.num_pages,
            old.extent_base_offset,
        )
        if new.direct_landing:  # what peers know of the old pages names nothing any more
            assert new.page_base_offset != old.page_base_offset and new.descriptor != old.descriptor
        assert await answer(one, 2) == before


async def test_what_a_sleep_leaves_of_weights_an_update_writes(wide: Path) -> None:
    """Level 2, other weights while it sleeps, and awake it answers by these; orders that come twice do nothing."""
    other = make_checkpoint(wide.parent / "other", tokenizer=False, seed=5, **WIDE)
    async with big(wide) as one:
        await fall_asleep(one, keep=True)
        assert (await fall_asleep(one, keep=False)).weight_bytes >= 25 * MIB
        assert await fall_asleep(one, keep=False) == m.Asleep(1, 0, 0)
        one.client.send(m.PrepareWeights(7, str(other)))
        assert await one.take(m.WeightsPrepared) == m.WeightsPrepared(7)
        one.client.send(m.ApplyWeights(7))
        assert not (await one.take(m.WeightsApplied)).why_not
        assert await wake(one) == await wake(one)
        assert await answer(one, 1) == said_by(other)


async def test_a_rank_with_work_does_not_sleep(wide: Path) -> None:
    async with big(wide) as one:
        before = await answer(one, 1)
        one.client.send(m.Join(5, tuple(range(10, 40)), 5, 7, 0, 400, 0, (), GREEDY))
        one.client.send(m.PrepareSleep(1, False))
        assert "in the batch" in (await one.take(m.SleepPrepared)).why_not
        one.client.send(m.Leave(5))
        await one.take(m.Left)
        one.inbox.clear()
        # Another rank of its group could not: it has given nothing back, and makes its pages known anew.
        one.client.send(m.PrepareSleep(1, False))
        assert not (await one.take(m.SleepPrepared)).why_not
        assert (await wake(one)).page_base_offset != one.client.ready.page_base_offset
        assert await answer(one, 2) == before
