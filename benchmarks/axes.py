"""Simulated: what parallel axes bring, as the simulator's roofline has it (kvmesh/sim/hardware/axes_times.py).

- long prompts of 128k and 1M tokens on 1 to 8 nodes: CPP, CP and TP over the nodes, each with the best length of chunks
- a load of 128k prompts on four nodes, in the simulator as a whole: one instance over all nodes, or one a node
- H20, 32k in, 15 tokens/s a row: what a token costs with context parallelism, tensor parallelism, DP + EP
- one node that holds the model: DP + TP (experts cut by tensor) against DP + EP
- DP + EP from one node to sixteen
- what conductors predict of such instances

No process is started and nothing is measured; a run takes about half a minute.

    python -m benchmarks.axes
    python -m benchmarks.axes --json benchmarks/results/axes.json --docs docs/reports/axes.md
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvmesh.chunk_pipeline import pipeline_ends
from kvmesh.engine.axes import Axes
from kvmesh.services.conductor.settings import AdmissionSettings, Settings
from kvmesh.services.conductor.settings import Mode as Admission
from kvmesh.sim.config import SimConfig
from kvmesh.sim.hardware.axes_times import AxesRoofline, axes_node_spec
from kvmesh.sim.hardware.hardware import hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.report.records import Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest

Told = dict[str, Any]
NODE = 8
BLOCK = 256
K, M = 1024, 1 << 20
CHUNKS = (4096, 8192, 16384, 32768)  # tokens of the longest chunk that a pipeline is tried with
WHOLE = 32768  # of other prompts: the more at once the better, as far as activations fit; over cp, each rank's
NODES = (1, 2, 4, 8)
MACHINES = (
    # model, GPU, weights, products in FP8
    ("llama3-70b", "a800", "bf16", False),
    ("llama3-70b", "h800", "bf16", False),
    ("deepseek-v3", "h200", "fp8", True),
)


# Nodes that a token's experts lie on at most, where the router sees to it (DeepSeek-V3's technical report, 2.1.2).
EXPERT_NODES = {"deepseek-v3": 4.0}


def times_of(model: str, gpu: str, axes: str, weights: str, fp8: bool, **told: Any) -> AxesRoofline:
    """An instance with these axes."""
    if model in EXPERT_NODES:
        told = {"expert_nodes": EXPERT_NODES[model]} | told
    return AxesRoofline(
        hardware(gpu),
        Axes.parse(axes),
        shape_of(model),
        weight_dtype=weights,
        fp8_products=fp8,
        block_tokens=BLOCK,
        **told,
    )


# ── one long prompt ───────────────────────────────────────────────────────────────────────────────


def through(times: AxesRoofline, ends: Sequence[int]) -> tuple[float, float]:
    """TTFT of a prompt cut there, and the share of the stages' time that is idle."""
    pieces = [(end - start, start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    stages = [times.stages_s([piece]) for piece in pieces]
    ttft_s = pipeline_ends(stages, [times.send_s(new) for new, _ in pieces])[-1][-1]
    return ttft_s, 1 - sum(map(sum, stages)) / (len(stages[0]) * ttft_s)


def prompt(times: AxesRoofline, tokens: int, sizes: Sequence[int]) -> Told:
    """The best of chunks of equal compute, each no longer than one of `sizes`; over stages also of equal tokens."""
    if times.kv_tokens < tokens:
        return {"why_not": f"room for {max(0, times.kv_tokens):,} tokens of KV"}
    found: Told = {}
    for size in sizes:
        cuts = {"compute": times.borders(tokens, 0, size)}
        if times.axes.pp > 1:
            cuts["equal_tokens"] = [*range(size, tokens, size), tokens]
        for name, ends in cuts.items():
            ttft_s, bubble = through(times, ends)
            if ttft_s < found.get(name, {"ttft_s": float("inf")})["ttft_s"]:
                found[name] = {"ttft_s": ttft_s, "bubble": bubble, "chunks": len(ends), "chunk_tokens": size}
    return found


def strategies(nodes: int, experts: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """How a prompt is spread over nodes of 8 GPUs: axes and options."""
    tensor, context = (",ep=tp", ",ep=cp+tp") if experts else ("", "")
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "CPP": (f"pp={nodes},tp={NODE}{tensor}", {}),
        "CP": (f"cp={nodes},tp={NODE}{context}", {}),
        "TP": (f"tp={NODE * nodes}{tensor}", {}),
    }
    if not experts:
        found["CP, whole MLPs"] = (f"cp={nodes},tp={NODE}", {"mlp_over": ("tp",)})
    return found


def long_prompts() -> list[Told]:
    """A row for each model, length, strategy and number of nodes."""
    rows = []
    for model, gpu, weights, fp8 in MACHINES:
        for tokens in (128 * K, M):
            alone_s = 0.0
            for nodes in NODES:
                for name, (axes, more) in strategies(nodes, bool(shape_of(model).experts)).items():
                    times = times_of(model, gpu, axes, weights, fp8, **more)
                    found = prompt(times, tokens, CHUNKS if times.axes.pp > 1 else [WHOLE * times.axes.cp])
                    row = {"model": model, "gpu": gpu, "tokens": tokens, "nodes": nodes, "how": name, "axes": axes}
                    if "compute" in found:
                        if nodes == 1 and name == "CPP":
                            alone_s = found["compute"]["ttft_s"]
                        found["efficiency"] = alone_s / nodes / found["compute"]["ttft_s"]
                    # Prompts of 4k, one behind the other: what a node gets done a second.
                    step_s = max(times.stages_s([(4096, 0)] * 2))
                    rows.append(row | found | {"short_tokens_per_node_s": 2 * 4096 / step_s / nodes})
    return rows


# ── a load of long prompts ────────────────────────────────────────────────────────────────────────


def load(how: str, axes: str, instances: int, more: dict[str, Any], rate: float, count: int = 24) -> Told:
    """Prompts of 128k tokens, evenly apart, through the simulator."""
    model, gpu, weights, fp8 = MACHINES[0]
    tokens, cp = 128 * K, Axes.parse(axes).cp
    chunk = 8192 if cp == 1 else WHOLE * cp
    times = times_of(model, gpu, axes, weights, fp8, chunk_tokens=chunk, **more)
    decode = times_of(model, gpu, "tp=8", weights, fp8)
    config = SimConfig(
        prefill=(axes_node_spec(times, block_tokens=BLOCK),) * instances,
        decode=(axes_node_spec(decode, block_tokens=BLOCK),) * 4,
        block_tokens=BLOCK,
        chunk_tokens=chunk,
        batch_tokens=chunk,
        long_tokens=chunk,
        conductor=Settings(admission=AdmissionSettings(mode=Admission.OFF), slo_ttft_s=1e6, slo_tbt_s=1e6),
        layers=80,
    )
    keys = tokens // BLOCK
    asked = [
        SimRequest(n, n / rate, tokens, 2, tuple(f"{n}:{at}".encode().ljust(16, b".") for at in range(keys)))
        for n in range(count)
    ]
    records: list[Record] = []
    run(config, asked, sink=records.append)
    assert all(one.outcome == "done" for one in records), [one.reason for one in records]
    ttfts = sorted(one.ttft_s for one in records)
    alone = records[0].ttft_s if rate < 0.001 else None
    told = {"how": how, "axes": axes, "instances": instances, "rate": rate, "mean_s": sum(ttfts) / len(ttfts)}
    return told | {
        "p90_s": ttfts[int(0.9 * len(ttfts))],
        "alone_s": alone,
        "predicted_s": times.prefill_s([(tokens, 0)]),
    }


LOADS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("CPP", "pp=4,tp=8", 1, {}),
    ("CP", "cp=4,tp=8", 1, {}),
    ("CP, whole MLPs", "cp=4,tp=8", 1, {"mlp_over": ("tp",)}),
    ("TP", "tp=32", 1, {}),
    ("a node each", "tp=8", 4, {}),
)


def loads() -> list[Told]:
    """Each strategy at two rates; the last is near what four nodes can do (a prompt takes 34 s of a node)."""
    rows = []
    for one in LOADS:
        rows.append({**load(*one, 0.0005, 2), "alone": True})
        rows += [load(*one, rate) for rate in (0.04, 0.1)]
    return rows


# ── what a token costs ────────────────────────────────────────────────────────────────────────────


def most_rows(times: AxesRoofline, context: int, fits: Callable[[int], bool]) -> int:
    """The most rows with such contexts that have room and for which `fits`; the step time rises with them."""
    low, high = 0, max(0, times.slot_tokens) // context * times.axes.dp
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


PROMPT, SPEED = 32 * K, 15.0
DECODES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("CP (attention whole at each rank)", "cp=8,ep=cp", {"tensor_experts": True}),
    ("TP + DCP", "tp=8,dcp=8", {}),
    ("TP", "tp=8", {}),
    ("DP + EP, 2 nodes", "dp=16,ep=dp", {}),
    ("DP + EP, 4 nodes", "dp=32,ep=dp", {}),
    ("DP + EP, 8 nodes", "dp=64,ep=dp", {}),
    ("DP + EP, 8 nodes, 2 micro-batches", "dp=64,ep=dp", {"micro_batches": 2}),
)
COSTED = (("kimi-k2", "int4", False), ("deepseek-v3", "fp8", True))


def costs(answer: int = 1024, cached: float = 0.0) -> list[Told]:
    """GPU-seconds of a thousand answered tokens on H20, in decode alone; with the prefill of `PROMPT` tokens, of which
    `cached` is a share, on the same GPUs in turns (coupled) or on a node of its own (CP over 8 GPUs)."""
    rows = []
    for model, weights, fp8 in COSTED:
        prefills = times_of(model, "h20", "cp=8,ep=cp", weights, fp8, chunk_tokens=8 * 8192)
        new = round(PROMPT * (1 - cached))
        prompt_s = prefills.prefill_s([(new, PROMPT - new)])  # of a node
        context = PROMPT + answer // 2
        for name, axes, more in DECODES:
            times = times_of(model, "h20", axes, weights, fp8, **more)

            def step(rows: int, times: AxesRoofline = times, context: int = context) -> float:
                return times.decode_s(rows, rows * context)

            apart = most_rows(times, context, lambda n: step(n) <= 1 / SPEED)
            row: Told = {
                "model": model,
                "how": name,
                "axes": axes,
                "gpus": times.world,
                "answer": answer,
                "cached": cached,
            }
            row |= {"room": max(0, times.slot_tokens) // context * times.axes.dp, "rows": apart}
            row["weights_gib"] = times.weight_bytes / 2**30
            if apart:
                row["step_ms"] = 1000 * step(apart)
                row["decode_gpu_s"] = 1000 * times.world * step(apart) / apart
                row["apart_gpu_s"] = row["decode_gpu_s"] + 1000 * NODE * prompt_s / answer
            if apart and times.world == NODE:
                # In turns: of each second so much goes to prompts that every row still has its tokens.
                both = most_rows(times, context, lambda n: step(n) + n * prompt_s / answer <= 1 / SPEED)  # noqa: B023
                row["coupled_rows"] = both
                if both:
                    row["coupled_gpu_s"] = 1000 * NODE * (step(both) / both + prompt_s / answer)
            rows.append(row)
    return rows


# ── experts in one node, and over many ────────────────────────────────────────────────────────────


def one_node() -> list[Told]:
    """A step of DP + TP and of DP + EP on eight GPUs that hold the model; contexts of 4k."""
    rows = []
    for model, gpu, weights, fp8 in (("deepseek-v3", "h200", "fp8", True), ("kimi-k2", "h200", "int4", False),
                                     ("qwen3-235b-a22b", "h20", "fp8", True)):  # fmt: skip
        for each in (1, 4, 16, 64, 128):
            row: Told = {"model": model, "gpu": gpu, "rows_per_gpu": each}
            for name, more in (("dp_tp", {"tensor_experts": True}), ("dp_ep", {}), ("dp_ep_skew", {"skew": 1.5})):
                times = times_of(model, gpu, "dp=8,ep=dp", weights, fp8, **more)
                fits = times.slot_tokens >= each * 4096
                row[name] = 1000 * times.decode_s(8 * each, 8 * each * 4096) if fits else None
            rows.append(row)
    return rows


def many_nodes() -> list[Told]:
    """DeepSeek-V3 by DP + EP on 1 to 16 nodes of H200: tokens a GPU and second at 20 and 10 tokens/s a row, context 4k;
    the better of one and two micro-batches."""
    rows = []
    for nodes in (1, 2, 4, 8, 16):
        row: Told = {"nodes": nodes}
        for speed in (50.0, 20.0):
            best = 0.0
            for parts in (1, 2):
                times = times_of("deepseek-v3", "h200", f"dp={8 * nodes},ep=dp", "fp8", True, micro_batches=parts)
                count = most_rows(times, 4096, lambda n: times.decode_s(n, n * 4096) <= 1 / speed)  # noqa: B023
                if count and (rate := count / times.decode_s(count, count * 4096) / times.world) > best:
                    best = rate
                    row |= {f"rows_{speed:g}": count / times.world, f"micro_{speed:g}": parts}
            row[f"rate_{speed:g}"] = best
        rows.append(row)
    return rows


# ── what a conductor predicts ─────────────────────────────────────────────────────────────────────


def predictions(count: int = 150) -> list[Told]:
    """What conductors that are told of no axes predict: TTFT over what it was by axes of prefill (LLaMA3-70B on A800,
    sizes log-normal around 8k, 85% of what the slowest stage can do), mean TBT by axes of decode (DeepSeek-V3 on H200).
    The first third of requests is left out."""
    dense, experts = MACHINES[0], MACHINES[2]
    rows = []
    for axes in ("tp=8", "pp=4,tp=8", "pp=8,tp=8"):
        times = _times(dense, axes)
        sizes = _sizes(count)
        work_s = sum(max(times.stages_s([(size, 0)])) for size in sizes) / count
        records = _serve(times, _times(dense, "tp=8"), 4, [(size, 2) for size in sizes], 0.85 / work_s)
        rows.append(
            {"pool": "prefill", "axes": axes} | _ratios([(one.predicted_ttft_s, one.ttft_s) for one in records])
        )
    for axes in ("tp=8,dcp=8", "dp=8,ep=dp", "dp=32,ep=dp"):
        asked = [(size // 8 + 500, 150) for size in _sizes(count)]
        records = _serve(_times(experts, "dp=8,ep=dp"), _times(experts, axes), 1, asked, 8.0)
        rows.append(
            {"pool": "decode", "axes": axes} | _ratios([(one.predicted_tbt_s, one.mean_tbt_s) for one in records])
        )
    return rows


def _times(machine: tuple[str, str, str, bool], axes: str) -> AxesRoofline:
    model, gpu, weights, fp8 = machine
    return times_of(model, gpu, axes, weights, fp8, chunk_tokens=8192)


def _sizes(count: int) -> list[int]:
    rng = random.Random(1)
    return [min(120_000, max(500, round(rng.lognormvariate(math.log(8000), 1.2)))) for _ in range(count)]


def _serve(
    prefill: AxesRoofline, decode: AxesRoofline, decodes: int, asked: Sequence[tuple[int, int]], rate: float
) -> list[Record]:
    config = SimConfig(
        prefill=(axes_node_spec(prefill, block_tokens=BLOCK),),
        decode=(axes_node_spec(decode, block_tokens=BLOCK),) * decodes,
        block_tokens=BLOCK,
        conductor=Settings(admission=AdmissionSettings(mode=Admission.OFF), slo_ttft_s=1e6, slo_tbt_s=1e6),
        layers=prefill.shape.layers,
        profiled=False,
        heartbeat_s=0.2,
    )
    rng, at_s, requests = random.Random(2), 0.0, []
    for n, (size, answer) in enumerate(asked):
        at_s += rng.expovariate(rate)
        keys = tuple(f"{n}:{at}".encode().ljust(16, b".") for at in range(size // BLOCK))
        requests.append(SimRequest(n, at_s, size, answer, keys))
    records: list[Record] = []
    run(config, requests, sink=records.append)
    return sorted(records, key=lambda one: one.index)[len(asked) // 3 :]


def _ratios(pairs: Sequence[tuple[float, float]]) -> Told:
    found = sorted(predicted / was for predicted, was in pairs)
    at = {f"p{share}": found[len(found) * share // 100] for share in (10, 50, 90)}
    return at | {"mean_s": sum(was for _, was in pairs) / len(pairs)}


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)


def _prompts_table(rows: Sequence[Told], model: str, gpu: str, tokens: int) -> str:
    chosen = [one for one in rows if (one["model"], one["gpu"], one["tokens"]) == (model, gpu, tokens)]
    names = list(dict.fromkeys(one["how"] for one in chosen))
    shown = []
    for nodes in NODES:
        here = {one["how"]: one for one in chosen if one["nodes"] == nodes}
        cells = [f"{nodes}"]
        for name in names:
            one = here[name]
            found = one.get("compute")
            share = f" ({one['efficiency']:.0%})" if one.get("efficiency") else ""
            cells.append(f"{found['ttft_s']:.2f}{share}" if found else "does not fit")
        piped = here["CPP"]
        if "compute" in piped:
            extra = f"{piped['equal_tokens']['ttft_s']:.2f}" if "equal_tokens" in piped else ""
            cells += [f"{piped['compute']['bubble']:.1%}", f"{piped['compute']['chunks']}", extra]
        else:
            cells += [""] * 3
        shown.append(cells)
    head = ["nodes", *names, "CPP: bubble", "chunks", "of equal tokens"]
    title = f"**{model} on {gpu}, {tokens // K}k tokens**: TTFT in s (speed-up over one node / nodes)"
    return f"{title}\n\n{table(head, shown)}"


def tables(told: Told) -> str:
    """All tables of a run."""
    parts = ["## Long prompts over several nodes"]
    for model, gpu, *_ in MACHINES:
        parts += [_prompts_table(told["prompts"], model, gpu, tokens) for tokens in (128 * K, M)]
    short = []
    for model, gpu, *_ in MACHINES:
        here = {
            (one["nodes"], one["how"]): f"{one['short_tokens_per_node_s']:,.0f}"
            for one in told["prompts"]
            if (one["model"], one["gpu"], one["tokens"]) == (model, gpu, 128 * K)
        }
        short.append([model, gpu, here[1, "TP"], *(here.get((4, how), "") for how in SHORT)])
    parts.append("**Prompts of 4k tokens** behind one another, two a step: tokens a second and node")
    parts.append(table(["model", "GPU", "one node", *(f"4 nodes, {how}" for how in SHORT)], short))
    parts.append("## A load of 128k prompts on four nodes of A800")
    rows = told["loads"]
    rates = sorted({one["rate"] for one in rows if not one.get("alone")})
    shown = []
    for name, *_ in LOADS:
        mine = [one for one in rows if one["how"] == name]
        alone = next(one for one in mine if one.get("alone"))
        at = {one["rate"]: one for one in mine if not one.get("alone")}
        cells = [f"{at[rate]['mean_s']:.1f} / {at[rate]['p90_s']:.1f}" for rate in rates]
        shown.append([name, f"`{mine[0]['axes']}`", f"{alone['predicted_s']:.2f}", f"{alone['alone_s']:.2f}", *cells])
    head = ["", "axes", "predicted", "simulated alone", *(f"{rate:g}/s" for rate in rates)]
    parts.append(f"Mean / P90 of TTFT in s.\n\n{table(head, shown)}")
    parts.append("## What a token costs: H20, 32k in, 15 tokens/s a row")
    for name in ("costs", "costs_long", "costs_cached"):
        rows = told[name]
        first = rows[0]
        shown = [
            [
                one["model"], one["how"], f"{one['gpus']}", f"{one['rows']} of {one['room']}",
                *(f"{one[key]:.1f}" if one.get(key) else "-"
                  for key in ("step_ms", "decode_gpu_s", "apart_gpu_s", "coupled_gpu_s")),
            ]
            for one in rows
        ]  # fmt: skip
        head = ["model", "decode", "GPUs", "rows", "step, ms", "decode alone", "prefill apart", "coupled"]
        title = f"GPU-seconds of 1,000 tokens; answers of {first['answer']:,}, {first['cached']:.0%} of prompts cached"
        parts.append(f"{title}\n\n{table(head, shown)}")
    parts.append("## Experts in one node: DP + TP against DP + EP")
    shown = [
        [one["model"], one["gpu"], f"{one['rows_per_gpu']}",
         *(f"{one[key]:.1f}" if one[key] else "no room" for key in ("dp_tp", "dp_ep", "dp_ep_skew"))]
        for one in told["one_node"]
    ]  # fmt: skip
    head = ["model", "GPU", "rows a GPU", "DP + TP", "DP + EP", "DP + EP, skew 1.5"]
    parts.append(f"Milliseconds of a step, contexts of 4k.\n\n{table(head, shown)}")
    parts.append("## DP + EP from one node to sixteen: DeepSeek-V3 on H200, contexts of 4k")
    shown = [
        [f"{one['nodes']}",
         *(f"{one[f'rate_{at}']:,.0f} ({one.get(f'rows_{at}', 0):.0f}, {one.get(f'micro_{at}', 1)})"
           for at in ("50", "20"))]
        for one in told["many_nodes"]
    ]  # fmt: skip
    head = ["nodes", "at 50 tokens/s a row", "at 20 tokens/s a row"]
    parts.append(f"Tokens a second and GPU (rows a GPU, micro-batches).\n\n{table(head, shown)}")
    parts.append("## What conductors predict that are told of no axes")
    shown = [
        [
            one["pool"],
            f"`{one['axes']}`",
            f"{one['mean_s']:.3f}",
            *(f"{one[f'p{share}']:.2f}" for share in (10, 50, 90)),
        ]
        for one in told["predictions"]
    ]
    head = ["pool", "axes", "mean, s", "P10", "P50", "P90"]
    parts.append(f"Predicted over what it was: TTFT (prefill), mean TBT (decode).\n\n{table(head, shown)}")
    return "\n\n".join(parts)


SHORT = ("CPP", "CP", "CP, whole MLPs", "TP")
BEGIN, END = "<!-- filled by benchmarks.axes --docs -->", "<!-- until here -->"


def fill(page: Path, shown: str) -> None:
    """Puts the tables into the page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"docs={str(page)!r}: no lines {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{shown}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    """The whole benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the rows there.")
    parser.add_argument("--docs", type=Path, help="Put the tables into this page.")
    args = parser.parse_args()
    told = {
        "kind": "axes",
        "prompts": long_prompts(),
        "loads": loads(),
        "costs": costs(),
        "costs_long": costs(answer=8192),
        "costs_cached": costs(cached=0.9),
        "one_node": one_node(),
        "many_nodes": many_nodes(),
        "predictions": predictions(),
    }
    shown = tables(told)
    print(shown)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if args.docs:
        fill(args.docs, shown)


if __name__ == "__main__":
    main()
