"""What a model of Llama-3.1-8B's shape does on one GPU, against what the GPU was measured to do.

    python -m benchmarks.engine_cuda [--json benchmarks/results/engine-cuda.json] [--layers 32]

Random bfloat16 weights, made on the device; pages hold noise, which costs what KV costs. A step's time is that of
`Runner.decode` or `Runner.prefill`, sampling and the way of the tokens to the host included, median of several.

MBU: the bytes that a decode step must read (all weights, the KV of its rows) over its time, as a share of the measured
bandwidth of a copy. MFU: the products that a step must do, as a share of the measured rate of one large product.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvmesh.engine import runner as engine
from kvmesh.engine.batch import DecodeBatch, DecodeInput, PrefillInput, SampleParams
from kvmesh.engine.checkpoint import Checkpoint, TensorInfo
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.tensors import expected_tensors
from kvmesh.engine.weights import Weights

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
DECODE = ((1, 1024), (1, 8192), (1, 65536), (8, 1024), (32, 1024), (32, 8192), (72, 1024), (128, 1024), (256, 1024))
PREFILL = (512, 1024, 2048, 8192, 16384)
MIXED = ((64, 1024, 512), (256, 1024, 1024))  # rows, tokens before each, tokens of a prompt's chunk
DRAFTED = ((1, 1024), (8, 1024), (32, 1024))  # requests, tokens before each
DRAFTS = (3, 7)
BLOCK_TOKENS = 64
PAGES_SHARE = 0.7  # of what the weights leave
WARM, STEPS = 3, 15
COPY_BYTES, PRODUCT = 4 << 30, 8192
DEVICE, DTYPE = "cuda", "bfloat16"

Row = dict[str, Any]


def use_small_shape() -> None:
    """A model of two small layers on the CPU, Triton's kernels in its interpreter: everything here runs in seconds and
    tells nothing of speed. The interpreter multiplies no bfloat16."""
    os.environ["TRITON_INTERPRET"] = "1"
    from kvmesh.engine.attention import choice
    from kvmesh.engine.attention.triton_backend import TritonAttention

    choice.BACKENDS["cpu"] = TritonAttention
    small = {
        "vocab_size": 331,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    globals().update(
        SHAPE=SHAPE | small, DEVICE="cpu", DTYPE="float16", BLOCK_TOKENS=16, DECODE=((1, 16), (3, 20)), PREFILL=(24,),
        MIXED=((2, 16, 24),), DRAFTED=((2, 16),), DRAFTS=(3,), WARM=0, STEPS=1, COPY_BYTES=1 << 20, PRODUCT=64,
    )  # fmt: skip


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class RandomWeights(Weights):
    """Noise of the right shapes."""

    def view(self, name: str) -> torch.Tensor:
        shape = self.checkpoint.tensors[name].shape
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        return made.fill_(1) if len(shape) == 1 else made.normal_(std=shape[-1] ** -0.5)


def seconds(work: Callable[[], object], steps: int = 0) -> float:
    """Median wall time of so many (0: STEPS), each waited for."""
    times = []
    for step in range(WARM + min(steps or STEPS, STEPS)):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        if step >= WARM:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes read and written a second by a copy within the device."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source))


def product_rate() -> float:
    """FLOP a second of one square bfloat16 product."""
    a, b = (torch.randn(PRODUCT, PRODUCT, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return float(2 * PRODUCT**3 / seconds(lambda: a @ b))


def make_runner(layers: int) -> engine.Runner:
    config = ModelConfig.from_hf(SHAPE | {"num_hidden_layers": layers})
    tensors = {
        name: TensorInfo(name, "BF16", shape, Path("none"), 0, 0) for name, shape in expected_tensors(config).items()
    }
    engine.Weights = RandomWeights  # type: ignore[misc]  # the runner's own way to its weights, without a file
    layout = engine.shard_layout(config, DTYPE, BLOCK_TOKENS)
    count = max(rows * (context // BLOCK_TOKENS + 1) for rows, context in DECODE)
    count = max(count, *(rows * (at // BLOCK_TOKENS + 1) - (-more // BLOCK_TOKENS) for rows, at, more in MIXED))
    if DEVICE == "cuda":
        weights = 2 * sum(torch.Size(info.shape).numel() for info in tensors.values())
        free, _ = torch.cuda.mem_get_info()
        count = min(count, int((free - weights) * PAGES_SHARE) // layout.shard_bytes)
    pages = torch.empty((count, *layout.shape), dtype=engine.torch_dtype(DTYPE), device=DEVICE)
    for some in pages.split(64):
        some.normal_(std=0.1)
    checkpoint = Checkpoint(Path("none"), config, tensors, "random")
    return engine.Runner(checkpoint, DTYPE, DEVICE, BLOCK_TOKENS, pages, cuda_graphs=True)


class Work:
    """What a step must do at least."""

    def __init__(self, config: ModelConfig) -> None:
        c = config
        per_layer = (
            c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.hidden_size * c.intermediate_size
        )
        self.linear, self.head = c.layers * per_layer, c.vocab_size * c.hidden_size
        self.kv_bytes = 2 * c.kv_elements_per_token
        self.per_pair = 4 * c.layers * c.heads * c.head_dim  # FLOP of one query and one key

    def decode(self, batch: int, context: int) -> tuple[float, float]:
        """Bytes, FLOP."""
        flop = 2 * batch * (self.linear + self.head) + batch * context * self.per_pair
        return 2 * (self.linear + self.head) + batch * context * self.kv_bytes, flop

    def prefill(self, tokens: int) -> float:
        """FLOP: causal attention is half the square; the head once."""
        return 2 * self.linear * tokens + self.per_pair * tokens * tokens / 2 + 2 * self.head


def decode_step(runner: engine.Runner, batch: int, context: int) -> Callable[[], object]:
    """One decode step of so many rows, each with `context` tokens before it, from columns as a rank has them."""
    need = context // BLOCK_TOKENS + 1
    rows = [
        DecodeInput((17 * i + 3) % 300, context, tuple(range(i * need, (i + 1) * need)), SampleParams())
        for i in range(batch)
    ]
    batch = DecodeBatch.of(rows)
    return lambda: runner.step((), batch)


def prefill_step(runner: engine.Runner, tokens: int) -> Callable[[], object]:
    """A prompt of so many tokens in one chunk, with its first token."""
    pages = tuple(range(-(-tokens // BLOCK_TOKENS)))
    item = PrefillInput([(31 * i) % 300 for i in range(tokens)], 0, pages, SampleParams())
    return lambda: runner.prefill([item])


def decode_rows(runner: engine.Runner, copy: float, product: float) -> Iterator[Row]:
    work, graphs, count = Work(runner.config), runner.graphs, runner.attention.num_pages
    for batch, context in DECODE:
        need = context // BLOCK_TOKENS + 1
        if need * batch > count:
            print(f"decode, {batch} rows at {context} tokens: {need * batch} pages, there are {count}", file=sys.stderr)
            continue
        step = decode_step(runner, batch, context)
        nbytes, flop = work.decode(batch, context)
        for name, used in (("replayed", graphs), ("launched", None)):
            if name == "replayed" and graphs is None:
                continue
            runner.graphs = used
            took = seconds(step)
            yield {
                "step": f"decode {batch} x {context}",
                "graphs": name,
                "ms": took * 1e3,
                "tokens_per_s": batch / took,
                "mbu": nbytes / took / copy,
                "mfu": flop / took / product,
            }
        runner.graphs = graphs


def drafted_step(runner: engine.Runner, batch: int, context: int, drafts: int) -> Callable[[], object]:
    """One step of so many requests, each a row and its drafts, all verified."""
    need, each = (context + drafts) // BLOCK_TOKENS + 1, 1 + drafts
    rows = [
        DecodeInput((17 * i + at) % 300, context + at, tuple(range(i * need, (i + 1) * need)), SampleParams())
        for i in range(batch)
        for at in range(each)
    ]
    columns = DecodeBatch.of(rows)._replace(lengths=np.full(batch, each, np.int64))
    return lambda: runner.step((), columns)


def drafted_rows(runner: engine.Runner, copy: float, product: float) -> Iterator[Row]:
    """Steps that verify drafts, with graphs for them in place of those before: call it last. `tokens_per_s` is of
    requests, as if no draft were kept; a step that keeps all gives 1 + drafts times as many."""
    work = Work(runner.config)
    runner.use_pages(
        runner.attention.pages, True, max_rows=max(rows for rows, _ in DRAFTED), max_tokens=0, max_drafts=max(DRAFTS)
    )
    for batch, context in DRAFTED:
        for drafts in (0, *DRAFTS):
            step = drafted_step(runner, batch, context, drafts) if drafts else decode_step(runner, batch, context)
            took = seconds(step)
            nbytes, _ = work.decode(batch, context)
            _, flop = work.decode(batch * (1 + drafts), context)
            yield {
                "step": f"decode {batch} x {context}, {drafts} drafts each",
                "graphs": "replayed" if runner.graphs is not None else "launched",
                "ms": took * 1e3,
                "tokens_per_s": batch / took,
                "mbu": nbytes / took / copy,
                "mfu": flop / took / product,
            }


def mixed_step(runner: engine.Runner, batch: int, context: int, tokens: int) -> Callable[[], object]:
    """One step of so many rows beside a prompt's first chunk."""
    need = context // BLOCK_TOKENS + 1
    rows = [
        DecodeInput((17 * i + 3) % 300, context, tuple(range(i * need, (i + 1) * need)), SampleParams())
        for i in range(batch)
    ]
    first = batch * need
    pages = tuple(range(first, first - (-tokens // BLOCK_TOKENS)))
    item = PrefillInput([(31 * i) % 300 for i in range(tokens)], 0, pages, SampleParams())
    columns = DecodeBatch.of(rows)
    return lambda: runner.step([item], columns)


def by_pieces(
    runner: engine.Runner, tokens: int, step: Callable[[], object], times: int
) -> Iterator[tuple[str, float]]:
    """Seconds of a step that computes `tokens`: by pieces, where it is so small that there are any, and launched."""
    pieces = runner.pieces
    if pieces is not None and pieces.sizes and tokens <= pieces.sizes[-1]:
        yield "pieces", seconds(step, times)
    runner.pieces = None
    yield "launched", seconds(step, times)
    runner.pieces = pieces


def prefill_rows(runner: engine.Runner, product: float) -> Iterator[Row]:
    work = Work(runner.config)
    for tokens in PREFILL:
        for name, took in by_pieces(runner, tokens, prefill_step(runner, tokens), 5):
            yield {
                "step": f"prefill {tokens}",
                "graphs": name,
                "ms": took * 1e3,
                "tokens_per_s": tokens / took,
                "mbu": None,
                "mfu": work.prefill(tokens) / took / product,
            }


def mixed_rows(runner: engine.Runner, product: float) -> Iterator[Row]:
    work, count = Work(runner.config), runner.attention.num_pages
    for batch, context, tokens in MIXED:
        if batch * (context // BLOCK_TOKENS + 1) - (-tokens // BLOCK_TOKENS) > count:
            print(f"mixed, {batch} rows and {tokens} tokens: too few pages, {count}", file=sys.stderr)
            continue
        flop = work.decode(batch, context)[1] + work.prefill(tokens)
        for name, took in by_pieces(runner, batch + tokens, mixed_step(runner, batch, context, tokens), 9):
            yield {
                "step": f"mixed {batch} x {context} + {tokens}",
                "graphs": name,
                "ms": took * 1e3,
                "tokens_per_s": (batch + tokens) / took,
                "mbu": None,
                "mfu": flop / took / product,
            }


def show(row: Row) -> None:
    mbu = f"{100 * row['mbu']:5.1f}%" if row["mbu"] is not None else "      "
    rate, mfu = f"{row['tokens_per_s']:10.0f}", f"{100 * row['mfu']:5.1f}%"
    print(f"{row['step']:<20} {row['graphs']:<9} {row['ms']:9.2f} {rate} {mbu:>7} {mfu:>7}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"engine_cuda needs an NVIDIA GPU: torch {torch.__version__} finds none here (docs/reports/cuda.md)")
    name = torch.cuda.get_device_name()
    copy, product = copy_rate(), product_rate()
    torch.cuda.empty_cache()
    print(
        f"{name}, torch {torch.__version__}: copies {copy / 1e12:.2f} TB/s, bf16 products {product / 1e12:.0f} TFLOP/s"
    )
    runner = make_runner(args.layers)
    print(f"{'step':<20} {'graphs':<9} {'ms':>9} {'tokens/s':>10} {'MBU':>7} {'MFU':>7}")
    told = {"device": name, "torch": torch.__version__, "layers": args.layers, "copy_bytes_per_s": copy}
    rows: list[Row] = []
    for found in (
        decode_rows(runner, copy, product),
        prefill_rows(runner, product),
        mixed_rows(runner, product),
        drafted_rows(runner, copy, product),
    ):
        for row in found:
            rows.append(row)
            show(row)
            if args.json:  # row by row: a machine that is lent goes when its time is over
                args.json.write_text(json.dumps(told | {"product_flop_per_s": product, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
