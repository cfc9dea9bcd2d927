"""The stages of `scripts.gpu.check` that measure: `python3 -m scripts.gpu.stages NAME [--dry]`.

Each prints what it finds and leaves `{"lines": [...], "rows": [...]}` in the file that $GPU_STAGE_RESULT names: a few
lines for the table, and every figure. Rates of memory count bytes read and written, those of products 2 FLOP a
multiplication and addition. A stage raises where something is wrong, so that it is told as failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Row = dict[str, Any]
PACKAGES = (
    "numpy",
    "torch",
    "triton",
    "transformers",
    "msgspec",
    "xxhash",
    "grpcio",
    "protobuf",
    "fastapi",
    "pytest-asyncio",
)
# Llama-3.1-8B's heads.
HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
BESIDE_S = 0.5  # steps and copies beside each other
ROTATED_BYTES = 512 << 20  # several times the cache: layers follow each other, so that none is found in it


class Report:
    """What a stage tells. `dry`: on a CPU, small."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.lines: list[str] = []
        self.rows: list[Row] = []

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def line(self, text: str) -> None:
        print(text, flush=True)
        self.lines.append(text)
        self.save()

    def row(self, **figures: Any) -> None:
        print(json.dumps(figures), flush=True)
        self.rows.append(figures)
        self.save()

    def save(self) -> None:
        if path := os.environ.get("GPU_STAGE_RESULT"):
            Path(path).write_text(json.dumps({"lines": self.lines, "rows": self.rows}))


def seconds(report: Report, work: Callable[[], object], times: int = 20) -> float:
    """Median time of `work` on the device, by events; a dry run's is the wall's, once."""
    if report.dry:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    found = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def replayed(report: Report, work: Callable[[], object]) -> float:
    """Seconds of the launches of `work` as one graph: what they take without the host."""
    if report.dry:
        return seconds(report, work)
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return seconds(report, graph.replay)


def copy_rate(report: Report) -> float:
    """Bytes read and written a second by a copy within the device."""
    import torch

    size = 1 << 20 if report.dry else 2 << 30
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=report.device)
    target = torch.empty_like(source)
    return 2 * size / seconds(report, lambda: target.copy_(source))


def environment(report: Report) -> None:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    report.line(f"Python {platform.python_version()}, {', '.join(found)}")
    if missing:
        report.line(f"missing: {', '.join(missing)} (scripts/gpu/wheels.sh)")
    import torch

    if report.dry:
        report.line("dry: no GPU is used")
        return
    properties = torch.cuda.get_device_properties(0)
    name, level = f"{properties.name}, {properties.multi_processor_count} SMs", f"{properties.major}.{properties.minor}"
    sizes = f"{properties.total_memory >> 30} GiB, L2 {properties.L2_cache_size >> 20} MiB"
    report.line(f"{name}, {sizes}, capability {level}, CUDA {torch.version.cuda}")
    asked = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    said = subprocess.run(
        ("nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"), capture_output=True, text=True
    )
    report.line(f"{asked}: {said.stdout.strip() or said.stderr.strip()}; {os.cpu_count()} CPUs")


def ceilings(report: Report) -> None:
    import torch

    copy = copy_rate(report)
    side = 256 if report.dry else 8192
    a, b = (torch.randn(side, side, device=report.device, dtype=torch.bfloat16) for _ in range(2))
    product = 2 * side**3 / seconds(report, lambda: a @ b)
    report.row(what="copy", bytes_per_s=copy)
    report.row(what="product", flop_per_s=product)
    size = 1 << 20 if report.dry else 256 << 20
    on_device = torch.empty(size, dtype=torch.uint8, device=report.device)
    told = []
    for kind in ("pinned", "pageable"):
        host = torch.empty(size, dtype=torch.uint8, pin_memory=kind == "pinned" and not report.dry)
        for way, (target, source) in {"to host": (host, on_device), "to device": (on_device, host)}.items():
            rate = size / seconds(report, lambda t=target, s=source: t.copy_(s, non_blocking=True), 7)
            report.row(what=f"{kind} {way}", bytes_per_s=rate)
            told.append(f"{kind} {way} {rate / 1e9:.1f}")
    one = torch.zeros(1, device=report.device)
    launches = 10 if report.dry else 1000

    def launch() -> None:
        for _ in range(launches):
            one.add_(1)

    alone, in_graph = (f(report, launch) / launches for f in (seconds, replayed))
    report.row(what="launch", seconds=alone, in_graph=in_graph)
    report.line(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s; GB/s: {', '.join(told)}")
    report.line(f"a launch: {alone * 1e6:.2f} us, {in_graph * 1e6:.2f} us in a graph")


class Paged:
    """One attention backend over pages of `layers` layers, all with values, and requests whose pages lie scattered."""

    def __init__(
        self, report: Report, contexts: Sequence[int], layers: int, dtype: str = "bfloat16", window: int = 0
    ) -> None:
        import torch

        from kvmesh.engine.attention.triton_backend import TritonAttention
        from kvmesh.engine.config import AttentionSpec

        heads, kv_heads, self.dim, block = (4, 2, 16, 16) if report.dry else (HEADS, KV_HEADS, DIM, BLOCK)
        self.dtype = torch.float16 if report.dry else getattr(torch, dtype)
        counts = [-(-(tokens + 1) // block) for tokens in contexts]
        made = torch.Generator().manual_seed(0)
        order = torch.randperm(sum(counts), generator=made).tolist()
        pages = torch.empty(sum(counts), layers, 2, kv_heads, block, self.dim, dtype=self.dtype, device=report.device)
        for page in pages.split(max(1, (256 << 20) // (2 * pages[0].numel()))):
            page.normal_()
        self.requests = []
        for count in counts:
            self.requests.append(tuple(order[:count]))
            del order[:count]
        specs = [AttentionSpec(self.dim**-0.5, window=window)] * layers
        self.backend = TritonAttention(pages, heads, specs)
        self.heads, self.kv_heads, self.layers, self.device = heads, kv_heads, layers, report.device

    def qkv(self, tokens: int) -> Any:
        import torch

        return torch.randn(tokens, self.heads + 2 * self.kv_heads, self.dim, device=self.device).to(self.dtype)

    def kv_bytes(self, tokens: int) -> int:
        return 2 * self.kv_heads * self.dim * self.dtype.itemsize * tokens


def layers_for(contexts: Sequence[int]) -> int:
    """So many that their KV does not stay in the GPU's cache."""
    return max(1, min(32, -(-ROTATED_BYTES // (2 * KV_HEADS * DIM * 2 * sum(contexts)))))


def batches(dry: bool) -> dict[str, list[int]]:
    if dry:
        return {"2 x 17": [17, 17], "3 x 9 + 40": [9, 9, 9, 40]}
    plain = ((1, 1024), (1, 65536), (8, 8192), (32, 1024), (32, 8192), (64, 2048), (256, 1024))
    found = {f"{rows} x {tokens}": [tokens] * rows for rows, tokens in plain}
    return found | {
        "31 x 1024 + 65536": [1024] * 31 + [65536],
        "63 x 2048 + 131072": [2048] * 63 + [131072],
        "255 x 1024 + 65536": [1024] * 255 + [65536],
    }


def decode(report: Report) -> None:
    copy = copy_rate(report)
    told = []
    for name, contexts in batches(report.dry).items():
        paged = Paged(report, contexts, 2 if report.dry else layers_for(contexts))
        plan, qkv = paged.backend.plan_decode(paged.requests, contexts), paged.qkv(len(contexts))

        def layers(paged: Paged = paged, plan: Any = plan, qkv: Any = qkv) -> None:
            for layer in range(paged.layers):
                plan.attend(layer, qkv)

        took = replayed(report, layers) / paged.layers
        rate = paged.kv_bytes(sum(contexts) + len(contexts)) / took
        report.row(batch=name, seconds=took, bytes_per_s=rate, of_copy=rate / copy)
        told.append(f"{name}: {took * 1e6:.0f} us {100 * rate / copy:.0f}%")
    for at in range(0, len(told), 4):
        report.line("; ".join(told[at : at + 4]))


def drafted(report: Report) -> None:
    """Attention of requests with drafts of 3 and 7 tokens against that of plain rows, and of as many rows apart."""
    told = []
    for rows, context in ((2, 17),) if report.dry else ((1, 65536), (8, 8192), (32, 8192), (64, 2048)):
        paged = Paged(report, [context] * rows, 2 if report.dry else layers_for([context] * rows))
        times = {}
        for drafts, together in ((0, True), (3, True), (7, True), (7, False)):
            each = 1 + drafts
            pages = [own for own in paged.requests for _ in range(each)]
            positions = [context - drafts + at for _ in range(rows) for at in range(each)]
            backend, qkv = paged.backend, paged.qkv(rows * each)
            if together and drafts:
                plan = backend.plan_drafts(pages, positions, [each] * rows, ())
            else:
                plan = backend.plan_decode(pages, positions)

            def layers(paged: Paged = paged, plan: Any = plan, qkv: Any = qkv) -> None:
                for layer in range(paged.layers):
                    plan.attend(layer, qkv)

            took = times[drafts, together] = replayed(report, layers) / paged.layers
            report.row(rows=rows, context=context, drafts=drafts, together=together, seconds=took)
        plain, few, many, apart = times.values()
        more = f"{few / plain:.2f} with 3 drafts, {many / plain:.2f} with 7, {apart / plain:.2f} with 7 apart"
        told.append(f"{rows} x {context}: {plain * 1e6:.0f} us, times {more}")
    for line in told:
        report.line(line)


def prefill(report: Report) -> None:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from kvmesh.engine.attention.backend import TokenSpan
    from kvmesh.engine.kernels.prefill import CANDIDATES, Variant

    candidates = [Variant(16, 32, 4, 2, folded=True)] if report.dry else CANDIDATES
    for tokens, prefix in ((40, 0), (20, 30)) if report.dry else ((2048, 0), (8192, 0), (32768, 0), (8192, 57344)):
        paged = Paged(report, [tokens + prefix], 1)
        plan, qkv = paged.backend.plan_prefill([TokenSpan(prefix, tokens, paged.requests[0])]), paged.qkv(tokens)
        plan.write(0, qkv)
        flop = 4 * paged.heads * paged.dim * (tokens * prefix + tokens * (tokens + 1) / 2)
        took = seconds(report, lambda plan=plan, qkv=qkv: plan.attend(0, qkv), 10)
        text = f"{tokens} after {prefix}: {took * 1e3:.2f} ms, {flop / took / 1e12:.0f} TFLOP/s"
        sdpa = None
        if not prefix:
            q, k, v = (x.transpose(0, 1)[None] for x in qkv.split([paged.heads, paged.kv_heads, paged.kv_heads], 1))
            group = paged.heads // paged.kv_heads
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
            with torch.inference_mode():
                sdpa = seconds(report, lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True), 10)
            text += f" (SDPA {flop / sdpa / 1e12:.0f})"
        report.row(tokens=tokens, prefix=prefix, seconds=took, flop_per_s=flop / took, sdpa_seconds=sdpa)
        told = []
        for variant in candidates:
            paged.backend.variant = paged.backend.long_variant = variant
            plan = paged.backend.plan_prefill([TokenSpan(prefix, tokens, paged.requests[0])])
            rate = flop / seconds(report, lambda plan=plan, qkv=qkv: plan.attend(0, qkv), 10)
            report.row(tokens=tokens, prefix=prefix, flop_per_s=rate, **variant._asdict())
            told.append(f"{'x'.join(map(str, variant[:4]))}{'f' if variant.folded else ''} {rate / 1e12:.0f}")
        report.line(f"{text}; {', '.join(told)}")


class Latents:
    """One latent backend of DeepSeek-V3's widths over pages with values, and requests whose pages lie scattered."""

    def __init__(self, report: Report, heads: int, contexts: Sequence[int], layers: int) -> None:
        import torch

        from kvmesh.engine.attention.latent import UpProjection
        from kvmesh.engine.attention.triton_latent import TritonLatent
        from kvmesh.engine.config_latent import LatentConfig

        widths = (32, 16, 16, 16) if report.dry else (512, 128, 64, 128)
        latent, nope, rope, value = widths
        self.sizes = LatentConfig(1536, latent, nope, rope, value, (nope + rope) ** -0.5, False, True)
        self.dtype, block = (torch.float16, 16) if report.dry else (torch.bfloat16, BLOCK)
        counts = [-(-(tokens + 1) // block) for tokens in contexts]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).tolist()
        shape = (sum(counts), layers, 1, 1, block, latent + rope)
        pages = torch.empty(shape, dtype=self.dtype, device=report.device).normal_()
        ends = [sum(counts[: at + 1]) for at in range(len(counts))]
        self.requests = [tuple(order[end - count : end]) for end, count in zip(ends, counts, strict=True)]
        weight = torch.randn(heads, nope + value, latent, device=report.device) * latent**-0.5
        self.backend = TritonLatent(pages, self.sizes, [UpProjection(weight.to(self.dtype), nope)] * layers)
        self.heads, self.layers, self.device = heads, layers, report.device

    def qkv(self, tokens: int) -> Any:
        return self.backend.inputs(tokens).normal_()

    def row_bytes(self, tokens: int) -> int:
        return tokens * (self.sizes.latent + self.sizes.rope) * self.dtype.itemsize


def latent(report: Report) -> None:
    """Latent attention: decode, whose limit is reading rows once or, with 128 heads, products; chunks, both ways."""
    import torch

    from kvmesh.engine.attention.backend import TokenSpan
    from kvmesh.engine.attention.triton_backend import LaunchedTables
    from kvmesh.engine.kernels.latent_decode import CANDIDATES, head_tiles
    from kvmesh.engine.kernels.latent_prefill import CANDIDATES as EXPANDED

    copy = copy_rate(report)
    cases = ((2, [17, 40]),) if report.dry else ((16, [8192] * 32), (128, [8192] * 32), (128, [1024] * 31 + [65536]))
    for heads, contexts in cases:
        held = 2 if report.dry else max(1, -(-ROTATED_BYTES // (1152 * sum(contexts))))
        made = Latents(report, heads, contexts, held)
        backend, qkv, told = made.backend, made.qkv(len(contexts)), []
        served = backend.variant
        for variant in (served,) if report.dry else (served, *(v for v in CANDIDATES if v != served)):
            backend.variant, backend.tile, backend.resident = variant, variant.keys, variant.resident
            backend.share_programs = head_tiles(heads, variant)
            backend.decode_tables = LaunchedTables(backend)
            plan = backend.plan_decode(made.requests, contexts)

            def layers(plan: Any = plan, made: Latents = made, qkv: Any = qkv) -> None:
                for layer in range(made.layers):
                    plan.attend(layer, qkv)

            took = replayed(report, layers) / made.layers
            rate = made.row_bytes(sum(contexts) + len(contexts)) / took
            flop = 2 * heads * (2 * made.sizes.latent + made.sizes.rope) * sum(contexts)
            report.row(heads=heads, rows=len(contexts), seconds=took, bytes_per_s=rate, of_copy=rate / copy,
                       flop_per_s=flop / took, programs=list(variant))  # fmt: skip
            told.append(f"{variant.heads}x{variant.keys}x{variant.stages} {took * 1e6:.0f} us {100 * rate / copy:.0f}%")
        report.line(f"{heads} heads, {len(contexts)} rows of {sum(contexts)} tokens: {', '.join(told)}")
    for tokens, prefix in ((20, 30),) if report.dry else ((8192, 0), (8192, 57344), (64, 65536), (256, 65536)):
        made = Latents(report, 2 if report.dry else 128, [tokens + prefix], 1)
        backend, qkv, told = made.backend, made.qkv(tokens), []
        backend.plan_prefill([TokenSpan(prefix, tokens, made.requests[0])]).write(0, qkv)
        pairs = tokens * prefix + tokens * (tokens + 1) / 2
        flop = 2 * made.heads * pairs * (made.sizes.nope + made.sizes.rope + made.sizes.value)
        served_name = "x".join(map(str, backend.expanded))
        ways = {served_name: backend.expanded, "absorbed": None} | {"x".join(map(str, v)): v for v in EXPANDED}
        right = torch.empty(0)
        for name, cut in ways.items():
            if tokens > 256 and cut is None:
                continue
            backend.absorbed_times = 0.0 if cut is None else math.inf
            backend.expanded = cut or backend.expanded
            plan = backend.plan_prefill([TokenSpan(prefix, tokens, made.requests[0])])
            answer = plan.attend(0, qkv).float()
            right = answer if name == served_name else right
            off = float((answer - right).norm() / right.norm())
            took = seconds(report, lambda plan=plan, qkv=qkv: plan.attend(0, qkv), 7)
            report.row(tokens=tokens, prefix=prefix, way=name, seconds=took, flop_per_s=flop / took, off=off)
            wrong = "" if off < 0.02 else f" WRONG BY {off:.2f}"
            told.append(f"{name} {took * 1e3:.2f} ms {flop / took / 1e12:.0f}{wrong}")
        report.line(f"{tokens} after {prefix}, TFLOP/s of what is written out: {', '.join(told)}")


def small(report: Report) -> None:
    """Each kernel once, on shapes with ragged ends: for tools that watch kernels."""
    import torch

    from kvmesh.engine.attention.backend import TokenSpan
    from kvmesh.engine.rope import Rotation

    paged = Paged(report, [5, 17, 33, 130], 1)
    tokens = 7
    plan = paged.backend.plan_mixed(paged.requests[1:], [17, 33, 130], [TokenSpan(0, tokens - 2, paged.requests[0])])
    qkv = paged.qkv(3 + tokens - 2)
    plan.write(0, qkv)
    out = plan.attend(0, qkv)
    if not report.dry:
        from kvmesh.engine import ops

        x = torch.randn(3, 100, device=report.device, dtype=paged.dtype)
        angle = torch.rand(len(qkv), 1, paged.dim, device=report.device).to(paged.dtype)
        heads = paged.heads + paged.kv_heads
        norm = torch.rand(heads, paged.dim, device=report.device).to(paged.dtype)
        plan.rotate_and_write(0, qkv, Rotation(heads, angle, angle, norm, 1e-6))
        total, normed = ops.add_rms_norm(x.clone(), x, x[0], 1e-6, x[1])
        out = out + ops.gated(ops.rms_norm(normed, x[0], 1e-6), "silu").sum() + total.sum()
    if not bool(out.isfinite().all()):
        raise AssertionError("attention answered values that are not finite")
    report.line(f"wrote, prefilled and decoded {len(qkv)} tokens")
    made = Latents(report, 2 if report.dry else 128, [5, 17, 130, 40], 1)
    spans = [TokenSpan(0, 5, made.requests[0]), TokenSpan(36, 4, made.requests[3])]
    latents, given = made.backend.plan_mixed(made.requests[1:3], [17, 130], spans), made.qkv(11)
    angle = torch.rand(11, 1, made.sizes.rope, device=report.device).to(made.dtype)
    weight = torch.rand(made.sizes.latent, device=report.device).to(made.dtype)
    latents.rotate_and_write(0, given, Rotation(made.heads + 1, angle, angle, weight, 1e-6))
    if not bool(latents.attend(0, given).isfinite().all()):
        raise AssertionError("latent attention answered values that are not finite")
    report.line(f"and {len(given)} tokens of latent attention")


@functools.cache
def cuda_benchmark(dry: bool) -> Any:
    """benchmarks.engine_cuda; a dry run's is of a small shape, on the CPU."""
    from benchmarks import engine_cuda

    if dry:
        engine_cuda.use_small_shape()
    return engine_cuda


def model(report: Report) -> None:
    cuda = cuda_benchmark(report.dry)
    copy, product = cuda.copy_rate(), cuda.product_rate()
    runner = cuda.make_runner(2 if report.dry else 32)
    told = []
    if runner.pieces is not None:
        sizes = runner.pieces.sizes
        report.line(f"{runner.pieces.count} pieces of {len(sizes)} sizes, {sizes[:1]} to {sizes[-1:]}")
    rows = (
        cuda.decode_rows(runner, copy, product),
        cuda.mixed_rows(runner, product),
        cuda.prefill_rows(runner, product),
        cuda.drafted_rows(runner, copy, product),
    )
    for found in rows:
        for row in found:
            report.row(**row)
            share = f"MFU {100 * row['mfu']:.0f}%" if row["mbu"] is None else f"MBU {100 * row['mbu']:.0f}%"
            told.append(f"{row['step']} {row['graphs']} {row['ms']:.2f} ms {share}")
            if len(told) == 3:
                report.line("; ".join(told))
                told.clear()
    if told:
        report.line("; ".join(told))


def sampler(report: Report) -> None:
    """One choice a kind; where the kernels cut, once more by torch: which is faster decides `CUT_BY_KERNELS`."""
    import numpy as np
    import torch

    from kvmesh.engine import sampler as product
    from kvmesh.engine.batch import SampleParams

    vocab = 331 if report.dry else 128256
    kinds = {
        "greedy": {},
        "temperature": {"temperature": 1.0},
        "top_p": {"temperature": 1.0, "top_p": 0.9},
        "top_k": {"temperature": 1.0, "top_k": 50},
        "both": {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
        "logprobs": {"logprobs": 5},
    }
    for rows in (1, 4) if report.dry else (1, 256):
        logits = torch.randn(rows, vocab, device=report.device) * 3
        told = []
        for name, asked in kinds.items():
            params, indices = [SampleParams(seed=i, **asked) for i in range(rows)], np.arange(rows)
            for by_kernels in (True, False) if {"top_k", "top_p"} & asked.keys() else (True,):
                served, product.CUT_BY_KERNELS = product.CUT_BY_KERNELS, by_kernels
                chooser = product.Sampler(logits.device)

                def choose(c=chooser, x=logits, p=params, i=indices) -> None:
                    c.choose(x, c.prepare(p, i, vocab))

                took = seconds(report, choose, 10)
                product.CUT_BY_KERNELS = served
                kind = name if by_kernels else f"{name} by torch"
                report.row(kind=kind, rows=rows, vocab=vocab, seconds=took)
                told.append(f"{kind} {took * 1e3:.2f} ms")
        report.line(f"{rows} rows x {vocab}: {', '.join(told)}")


def profile(report: Report) -> None:
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    cuda = cuda_benchmark(report.dry)
    runner = cuda.make_runner(2 if report.dry else 8)
    batches, tokens = (((3, 20),), 24) if report.dry else (((32, 1024), (256, 1024)), 8192)
    steps = {f"decode {rows} x {context}": cuda.decode_step(runner, rows, context) for rows, context in batches}
    steps[f"prefill {tokens}"] = cuda.prefill_step(runner, tokens)
    rows, context, chunk = cuda.MIXED[0]
    steps[f"mixed {rows} x {context} + {chunk}"] = cuda.mixed_step(runner, rows, context, chunk)
    activities = [ProfilerActivity.CPU] if report.dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    for name, step in steps.items():
        step()
        wall = cuda.seconds(step, 5)
        with watch(activities=activities) as seen:
            step()
            cuda.synchronize()
        busy: dict[str, float] = {}
        count = 0
        for event in seen.events():
            on_device = event.device_type == torch.autograd.DeviceType.CUDA
            if on_device != report.dry and event.name:
                busy[event.name] = (
                    busy.get(event.name, 0.0) + (event.cpu_time_total if report.dry else event.device_time) / 1e6
                )
                count += 1
        total = sum(busy.values())
        best = sorted(busy.items(), key=lambda item: -item[1])
        report.row(step=name, wall=wall, kernels=total, launches=count, by_kernel=dict(best[:25]))
        report.line(f"{name}: {wall * 1e3:.2f} ms of wall, {total * 1e3:.2f} ms of kernels in {count} launches")
        report.line(", ".join(f"{short(kernel)} {100 * took / total:.0f}%" for kernel, took in best[:7]))


def short(kernel: str) -> str:
    """A kernel's name without its template's arguments."""
    name = kernel.split("<")[0].split("(")[0].removeprefix("void ")
    return name.rsplit("::", 1)[-1][:28]


def moves(report: Report) -> None:
    """Pieces of KV between pages that lie apart and pinned memory of the host, by the copy engine and by the kernel,
    alone and beside steps: layers of 64 KiB, and the runs of 16 KiB that a reader of other heads gets."""
    cuda = cuda_benchmark(report.dry)
    runner = cuda.make_runner(2 if report.dry else 8)
    rows, context, tokens = (3, 20, 24) if report.dry else (32, 1024, 4096)
    steps = {
        f"decode {rows} x {context}": cuda.decode_step(runner, rows, context),
        f"prefill {tokens}": cuda.prefill_step(runner, tokens),
    }
    alone_s = {name: cuda.seconds(step, 5) for name, step in steps.items()}
    for piece, count in ((64, 8),) if report.dry else ((64 << 10, 2048), (16 << 10, 4096)):
        for direction, named in ways_to_move(report, piece, count).items():
            told = []
            for way, work in named.items():
                figures: Row = {"direction": direction, "way": way, "piece": piece, "pieces": count}
                rate = piece * count / seconds(report, work, 7)
                report.row(**figures, beside="nothing", bytes_per_s=rate)
                said = f"{way} {rate / 1e9:.1f}"
                for name, step in steps.items():
                    works, step_s = beside(report, step, work)
                    rate, slower = piece * count * works, step_s / alone_s[name]
                    report.row(**figures, beside=name, bytes_per_s=rate, step=step_s, step_alone=alone_s[name])
                    said += f" | {rate / 1e9:.1f} x{slower:.2f}"
                told.append(said)
            report.line(f"{piece} B {direction}, GB/s alone | beside {' | '.join(steps)}, slower by: {'; '.join(told)}")


def ways_to_move(report: Report, piece: int, count: int) -> dict[str, dict[str, Callable[[], object]]]:
    """`count` pieces out of twice as many, by direction and way."""
    import torch

    from kvmesh.engine.kernels import move

    pages = torch.randint(0, 255, (2 * count * piece,), dtype=torch.uint8, device=report.device)
    host = torch.empty(count * piece, dtype=torch.uint8, pin_memory=not report.dry)
    places = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count].tolist()
    out = [(place * piece, at * piece, piece) for at, place in enumerate(places)]
    back = [(at, place, length) for place, at, length in out]
    found: dict[str, dict[str, Callable[[], object]]] = {}
    for direction, source, target, runs in (("to the host", pages, host, out), ("from the host", host, pages, back)):

        def by_engine(source: Any = source, target: Any = target, runs: Any = runs) -> None:
            for begin, end, length in runs:
                target[end : end + length].copy_(source[begin : begin + length], non_blocking=True)

        table = move.as_table(source, target, runs)
        launches, few = 1 if report.dry else 100, runs[:16]
        started = time.perf_counter()
        for _ in range(launches):  # what kvmesh.ranks.worker.copy_rule takes for LAUNCH_S, at the host
            move.move(source, target, move.as_table(source, target, few), 16)
        took = (time.perf_counter() - started) / launches
        report.row(direction=direction, piece=piece, pieces=len(few), launch=took)
        named = found[direction] = {"copy engine": by_engine}
        for programs in (4,) if report.dry else (4, 16, 64):
            named[f"{programs} programs"] = functools.partial(move.move, source, target, table, programs)
            named[f"{programs} programs"]()
            if not torch.equal(source[runs[-1][0] :][:piece].cpu(), target[runs[-1][1] :][:piece].cpu()):
                raise AssertionError(f"{programs} programs moved other bytes {direction}")
    return found


def beside(report: Report, step: Callable[[], object], work: Callable[[], object]) -> tuple[float, float]:
    """Calls of `work` a second, one after the other on a stream of their own, and the seconds of a step beside them."""
    import torch

    over, works, failed = threading.Event(), 0, list[Exception]()
    started = time.perf_counter()
    if report.dry:  # Triton's interpreter knows one thread
        work()
        step()
        took = time.perf_counter() - started
        return 1 / took, took

    def copies() -> None:
        nonlocal works
        stream = torch.cuda.Stream()
        try:
            with torch.cuda.stream(stream):
                while not over.is_set():
                    work()
                    stream.synchronize()
                    works += 1
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=copies)
    thread.start()
    steps = 0
    while not failed and (not works or time.perf_counter() - started < BESIDE_S):
        step()
        steps += 1
    torch.cuda.synchronize()
    took = time.perf_counter() - started
    over.set()
    thread.join()
    if failed:
        raise failed[0]
    return works / took, took / steps


def pages_for_nics(report: Report) -> None:
    """What a rank does so that KV lands in its pages: the driver's memory, as torch's, exported, registered with every
    RDMA device, written to, flushed. What this machine lacks is told, and is no failure."""
    import torch

    from kvmesh.errors import TransferError
    from kvmesh.ranks.worker.device_cuda import DriverMemory
    from kvmesh.transfer import EngineConfig, TransferEngine
    from kvmesh.transfer import cuda_driver as cuda

    driver = cuda.CudaDriver("cuda:0")
    supported, ordering = driver.attribute(cuda.DMA_BUF_SUPPORTED), driver.attribute(cuda.WRITES_ORDERING)
    options = driver.attribute(cuda.FLUSH_OPTIONS)
    report.row(dma_buf_supported=supported, writes_ordering=ordering, flush_options=options)
    needs = "no flush" if ordering >= cuda.ORDERED_FOR_OWNER else "a flush after each fence"
    report.line(f"dma-buf supported: {bool(supported)}; order of NICs' writes {ordering}: {needs} (options {options})")
    nbytes = (33 << 20) + 4096  # no multiple of GRAIN
    address = driver.allocate(nbytes)
    memory = torch.as_tensor(DriverMemory(address, nbytes), device="cuda")
    if memory.data_ptr() != address or int(memory.fill_(3).sum(dtype=torch.int64)) != 3 * nbytes:
        raise AssertionError("torch does not use the driver's memory as it lies")
    try:
        fd, offset = driver.export(address, nbytes)
        report.line(f"the driver's {nbytes} bytes are exported: descriptor {fd}, offset {offset}")
        os.close(fd)
    except TransferError as error:
        report.line(f"no export: {error.message}")
    try:
        with TransferEngine("check#1", EngineConfig(transports=("rdma", "tcp"))) as engine:
            region = engine.register_memory((address, nbytes), "cuda:0")
            report.line(f"registered with {', '.join(engine.topology.get('cuda:0', ((), ()))[0]) or 'RDMA devices'}")
            engine.unregister_memory(region)
    except TransferError as error:
        report.line(f"no registration: {error.message}")
    if options & cuda.FLUSH_BY_HOST:
        driver.flush()
        report.line("flushGPUDirectRDMAWrites answers")


def links(report: Report) -> None:
    if report.dry:
        report.line("dry: a CPU exports no memory and captures no collective")
        return
    import torch

    torch.zeros(1, device="cuda")
    pages_for_nics(report)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    x = torch.ones(1 << 20, device="cuda", dtype=torch.bfloat16)
    from kvmesh.engine.capture import CudaCapture

    capture = CudaCapture(x.device)  # as the engine captures: beside NCCL's watchdog
    parts = [torch.empty_like(x)]

    def talk() -> None:
        torch.distributed.all_reduce(x)
        torch.distributed.all_gather(parts, x)

    capture.warm_up(talk)
    replay = capture.record(talk)
    took = seconds(report, replay)
    capture.end()
    if not bool((parts[0] == 1).all()):
        raise AssertionError("a replayed all-gather of one rank's ones did not answer ones")
    del replay  # NCCL's communicator is closed after the graphs that hold its calls
    torch.distributed.destroy_process_group()
    report.line(f"an all-reduce and an all-gather of one rank in a graph: {took * 1e6:.1f} us")


STAGES = (environment, ceilings, decode, drafted, prefill, latent, small, model, sampler, profile, moves, links)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=[stage.__name__ for stage in STAGES])
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    report = Report(args.dry)
    if args.dry:
        from kvmesh.engine.attention import triton_backend
        from tests.support.engine.interpreter import count_with_numpy

        count_with_numpy()
        triton_backend.PROCESSORS = 1  # the interpreter runs one program after the other
    next(stage for stage in STAGES if stage.__name__ == args.stage)(report)


if __name__ == "__main__":
    main()
