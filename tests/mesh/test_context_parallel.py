"""Instances whose ranks share contexts (cp, dcp) in a real mesh, of a model with latents: handoffs from and to every
other cut, prefixes that are used again, chunks, blocks that other cuts read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.mesh.client import Answer, until
from tests.support.mesh.direct import Direct, blocks_at
from tests.support.mesh.harness import Running, running_mesh
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

BLOCK, TOKENS = 16, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "deepseek_v3", **FAMILY_ZOO["deepseek_v3"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """prefill-0 of one rank, coupled-0 with contexts over cp, decode-0 of two data-parallel places, decode-1 with
    contexts over dcp."""
    flags: dict[str, Any] = {
        "prefill": {"prefill_chunk_tokens": 48},
        "coupled-0": {"mesh": "cp=2", "prefill_chunk_tokens": 48},
        "decode-0": {"mesh": "dp=2,ep=dp"},
        "decode-1": {"mesh": "tp=2,dcp=2"},
    }
    shape: dict[str, Any] = {"prefill": 1, "decode": 2, "coupled": 1, "block_tokens": BLOCK, "memory_mb": 16}
    async with running_mesh(model, tmp_path_factory.mktemp("run"), flags=flags, **shape) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % 240 + 3 for i in range(length)]


def check(model: Path, asked: list[int], answer: Answer) -> None:
    assert answer.error is None
    assert len(answer.tokens) == TOKENS
    assert_matches_reference(model, asked, answer.tokens)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("coupled-0", "decode-0.dp1"),
        ("coupled-0", "decode-1"),
        ("prefill-0", "decode-1"),
        ("prefill-0", "coupled-0"),
        ("coupled-0", "coupled-0"),
    ],
)
async def test_tokens_do_not_depend_on_who_has_which_part_of_a_block(
    mesh: Running, model: Path, prefill: str, decode: str
) -> None:
    """Several requests at a time, so that rows join and leave while others run; then the same prompts again, whose
    blocks lie at both ends already, but for what the last block lacks."""
    direct, salt = await Direct.of(mesh), f"{prefill}{decode}"
    asked = [prompt(length, seed) for seed, length in enumerate((130, 17, 16, 95, 3))]
    for _ in range(2):
        calls = [direct.generate(one, TOKENS, prefill=prefill, decode=decode, salt=salt) for one in asked]
        answers = await asyncio.gather(*calls)
        for one, answer in zip(asked, answers, strict=True):
            check(model, one, answer)
    assert [answer.cached_tokens for answer in answers] == [128, 16, 0, 80, 0]
    await mesh.settled()


@pytest.mark.parametrize(
    ("holder", "reader", "decode"),
    [("coupled-0", "prefill-0", "decode-1"), ("prefill-0", "coupled-0", "decode-0")],
)
async def test_stored_blocks_go_from_one_cut_to_the_other(
    mesh: Running, model: Path, holder: str, reader: str, decode: str
) -> None:
    """A prompt that one instance has computed is read by a prefill instance of another cut, and by decode for its own
    part of the next turn."""
    direct, salt, asked = await Direct.of(mesh), f"from {holder}", prompt(130, 9)
    check(model, asked, await direct.generate(asked, TOKENS, prefill=holder, decode="decode-0.dp1", salt=salt))
    keys = direct.keys(asked, salt)

    async def sealed() -> bool:
        return set(keys) <= await blocks_at(mesh.mesh.addresses[holder])

    await until(sealed, f"{len(keys)} blocks at {holder}")
    pulls = [(holder, 0, len(keys))]
    answer = await direct.generate(
        asked, TOKENS, prefill=reader, decode=decode, salt=salt, pulls=pulls, decode_pulls=pulls
    )
    check(model, asked, answer)
    assert answer.timings is not None
    assert answer.timings.pulled_tokens == answer.timings.at_decode_tokens == 128
    await mesh.settled()
