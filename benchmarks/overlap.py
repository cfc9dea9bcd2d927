"""What layer-wise push hides: layers that travel while the next one is computed, against a push after the prompt.

One mesh of two prefill instances and one decode instance over `tcp`, each prefill instance behind a link of so many
bytes a second (the fault transport's `bandwidth`: a frame leaves when the bytes before it have passed). prefill-0
pushes layer by layer, prefill-1 when the prompt is computed (`push = end`); decode-0 is the same. Prompts are new.

The first token leaves prefill at once and waits for no KV; what waits is decode's first step. So two figures are told:
TTFT, and *second token*, the time from sending a request to the token that decode itself made. The parts are measured
in the same rounds: *prefill alone* is TTFT of a request that ends with its first token, *transfer alone* the time from
the first write to the last acknowledgement where nothing else goes on (push = end). Link rates are chosen so that the
transfer of the middle length takes `--shares` of its prefill, as measured at first without a limit.

    python -m benchmarks.overlap                        # 12 layers x 512, 512 to 2,048 tokens: some minutes
    python -m benchmarks.overlap --quick --json benchmarks/results/overlap.json
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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import progress
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import Answer
from tests.support.mesh.direct import Direct
from tests.support.mesh.harness import running_mesh

VOCAB = 512
LAYERS, HIDDEN, KV_HEADS, HEAD_DIM, ITEM = 12, 512, 8, 64, 4
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * ITEM  # of a token
WAYS = {"layers": "prefill-0", "end": "prefill-1"}
BLOCK = 64


@dataclass
class Case:
    """One prompt length on one link; milliseconds, one a round."""

    tokens: int
    link_bytes_per_s: float  # 0: no limit
    prefill: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    ttft: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    second: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def told(self) -> dict[str, float]:
        """Medians and ratios."""
        prefill, transfer = statistics.median(self.prefill), statistics.median(self.transfer)
        second = {way: statistics.median(values) for way, values in self.second.items()}
        step = max(0.0, second["end"] - statistics.median(self.ttft["end"]) - transfer)
        return {
            "tokens": self.tokens,
            "link_mb_per_s": self.link_bytes_per_s / 1e6,
            "prefill_alone_ms": prefill,
            "transfer_alone_ms": transfer,
            "transfer_to_prefill": transfer / prefill,
            "ttft_layers_ms": statistics.median(self.ttft["layers"]),
            "ttft_end_ms": statistics.median(self.ttft["end"]),
            "second_layers_ms": second["layers"],
            "second_end_ms": second["end"],
            "sum_of_parts_ms": prefill + transfer,
            "layers_to_end": second["layers"] / second["end"],
            "layers_to_sum": second["layers"] / (prefill + transfer),
            "step_and_messages_ms": step,
        }


@asynccontextmanager
async def meshed(model: Path, folder: Path, args: argparse.Namespace, rate: float) -> AsyncIterator[Direct]:
    """`rate`: bytes a second out of each prefill instance; 0: no limit."""
    rule = {"kind": "bandwidth", "transport": "tcp", "op": "write", "bandwidth_mbps": rate * 8 / 1e6}
    slow = {"fault": json.dumps({"rules": [rule]})} if rate else {}
    pages = 3 * -(-max(args.tokens) // BLOCK) + 8  # one request at a time
    flags: dict[str, dict[str, Any]] = {
        "*": {"transports": "tcp", "num_pages": pages, "num_extents": pages},
        "prefill": {"prefill_chunk_tokens": args.chunk, "max_batch_tokens": args.chunk, **slow},
        "prefill-1": {"prefill_chunk_tokens": args.chunk, "max_batch_tokens": args.chunk, "push": "end", **slow},
        "decode": {"lease_ms": 60_000, "fill_begin_ms": 60_000, "queue_ms": 120_000, "store_high_percent": 100},
    }
    async with running_mesh(
        model, folder, prefill=2, decode=1, block_tokens=BLOCK, threads=args.threads, flags=flags
    ) as running:
        yield await Direct.of(running)


async def ask(direct: Direct, prompt: list[int], max_tokens: int, prefill: str) -> Answer:
    answer = await direct.generate(prompt, max_tokens, prefill=prefill, decode="decode-0", timeout_s=300)
    if answer.error is not None:
        raise SystemExit(f"a request failed: {answer.error}")
    if answer.cached_tokens:
        raise SystemExit(f"{answer.cached_tokens} tokens were cached: prompts must be new")
    return answer


async def measure(direct: Direct, case: Case, rng: random.Random, *, keep: bool) -> None:
    """One round: prefill alone, and both ways of pushing, in random order."""

    def prompt() -> list[int]:
        return [rng.randrange(5, VOCAB - 5) for _ in range(case.tokens)]

    for what in rng.sample(["alone", *WAYS], 3):
        if what == "alone":
            answer = await ask(direct, prompt(), 1, rng.choice(list(WAYS.values())))
            if keep:
                case.prefill.append(answer.first_s * 1e3)
            continue
        answer = await ask(direct, prompt(), 2, WAYS[what])
        assert answer.timings is not None
        if keep:
            case.ttft[what].append(answer.first_s * 1e3)
            case.second[what].append(answer.last_s * 1e3)
            if what == "end":
                case.transfer.append(answer.timings.transfer_us / 1e3)


async def rounds(direct: Direct, cases: list[Case], count: int, rng: random.Random, what: str) -> None:
    for n in range(count + 1):  # the first one warms connections and maps
        for case in rng.sample(cases, len(cases)):
            await measure(direct, case, rng, keep=n > 0)
        progress.tell(f"{what}: round {n}/{count}")
    progress.tell("")


async def run(args: argparse.Namespace, model: Path, home: Path) -> list[Case]:
    rng = random.Random(args.seed)
    free = [Case(tokens, 0.0) for tokens in args.tokens]
    async with meshed(model, home / "free", args, 0.0) as direct:
        await rounds(direct, free, max(2, args.rounds // 2), rng, "no limit")
    middle = free[len(free) // 2]
    found = list(free)
    for share in args.shares:
        rate = middle.tokens * KV_BYTES / (share * statistics.median(middle.prefill) / 1e3)
        cases = [Case(tokens, rate) for tokens in args.tokens]
        async with meshed(model, home / f"share-{share}", args, rate) as direct:
            await rounds(direct, cases, args.rounds, rng, f"{rate / 1e6:.0f} MB/s")
        found += cases
    return found


COLUMNS = (
    ("tokens", "tokens", "{:.0f}"),
    ("link_mb_per_s", "MB/s", "{:.0f}"),
    ("prefill_alone_ms", "prefill", "{:.0f}"),
    ("transfer_alone_ms", "transfer", "{:.0f}"),
    ("transfer_to_prefill", "ratio", "{:.2f}"),
    ("ttft_layers_ms", "TTFT", "{:.0f}"),
    ("ttft_end_ms", "TTFT end", "{:.0f}"),
    ("second_layers_ms", "2nd", "{:.0f}"),
    ("second_end_ms", "2nd end", "{:.0f}"),
    ("sum_of_parts_ms", "sum", "{:.0f}"),
    ("layers_to_end", "2nd/end", "{:.2f}"),
    ("layers_to_sum", "2nd/sum", "{:.2f}"),
)


def show(cases: list[Case]) -> None:
    print("".join(f"{heading:>9}" for _, heading, _ in COLUMNS))
    for case in cases:
        told = case.told()
        words = [
            "none" if key == "link_mb_per_s" and not told[key] else form.format(told[key]) for key, _, form in COLUMNS
        ]
        print("".join(f"{word:>9}" for word in words))
    print("medians, ms; 2nd: sent -> first token made by decode; end: push after the prompt; sum: prefill + transfer")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 1.0, 2.0], help="of prefill, for transfers")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="one length, two links, two rounds")
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.shares, args.rounds = [1024], [1.0, 2.0], 2
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model = make_checkpoint(
            home / "model", family="llama", vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN,
            num_hidden_layers=LAYERS, num_attention_heads=KV_HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
            max_position_embeddings=2 * max(args.tokens),
        )  # fmt: skip
        cases = await run(args, model, home)
    show(cases)
    if args.json:
        said = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": vars(args)}
        told = {**said, "cases": [case.told() for case in cases]}
        Path(args.json).write_text(json.dumps(told, indent=1) + "\n")  # noqa: ASYNC240


if __name__ == "__main__":
    asyncio.run(main())
