"""Instances of data-parallel ranks that share experts, in a real mesh: each place is a member by itself, with rows,
prompts, pages and blocks of its own; they begin, compute and end together. Prefill, decode, and both in one with two
stages of layers a place."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.kvcache.tiers import Tier
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.mesh.client import Answer, pools, until
from tests.support.mesh.direct import Direct, blocks_at, members
from tests.support.mesh.harness import Running, running_mesh
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

TOKENS, BLOCK = 12, 16
ANSWERS, LONG = 6, 600  # so long that none is over when the last one has begun
PREFILLS, DECODES, BOTH = (("prefill-0", "prefill-0.dp1"), ("decode-0", "decode-0.dp1"), ("coupled-0", "coupled-0.dp1"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latent KV, which every rank has whole, routed experts and a shared one; none in the first of two stages."""
    settings = FAMILY_ZOO["deepseek_v3"] | {"num_hidden_layers": 4, "first_k_dense_replace": 2}
    return make_checkpoint(tmp_path_factory.mktemp("model") / "deepseek_v3", **settings)


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model: Path, memory: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("run")
    kept = {"ssd_path": str(folder / "ssd"), "ssd_capacity_mb": 64, "ssd_offload_percent": 0}
    flags: dict[str, Any] = {
        "prefill-0": {"mesh": "dp=2,ep=dp", "warm_segment": str(memory), **kept},
        "decode-0": {"mesh": "dp=2,ep=dp"},
        "coupled-0": {"mesh": "dp=2,pp=2,ep=dp"},
    }
    async with running_mesh(model, folder, flags=flags, block_tokens=BLOCK, memory_mb=16, coupled=1) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % 240 + 3 for i in range(length)]


async def sealed(address: str, keys: Sequence[bytes], tier: Tier | None = None) -> None:
    async def there() -> bool:
        return set(keys) <= await blocks_at(address, tier)

    await until(there, f"{len(keys)} blocks at {address}", 20)


async def test_each_place_answers_as_one_rank_does(mesh: Running, model: Path) -> None:
    """At one place alone, while the others have nothing; then at all, with prompts and answers of different lengths."""
    direct = await Direct.of(mesh)
    assert set(direct.members) == {*PREFILLS, *DECODES, *BOTH}

    async def ask(length: int, prefill: str, decode: str) -> None:
        asked = prompt(length, length)
        answer: Answer = await direct.generate(asked, TOKENS, prefill=prefill, decode=decode)
        assert answer.error is None and len(answer.tokens) == TOKENS
        assert_matches_reference(model, asked, answer.tokens)

    for prefill, decode in zip(PREFILLS + BOTH, DECODES + BOTH, strict=True):
        await ask(37, prefill, decode)
    pairs = [(one, other) for one in PREFILLS for other in DECODES]
    pairs += [*zip(BOTH, BOTH, strict=True), (BOTH[1], DECODES[0]), (PREFILLS[1], BOTH[0])]
    await asyncio.gather(*(ask(length, *pairs[at % 7]) for at, length in enumerate((70, 5, 18, 33, 2, 600, 530))))


async def test_blocks_of_one_place_are_read_by_others_and_by_another_cut(mesh: Running, model: Path) -> None:
    """A sibling, and two stages of layers, pull what one place has in its memory and on its SSD."""
    direct, asked = await Direct.of(mesh), prompt(133, 77)
    holder = PREFILLS[1]
    first = await direct.generate(asked, TOKENS, prefill=holder, decode=DECODES[0])
    assert first.error is None and first.cached_tokens == 0
    assert_matches_reference(model, asked, first.tokens)
    keys = direct.keys(asked)
    address = direct.members[holder].address
    await sealed(address, keys)
    await sealed(address, keys, Tier.SSD)
    assert not set(keys) & await blocks_at(direct.members[PREFILLS[0]].address)
    for reader, decode in ((PREFILLS[0], DECODES[1]), (BOTH[0], BOTH[0])):
        pulls = [(holder, 0, len(keys))]
        answer = await direct.generate(asked, TOKENS, prefill=reader, decode=decode, pulls=pulls)
        assert answer.error is None and answer.timings is not None
        assert answer.timings.pulled_tokens == 128 and answer.tokens == first.tokens


async def begun_answers(mesh: Running) -> dict[int, asyncio.Task[Answer]]:
    """Greedy answers that both places of decode-0 have begun, and others may go on with."""
    await mesh.cordon(*BOTH)
    begun: set[int] = set()
    all_begun = asyncio.Event()

    def token(seed: int, _: int) -> None:
        begun.add(seed)
        if len(begun) == ANSWERS:
            all_begun.set()

    answers = {
        seed: asyncio.create_task(mesh.client.generate(prompt(40, seed), LONG, on_token=partial(token, seed)))
        for seed in range(ANSWERS)
    }
    async with asyncio.timeout(60):
        await all_begun.wait()
    await mesh.cordon(*BOTH, keep=False)
    known = await members(mesh)
    for place in DECODES:
        assert (await pools(known[place].address, "decode")).requests
    return answers


async def test_a_rank_that_is_killed_ends_both_places(mesh: Running, model: Path) -> None:
    """Both are gone, and both come back, each with its own blocks. What both decode places answered goes on at those of
    another instance."""
    direct = await Direct.of(mesh)
    prompts = {place: prompt(100 + at, 50 + at) for at, place in enumerate(PREFILLS)}
    for place, asked in prompts.items():
        answer = await direct.generate(asked, TOKENS, prefill=place, decode=DECODES[0])
        assert_matches_reference(model, asked, answer.tokens)
        await sealed(direct.members[place].address, direct.keys(asked), Tier.SSD)
    names = ("prefill-0", "decode-0")
    before, pids = await members(mesh), {name: mesh.pid(name) for name in names}
    answers = await begun_answers(mesh)
    for name in names:
        os.kill(mesh.rank_pids(name)[1], signal.SIGKILL)
    await asyncio.gather(*(mesh.reborn(name, pid) for name, pid in pids.items()))
    for seed, going in answers.items():
        answer = await going
        assert answer.error is None and len(answer.tokens) == LONG
        assert_matches_reference(model, prompt(40, seed), answer.tokens)

    async def anew() -> bool:
        now = await members(mesh)
        places = (*PREFILLS, *DECODES)
        return all(place in now and now[place].incarnation != before[place].incarnation for place in places)

    await until(anew, "both places of both instances with a new life", 30)
    direct = await Direct.of(mesh)
    for at, (place, asked) in enumerate(prompts.items()):
        address = direct.members[place].address
        await sealed(address, direct.keys(asked), Tier.DRAM)  # its own, from the warm segment
        await sealed(address, direct.keys(asked), Tier.SSD)
        answer = await direct.generate(asked, TOKENS, prefill=place, decode=DECODES[at])
        assert answer.error is None and answer.cached_tokens >= 96
        assert_matches_reference(model, asked, answer.tokens)
