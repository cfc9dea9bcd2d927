"""KV of older weights is painted: whoever reads one token of it says so. After an update nobody does, whether it lies
in device pages, in a pool node, on SSD, or under an answer that was in flight."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmesh.kvcache.tiers import Tier
from kvmesh.rollout import RolloutClient, RolloutGroup
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt, until
from tests.support.mesh.direct import Direct, ask_to_pull, blocks_at, node_store
from tests.support.mesh.harness import Running
from tests.support.reference import reference_greedy

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(600)]

VOCAB, BLOCK, BLOCKS = 331, 16, 8
LENGTH = BLOCKS * BLOCK + 5
COLOURS, FIRST_TOKEN, LOUD = 2, 100, 10_000.0
ANSWER, LONG_ANSWER = 6, 400


def painted(folder: Path, source: Path, colour: int) -> Path:
    """Weights whose V is one colour whatever the token, the same channel in every head and layer, and whose head says
    token FIRST_TOKEN + colour; but if attention brought a ten-thousandth of any other colour, that one's token."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, : 1 + COLOURS] = 0.0
    tensors["model.embed_tokens.weight"][:, 0] = 100.0
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensor.zero_()
            tensor[colour::16, 0] = 1.0  # heads of 16 channels
        elif name.endswith("o_proj.weight"):
            tensor.zero_()
            for each in range(COLOURS):
                tensor[1 + each, each::16] = 1.0
        elif name.endswith("down_proj.weight"):
            tensor.zero_()
    tensors["model.norm.weight"] = torch.ones_like(tensors["model.norm.weight"])
    head = tensors["lm_head.weight"].zero_()
    for each in range(COLOURS):
        head[FIRST_TOKEN + each, 1 + each] = 1.0 if each == colour else LOUD
    save_file(tensors, folder / "model.safetensors")
    return folder


class Walk:
    """Puts prompts where a test wants them, and asks for them there."""

    def __init__(self, running: Running, direct: Direct) -> None:
        self.running, self.direct = running, direct
        self.addresses = running.mesh.addresses

    @classmethod
    async def of(cls, running: Running, epoch: int) -> Walk:
        """Waits until the conductor has heard that these weights are served."""

        async def heard() -> Direct | None:
            direct = await Direct.of(running)
            return direct if direct.card.weights_epoch == epoch else None

        return cls(running, await until(heard, f"epoch {epoch} at the conductor"))

    async def asked(self, tokens: list[int], prefill: str, **more: Any) -> Any:
        answer = await self.direct.generate(
            tokens, ANSWER, prefill=prefill, decode="decode-0", timeout_s=120, temperature=0.0, **more
        )
        assert (answer.error, len(answer.tokens)) == (None, ANSWER)
        return answer

    async def holds(self, name: str, keys: Sequence[bytes], tier: Tier) -> None:
        async def there() -> bool:
            return set(keys) <= await blocks_at(self.addresses[name], tier)

        await until(there, f"{len(keys)} blocks at {name}, {tier.name}")

    async def only_on_ssd(self, name: str, keys: Sequence[bytes]) -> None:
        """Other prompts take the place of these blocks in the pages and the memory of `name`."""
        await self.holds(name, keys, Tier.SSD)
        left: list[int] = []
        for seed in range(20):
            left.append(len(set(keys) & await blocks_at(self.addresses[name], Tier.DRAM)))
            if not left[-1]:
                return
            await self.asked(prompt(1000 + seed, LENGTH, VOCAB), name)
        raise AssertionError(f"blocks stay in memory: {left}")

    async def to_pool(self, holder: str, keys: Sequence[bytes]) -> None:
        store = await node_store(self.addresses[holder])
        refs = [self.direct.members[holder]]
        held = await ask_to_pull(self.addresses["pool-0"], keys, refs, store.layout, store.shard_bytes)
        assert all(held)


async def test_no_token_comes_of_older_kv(
    mesh: Callable[..., AbstractAsyncContextManager[Running]], tmp_path: Path
) -> None:
    start = make_checkpoint(tmp_path / "policy", vocab_size=VOCAB)
    old, new = (painted(tmp_path / f"colour-{colour}", start, colour) for colour in range(COLOURS))
    few: dict[str, Any] = {"num_pages": 20, "num_extents": 12, "ssd_offload_percent": 0}
    flags: dict[str, dict[str, Any]] = {
        "gateway": {"rollout": True},
        "conductor": {"admission": "off"},
        "prefill-0": few | {"ssd_path": str(tmp_path / "ssd"), "ssd_capacity_mb": 64},
    }
    in_pages, in_pool, on_ssd, running_on = (prompt(seed, LENGTH, VOCAB) for seed in (1, 2, 3, 4))
    async with mesh(old, prefill=2, pool=1, block_tokens=BLOCK, memory_mb=16, flags=flags) as running:
        async with RolloutClient(running.http) as trainer:
            first = await trainer.update_weights(path=str(old))  # of its own: no old block is one of a checkpoint
            walk = await Walk.of(running, first.epoch)
            before = walk.direct.keys
            for tokens in (on_ssd, in_pool):
                said = await walk.asked(tokens, "prefill-0")
                assert said.tokens == [FIRST_TOKEN] * ANSWER
            await walk.holds("prefill-0", before(in_pool), Tier.DRAM)
            await walk.to_pool("prefill-0", before(in_pool))
            await walk.only_on_ssd("prefill-0", before(on_ssd))
            await walk.asked(in_pages, "prefill-0")
            assert (await walk.asked(in_pages, "prefill-0")).cached_tokens == BLOCKS * BLOCK
            old_keys = {name: before(tokens) for name, tokens in (("pool-0", in_pool), ("prefill-0", on_ssd))}

            flows: list[RolloutGroup] = []
            flowing = asyncio.create_task(
                trainer.group(
                    running_on, 2, max_tokens=LONG_ANSWER, temperature=0.0, ignore_eos=True,
                    enough=lambda group: bool(flows.append(group)),  # type: ignore[func-returns-value]
                )
            )  # fmt: skip

            async def said_something() -> bool:
                return bool(flows) and all(sample.token_ids for sample in flows[-1].samples)

            await until(said_something, "tokens of an answer in flight")
            update = await trainer.update_weights(path=str(new))
            group = await flowing
        for sample in group.samples:
            colours = [FIRST_TOKEN + (epoch == update.epoch) for epoch in sample.token_epochs]
            assert len(set(colours)) == 2 and sample.token_ids == colours, "an answer in flight"

        walk = await Walk.of(running, update.epoch)
        asked = {
            "device pages": await walk.asked(in_pages, "prefill-0"),
            "pool": await walk.asked(in_pool, "prefill-1", pulls=[("pool-0", 0, BLOCKS)]),
            "SSD": await walk.asked(on_ssd, "prefill-0"),
        }
        fresh = [FIRST_TOKEN + 1] * ANSWER
        assert {name: (one.tokens, one.cached_tokens) for name, one in asked.items()} == dict.fromkeys(
            asked, (fresh, 0)
        )
        assert reference_greedy(new, in_pool, ANSWER) == fresh, "what a fresh mesh with these weights says"
        # The old blocks are there all the same, and the ways to them work: by those the new ones are found.
        assert set(old_keys["pool-0"]) <= await blocks_at(walk.addresses["pool-0"])
        keys = walk.direct.keys
        await walk.holds("prefill-1", keys(in_pool), Tier.DRAM)
        await walk.to_pool("prefill-1", keys(in_pool))
        await walk.only_on_ssd("prefill-0", keys(on_ssd))
        pulled = await walk.asked(in_pool, "prefill-0", pulls=[("pool-0", 0, BLOCKS)])
        read = await walk.asked(on_ssd, "prefill-0")
        assert (pulled.tokens, pulled.timings.pulled_tokens) == (fresh, BLOCKS * BLOCK)
        assert read.tokens == fresh and read.cached_tokens
        await running.settled()
