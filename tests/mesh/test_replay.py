"""`kvmesh replay` of a slice of a production trace: the live hit rate is what the same policies give offline."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvmesh.sim.workloads import trace
from kvmesh.testing.offline_pool import Hit, OfflinePool, OfflinePoolConfig
from tests.support.mesh.harness import Running, running_mesh
from tests.support.paths import ROOT

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

TRACE = ROOT / "examples" / "traces" / "conversation-400.jsonl"
BLOCK = 16  # so that 1/32 of the trace's 512 is one block
REQUESTS, ANSWER = 150, 2
AMPLE = 6000
# Fetch whenever somebody holds more (the paper's rule): what a prediction says depends on the machine.
RULE = {"fetch": "always"}


async def replayed(running: Running) -> dict[str, Any]:
    """The JSON report of the slice, sent in order, one request after the other."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvmesh.cli", "replay", str(TRACE), "--speed", "inf", "--requests", str(REQUESTS),
        "--scale-tokens", "1/32", "--max-output", str(ANSWER), "--url", running.http, "--json", "-",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(240):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    told: dict[str, Any] = json.loads(out)
    return told


def slice_of(context: int) -> list[trace.Made]:
    shape = trace.TraceShape(scale=Fraction(1, 32), context_tokens=context, max_output=ANSWER)
    return trace.fit(trace.between(trace.read(TRACE), count=REQUESTS), shape).made


def offline(prefills: Mapping[str, tuple[int, int]], decodes: Mapping[str, int], context: int = 2048) -> list[Hit]:
    pool = OfflinePool(OfflinePoolConfig(prefills=prefills, decodes=decodes, block_tokens=BLOCK))
    maker = trace.TokenMaker(512)
    names = [*prefills], [*decodes]
    return [
        pool.serve(maker.prompt(made, BLOCK), made.output_tokens, names[0][n % len(names[0])], names[1][0])
        for n, made in enumerate(slice_of(context))
    ]


async def test_with_room_for_everything_every_block_is_found_wherever_it_lies(demo_path: Path, tmp_path: Path) -> None:
    flags = {"*": {"num_pages": AMPLE, "num_extents": AMPLE, "announce_ms": 1}, "conductor": RULE}
    async with running_mesh(
        demo_path, tmp_path / "run", prefill=2, decode=2, pool=1, block_tokens=BLOCK, flags=flags
    ) as running:
        told = await replayed(running)
        await running.settled()
    live, reachable = told["hit_rates"]["live"], told["hit_rates"]["reachable"]
    hits = offline({"a": (AMPLE, AMPLE), "b": (AMPLE, AMPLE)}, {"c": AMPLE})
    assert sum(hit.pulled_tokens for hit in hits) > 0, "nothing travels: the comparison shows nothing"
    assert (live["tokens"], live["hit_tokens"]) == (
        sum(hit.prompt_tokens for hit in hits),
        sum(hit.cached_tokens for hit in hits),
    )
    assert live["hit_tokens"] == reachable["hit_tokens"] > 0


@pytest.mark.parametrize(("pages", "extents"), [pytest.param(160, 300, marks=pytest.mark.long), (300, 128)])
async def test_with_little_room_what_is_evicted_is_what_the_policies_evict(
    pages: int, extents: int, demo_path: Path, tmp_path: Path
) -> None:
    flags = {
        "prefill": {"num_pages": pages, "num_extents": extents, "announce_ms": 1},
        "decode": {"num_pages": 300, "num_extents": 64, "announce_ms": 1},
        "conductor": RULE,
    }
    async with running_mesh(demo_path, tmp_path / "run", block_tokens=BLOCK, flags=flags) as running:
        told = await replayed(running)
        await running.settled()
    live = told["hit_rates"]["live"]
    hits = offline({"a": (pages, extents)}, {"c": 64})
    ample = offline({"a": (AMPLE, AMPLE)}, {"c": AMPLE})
    cached = sum(hit.cached_tokens for hit in hits)
    assert 0 < cached < sum(hit.cached_tokens for hit in ample), "nothing was evicted: the comparison shows nothing"
    assert (live["tokens"], live["hit_tokens"]) == (sum(hit.prompt_tokens for hit in hits), cached)
