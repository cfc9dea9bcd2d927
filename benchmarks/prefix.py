"""What a cached prefix is worth: TTFT at 0 %, 50 % and 95 % prefix hits, local and pulled from another node.

One mesh of 2 prefill and 1 decode instances; every case takes its turn in every round, with prompts of its own.
*local*: the prefix was computed on the prefill instance that gets the request and lies in its device pages; *remote*:
it lies in the host segment of the other one and is pulled through the transfer engine, then loaded. Beside it in the
same run: the time of the pull alone, and a memcpy of as many bytes.

    python -m benchmarks.prefix                       # a random model of 8 layers, prompts of 2,048 tokens
    python -m benchmarks.prefix --tokens 1024 --rounds 8 --transport tcp --json benchmarks/results/prefix.json
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

import numpy as np

from benchmarks import progress
from kvmesh.quantiles import quantile
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import Answer
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import Running, running_mesh

VOCAB = 512
BLOCK = 64


@dataclass
class Case:
    """One kind of request; figures in ms, one a round."""

    name: str
    share: float
    where: str  # "", "local", "remote"
    ttft: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    pull: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    cached_tokens: int = 0


CASES = (
    ("0 %", 0.0, ""),
    ("50 % local", 0.5, "local"),
    ("50 % remote", 0.5, "remote"),
    ("95 % local", 0.95, "local"),
    ("95 % remote", 0.95, "remote"),
)


def memcpy_ms(nbytes: int) -> float:
    """The same bytes within one process: the limit of a pull."""
    if not nbytes:
        return 0.0
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    start = time.perf_counter()
    np.copyto(target, source)
    return (time.perf_counter() - start) * 1e3


async def measure(direct: Direct, case: Case, tokens: int, rng: random.Random) -> None:
    """One request of this case, its prefix laid where the case says."""
    prompt = [rng.randrange(5, VOCAB - 5) for _ in range(tokens)]
    blocks = int(tokens * case.share) // BLOCK
    target, other = "prefill-1", "prefill-0"
    if blocks:
        seeded = await direct.generate(
            prompt[: blocks * BLOCK], 1, prefill=target if case.where == "local" else other, decode="decode-0"
        )
        fail_on(seeded)
        await asyncio.sleep(0.15)  # sealing ends behind the answer; not part of what is measured
    pulls = [(other, 0, blocks)] if case.where == "remote" else []
    answer = await direct.generate(prompt, 2, prefill=target, decode="decode-0", pulls=pulls)
    fail_on(answer)
    assert answer.timings is not None
    if answer.cached_tokens != blocks * BLOCK:
        raise SystemExit(f"{case.name}: {answer.cached_tokens} tokens were cached, {blocks * BLOCK} should have been")
    case.cached_tokens = answer.cached_tokens
    case.ttft.append(answer.first_s * 1e3)
    case.prefill.append(answer.timings.prefill_us / 1e3)
    case.pull.append(answer.timings.pull_us / 1e3)
    case.memcpy.append(memcpy_ms(answer.timings.pull_bytes))


def fail_on(answer: Answer) -> None:
    if answer.error is not None:
        raise SystemExit(f"a request failed: {answer.error}")


async def run(args: argparse.Namespace, running: Running) -> list[Case]:
    direct = await Direct.of(running)
    rng = random.Random(args.seed)
    cases = [Case(*case) for case in CASES]
    for n in range(args.rounds + 1):
        for case in rng.sample(cases, len(cases)):
            await measure(direct, case, args.tokens, rng)
        if not n:  # the first round warms connections, threads and maps
            for case in cases:
                case.ttft, case.prefill, case.pull, case.memcpy = [], [], [], []
        progress.tell(f"round {n}/{args.rounds}")
    progress.tell("")
    return cases


def show(cases: list[Case]) -> None:
    base = statistics.median(cases[0].ttft)
    print(
        f"{'prefix hit':<14}{'cached':>8}{'TTFT p50':>11}{'p90':>9}{'of 0 %':>9}{'prefill':>10}{'pull':>9}{'memcpy':>9}"
    )
    for case in cases:
        p50 = statistics.median(case.ttft)
        p90 = quantile(sorted(case.ttft), 0.9)
        print(
            f"{case.name:<14}{case.cached_tokens:>8}{p50:>8.1f} ms{p90:>6.1f} ms{p50 / base:>8.2f}×"
            f"{statistics.median(case.prefill):>7.1f} ms{statistics.median(case.pull):>6.1f} ms"
            f"{statistics.median(case.memcpy):>6.2f} ms"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--transport", default="shm,tcp", help="in order of preference")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(
            Path(folder) / "model", family="llama", vocab_size=VOCAB, hidden_size=args.hidden,
            intermediate_size=3 * args.hidden, num_hidden_layers=args.layers, num_attention_heads=8,
            num_key_value_heads=2, head_dim=args.hidden // 8, max_position_embeddings=2 * args.tokens,
        )  # fmt: skip
        pages = 4 * (args.rounds + 2) * len(CASES) * args.tokens // BLOCK
        flags = {"*": {"transports": args.transport, "num_pages": pages, "num_extents": pages}}
        async with running_mesh(model, Path(folder) / "run", prefill=2, decode=1, flags=flags) as running:
            cases = await run(args, running)
    show(cases)
    if args.json:
        told = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(args)}
        Path(args.json).write_text(  # noqa: ASYNC240
            json.dumps({**told, "cases": [asdict(c) for c in cases]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    asyncio.run(main())
