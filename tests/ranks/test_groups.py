"""A real rank process keeps models by cache groups: cold prefills in chunks, hits from extents, preemption, pages that
go while rows run. What is given back holds NaN; the tokens are those of a runner that keeps everything."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.kvcache.cache_groups import CacheKind, needed_blocks
from kvmesh.ranks import protocol as m
from kvmesh.ranks.devices import STAGED_CPU
from kvmesh.transfer import EngineConfig, TransferEngine
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint, prompts
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.grouped_rank import GroupedFront, hand_over, told_by_runner
from tests.support.rank_driver import BLOCK, GREEDY, rank, ranks

MOST = 40
MODELS = ("gemma2", "gemma3", "llama4", "qwen3_next")
KINDS = {
    "gemma2": {CacheKind.ALL, CacheKind.WINDOW},
    "gemma3": {CacheKind.ALL, CacheKind.WINDOW},
    "llama4": {CacheKind.ALL, CacheKind.CHUNK},
    "qwen3_next": {CacheKind.ALL, CacheKind.STATE},
    "mistral": {CacheKind.WINDOW},
}
Models = Callable[[str], Path]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp(name) / "model"
            made[name] = make_qwen3_next(path) if name == "qwen3_next" else make_checkpoint(path, **FAMILY_ZOO[name])
        return made[name]

    return get


@asynccontextmanager
async def serving(
    name: str, path: Path, pages: int = 40, early: int = 0, **settings: Any
) -> AsyncIterator[GroupedFront]:
    with TransferEngine(f"test-{name}@1", EngineConfig(transports=("shm",))) as engine:
        async with rank(name, path, pages=pages, cache_groups=True, **settings) as driver:
            front = GroupedFront(driver, path, early)
            await front.poison(engine)
            yield front


def prompt_of(path: Path, tokens: int, seed: int = 3) -> list[int]:
    return prompts(1, 250, seed=seed, low=tokens, high=tokens + 1)[0]


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        ("gemma2", "on"),
        ("gemma3", "off"),
        ("llama4", "on"),
        ("qwen3_next", "off"),
        ("qwen3_next", "on"),
        ("mistral", "on"),
    ],
)
async def test_tokens_are_the_runners_while_pages_come_and_go(models: Models, name: str, ahead: str) -> None:
    path, prompt = models(name), prompt_of(models(name), 75)
    expected = told_by_runner(path, prompt, MOST)
    device = STAGED_CPU if ahead == "on" else "cpu"
    async with serving("a", path, device=device, async_steps=ahead) as front:
        assert {group.kind for group in front.groups} == KINDS[name]
        request = front.request(prompt)
        await front.prefill(request, 32)
        front.join(request, MOST)
        await front.decode(request, MOST)
        assert request.made == expected
        assert front.holes or CacheKind.STATE in KINDS[name]
        await front.give_back_all(request)
        assert [len(pages) for pages in front.free] == [one.num_pages for one in front.memory]


@pytest.mark.parametrize(("name", "ahead"), [("gemma3", "off"), ("qwen3_next", "on")])
async def test_tokens_are_the_runners_whatever_is_drafted(models: Models, name: str, ahead: str) -> None:
    """The first answer to a prompt is another, so that what is drafted of the second from it is wrong; the third finds
    both. Windows move on, states go back."""
    path, prompt = models(name), prompt_of(models(name), 75)
    expected = told_by_runner(path, prompt, MOST)
    device = STAGED_CPU if ahead == "on" else "cpu"
    settings = {"async_steps": ahead, "speculate": "suffix", "max_draft_tokens": 7}
    async with serving("a", path, device=device, **settings) as front:
        for sampling in (m.Sampling(1.5, 1.0, 0, 3), GREEDY, GREEDY):
            request = front.request(prompt)
            await front.prefill(request, 32)
            front.join(request, MOST, room=request.done + MOST, sampling=sampling)
            await front.decode(request, MOST)
            assert (request.made == expected) == (sampling is GREEDY)
            await front.give_back_all(request)
        assert front.drafted >= front.kept > 1  # how many of the first answer's fit is the CPU's last bits' matter
        assert [len(pages) for pages in front.free] == [one.num_pages for one in front.memory]


@pytest.mark.parametrize(
    ("name", "device"), [("gemma3", "cpu"), ("llama4", STAGED_CPU), ("qwen3_next", "cpu"), ("qwen3_next", STAGED_CPU)]
)
async def test_a_hit_from_sealed_extents_and_a_preemption(models: Models, name: str, device: str) -> None:
    path = models(name)
    shared, tail = prompt_of(path, 129), prompt_of(path, 60, seed=4)
    other = [*shared[:128], *tail]
    expected = told_by_runner(path, other, MOST)
    async with serving("a", path, device=device) as front:
        sealed: list[dict[int, int]] = [{} for _ in front.groups]
        first = front.request(shared)
        await front.prefill(first, 48, sealed=sealed)
        await front.give_back_all(first)
        assert first.made == told_by_runner(path, shared, 1)
        request = front.request(other)
        await front.load(request, 8, sealed)
        await front.prefill(request, 32, start=128)
        front.join(request, MOST)
        await front.decode(request, MOST, until=15)
        kept = await front.preempt(request)
        assert len(request.made) < MOST
        await front.resume(request, kept)
        front.join(request, MOST)
        await front.decode(request, MOST)
        assert request.made == expected


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
async def test_objects_of_all_groups_are_pulled_in_one_order_and_hit(models: Models, name: str) -> None:
    path, shared = models(name), prompt_of(models(name), 129)
    other = [*shared[:128], *prompt_of(path, 30, seed=4)]
    async with serving("a", path) as a, serving("b", path) as b:
        sealed: list[dict[int, int]] = [{} for _ in a.groups]
        await a.prefill(a.request(shared), 64, sealed=sealed)
        pulled: list[dict[int, int]] = [{} for _ in b.groups]
        theirs, ours, sizes = [], [], []
        for number, group in enumerate(a.groups):
            for block in needed_blocks(group, BLOCK, 128):
                pulled[number][block] = b.free_extents[number].pop()
                for front, extent, into in ((a, sealed[number][block], theirs), (b, pulled[number][block], ours)):
                    of = front.memory[number]
                    into.append(of.extent_base_offset + extent * of.shard.shard_bytes)
                sizes.append(a.memory[number].shard.shard_bytes)
        segment, deadline = a.driver.client.ready.engine_name, time.monotonic_ns() + 30_000_000_000
        b.driver.client.send(m.OpenSegment(a.driver.client.ready.descriptor))
        named = (tuple(theirs), tuple(ours), max(sizes), deadline)
        b.driver.client.send(m.PullOpen(5, segment, *named, sizes=tuple(sizes)))
        ended = await b.driver.take(m.PullEnded)
        assert sorted(ended.arrived) == list(range(len(sizes))) and ended.bytes_done == sum(sizes)
        sums = []
        for front, offsets in ((a, theirs), (b, ours)):
            front.driver.client.send(m.Sum(6, tuple(offsets), tuple(sizes), deadline))
            sums.append((await front.driver.take(m.Summed)).sums)
        assert sums[0] == sums[1] and len(set(sums[0])) == len(sizes)
        request = b.request(other)
        await b.load(request, 8, pulled)
        await b.prefill(request, 64, start=128)
        b.join(request, 12)
        await b.decode(request, 12)
    assert request.made == told_by_runner(path, other, 12)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvmesh-test-", dir="/dev/shm") as folder:
        yield Path(folder)


async def test_memory_that_outlives_a_rank_is_of_its_groups(models: Models, memory_folder: Path) -> None:
    settings = {"warm_segment": str(memory_folder / "warm"), "warm_lease_ms": 1000}
    found = []
    for switched in (True, True, False):
        async with rank("a", models("gemma2"), cache_groups=switched, **settings) as driver:
            found.append(bool(driver.client.ready.warm_until_ns))
    assert found == [False, True, False], "of one group it is another layout"


async def test_without_the_switch_a_model_of_two_groups_has_one(models: Models) -> None:
    async with rank("a", models("gemma2")) as driver:
        ready = driver.client.ready
        assert not ready.groups and ready.shard is not None and ready.shard.layers == 3
        assert ready.layout.split()[1] == "float32" and " G" not in ready.layout


async def test_what_a_rank_says_of_its_groups(models: Models) -> None:
    async with rank("a", models("qwen3_next"), cache_groups=True) as driver:
        ready: m.Ready = driver.client.ready
    assert [one.layout.split()[1] for one in ready.groups] == ["Gall", "Gdelta", "Gconvolution"]
    assert [one.shard.group for one in ready.groups] == [0, 1, 2]
    assert all(one.layout.split(" G")[0] in ready.layout and "rank 0/1" in one.layout for one in ready.groups)
    ends = [one.extent_base_offset + one.num_extents * one.shard.shard_bytes for one in ready.groups]
    assert all(end <= one.extent_base_offset for end, one in zip(ends, ready.groups[1:], strict=False))
    assert ready.shard == ready.groups[0].shard and ready.num_pages == ready.groups[0].num_pages


@pytest.mark.parametrize(
    ("name", "device"),
    [("gemma2", "cpu"), ("gemma3", STAGED_CPU), ("llama4", "cpu"), ("qwen3_next", "cpu"), ("qwen3_next", STAGED_CPU)],
)
async def test_a_push_from_one_rank_to_another_goes_on(models: Models, name: str, device: str) -> None:
    """The landing is known before anything is computed, in the middle, or at the end."""
    path, prompt = models(name), prompt_of(models(name), 75)
    async with serving("p", path, device=device) as a, serving("d", path, device=device) as b:
        for epoch, at in enumerate((0, 40, 75), 1):
            request = await hand_over(a, b, prompt, 32, at, epoch=epoch)
            b.join(request, MOST)
            await b.decode(request, MOST)
            assert request.made == told_by_runner(path, prompt, MOST)
            await b.give_back_all(request)


async def test_a_window_with_the_first_groups_size_is_too_small(models: Models) -> None:
    path = models("qwen3_next")  # whose states are larger than a block of its keys and values
    async with serving("p", path) as a, serving("d", path) as b:
        with pytest.raises(AssertionError, match="window"):
            await hand_over(a, b, prompt_of(path, 75), 32, 0, by_first_group=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
async def test_two_ranks_share_every_group_and_push_to_one(models: Models, name: str, tmp_path: Path) -> None:
    path, prompt = models(name), prompt_of(models(name), 75)
    expected = told_by_runner(path, prompt, MOST)
    settings = {"cache_groups": True, "pages": 40}
    async with ranks("p", path, 2, tmp_path, **settings) as both, serving("d", path) as b:
        a = GroupedFront(both, path)
        request = a.request(prompt)
        await a.prefill(request, 32)
        a.join(request, MOST)
        await a.decode(request, MOST)
        assert request.made == expected
        await a.give_back_all(request)
        landed = await hand_over(a, b, prompt, 32, 40)
        b.join(landed, MOST)
        await b.decode(landed, MOST)
        assert landed.made == expected


# ── what goes too early shows ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
async def test_pages_that_go_a_block_early_show(models: Models, name: str) -> None:
    """The rank refuses a hole that a token sees."""
    path = models(name)
    async with serving("a", path, early=1) as front:
        request = front.request(prompt_of(path, 75))
        with pytest.raises(AssertionError, match="RankError"):
            await front.prefill(request, 32)
    async with serving("b", path) as front:
        request = front.request(prompt_of(path, 75))
        await front.prefill(request, 32)
        front.join(request, MOST)
        front.early = 1
        with pytest.raises(AssertionError, match="RankError"):
            await front.decode(request, MOST)


# ── states ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("ahead", ["off", "on"])
async def test_the_second_slot_has_the_state_after_the_last_full_block(models: Models, ahead: str) -> None:
    """It ends at a border of blocks (80 or 96 tokens are computed) or beyond one, by length or by a stop token, after
    which a step that was launched ahead has changed the slot in vain. Another request goes on from there."""
    path, prompt = models("qwen3_next"), prompt_of(models("qwen3_next"), 75)
    device = STAGED_CPU if ahead == "on" else "cpu"
    async with serving("a", path, device=device, async_steps=ahead) as front:
        for tokens, stops in ((6, False), (6, True), (9, False), (9, True), (22, True)):
            expected = told_by_runner(path, prompt, tokens)
            request = front.request(prompt)
            await front.prefill(request, 32)
            front.join(request, 90 if stops else tokens, stop=(expected[-1],) if stops else (), room=128, least=tokens)
            await front.decode(request, tokens)
            assert request.made == expected
            if ahead == "on" and stops:
                await front.driver.take(m.Left)
            blocks = request.done // 16
            other = front.request([*prompt, *expected][: 16 * blocks] + prompt_of(path, 20, seed=9))
            for number, group in enumerate(front.groups):
                if group.kind is CacheKind.ALL:
                    other.tables[number], request.tables[number] = request.tables[number], []
                    await front.give_back(number, other.tables[number][blocks:])
                    del other.tables[number][blocks:]
            source = [request.tables[n][1] for n, group in enumerate(front.groups) if group.kind is CacheKind.STATE]
            await front.prefill(other, 32, start=16 * blocks, source=source)
            front.join(other, 8, room=128)
            await front.decode(other, 8)
            assert other.made == told_by_runner(path, other.prompt, 8)
            await front.give_back_all(request)
            await front.give_back_all(other)


@pytest.mark.parametrize("ahead", ["off", "on"])
async def test_what_is_not_finite_fails_alone_and_no_state_goes_twice(models: Models, ahead: str) -> None:
    path = models("qwen3_next")
    prompts_ = [prompt_of(path, 40), prompt_of(path, 41, seed=8), prompt_of(path, 70, seed=9)]
    device = STAGED_CPU if ahead == "on" else "cpu"
    async with serving("a", path, pages=60, device=device, async_steps=ahead) as front:
        well, bad, late = (front.request(prompt) for prompt in prompts_)
        await front.prefill(well, 32)
        await front.prefill(bad, 32)
        await front.give_back(0, bad.tables[0][:1])  # somebody spoils a page that it has
        front.join(well, MOST, room=96)
        front.join(bad, MOST, room=96)
        # A prompt beside them, of which a step may have the one that is spoiled as well.
        await front.prefill(late, 128)
        await front.decode(well, MOST)
        assert well.made == told_by_runner(path, well.prompt, MOST)
        front.join(late, 8, room=96)
        await front.decode(late, 8)
        assert late.made == told_by_runner(path, late.prompt, 8)
        assert front.failed == [bad.handle]
