"""A working set three times the DRAM pool, through a real mesh: with the SSD tier it keeps its hit rate, also over the
death of the instance that holds it; without, hardly anything is found. The tokens are the same."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvmesh.cli import status
from kvmesh.cli.collect import collect
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt, until
from tests.support.mesh.direct import node_store
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

VOCAB, BLOCK = 301, 16
EXTENTS = 32  # of the DRAM pool
PROMPTS, BLOCKS = 12, 8
LENGTH = BLOCKS * BLOCK + 5
ANSWER = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    make_checkpoint(path, family="llama", vocab_size=VOCAB)
    return path


def flags(ssd: Path | None) -> dict[str, dict[str, Any]]:
    small: dict[str, Any] = {"num_pages": 16, "num_extents": EXTENTS}
    tier = {"ssd_path": str(ssd), "ssd_capacity_mb": 64, "ssd_offload_percent": 0} if ssd is not None else {}
    return {"prefill": small | tier, "decode": {"num_pages": 24, "num_extents": 16}}


async def ask(running: Running, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """One after the other: (share of the reusable tokens that was found, answers)."""
    cached, answers = 0, []
    for tokens in prompts:
        answer = await running.client.generate(tokens, ANSWER)
        assert answer.error is None, answer.error
        cached += answer.cached_tokens
        answers.append(answer.tokens)
    return cached / (len(prompts) * BLOCKS * BLOCK), answers


async def written(running: Running, blocks: int) -> None:
    """So many blocks are on the SSD, and the kernel has them."""

    async def there() -> bool:
        return any(t.blocks >= blocks for t in (await node_store(running.mesh.addresses["prefill-0"])).tiers)

    await until(there, f"{blocks} blocks on the SSD")


async def shown(running: Running, blocks: int) -> None:
    """The conductor knows what the SSD holds and what reading costs; `kvmesh status` shows it."""
    address = running.mesh.addresses
    found: dict[str, Any] = {}

    async def known() -> bool:
        found.update(await collect(address["conductor"], address["gateway"], address["store"]))
        instances = found["conductor"]["instances"]
        tiers = [tier for one in instances for tier in one["tiers"] if tier["usage"]["bytes_per_s"]]
        return [tier["indexed_blocks"] for tier in tiers] == [blocks] and tiers[0]["expected_ms"] > 0

    await until(known, f"{blocks} blocks of the SSD in the conductor's index")
    out = Console(width=120, file=io.StringIO())
    out.print(status._screen(found, 120))
    assert re.search(rf"prefill-0 +ssd +{blocks} .* MiB", out.file.getvalue()), out.file.getvalue()  # type: ignore[attr-defined]


async def test_three_times_the_dram(
    mesh: Callable[..., AbstractAsyncContextManager[Running]], model: Path, tmp_path: Path
) -> None:
    prompts = [prompt(seed, LENGTH, VOCAB) for seed in range(PROMPTS)]
    async with mesh(model, block_tokens=BLOCK, flags=flags(None)) as running:
        first, answers = await ask(running, prompts)
        without, again = await ask(running, prompts)
        assert (first, again) == (0, answers)
    for tokens, answer in zip(prompts, answers, strict=True):
        assert_matches_reference(model, tokens, answer)

    async with mesh(model, block_tokens=BLOCK, flags=flags(tmp_path / "ssd")) as running:
        for at, tokens in enumerate(prompts):  # what the DRAM has to drop before it is written is lost
            assert await ask(running, [tokens]) == (0, [answers[at]])
            await written(running, (at + 1) * BLOCKS)
        with_tier, again = await ask(running, prompts)
        assert again == answers
        await shown(running, PROMPTS * BLOCKS)
        await running.settled()

        old = running.pid("prefill-0")
        running.kill("prefill-0")
        await running.restarted("prefill-0", old)
        await running.ready("prefill-0")
        await written(running, PROMPTS * BLOCKS)
        restarted, again = await ask(running, prompts)
        assert again == answers
        await running.settled()
    figures = f"without {without:.2f}, with {with_tier:.2f}, after kill -9 and restart {restarted:.2f}"
    print(f"{PROMPTS * BLOCKS} blocks over {EXTENTS} extents of DRAM: {figures}")
    assert with_tier >= 0.95 and restarted >= 0.95 and without <= 0.2, figures
