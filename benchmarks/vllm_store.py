"""Time to first token of a vLLM instance on a prefix that another instance has computed, beside computing it again.

Instance A answers prompts and saves their blocks, and ends. Instance B then gets in turn a prompt that A had and one of
the same length that nobody had, a token each; its own prefix cache is emptied before each. Both are real vLLM processes
for CPUs, on random weights of Qwen3-0.6B's shape, in bfloat16.

    PYTHON_OF_VLLM=.venv-vllm/bin/python python -m benchmarks.vllm_store
    ... python -m benchmarks.vllm_store --small --tokens 512 --rounds 6
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from kvmesh.connectors.vllm.keys import split_layers
from tests.connectors.vllm.engines import (
    BLOCK_TOKENS,
    PYTHON_ENV,
    EngineProcess,
    make_model,
    python_of_vllm,
    store_processes,
    transfer_config,
)
from tests.connectors.vllm.test_vllm import stored_blocks
from tests.support.services import until

FULL = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
SMALL = {**FULL, "vocab_size": 8192, "num_hidden_layers": 6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--small", action="store_true", help="six layers in place of 28")
    parser.add_argument("--transports", default="auto")
    parser.add_argument("--memory-mb", type=int, default=2048)
    args = parser.parse_args()
    if not python_of_vllm():
        parser.error(f"{PYTHON_ENV} names no Python with vLLM")
    fields = SMALL if args.small else FULL
    blocks = args.tokens // BLOCK_TOKENS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model", 3, **fields)
        with store_processes(folder, memory_mb=args.memory_mb) as (master, _):
            measure(args, folder, model, master.address, blocks, parts_of(fields))


def parts_of(fields: dict[str, Any]) -> int:
    """Returns in how many parts a block is stored."""
    page = 2 * 2 * int(fields["num_key_value_heads"]) * int(fields["head_dim"]) * BLOCK_TOKENS  # K and V, bfloat16
    return len(split_layers([page] * int(fields["num_hidden_layers"]), 1 << 20))


def measure(args: argparse.Namespace, folder: Path, model: Path, store: str, blocks: int, parts: int) -> None:
    config = transfer_config(store, transports=args.transports, load_timeout_ms=60_000, lookup_timeout_ms=5_000)
    options = {"dtype": "bfloat16", "max_model_len": args.tokens + 64, "max_num_batched_tokens": args.tokens + 64}
    draw = random.Random(1)

    def prompt() -> list[int]:
        return [draw.randrange(8192) for _ in range(args.tokens + 8)]

    shared, fresh = [prompt() for _ in range(args.rounds + 1)], [prompt() for _ in range(args.rounds + 1)]
    first = EngineProcess(model, config, folder / "a.log", **options)
    try:
        first.wait_ready()
        answers = [first.run(one, max_tokens=1) for one in shared]

        async def saved() -> bool:
            return await stored_blocks(store) >= blocks * parts * len(shared)

        asyncio.run(until(saved, 120.0))
    finally:
        first.stop()
    second = EngineProcess(model, config, folder / "b.log", **options)
    try:
        second.wait_ready()
        loaded, computed = [], []
        for at, (known, unknown) in enumerate(zip(shared, fresh, strict=True)):
            told = second.run(known, max_tokens=1, forget=True)
            assert told["cached"] == [blocks * BLOCK_TOKENS], told
            equal = told["tokens"] == answers[at]["tokens"]
            again = second.run(unknown, max_tokens=1, forget=True)
            assert again["cached"] == [0], again
            print(f"{told['seconds']:8.3f} s loaded  {again['seconds']:8.3f} s computed  tokens equal: {equal}")
            if at:  # the first of each warms up
                loaded.append(told["seconds"])
                computed.append(again["seconds"])
        a, b = statistics.median(loaded), statistics.median(computed)
        print(
            f"TTFT of {args.tokens + 8} tokens, median of {len(loaded)}: {a:.3f} s loaded, {b:.3f} s computed: "
            f"{b / a:.1f} times"
        )
    finally:
        second.stop()


if __name__ == "__main__":
    main()
