"""One layer's attention over pages: the C++ operators, the torch backend, and scaled_dot_product_attention over K and V
that already lie in order (which a server with pages would first have to bring about).

    python -m benchmarks.engine_attention [--threads 2] [--rounds 3] [--save FILE]

Qwen3-0.6B's heads (16 of 128, 8 of KV), bfloat16, pages of 64 tokens in no order. The three run in turns, round by
round; reported is each one's best round. Decode: bytes of K and V a second, and the share of what the machine reads;
prefill of a whole prompt: FLOP of the causal half, and the share of what it multiplies (benchmarks/limits.py).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.limits import measure
from kvmesh.engine.attention.backend import AttentionBackend, StepPlan, TokenSpan
from kvmesh.engine.attention.native_backend import NativeAttention
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.cpu import native

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 16, 8, 128, 64
SPEC = AttentionSpec(HEAD_DIM**-0.5)
DECODE = [(batch, context) for context in (512, 4096) for batch in (1, 16, 64)]
PREFILL = (512, 2048, 8192)
SHORTEST_S = 0.05  # what takes less is repeated: a round's time is one call's of several


def noise(*shape: int) -> torch.Tensor:
    """Numbers of which a million differ: drawing a gigabyte takes longer than the benchmark."""
    count = math.prod(shape)
    drawn = torch.randn(min(count, 2**20)).bfloat16()
    return drawn.repeat(-(-count // drawn.numel()))[:count].view(shape)


def best_of(contenders: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Seconds of one call. What they answer must agree."""
    answers = {name: call().flatten().float() for name, call in contenders.items()}
    for name, answer in answers.items():
        if not torch.allclose(answer, answers["sdpa"], atol=0.03):
            raise SystemExit(f"{name} answers something else than sdpa")
    best = dict.fromkeys(contenders, math.inf)
    for _ in range(rounds):
        for name, call in contenders.items():
            calls, started = 0, time.perf_counter()
            while (spent := time.perf_counter() - started) < SHORTEST_S or not calls:
                call()
                calls += 1
            best[name] = min(best[name], spent / calls)
    return best


def backends(pages: torch.Tensor) -> dict[str, AttentionBackend]:
    made: dict[str, AttentionBackend] = {"torch": TorchAttention(pages, HEADS, [SPEC])}
    if native.loaded():
        made["native"] = NativeAttention(pages, HEADS, [SPEC])
    return made


def step(plan: StepPlan, qkv: torch.Tensor) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        plan.write(0, qkv)
        return plan.attend(0, qkv)

    return call


def decode(batch: int, context: int, rounds: int) -> tuple[dict[str, float], float]:
    """Seconds by contender, and bytes of K and V."""
    per_request = context // BLOCK_TOKENS
    pages = noise(batch * per_request, 1, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    order = torch.randperm(len(pages))
    tables = [tuple(ids) for ids in order.view(batch, -1).tolist()]
    qkv = noise(batch, HEADS + 2 * KV_HEADS, HEAD_DIM)
    plans = {name: made.plan_decode(tables, [context - 1] * batch) for name, made in backends(pages).items()}
    next(iter(plans.values())).write(0, qkv)
    kv = pages[order, 0].view(batch, per_request, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    k, v = kv.permute(2, 0, 3, 1, 4, 5).reshape(2, batch, KV_HEADS, context, HEAD_DIM).unbind(0)
    q = qkv[:, :HEADS].view(batch, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)  # the heads of a group as its queries
    contenders: dict[str, Callable[[], torch.Tensor]] = {name: step(plan, qkv) for name, plan in plans.items()}
    contenders["sdpa"] = lambda: functional.scaled_dot_product_attention(q, k, v, scale=SPEC.scale)
    return best_of(contenders, rounds), float(pages.nbytes)


def prefill(tokens: int, rounds: int) -> tuple[dict[str, float], float]:
    """Seconds by contender, and FLOP."""
    pages = noise(tokens // BLOCK_TOKENS, 1, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    span = TokenSpan(0, tokens, torch.randperm(len(pages)).tolist())
    qkv = noise(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    contenders = {name: step(made.plan_prefill([span]), qkv) for name, made in backends(pages).items()}
    heads = qkv.transpose(0, 1)[None].contiguous()
    q = heads[:, :HEADS]
    k, v = heads[:, HEADS:].repeat_interleave(HEADS // KV_HEADS, 1).chunk(2, 1)

    def sdpa() -> torch.Tensor:
        answer = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SPEC.scale)
        return answer[0].transpose(0, 1)

    return best_of({**contenders, "sdpa": sdpa}, rounds), 2.0 * HEADS * HEAD_DIM * tokens * (tokens + 1)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="JSON with all points")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if not native.loaded():
        print(f"without the CPU operators: {native.why_not()}")
    limits = measure(given.threads)
    limit = {"read_gb_s": limits.read_bytes_s / 1e9, "bf16_tflops": limits.bf16_flops / 1e12}
    print(f"{given.threads} threads read {limit['read_gb_s']:.1f} GB/s, multiply {limit['bf16_tflops']:.2f} TFLOP/s")
    rows = []
    for batch, context in DECODE:
        seconds, nbytes = decode(batch, context, given.rounds)
        rows.append(report(f"decode {batch}x{context}", seconds, nbytes, "GB/s", 1e9, limits.read_bytes_s))
    for tokens in PREFILL:
        seconds, flop = prefill(tokens, min(given.rounds, 2) if tokens > 4096 else given.rounds)
        rows.append(report(f"prefill {tokens}", seconds, flop, "TFLOP/s", 1e12, limits.bf16_flops))
    if given.save:
        given.save.write_text(json.dumps({"threads": given.threads, "limits": limit, "points": rows}, indent=1) + "\n")


def report(
    name: str, seconds: dict[str, float], work: float, unit: str, scale: float, limit: float
) -> dict[str, str | float]:
    """One point: prints its line, answers what is kept of it."""
    kept: dict[str, str | float] = {"point": name, "unit": unit}
    line = [f"{name:16s}"]
    for contender in ("native", "torch", "sdpa"):
        if contender in seconds:
            rate = work / seconds[contender]
            kept[contender] = round(rate / scale, 4)
            share = f" {rate / limit:4.0%}" if limit else ""
            line.append(f"{contender} {seconds[contender] * 1e3:9.3f} ms {rate / scale:7.3f} {unit}{share}")
    print("   ".join(line), flush=True)
    return kept


if __name__ == "__main__":
    main()
