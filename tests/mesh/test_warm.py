"""An instance whose host segment outlives it: killed with kill -9, it has its blocks again, and the same tokens."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt, until
from tests.support.mesh.direct import Direct, blocks_at, lookup
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

VOCAB, BLOCK = 301, 16
PROMPTS, BLOCKS = 4, 6


@pytest.fixture
def memory() -> Iterator[Path]:
    path = Path(f"/dev/shm/kvmesh-test-{uuid.uuid4().hex}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


async def test_a_killed_prefill_instance_has_its_blocks_again(
    mesh: Callable[..., AbstractAsyncContextManager[Running]], tmp_path: Path, memory: Path
) -> None:
    model = tmp_path / "llama"
    make_checkpoint(model, family="llama", vocab_size=VOCAB)
    prompts = [prompt(seed, BLOCKS * BLOCK + 3, VOCAB) for seed in range(PROMPTS)]
    async with mesh(model, block_tokens=BLOCK, memory_mb=8, warm_segment=str(memory)) as running:
        direct = await Direct.of(running)
        first = [await direct.generate(each, 6, prefill="prefill-0", decode="decode-0") for each in prompts]
        for tokens, answer in zip(prompts, first, strict=True):
            assert (answer.error, answer.cached_tokens) == (None, 0)
            assert_matches_reference(model, tokens, answer.tokens)
        address = running.mesh.addresses["prefill-0"]
        keys = [key for tokens in prompts for key in direct.keys(tokens)]

        async def sealed() -> bool:
            return set(keys) <= await blocks_at(address)

        await until(sealed, "all blocks sealed")
        for _ in range(2):  # the second life's blocks are the first one's
            old = running.pid("prefill-0")
            running.kill("prefill-0")
            await running.restarted("prefill-0", old)
            await until(sealed, "all blocks here again", 15)

            async def known() -> bool:
                return all("prefill-0" in holders for holders in await lookup(running, keys))

            await until(known, "the master knows of the new life's blocks", 15)
        await running.ready("prefill-0")
        await direct.refresh()
        again = await asyncio.gather(
            *(direct.generate(each, 6, prefill="prefill-0", decode="decode-0") for each in prompts)
        )
        for before, answer in zip(first, again, strict=True):
            assert answer.error is None and answer.timings is not None
            assert (answer.cached_tokens, answer.timings.pulled_tokens) == (BLOCKS * BLOCK, 0)
            assert answer.tokens == before.tokens
        await running.settled()
