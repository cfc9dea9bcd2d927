"""Mixtures of experts: grouped products on this CPU beside transformers and a loop, and where a GPU's become bound by
its multipliers.

    python -m benchmarks.moe cpu [--layers 4] [--rounds 3] [--threads 2] [--full] [--of 128] [--json FILE]
    python -m benchmarks.moe roofline [--experts 256] [--chosen 8] [--requests 128] [--cards 1 8 32 128]

`cpu` computes layers of experts of Qwen3-30B-A3B's shape, random weights in bfloat16: 128 experts of which a token has
8, and inner = 3/8 of hidden as there. Scaled down are the number of layers (48 there), without --full the width (hidden
1,024 instead of 2,048, inner 384 instead of 768), and with --of the number of experts that there are: a token has 8 all
the same, and reads as many bytes. What is timed is the block: router, products, weighted sum;
no attention. Sides take turns at every point of every round, in this process, over the same weights:

    ours           the C++ operator over packed weights of all experts (kvmesh/engine/cpu/experts.cpp)
    loop           the same packed products, expert by expert, as kvmesh did before
    grouped_mm     torch's grouped product over tokens sorted by expert, as transformers calls it
    transformers   its block as it loads by default; and `eager`, its loop

Points: decode of 1, 8 and 64 tokens and a prompt of 512. Rates are of the median round; ratios are the median of each
round's own. `of reading` is the share of the read bandwidth, measured before and after each point with as many threads
(benchmarks.limits), that the touched experts' bytes need: where it is near 1 nothing can be gained but by smaller
weights. `best` is the fastest single call of all rounds, and `of best` its share of the fastest reading: on a machine
that others use, medians tell how long the others held a thread up; a best is what the code takes. At 512 tokens each
expert is touched and has 32 rows: there the multipliers are the limit.

`roofline` derives m, the rows that an expert's product has in a decode step: with `requests` on each of n cards, whose
experts are cut over all of them (EP n), the products gather n * requests tokens: m = n * requests * chosen / experts. A
product reads its weights once, and its rows' inputs and outputs: with few rows it is bound by that. Printed is the m
from which on the multipliers bound it instead, and how much of their peak a given m can reach at most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

EXPERTS, CHOSEN = 128, 8
POINTS = (1, 8, 64, 512)
REPEATS = {1: 8, 8: 3}


class Card(NamedTuple):
    """One GPU: bytes read and bfloat16 FLOP, each per second."""

    name: str
    read_bytes_s: float
    bf16_flops: float


H200 = Card("H200", 4.8e12, 989e12)
# Rows of an expert as the project's seed gives them, for EP 8 and EP 128 with DeepSeek-V3.
TOLD = {8: 128, 128: 2048}


def rows_per_expert(cards: int, requests: int, chosen: int, experts: int) -> float:
    """Returns m of one decode step."""
    return cards * requests * chosen / experts


def reachable(rows: float, inputs: int, outputs: int, card: Card) -> float:
    """Returns the share of the peak that a product `[rows, inputs] x [inputs, outputs]` in bfloat16 can reach."""
    flop = 2 * rows * inputs * outputs
    nbytes = 2 * (inputs * outputs + rows * (inputs + outputs))
    return min(1.0, flop / card.bf16_flops / (nbytes / card.read_bytes_s))


def bound_from(inputs: int, outputs: int, card: Card) -> float:
    """Returns the rows from which on the multipliers bound the product; infinite where inputs and outputs alone take
    longer."""
    ridge = card.bf16_flops / card.read_bytes_s  # FLOP for each byte read
    left = inputs * outputs - ridge * (inputs + outputs)
    return ridge * inputs * outputs / left if left > 0 else float("inf")


def roofline(options: argparse.Namespace) -> dict[str, Any]:
    hidden, inner = options.hidden, options.inner
    products = {"gate_up": (hidden, 2 * inner), "down": (inner, hidden)}
    print(
        f"{H200.name}: {H200.read_bytes_s / 1e12:.1f} TB/s, {H200.bf16_flops / 1e12:.0f} TFLOP/s bfloat16: "
        f"{H200.bf16_flops / H200.read_bytes_s:.0f} FLOP a byte"
    )
    bounds = {name: bound_from(*shape, H200) for name, shape in products.items()}
    for name, shape in products.items():
        print(f"{name} {shape[0]:,} -> {shape[1]:,}: compute bound from m = {bounds[name]:.0f} rows of an expert on")
    print(f"\n{options.requests} requests a card, {options.chosen} of {options.experts} experts a token")
    print(f"{'EP':>5} {'tokens':>8} {'m':>7} {'gate_up':>9} {'down':>7}   seed")
    rows = []
    for cards in options.cards:
        m = rows_per_expert(cards, options.requests, options.chosen, options.experts)
        shares = [reachable(m, *shape, H200) for shape in products.values()]
        told = TOLD.get(cards)
        beside = ""
        if told:
            needed = told * options.experts / options.chosen / cards
            beside = f"{told:,} (= {told / m:.0f} x m: {needed:,.0f} tokens a card and step)"
        print(
            f"{cards:5} {cards * options.requests:8,} {m:7,.0f} {shares[0]:8.0%} {shares[1]:7.0%}   {beside}".rstrip()
        )
        rows.append({"cards": cards, "m": m, "gate_up": shares[0], "down": shares[1], "told": told})
    return {"bounds": bounds, "rows": rows}


# ── this CPU ──────────────────────────────────────────────────────────────────────────────────────


class Sides:
    """Layers of experts with the same weights, in each form: name → what answers `x [T, hidden]`."""

    def __init__(self, layers: int, hidden: int, inner: int, count: int = EXPERTS) -> None:
        import torch
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        from kvmesh.engine.config_experts import ExpertsConfig
        from kvmesh.engine.matrix import PackedMatrix
        from kvmesh.engine.models.experts import ExpertGate, ExpertParts, GatedExpert, LoopedExperts, PackedExperts
        from kvmesh.engine.models.moe import Router

        config: Any = Qwen3MoeConfig(
            hidden_size=hidden,
            moe_intermediate_size=inner,
            num_experts=count,
            num_experts_per_tok=CHOSEN,
            norm_topk_prob=True,
        )
        make: Any = Qwen3MoeSparseMoeBlock
        gate = ExpertGate("silu")
        self.experts = ExpertsConfig(tuple(range(layers)), count, CHOSEN, inner)
        self.config, self.torch = config, torch
        self.blocks, self.routers, self.packed, self.looped = [], [], [], []
        torch.manual_seed(0)
        for _ in range(layers):
            block = make(config).to(torch.bfloat16).eval()
            with torch.no_grad():
                for parameter in block.parameters():
                    parameter.normal_(0, parameter.shape[-1] ** -0.5)
            packed, looped = PackedExperts(self.experts, inner, hidden, gate), []
            for index in range(count):
                up, down = block.experts.gate_up_proj[index].detach(), block.experts.down_proj[index].detach()
                packed.read(index, ExpertParts(up[:inner], up[inner:], down))
                looped.append(GatedExpert(gate, PackedMatrix.of([up]), PackedMatrix.of([down])))
            self.blocks.append(block)
            self.packed.append(packed)
            self.looped.append(LoopedExperts(looped, False))
            self.routers.append(Router(self.experts, block.gate.weight.detach().float()))

    def calls(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "ours": lambda x: self._own(self.packed, x),
            "loop": lambda x: self._own(self.looped, x),
            "grouped_mm": lambda x: self._theirs("grouped_mm", x),
            "transformers": lambda x: self._theirs(None, x),
            "eager": lambda x: self._theirs("eager", x),
        }

    def _own(self, forms: Sequence[Any], x: Any) -> Any:
        for router, experts in zip(self.routers, forms, strict=True):
            x = self._normed(experts(x, *router(x)).to(x.dtype))
        return x

    def _theirs(self, implementation: str | None, x: Any) -> Any:
        for block in self.blocks:
            block.experts.config._experts_implementation = implementation or self.default
            answer = block(x[None])
            x = self._normed((answer[0] if isinstance(answer, tuple) else answer).view(x.shape))
        return x

    @property
    def default(self) -> str:
        """What transformers chooses by itself when it loads a model of this config."""
        from transformers import AutoModelForCausalLM

        if not hasattr(self, "_default"):
            make: Any = AutoModelForCausalLM
            with self.torch.device("meta"):
                model = make.from_config(self.config)
            self._default = str(model.config._experts_implementation)
        return self._default

    def _normed(self, x: Any) -> Any:
        """Keeps values as large as they were: the next layer chooses other experts."""
        return self.torch.nn.functional.rms_norm(x, x.shape[-1:])

    def touched(self, x: Any) -> int:
        """Returns the bytes of the experts that these tokens have, and of the routers."""
        nbytes = 0
        for router, experts in zip(self.routers, self.packed, strict=True):
            chosen, weights = router(x)
            of_expert = 3 * x.shape[-1] * self.experts.inner * 2
            nbytes += len(set(chosen.flatten().tolist())) * of_expert + router.weight.nbytes
            x = self._normed(experts(x, chosen, weights).to(x.dtype))
        return nbytes


def cpu(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from benchmarks.limits import measure
    from kvmesh.engine.cpu import native

    if not native.loaded():
        raise SystemExit(f"no C++ operators: {native.why_not()}")
    torch.set_num_threads(options.threads)
    hidden, inner = (2048, 768) if options.full else (1024, 384)
    told: dict[str, Any] = {}
    with torch.inference_mode():
        sides = Sides(options.layers, hidden, inner, options.of)
        calls = sides.calls()
        print(
            f"{options.layers} layers, hidden {hidden}, {options.of} experts of {inner}, {CHOSEN} a token, bfloat16, "
            f"{options.threads} threads; transformers' own choice here is {sides.default}"
        )
        for tokens in options.points:
            x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
            nbytes = sides.touched(x)
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            best = dict.fromkeys(calls, float("inf"))
            reads, most_read = [], 0.0
            for _ in range(options.rounds):
                read = [measure(options.threads).read_bytes_s]
                for name, call in calls.items():
                    call(x)
                    took = []
                    for _ in range(REPEATS.get(tokens, 1)):
                        started = time.perf_counter()
                        call(x)
                        took.append(time.perf_counter() - started)
                    seconds[name].append(statistics.mean(took))
                    best[name] = min(best[name], *took)
                read.append(measure(options.threads).read_bytes_s)
                reads.append(statistics.mean(read))
                most_read = max(most_read, *read)
            print(
                f"\n{tokens} tokens: {nbytes / 1e6:,.0f} MB touched; reading {statistics.median(reads) / 1e9:.1f}, "
                f"at best {most_read / 1e9:.1f} GB/s"
            )
            point = told[str(tokens)] = {
                "bytes": nbytes,
                "read_bytes_s": statistics.median(reads),
                "best_read_bytes_s": most_read,
            }
            for name, taken in seconds.items():
                ratio = statistics.median(own / theirs for own, theirs in zip(taken, seconds["ours"], strict=True))
                share = statistics.median(nbytes / took / read for took, read in zip(taken, reads, strict=True) if read)
                of_best = nbytes / best[name] / most_read if most_read else float("nan")
                point[name] = {
                    "seconds": statistics.median(taken),
                    "ratio": ratio,
                    "of_reading": share,
                    "best_seconds": best[name],
                    "of_best": of_best,
                }
                print(
                    f"  {name:13} {statistics.median(taken) * 1e3:9.2f} ms {ratio:6.2f} x ours {share:6.0%} of reading"
                    f"; best {best[name] * 1e3:9.2f} ms {best[name] / best['ours']:6.2f} x ours {of_best:6.0%} of best",
                    flush=True,
                )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    own = kinds.add_parser("cpu", help="this CPU: ours beside a loop, grouped_mm and transformers")
    own.add_argument("--layers", type=int, default=4)
    own.add_argument("--rounds", type=int, default=3)
    own.add_argument("--threads", type=int, default=2)
    own.add_argument("--full", action="store_true", help="the model's own width: 1.2 GB a layer and side")
    own.add_argument("--of", type=int, default=EXPERTS, help="experts that there are, of which a token has 8")
    own.add_argument("--points", type=int, nargs="+", default=POINTS, help="tokens of a step")
    own.set_defaults(run=cpu)
    line = kinds.add_parser("roofline", help="rows of an expert, and what a GPU's grouped products can reach")
    line.add_argument("--experts", type=int, default=256)
    line.add_argument("--chosen", type=int, default=8)
    line.add_argument("--requests", type=int, default=128, help="on each card, one token of each in a step")
    line.add_argument("--cards", type=int, nargs="+", default=[1, 8, 32, 128], help="that share all experts (EP)")
    line.add_argument("--hidden", type=int, default=7168)
    line.add_argument("--inner", type=int, default=2048)
    line.set_defaults(run=roofline)
    for kind in (own, line):
        kind.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    told = options.run(options)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
