"""A mesh that sleeps while a trainer has the memory: answers in flight go on after it, with the weights there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from kvmesh.rollout import MemoryGivenBack, RolloutClient, RolloutGroup, RolloutRefused
from tests.mesh.test_rollout import marked
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt, until
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(580), pytest.mark.asyncio(loop_scope="module")]

VOCAB, LONG = 331, 200
PROMPT = prompt(5, 70, VOCAB)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "policy", vocab_size=VOCAB)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live(start: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    ranks = {"rollout_folders": str(tmp_path_factory.getbasetemp())}
    flags = {"gateway": {"rollout": True}, "prefill-0": ranks, "decode-0": ranks}
    folder = tmp_path_factory.mktemp("run")
    async with running_mesh(start, folder, block_tokens=16, memory_mb=64, flags=flags) as running:
        yield running


def resident(live: Running) -> int:
    pids = [pid for name in ("prefill-0", "decode-0") for pid in live.rank_pids(name)]
    found: int = sum(psutil.Process(pid).memory_info().rss for pid in pids)
    return found


async def greedy(mesh: RolloutClient, seen: list[RolloutGroup]) -> RolloutGroup:
    def watch(group: RolloutGroup) -> bool:
        seen[:] = [group]
        return False

    return await mesh.group(PROMPT, 1, max_tokens=LONG, temperature=0.0, ignore_eos=True, enough=watch)


async def sleeping_amid(live: Running, mesh: RolloutClient, level: int) -> tuple[MemoryGivenBack, asyncio.Task]:  # type: ignore[type-arg]
    """Puts the mesh to sleep in the middle of an answer, which waits."""
    seen: list[RolloutGroup] = []
    waiting = asyncio.create_task(greedy(mesh, seen))

    async def flows() -> bool:
        return bool(seen) and len(seen[0].samples[0].token_ids) >= 10

    await until(flows, "some tokens")
    before = resident(live)
    given = await mesh.sleep(level)
    assert given.ended >= 1 and [one["level"] for one in given.instances] == [level, level]
    assert given.page_bytes >= 2 * (60 << 20)
    assert before - resident(live) >= 0.8 * given.page_bytes

    async def told() -> bool:
        return all(f"asleep at level {level}" in one.not_ready_reason for one in await live._told())

    await until(told, "the conductor to know")
    assert not waiting.done() and len(seen[0].samples[0].token_ids) < LONG
    return given, waiting


async def test_answers_go_on_after_each_kind_of_sleep(live: Running, start: Path, tmp_path: Path) -> None:
    async with RolloutClient(live.http) as mesh:
        expected = (await greedy(mesh, [])).samples[0].token_ids
        for level in (1, 2):  # of the second the weights are the checkpoint's, read again
            _, waiting = await sleeping_amid(live, mesh, level)
            assert (await mesh.sleep(level)).page_bytes == 0
            with pytest.raises(RolloutRefused, match="it sleeps; wake it first"):
                await mesh.resume()
            assert await asyncio.gather(mesh.wake(), mesh.wake()) == [0, 0]
            group = await waiting
            assert group.samples[0].token_ids == expected
        _, waiting = await sleeping_amid(live, mesh, 2)
        update = await mesh.update_weights(path=str(marked(tmp_path / "a", start, 101)))
        assert update.whole and not waiting.done()
        assert await mesh.wake() == update.epoch
        [sample] = (await waiting).samples
        of_old = sample.token_epochs.count(0)
        assert 10 <= of_old < LONG
        assert sample.token_ids == [*expected[:of_old], *[101] * (LONG - of_old)]
        assert await mesh.wake() == update.epoch, "it is awake, and serves"
        await mesh.sleep(2)
        with pytest.raises(RolloutRefused, match="were dropped in a sleep: update the weights"):
            await mesh.wake()
        update = await mesh.update_weights(path=str(marked(tmp_path / "b", start, 102)))
        assert await mesh.wake() == update.epoch
        assert (await greedy(mesh, [])).samples[0].token_ids == [102] * LONG
    await live.settled()
