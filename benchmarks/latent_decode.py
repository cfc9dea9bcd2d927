"""Decode of latent attention on a CPU: the C++ operator, torch's absorbed walk, and K and V written out for each token.

    python -m benchmarks.latent_decode --heads 16 --rows 1 4 --context 512 4096

Each round times all of them one after the other over the same pages, and prints medians of the rounds' ratios: what the
machine does beside it falls on all alike. One layer of DeepSeek's widths; absorbing and the way back are in the times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from benchmarks.turns import in_words, take_turns
from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.attention.latent import LatentBackend, UpProjection
from kvmesh.engine.attention.native_latent import NativeLatent
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.cpu import native
from kvmesh.engine.runner import torch_dtype

BLOCK = 64
SIZES = LatentConfig(
    query_rank=1536, latent=512, nope=128, rope=64, value=128, scale=192**-0.5, bias=False, interleaved=True
)


def works(rows: int, context: int, heads: int, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns what is timed, by name: a decode step's attention of `rows` requests of `context` tokens."""
    per_row = -(-context // BLOCK)
    pages = torch.randn(rows * per_row, 1, 1, 1, BLOCK, SIZES.latent + SIZES.rope).to(dtype)
    up = UpProjection((torch.randn(heads, 256, SIZES.latent) * SIZES.latent**-0.5).to(dtype), SIZES.nope)
    tables = [tuple(range(row * per_row, (row + 1) * per_row)) for row in range(rows)]
    given = torch.randn(rows, heads * 192 + SIZES.latent + SIZES.rope).to(dtype)
    plain = LatentBackend(pages, SIZES, [up])
    where = [context - 1] * rows
    decode = plain.plan_decode(tables, where)
    expanded = plain.plan_prefill([TokenSpan(context - 1, 1, table) for table in tables])
    found = {"torch": lambda: decode.attend(0, given), "written out": lambda: expanded.attend(0, given)}
    if native.loaded() and dtype in (torch.float32, torch.bfloat16):
        own = NativeLatent(pages, SIZES, [up]).plan_decode(tables, where)
        found["operator"] = lambda: own.attend(0, given)
    return found


@torch.inference_mode()
def compare(rows: int, context: int, heads: int, dtype: torch.dtype, rounds: int) -> None:
    """Prints one line: the operator's median time in milliseconds, and how many times as long the others take."""
    ways = works(rows, context, heads, dtype)
    told = in_words(take_turns(ways, rounds), "operator" if "operator" in ways else "torch")
    print(f"{str(dtype)[6:]:9} {rows:3} rows of {context:6} tokens, {heads} heads: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    for dtype in map(torch_dtype, args.dtype):
        for rows in args.rows:
            for context in args.context:
                compare(rows, context, args.heads, dtype, args.rounds)


if __name__ == "__main__":
    main()
