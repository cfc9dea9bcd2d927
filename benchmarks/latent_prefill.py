"""Chunks of latent attention on a CPU: this engine's plan, torch's walk, and transformers' eager attention.

    python -m benchmarks.latent_prefill --heads 16 --chunks 512+0 512+4096 32+4096

A chunk is QUERIES+PREFIX tokens. All write K and V out of the same latents, or absorb the queries, in the time that is
taken; transformers' has queries, latents and the mask ready, as its module would. Rounds go through all ways one after
the other, and medians of the rounds' ratios are printed: what the machine does beside it falls on all alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import eager_attention_forward

from benchmarks.latent_decode import BLOCK, SIZES
from benchmarks.turns import in_words, take_turns
from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.attention.latent import LatentBackend, UpProjection
from kvmesh.engine.attention.native_latent import NativeLatent
from kvmesh.engine.cpu import native
from kvmesh.engine.runner import torch_dtype


def works(queries: int, prefix: int, heads: int, dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns what is timed, by name: the attention of a chunk of `queries` tokens behind `prefix` of them."""
    tokens = queries + prefix
    count = -(-tokens // BLOCK)
    pages = torch.randn(count, 1, 1, 1, BLOCK, SIZES.latent + SIZES.rope).to(dtype)
    up = UpProjection((torch.randn(heads, 256, SIZES.latent) * SIZES.latent**-0.5).to(dtype), SIZES.nope)
    given = torch.randn(queries, heads * 192 + SIZES.latent + SIZES.rope).to(dtype)
    span = TokenSpan(prefix, queries, tuple(range(count)))
    walk = LatentBackend(pages, SIZES, [up]).plan_prefill([span])
    walk.write(0, given)
    rows = pages.view(-1, SIZES.latent + SIZES.rope)[:tokens]
    asked = given[:, : heads * 192].view(1, queries, heads, 192).transpose(1, 2)
    mask = torch.full((queries, tokens), -torch.inf, dtype=dtype).triu_(prefix + 1)[None, None]
    module = SimpleNamespace(num_key_value_groups=1, training=False)

    def eager() -> torch.Tensor:
        both = functional.linear(rows[:, : SIZES.latent], up.weight.flatten(0, 1)).view(1, tokens, heads, 256)
        keys, values = both.transpose(1, 2).split([SIZES.nope, SIZES.value], -1)
        shared = rows[None, None, :, SIZES.latent :].expand(1, heads, -1, -1)
        keys = torch.cat((keys, shared), -1)
        answer, _ = eager_attention_forward(module, asked, keys, values, mask, SIZES.scale)  # type: ignore[arg-type]
        return answer.flatten(2)[0]

    found = {"torch's walk": lambda: walk.attend(0, given), "transformers": eager}
    if native.loaded() and dtype in (torch.float32, torch.bfloat16):
        own = NativeLatent(pages, SIZES, [up]).plan_prefill([span])
        found["this engine"] = lambda: own.attend(0, given)
    return found


@torch.inference_mode()
def compare(queries: int, prefix: int, heads: int, dtype: torch.dtype, rounds: int) -> None:
    """Prints one line: each way's median time in milliseconds, and how many times as long as this engine's the others
    take in the same round. Raises AssertionError where two ways answer something else."""
    ways = works(queries, prefix, heads, dtype)
    answers = [work().float() for work in ways.values()]
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], atol=3e-2, rtol=3e-2)
    told = in_words(take_turns(ways, rounds), "this engine" if "this engine" in ways else "torch's walk")
    print(f"{str(dtype)[6:]:9} {queries:5} after {prefix:5}, {heads} heads: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--chunks", nargs="+", default=["512+0", "2048+0", "512+4096", "32+4096"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's own choice")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    for dtype in map(torch_dtype, args.dtype):
        for chunk in args.chunks:
            queries, prefix = map(int, chunk.split("+"))
            compare(queries, prefix, args.heads, dtype, args.rounds)


if __name__ == "__main__":
    main()
