"""A checkpoint whose weights change shares no KV with what it was, in memory or on SSD."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from kvmesh.engine.checkpoint import open_checkpoint
from tests.support.mesh.client import prompt, until
from tests.support.mesh.direct import node_store
from tests.support.mesh.harness import Running
from tests.support.reference import assert_matches_reference, reference_greedy

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

BLOCK, BLOCKS, ANSWER = 16, 8, 6
SAMPLES, SAMPLE = 16, 1024  # of each tensor older versions hashed so many pieces of so many bytes
CHANGED = 42_000  # bytes between two of them
MakeMesh = Callable[..., AbstractAsyncContextManager[Running]]


def edit(folder: Path) -> None:
    """Negate 21 000 embeddings' numbers, none of them in a piece that older versions looked at, and set the file's
    time back. Done twice it is undone."""
    with open_checkpoint(folder) as checkpoint:
        info = checkpoint.tensors["model.embed_tokens.weight"]
    assert info.dtype == "BF16"
    apart = (info.nbytes - SAMPLE) // (SAMPLES - 1)
    first = 4 * apart + SAMPLE + 8
    first -= first % 2
    assert first + CHANGED < 5 * apart
    found = info.file.stat()
    with info.file.open("r+b") as file:
        file.seek(info.offset + first)
        old = file.read(CHANGED)
        file.seek(info.offset + first)
        file.write(bytes(byte ^ (0x80 if at % 2 else 0) for at, byte in enumerate(old)))
    os.utime(info.file, ns=(found.st_atime_ns, found.st_mtime_ns))


async def asked(running: Running, tokens: list[int]) -> tuple[int, list[int]]:
    """(tokens that were found in caches, the answer)."""
    answer = await running.client.generate(tokens, ANSWER)
    assert answer.error is None, answer.error
    return answer.cached_tokens, answer.tokens


async def on_ssd(running: Running) -> int:
    return sum(tier.blocks for tier in (await node_store(running.mesh.addresses["prefill-0"])).tiers)


async def test_a_changed_checkpoint_finds_nothing_of_the_old_one(
    mesh: MakeMesh, demo_path: Path, tmp_path: Path
) -> None:
    served, ssd = tmp_path / "served", tmp_path / "ssd"
    shutil.copytree(demo_path, served, ignore=shutil.ignore_patterns(".kvmesh*"))
    tokens = prompt(3, BLOCKS * BLOCK + 5, 2040)
    tier: dict[str, Any] = {"ssd_path": str(ssd), "ssd_capacity_mb": 64, "ssd_offload_percent": 0}
    options: dict[str, Any] = {"block_tokens": BLOCK, "flags": {"prefill": tier}}

    async def written() -> bool:
        return await on_ssd(running) >= BLOCKS

    async with mesh(served, **options) as running:
        none, old = await asked(running, tokens)
        await until(written, "all blocks on the SSD")
        again = await asked(running, tokens)
        assert none == 0 and again[0] > 0 and again[1] == old
    assert_matches_reference(demo_path, tokens, old)
    async with mesh(served, **options) as running:  # the tier outlives its instance while the weights are the same
        found = await asked(running, tokens)
        assert found[0] > 0 and found[1] == old
    assert (first := identity(ssd)) and list(ssd.rglob("bucket-*"))

    edit(served)
    changed = shutil.copytree(served, tmp_path / "changed")
    assert reference_greedy(changed, tokens, ANSWER) != old, "the edit has no effect on this answer"
    async with mesh(served, **options) as running:
        assert await on_ssd(running) == 0
        none, new = await asked(running, tokens)
        assert none == 0, "KV of the old weights was taken for that of the new ones"
        assert_matches_reference(changed, tokens, new)
        again = await asked(running, tokens)
        assert again[0] > 0 and again[1] == new
        assert identity(ssd) != first

        async def removed() -> bool:
            return not list(ssd.rglob("aside-*"))

        await until(removed, "the old weights' files removed")

    edit(served)
    async with mesh(served, **options) as running:
        assert await asked(running, tokens) == (0, old)
    assert identity(ssd) == first


def identity(ssd: Path) -> str:
    """Whose blocks the instance's folder holds."""
    return str(json.loads(next(ssd.rglob("tier.json")).read_text())["identity"])
