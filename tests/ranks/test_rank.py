"""Two real rank processes and nothing else: prefill here, KV bytes over the transfer engine, decode there.

The front's brains are not in this test: it plays their part message by message, so that a failure here is one of
rank, pusher, engine or transfer engine.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from kvmesh.errors import CheckpointError, ConfigError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.devices import STAGED_CPU
from kvmesh.ranks.worker.device import LATE_LOOKS
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.rank_driver import BLOCK, GREEDY, Driver, rank
from tests.support.reference import assert_matches_reference


def join(handle: int, pages: tuple[int, ...], prompt: int, token: int, max_tokens: int) -> m.Join:
    return m.Join(handle, pages, prompt, token, 0, max_tokens, 0, (), GREEDY)


async def hand_over(a: Driver, b: Driver, prompt: list[int], chunk: int, handle: int, epoch: int) -> int:
    """Prefill `prompt` on `a` in chunks, land it in pages 0.. of `b`; returns the first token."""
    ready = b.client.ready
    blocks = -(-len(prompt) // BLOCK)
    offsets = tuple(ready.page_base_offset + p * ready.shard_bytes for p in range(blocks))
    pages = tuple(range(3, 3 + blocks))
    a.client.send(m.OpenSegment(ready.descriptor))
    b.client.send(m.OpenWindow(a.client.ready.engine_name, epoch, offsets))
    lease = time.monotonic_ns() + 60_000_000_000
    segment = ready.engine_name
    starts = list(range(0, len(prompt), chunk))
    for n, start in enumerate(starts):
        end = min(start + chunk, len(prompt))
        sample = GREEDY if end == len(prompt) else None
        covered = pages[: -(-end // BLOCK)]
        a.client.send(m.PrefillStep(n, (m.PrefillItem(handle, tuple(prompt[start:end]), start, covered, sample),)))
        if n == len(starts) // 2:  # the landing becomes known in the middle of the computation
            a.client.send(m.PushOpen(handle, epoch, segment, pages, offsets, 0, 0, len(prompt), lease))
    token = -1
    for _ in starts:
        done = await a.take(m.PrefillStepDone)
        for sampled in done.sampled:
            token = sampled.token_id
    pushed = await a.take(m.PushDone)
    assert pushed.bytes_done == blocks * ready.shard_bytes
    ended = await b.take(m.FillEnded)
    assert ended == m.FillEnded(a.client.ready.engine_name, epoch)
    b.client.send(m.Fence(a.client.ready.engine_name, epoch))
    await b.take(m.Fenced)
    return token


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.slow
async def test_tokens_after_a_handoff_equal_the_reference(checkpoint: Path, transport: str, chunk: int) -> None:
    prompt = [(7 * i * i + 3 * i) % 90 + 5 for i in range(61)]
    async with rank("p", checkpoint, (transport,)) as a, rank("d", checkpoint, (transport,)) as b:
        first = await hand_over(a, b, prompt, chunk, handle=1, epoch=1)
        # four pages hold 64 tokens; token 64 needs a fifth: the rank stalls until it is granted
        b.client.send(join(1, (0, 1, 2, 3), len(prompt), first, max_tokens=12))
        await b.take(m.Stalled)
        b.client.send(m.Grant(1, (9,)))
        tokens = [first]
        while len(tokens) < 12:
            step = await b.take(m.DecodeStepDone)
            tokens += [t.token_id for t in step.tokens]
        assert step.tokens[-1].finish == 2
    assert_matches_reference(checkpoint, prompt, tokens)


@pytest.mark.slow
async def test_swapped_out_and_in_again_it_goes_on_with_the_same_tokens(checkpoint: Path) -> None:
    prompt = list(range(10, 40))
    async with rank("p", checkpoint, ("shm",)) as a, rank("d", checkpoint, ("shm",)) as b:
        first = await hand_over(a, b, prompt, 64, handle=1, epoch=1)
        b.client.send(join(1, (0, 1), len(prompt), first, max_tokens=20))
        await b.take(m.Stalled)
        steps = [x for x in b.inbox if isinstance(x, m.DecodeStepDone)]
        made = [first] + [t.token_id for s in steps for t in s.tokens]
        b.client.send(m.Leave(1))
        await b.take(m.Left)
        b.client.send(m.CopyOut(1, (0, 1), (5, 6)))
        await b.take(m.Copied)
        b.client.send(m.CopyIn(1, (5, 6), (20, 21)))
        await b.take(m.Copied)
        b.client.send(m.Join(1, (20, 21, 22, 23), 32, made[-1], len(made) - 1, 20, 0, (), GREEDY))
        b.inbox.clear()
        while len(made) < 20:
            step = await b.take(m.DecodeStepDone)
            made += [t.token_id for t in step.tokens]
    assert_matches_reference(checkpoint, prompt, made)


async def test_rows_go_on_while_a_prefix_is_loaded_and_the_step_that_reads_it_comes_after(checkpoint: Path) -> None:
    prompt = list(range(10, 40))
    async with rank("a", checkpoint, device=STAGED_CPU) as a:
        item = m.PrefillItem(1, tuple(prompt), 0, (3, 4), GREEDY, push=False)
        a.client.send(m.PrefillStep(1, (item,)))
        (first,) = (await a.take(m.PrefillStepDone)).sampled
        a.client.send(m.CopyOut(2, (3, 4), (5, 6)))
        await a.take(m.Copied)
        a.client.send(m.Join(3, (3, 4, *range(6, 12)), len(prompt), first.token_id, 0, 90, 0, (), GREEDY))
        await a.take(m.DecodeStepDone)
        a.inbox.clear()
        # The prompt once more, its first block from the host; more blocks before it, so that loading takes a while.
        a.client.send(m.LoadCopy(4, (5, 6, 7, 8), (20, 21, 22, 23)))
        rest = m.PrefillItem(5, tuple(prompt[BLOCK:]), BLOCK, (20, 19), GREEDY, push=False)
        a.client.send(m.PrefillStep(2, (rest,)))
        again = await a.take(m.PrefillStepDone)
        said = [type(x).__name__ for x in a.inbox]
        assert again.sampled[0].token_id == first.token_id
        loaded = said.index("LoadCopied")
        assert said[:loaded].count("DecodeStepDone") >= LATE_LOOKS, "rows waited for a load"
        assert all(x.prefill_tokens == 0 for x in a.inbox[:loaded] if isinstance(x, m.DecodeStepDone))


async def test_a_rank_that_launches_ahead_gives_the_same_tokens_and_pages_after_the_step(checkpoint: Path) -> None:
    prompt = list(range(10, 40))
    async with rank("a", checkpoint, device=STAGED_CPU, async_steps="on", steps={"max_running": 4}) as a:
        assert "a step is launched before the last one's tokens are read (as told)" in a.client.ready.settings
        item = m.PrefillItem(1, tuple(prompt), 0, (3, 4), GREEDY, push=False)
        a.client.send(m.PrefillStep(1, (item,)))
        (first,) = (await a.take(m.PrefillStepDone)).sampled
        made, joined = [first.token_id], join(1, (3, 4, 5), len(prompt), first.token_id, 12)
        a.client.send(joined)
        while len(made) < 12:
            step = await a.take(m.DecodeStepDone)
            made += [token.token_id for token in step.tokens]
        assert step.tokens[-1].finish == 2 and not step.held, "the next step was not launched with it"
        assert_matches_reference(checkpoint, prompt, made)
        a.inbox.clear()
        a.client.send(msgspec.structs.replace(joined, handle=2, stop_token_ids=(made[4],)))
        while not (step := await a.take(m.DecodeStepDone)).held:
            assert not any(token.finish for token in step.tokens)
        assert step.held == (2,) and step.tokens[-1].token_id == made[4]
        assert await a.take(m.Left) == m.Left(2)
        assert all(not message.tokens for message in a.inbox if isinstance(message, m.DecodeStepDone))


async def test_a_cancelled_push_drains_and_an_unknown_one_too(checkpoint: Path) -> None:
    async with rank("p", checkpoint, ("shm",)) as a:
        a.client.send(m.PushCancel(99))
        assert await a.take(m.PushDrained) == m.PushDrained(99)


@pytest.mark.slow
async def test_a_push_outside_its_window_or_after_its_lease_fails(checkpoint: Path) -> None:
    prompt = tuple(range(5, 37))
    async with rank("p", checkpoint, ("shm",)) as a, rank("d", checkpoint, ("shm",)) as b:
        ready = b.client.ready
        a.client.send(m.OpenSegment(ready.descriptor))
        a.client.send(m.PrefillStep(0, (m.PrefillItem(1, prompt, 0, (0, 1), GREEDY),)))
        await a.take(m.PrefillStepDone)
        offsets = (ready.page_base_offset, ready.page_base_offset + ready.shard_bytes)
        far = time.monotonic_ns() + 60_000_000_000
        a.client.send(m.PushOpen(1, 1, ready.engine_name, (0, 1), offsets, 0, 32, 32, far))
        failed = await a.take(m.PushFailed)
        assert "window" in failed.cause
        b.client.send(m.OpenWindow(a.client.ready.engine_name, 2, offsets))
        a.client.send(m.PushOpen(2, 2, ready.engine_name, (0, 1), offsets, 0, 32, 32, time.monotonic_ns() - 1))
        failed = await a.take(m.PushFailed)
        assert "lease" in failed.cause
        assert failed.drained


async def test_a_rank_that_cannot_load_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError):
        async with rank("p", tmp_path, ("shm",)):
            pass


async def test_a_model_that_keeps_states_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keeps recurrent states .*, which need cache_groups=true"):
        async with rank("p", make_qwen3_next(tmp_path), ("shm",)):
            pass


async def test_a_killed_rank_is_noticed(checkpoint: Path) -> None:
    async with rank("p", checkpoint, ("shm",)) as a:
        os.kill(a.client.pid, signal.SIGKILL)
        assert "rank 0" in await a.until_lost()
