"""A working set larger than the DRAM pool: hit rate and TTFT with the SSD tier and without it.

Two meshes of 1 prefill and 1 decode instance side by side, one with `--ssd-path`; every request goes to both, in random
order, and both must give the same tokens. The prompts (`--over` times as many blocks as the prefill instance's host
segment has) are asked for again and again: *cyclic*, each once a round (LRU's worst case), and *zipf*, the popular ones
more often. At last both prefill instances are killed with SIGKILL and restarted, and every prompt is asked for once
more. The first round only computes.

    python -m benchmarks.ssd_mesh                               # 24 prompts of 1,024 tokens, 8 layers, about 3 minutes
    python -m benchmarks.ssd_mesh --over 3 --rounds 4 --json benchmarks/results/ssd_mesh.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import progress
from kvmesh.quantiles import quantile
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import until
from tests.support.mesh.direct import node_store
from tests.support.mesh.harness import Running, running_mesh

VOCAB, BLOCK = 512, 64
PREFILL = "prefill-0"
Asked = tuple[int, list[int], float]  # cached tokens, answer, ms to the first token


@dataclass
class Row:
    """One mesh under one pattern."""

    pattern: str
    tier: str  # "ssd", "none"
    reusable: int = 0  # tokens of full blocks before each prompt's last token
    cached: int = 0
    ttft: list[float] = field(default_factory=list)  # ms

    def add(self, reusable: int, asked: Asked) -> None:
        self.reusable += reusable
        self.cached += asked[0]
        self.ttft.append(asked[2])


async def ask(running: Running, prompt: list[int]) -> Asked:
    start, first = time.perf_counter(), 0.0

    def token(_: int) -> None:
        nonlocal first
        first = first or (time.perf_counter() - start) * 1e3

    answer = await running.client.generate(prompt, 4, on_token=token)
    if answer.error is not None:
        raise SystemExit(f"a request failed: {answer.error}")
    return answer.cached_tokens, answer.tokens, first


async def both(meshes: dict[str, Running], prompt: list[int], rows: dict[str, Row], rng: random.Random) -> None:
    """The same request to both, one after the other."""
    answers = []
    for tier in rng.sample(sorted(meshes), len(meshes)):
        asked = await ask(meshes[tier], prompt)
        rows[tier].add((len(prompt) - 1) // BLOCK * BLOCK, asked)
        answers.append(asked[1])
    if answers[0] != answers[1]:
        raise SystemExit(f"two answers to one prompt: {answers}")


async def written(running: Running, blocks: int) -> None:
    """The tier has taken so many blocks: what follows measures reads."""

    async def there() -> bool:
        return (await node_store(running.mesh.addresses[PREFILL])).tiers[0].blocks >= blocks

    await until(there, "write-behind", 60)


async def restart(running: Running) -> None:
    old = running.pid(PREFILL)
    running.kill(PREFILL)
    await running.restarted(PREFILL, old)
    await running.ready(PREFILL)


def popular(prompts: list[list[int]], rng: random.Random) -> list[list[int]]:
    """As many requests as there are prompts, the n-th one with weight 1/n."""
    return rng.choices(prompts, [1 / (n + 1) for n in range(len(prompts))], k=len(prompts))


async def run(args: argparse.Namespace, meshes: dict[str, Running]) -> list[Row]:
    rng = random.Random(args.seed)
    prompts = [[rng.randrange(5, VOCAB - 5) for _ in range(args.tokens)] for _ in range(args.prompts)]
    rows = [{tier: Row(pattern, tier) for tier in meshes} for pattern in ("first", "cyclic", "zipf", "restarted")]
    first, cyclic, zipf, restarted = rows
    for prompt in prompts:
        await both(meshes, prompt, first, rng)
    await written(meshes["ssd"], len(prompts) * (args.tokens // BLOCK))
    for n in range(args.rounds):
        for prompt in prompts:
            await both(meshes, prompt, cyclic, rng)
        progress.tell(f"cyclic {n + 1}/{args.rounds}")
    for n in range(args.rounds):
        for prompt in popular(prompts, rng):
            await both(meshes, prompt, zipf, rng)
        progress.tell(f"zipf {n + 1}/{args.rounds}")
    for running in meshes.values():
        await restart(running)
    await written(meshes["ssd"], len(prompts) * (args.tokens // BLOCK))
    for prompt in prompts:
        await both(meshes, prompt, restarted, rng)
    progress.tell("")
    return [row for pair in rows for row in pair.values()]


def show(rows: list[Row]) -> None:
    print(f"{'pattern':<11}{'tier':<6}{'requests':>9}{'hit rate':>10}{'TTFT p50':>12}{'p90':>10}")
    for row in rows:
        p90 = quantile(sorted(row.ttft), 0.9)
        rate, p50 = row.cached / row.reusable, statistics.median(row.ttft)
        print(f"{row.pattern:<11}{row.tier:<6}{len(row.ttft):>9}{rate:>10.3f}{p50:>9.1f} ms{p90:>7.1f} ms")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    parser.add_argument("--over", type=float, default=3.0, help="working set, in host segments")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--folder", default="", help="of the SSD tier; empty: a temporary one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    blocks = args.tokens // BLOCK
    extents = int(args.prompts * blocks / args.over)
    with tempfile.TemporaryDirectory(dir=args.folder or None) as folder:
        home = Path(folder)
        model = make_checkpoint(
            home / "model", family="llama", vocab_size=VOCAB, hidden_size=args.hidden,
            intermediate_size=3 * args.hidden, num_hidden_layers=args.layers, num_attention_heads=8,
            num_key_value_heads=2, head_dim=args.hidden // 8, max_position_embeddings=2 * args.tokens,
        )  # fmt: skip
        # Hardly more pages than one prompt needs, and as few extents at decode: nothing else keeps blocks.
        small: dict[str, Any] = {"num_pages": 2 * blocks + 4, "num_extents": extents}
        decode = {"num_pages": 2 * blocks + 4, "num_extents": blocks}
        tier = {"ssd_path": str(home / "ssd"), "ssd_offload_percent": 0, "ssd_capacity_mb": 4096}
        plain = {"prefill": small, "decode": decode}
        async with (
            running_mesh(model, home / "none", flags=plain) as without,
            running_mesh(model, home / "with", flags=plain | {"prefill": small | tier}) as having,
        ):
            rows = await run(args, {"none": without, "ssd": having})
            told = (await node_store(having.mesh.addresses[PREFILL])).tiers[0]
    print(f"{args.prompts * blocks} blocks of {args.tokens // blocks} tokens, {extents} extents of DRAM")
    show(rows)
    print(f"a read of the SSD tier: {told.read_ns / 1e6:.2f} ms, then {told.bytes_per_s / 1e9:.2f} GB/s")
    if args.json:
        said = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(args)}
        Path(args.json).write_text(  # noqa: ASYNC240
            json.dumps({**said, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    asyncio.run(main())
