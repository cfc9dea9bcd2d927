"""The long tail of a rollout: a coupled instance that has no prompts left decodes beside the others, and answers that
are few are gathered there, token for token, so that the others are free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from kvmesh.rollout import RolloutClient, RolloutGroup
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import pools, prompt, until
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(600)]

VOCAB, BLOCK, LONG = 331, 16, 1200


async def test_a_tail_is_spread_over_idle_prefill_and_gathered(
    mesh: Callable[..., AbstractAsyncContextManager[Running]], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "policy", vocab_size=VOCAB)
    flags = {"gateway": {"rollout": True}, "conductor": {"admission": "off"}}
    shape = {"prefill": 0, "decode": 1, "coupled": 1, "block_tokens": BLOCK, "memory_mb": 32}
    async with mesh(model, flags=flags, **shape) as running, RolloutClient(running.http) as trainer:
        for name in ("decode-0", "coupled-0"):
            await running.ready(name)
        flowing: dict[int, RolloutGroup] = {}

        def watch(number: int) -> Callable[[RolloutGroup], bool]:
            return lambda group: flowing.update({number: group}) is not None

        async def rows(name: str) -> int:
            return (await pools(running.mesh.addresses[name], "decode")).requests

        rollouts = [
            asyncio.create_task(
                trainer.group(
                    prompt(i, 40 + i, VOCAB), 1, max_tokens=LONG, temperature=0.0, ignore_eos=True, enough=watch(i)
                )
            )
            for i in range(6)
        ]

        async def at_both() -> bool:
            told = len(flowing) == len(rollouts)
            return told and bool(await rows("decode-0")) and bool(await rows("coupled-0"))

        await until(at_both, "answers at the decode instance and at the coupled one")
        gathered = await trainer.gather(slower=10.0)
        assert (gathered.kept, gathered.freed) == (("coupled-0",), ("decode-0",)), gathered.why
        assert gathered.moved and await rows("decode-0") == 0
        said = {number: len(group.samples[0].token_ids) for number, group in flowing.items()}
        assert any(count < LONG for count in said.values()), "the tail was over before"
        for number, group in enumerate(await asyncio.gather(*rollouts)):
            [sample] = group.samples
            assert (group.error, sample.finish, len(sample.token_ids)) == ("", "length", LONG), number
            assert_matches_reference(model, group.prompt, sample.token_ids)
        assert await rows("decode-0") == 0, "it is free until it is resumed"
        await trainer.resume()
        await running.ready("decode-0")
        await running.settled()
