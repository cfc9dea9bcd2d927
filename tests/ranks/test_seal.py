"""KV sealed into a host segment, pulled from there by another rank, and used: the tokens stay the reference's."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from kvmesh.ranks import protocol as m
from kvmesh.transfer import TransferEngine
from tests.support.rank_driver import BLOCK, GREEDY, Driver, rank
from tests.support.reference import assert_matches_reference

PROMPT = [(11 * i * i + 3 * i) % 90 + 5 for i in range(3 * BLOCK + 5)]


def extent_offset(driver: Driver, extent: int) -> int:
    ready = driver.client.ready
    return ready.extent_base_offset + extent * ready.shard_bytes


def pull_open(ticket: int, a: Driver, b: Driver, source: tuple[int, ...], target: tuple[int, ...]) -> m.PullOpen:
    offsets = tuple(extent_offset(a, e) for e in source)
    landing = tuple(extent_offset(b, e) for e in target)
    ready = b.client.ready
    return m.PullOpen(ticket, a.name, offsets, landing, ready.shard_bytes, time.monotonic_ns() + 20_000_000_000)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.slow
async def test_sealed_at_a_pulled_and_loaded_by_b(checkpoint: Path, transport: str) -> None:
    full = len(PROMPT) // BLOCK
    async with rank("a", checkpoint, (transport,)) as a, rank("b", checkpoint, (transport,)) as b:
        assert a.client.ready.layout == b.client.ready.layout and a.client.ready.layout
        assert a.client.ready.host_bytes >= 24 * a.client.ready.shard_bytes
        pages = (5, 6, 7, 8)
        a.client.send(m.PrefillStep(0, (m.PrefillItem(1, tuple(PROMPT), 0, pages, GREEDY),)))
        await a.take(m.PrefillStepDone)  # only then are the pages complete: copies do not wait for steps
        a.client.send(m.SealCopy(31, pages[:full], (2, 0, 9)))
        sealed = await a.take(m.SealCopied)
        assert sealed.ticket == 31 and sealed.start_ns <= sealed.end_ns
        b.client.send(m.OpenSegment(a.client.ready.descriptor))
        b.client.send(pull_open(32, a, b, (2, 0, 9), (1, 4, 3)))
        pulled = await b.take(m.PullEnded)
        assert (pulled.ticket, pulled.arrived, pulled.cause) == (32, (0, 1, 2), "")
        assert pulled.bytes_done == 3 * a.client.ready.shard_bytes
        # Loaded, and at once used by the step behind it: it computes only what is not there.
        b.client.send(m.LoadCopy(33, (1, 4, 3), (20, 21, 22)))
        rest = tuple(PROMPT[full * BLOCK :])
        b.client.send(m.PrefillStep(1, (m.PrefillItem(2, rest, full * BLOCK, (20, 21, 22, 23), GREEDY),)))
        assert (await b.take(m.LoadCopied)).ticket == 33
        (first,) = (await b.take(m.PrefillStepDone)).sampled
        b.client.send(m.Join(2, (20, 21, 22, 23), len(PROMPT), first.token_id, 0, 8, 0, (), GREEDY))
        tokens = [first.token_id]
        while len(tokens) < 8:
            tokens += [t.token_id for t in (await b.take(m.DecodeStepDone)).tokens]
    assert_matches_reference(checkpoint, PROMPT, tokens)


async def test_a_pull_that_cannot_be_says_why_and_the_rank_goes_on() -> None:
    async with rank("a", None, ("shm",)) as a, rank("b", None, ("shm",)) as b:
        base, size = b.client.ready.extent_base_offset, 4096
        source = a.client.ready.extent_base_offset
        end = base + b.client.ready.host_bytes
        far = time.monotonic_ns() + 20_000_000_000

        async def cause_of(ticket: int, offset: int, landing: int, nbytes: int, deadline: int = far) -> str:
            b.client.send(m.PullOpen(ticket, a.name, (offset,), (landing,), nbytes, deadline))
            ended = await b.take(m.PullEnded)
            assert ended.ticket == ticket
            return ended.cause

        assert "not open" in await cause_of(1, source, base, size)
        b.client.send(m.OpenSegment(a.client.ready.descriptor))
        assert not await cause_of(2, source, base, size)
        assert "host region" in await cause_of(3, source, base - 8, size)
        assert "host region" in await cause_of(4, source, end - size + 1, size)
        assert "region" in await cause_of(5, source + a.client.ready.host_bytes, base, size)
        assert "negative" in await cause_of(6, -5, base, size)
        assert "0 bytes" in await cause_of(7, source, base, 0)
        assert "deadline" in await cause_of(8, source, base, size, time.monotonic_ns() - 1)
        assert "host region" in await cause_of(9, source, base, 1 << 62)
        b.client.send(m.PullOpen(10, a.name, (source, source), (base,), size, far))
        assert "2 shards" in (await b.take(m.PullEnded)).cause
        b.client.send(m.PullCancel(77))
        b.client.send(m.OpenSegment(b"no descriptor"))
        assert not await cause_of(11, source, base, size)
        b.client.send(m.PrefillStep(1, (m.PrefillItem(1, (1,), 0, (0,), GREEDY),)))
        assert "no engine" in (await b.take(m.RankError)).message
        assert not b.inbox, "each pull ends once"


async def test_a_rank_without_an_engine_imports_no_torch(cold_ranks: None) -> None:
    async with rank("a", None, ("shm",)) as a:
        with open(f"/proc/{a.client.pid}/maps") as maps:  # noqa: ASYNC230
            assert "libtorch" not in maps.read()
        assert a.client.ready.num_pages == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.slow
async def test_a_block_that_is_not_finite_is_told(checkpoint: Path, poison: float) -> None:
    engine = TransferEngine("source")
    try:
        async with rank("a", checkpoint, ("shm",)) as a:
            size = a.client.ready.shard_bytes
            region = engine.allocate(2 * size, "cpu:0")
            assert region.memory is not None
            values = region.memory.cast("B").cast("f")
            values[size // 4 + 7] = poison  # one of the second block's values
            a.client.send(m.OpenSegment(engine.local_descriptor().encode()))
            offsets = (region.base_offset, region.base_offset + size)
            landing = (extent_offset(a, 3), extent_offset(a, 4))
            deadline = time.monotonic_ns() + 20_000_000_000
            a.client.send(m.PullOpen(1, "source", offsets, landing, size, deadline))
            assert (await a.take(m.PullEnded)).arrived == (0, 1)
            a.client.send(m.LoadCopy(2, (3, 4), (9, 5)))
            a.client.send(m.SealCopy(3, (9, 5, 9), (10, 11, 12)))
            assert (await a.take(m.SealCopied)).bad == (1,)
            values.release()
    finally:
        engine.close()
