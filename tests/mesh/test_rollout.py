"""Rollouts on a live mesh whose weights change: no token of stale weights, no block of them found, all of the old or
all of the new at every rank whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.rollout import RolloutClient, RolloutGroup, RolloutRefused, TrainerSegment, WeightsUpdated
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt, until
from tests.support.mesh.direct import model_card
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

VOCAB = 331
LONG = 300


def marked(folder: Path, source: Path, token: int) -> Path:
    """Weights that answer one token whatever they are asked: the residual is the embedding alone, which has one large
    number in one channel, and only the head of that token reads it."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 0] = 100.0
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
    tensors["lm_head.weight"].zero_()
    tensors["lm_head.weight"][token, 0] = 10.0
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "policy", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def steps(start: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights whose every token says which they are: step i answers token 100 + i."""
    root = tmp_path_factory.mktemp("steps")
    return [marked(root / str(i), start, 100 + i) for i in range(5)]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def live(start: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    ranks = {"tensor_parallel": 2, "rollout_folders": str(tmp_path_factory.getbasetemp())}
    flags = {"gateway": {"rollout": True}, "prefill": ranks, "decode": ranks}
    folder = tmp_path_factory.mktemp("run")
    async with running_mesh(start, folder, block_tokens=16, memory_mb=32, flags=flags) as running:
        yield running


def client(live: Running) -> RolloutClient:
    return RolloutClient(live.http)


async def flowing(groups: list[RolloutGroup], tokens: int) -> None:
    """Every sample of every group has so many tokens at least, or is whole."""

    async def there() -> bool:
        return all(len(one.token_ids) >= tokens or one.finish for group in groups for one in group.samples)

    await until(there, f"{tokens} tokens of each sample")


async def test_every_token_is_of_the_weights_that_it_names(live: Running, steps: list[Path]) -> None:
    """Three updates under rollouts in flight, two of them out of a folder and one out of a trainer's memory."""
    seen: list[RolloutGroup] = []

    def watch(group: RolloutGroup) -> bool:
        if group not in seen:
            seen.append(group)
        return False

    async with client(live) as mesh:
        first = await mesh.update_weights(path=str(steps[0]))
        rollouts = [
            asyncio.create_task(
                mesh.group(prompt(i, 40 + i, VOCAB), 2, max_tokens=LONG, seed=i, ignore_eos=True, enough=watch)
            )
            for i in range(4)
        ]
        await until(lambda: _is(len(seen) == 4), "all groups")
        updates: list[WeightsUpdated] = [first]
        for at in (1, 2, 3):
            await flowing(seen, 20 * at)
            if at == 2:
                with TrainerSegment() as trainer, open_checkpoint(_whole(steps[at], live)) as checkpoint:
                    for name, info in checkpoint.tensors.items():
                        trainer.add(name, info.dtype, info.shape, checkpoint.raw(name))
                    updates.append(await mesh.update_weights(trainer=trainer))
            else:
                updates.append(await mesh.update_weights(path=str(steps[at])))
        groups = await asyncio.gather(*rollouts)
    assert all(update.whole and len(update.instances) == 2 for update in updates)
    says = {update.epoch: 100 + at for at, update in enumerate(updates)}
    for group in groups:
        assert not group.error
        for sample in group.samples:
            assert len(sample.token_ids) == LONG and sample.finish == "length"
            assert sample.token_ids == [says[epoch] for epoch in sample.token_epochs]
            assert len({epoch for _, epoch in sample.epochs}) >= 2, "no update came into its middle"
    await live.settled()


async def _is(what: bool) -> bool:
    return what


def _whole(weights: Path, live: Running) -> Path:
    """The folder with a config.json, which an update does without."""
    (weights / "config.json").write_bytes(Path(live.mesh.settings.model, "config.json").read_bytes())
    return weights


async def test_no_block_of_an_old_epoch_is_found(live: Running, steps: list[Path]) -> None:
    """The same prompt is a hit while the weights are the same, and none after an update, anywhere: the KV of before is
    that of other weights."""
    tokens = prompt(77, 64, VOCAB)
    async with client(live) as mesh:
        await mesh.update_weights(path=str(steps[0]))
        await live.client.generate(tokens, 4)
        assert (await live.client.generate(tokens, 4)).cached_tokens >= 48
        update = await mesh.update_weights(path=str(steps[1]))
        again = await live.client.generate(tokens, 4)
        assert (again.cached_tokens, again.tokens) == (0, [101] * 4)
    assert (await model_card(live)).weights_epoch == update.epoch


async def test_modes_of_a_pause(live: Running, steps: list[Path]) -> None:
    seen: list[RolloutGroup] = []

    def watch(group: RolloutGroup) -> bool:
        seen.append(group)
        return False

    async with client(live) as mesh:
        await mesh.update_weights(path=str(steps[0]))
        aborted = asyncio.create_task(
            mesh.group(prompt(1, 40, VOCAB), 2, max_tokens=1500, ignore_eos=True, enough=watch)
        )
        await until(lambda: _is(bool(seen)), "tokens")
        assert await mesh.pause("abort") >= 1
        group = await aborted
        assert "ended by a pause" in group.error and group.samples[0].token_ids
        waiting = asyncio.create_task(mesh.group(prompt(2, 40, VOCAB), 2, max_tokens=40, ignore_eos=True))
        with pytest.raises(RolloutRefused, match="must be greater"):
            await mesh.update_weights(path=str(steps[1]), epoch=1)
        update = await mesh.update_weights(path=str(steps[1]))  # a model that was paused stays so
        assert await mesh.resume() == update.epoch
        group = await waiting  # who comes in a pause waits
        assert [sample.token_ids for sample in group.samples] == [[101] * 40] * 2
        finishing = asyncio.create_task(mesh.group(prompt(3, 40, VOCAB), 2, max_tokens=200, ignore_eos=True))
        await live.busy("decode-0")
        assert await mesh.pause("finish") == 0
        assert (await finishing).finished == 2
        await mesh.resume()
        with pytest.raises(RolloutRefused, match="path='/nowhere' is outside of rollout_folders"):
            await mesh.update_weights(path="/nowhere")
        assert (await mesh.group(prompt(4, 20, VOCAB), 1, max_tokens=4)).finished == 1  # the old ones are served on


async def test_a_rank_killed_in_an_update_ends_its_instance_and_no_other(live: Running, steps: list[Path]) -> None:
    """A frozen rank holds the update up, so that its death comes in the middle. The other instance has the new weights,
    whole; the one that starts anew has those of its checkpoint, and gets no work before it has fetched the newest."""
    old = live.pid("decode-0")
    victim = live.rank_pids("decode-0")[1]
    async with client(live) as mesh:
        os.kill(victim, signal.SIGSTOP)
        order = asyncio.create_task(mesh.update_weights(path=str(steps[2]), timeout_s=100))

        async def paused() -> bool:
            return any("paused" in i.not_ready_reason for i in await live._told())

        await until(paused, "the pause")
        os.kill(victim, signal.SIGKILL)
        update = await order
        assert not update.whole
        told = {one["instance"]: one.get("error", "") for one in update.instances}
        assert not told["prefill-0"] and "SIGKILL" in told["decode-0"]
        await live.reborn("decode-0", old)

        async def caught_up() -> bool:
            found = {i.instance.instance_id: i for i in await live._told()}
            return (
                "decode-0" in found
                and found["decode-0"].card.weights_epoch == update.epoch
                and all(i.ready for i in found.values())
            )

        await until(caught_up, "the new decode-0, of the newest weights", 60)
        group = await mesh.group(prompt(6, 30, VOCAB), 2, max_tokens=8, ignore_eos=True)
        assert [sample.token_ids for sample in group.samples] == [[102] * 8] * 2
        assert group.samples[0].token_epochs == [update.epoch] * 8
        mended = await mesh.update_weights(path=str(steps[3]))
        assert mended.whole
        group = await mesh.group(prompt(5, 30, VOCAB), 2, max_tokens=8, ignore_eos=True)
    assert [sample.token_ids for sample in group.samples] == [[103] * 8] * 2
    assert group.samples[0].token_epochs == [mended.epoch] * 8
