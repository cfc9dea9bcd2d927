"""Simulated: a model of 1T parameters in INT4 on nodes of 8 GPUs, with MTP: prefill and decode apart ("Mooncake") or
all in one, each with the contexts of attention over all ranks (CP) or with requests whole at one (DP).

- what fits: weights and KV of Kimi K2 by GPU and layout, a whole node an instance or half of one
- rollout: all requests at once, several answers to each prompt, whose lengths have a long tail
- online: prompts of 32k tokens, 15 tokens/s a row

for instances that are a node each, and for one node alone, cut in two halves, as if memory were no matter. Step times
are rooflines (kvmesh/sim/hardware/axes_times.py). Drafts are as long as the list of their chances
(kvmesh/sim/drafted_rows.py), but in one row, where the live policy decides. Nothing is measured, and no process is
started; a run takes some minutes.

    python -m benchmarks.one_node
    python -m benchmarks.one_node --json benchmarks/results/one-node.json --docs docs/reports/one-node.md
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.axes import table
from kvmesh.engine.axes import Axes
from kvmesh.services.conductor.settings import AdmissionSettings, Settings
from kvmesh.services.conductor.settings import Mode as Admission
from kvmesh.sim.config import MeshMode, SimConfig
from kvmesh.sim.hardware.axes_times import AxesRoofline, axes_node_spec
from kvmesh.sim.hardware.hardware import Hardware, hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.speculation import Speculation, SpeculationModel
from kvmesh.sim.hardware.times import NodeSpec
from kvmesh.sim.report.records import DONE, MeshSample, Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest

Told = dict[str, Any]
MODEL, GPU, BLOCK = "kimi-k2", "h200", 256
# DeepSeek-V3's report: 85 to 90% of its head's first tokens are kept; what lies deeper is assumed.
ACCEPT = (0.85, 0.70, 0.55)
SLO_TTFT_S, SLO_TOKEN_S = 10.0, 1 / 15
LAYOUTS = {"CP": "tp={n},dcp={n}", "DP": "dp={n},ep=dp"}
# Tokens of a step beside rows, at each copy of dp: steps of about 0.15 s for both. Of one that only computes prompts.
MIXED_CHUNK = {"CP": 4096, "DP": 1024}
# The planner gives a chunk of a longer prompt a step of its own, so of dp whole prompts go: one at each copy.
CHUNK, BATCH = {"CP": 32_768, "DP": 32_768}, {"CP": 32_768, "DP": 8 * 32_768}


def times_of(gpu: Hardware, layout: str, gpus: int, mtp: bool) -> AxesRoofline:
    """An instance of so many GPUs."""
    axes = Axes.parse(LAYOUTS[layout].format(n=gpus))
    return AxesRoofline(gpu, axes, shape_of(MODEL), weight_dtype="int4", block_tokens=BLOCK, mtp=mtp)


# ── what fits ─────────────────────────────────────────────────────────────────────────────────────


def fits() -> list[Told]:
    """Weights and KV of an instance that is a node, or half of one."""
    rows = []
    for name in ("h20", "h800", "h200"):
        gpu = hardware(name)
        for gpus in (8, 4):
            for layout in LAYOUTS:
                times = times_of(gpu, layout, gpus, True)
                room = gpu.memory_bytes * gpu.efficiency.device_memory
                row = {"gpu": name, "gpus": gpus, "layout": layout, "weights_gib": times.weight_bytes / 2**30}
                rows.append(row | {"room_gib": room / 2**30, "kv_tokens": max(0, times.kv_tokens)})
    return rows


# ── what arrives ──────────────────────────────────────────────────────────────────────────────────


def rollout(nodes: int, seed: int = 1) -> Iterator[SimRequest]:
    """One step of reinforcement learning: 8 prompts a node, 8 answers to each, all at once."""
    source = random.Random(seed)
    for group in range(8 * nodes):
        tokens = min(16_000, max(500, round(source.lognormvariate(math.log(3500), 0.5))))
        keys = tuple(f"{group}:{at}".encode().ljust(16, b".") for at in range(tokens // BLOCK))
        for sample in range(8):
            answer = min(16_000, max(50, round(source.lognormvariate(math.log(1200), 1.0))))
            yield SimRequest(8 * group + sample, 0.0, tokens, answer, keys)


def online(nodes: int, rate: float, seed: int = 2) -> Iterator[SimRequest]:
    """Prompts of 32k tokens that have nothing in common, by Poisson, `rate` a second and node."""
    source, at_s = random.Random(seed), 0.0
    for n in range(60 * nodes):
        at_s += source.expovariate(rate * nodes)
        answer = min(4096, max(20, round(source.lognormvariate(math.log(450), 0.5))))
        keys = tuple(f"{n}:{at}".encode().ljust(16, b".") for at in range(32_768 // BLOCK))
        yield SimRequest(n, at_s, 32_768, answer, keys)


# ── what serves it ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SetUp:
    """One of the four, with `prefill` and `decode` instances or so many `coupled` ones, of `gpus` GPUs each."""

    layout: str
    prefill: int = 0
    decode: int = 0
    coupled: int = 0
    gpus: int = 8
    accept: tuple[float, ...] = ACCEPT  # (): no drafts
    adapts: bool = False  # the live policy decides how long drafts are; else all are as long as `accept`
    unbounded: bool = False  # twice the memory that there is

    @property
    def name(self) -> str:
        """As tables show it."""
        apart = f"Mooncake {self.prefill} + {self.decode}"
        return f"{apart if self.prefill else f'all in one, {self.coupled}'}, {self.layout}"

    @property
    def nodes(self) -> float:
        """Nodes of 8 GPUs."""
        return (self.prefill + self.decode + self.coupled) * self.gpus / 8

    def spec(self, decodes: bool) -> NodeSpec:
        """One instance."""
        gpu = hardware(GPU)
        if self.unbounded:
            gpu = replace(gpu, memory_bytes=2 * gpu.memory_bytes)
        drafts = decodes and bool(self.accept)
        times = times_of(gpu, self.layout, self.gpus, drafts)
        spec = axes_node_spec(times, block_tokens=BLOCK)
        if self.gpus < 8:  # the other half of the node is behind NVLink
            spec = replace(spec, nic_bytes_per_s=self.gpus * times.fabric.link)
        if drafts:
            spec = replace(
                spec,
                speculation=Speculation(SpeculationModel("mtp", self.accept, self.adapts, beside_chunks=True), times),
            )
        return spec

    def config(self) -> SimConfig:
        """Nobody is refused: what comes too late is counted."""
        gpu, layout = hardware(GPU), self.layout
        told: Told = {
            "block_tokens": BLOCK,
            "conductor": Settings(admission=AdmissionSettings(mode=Admission.OFF), slo_ttft_s=1e6, slo_tbt_s=1e6),
            "layers": shape_of(MODEL).layers,
            "max_running": 1024,
            "load_bytes_per_s": self.gpus * gpu.host_bytes_per_s * gpu.efficiency.host,
        }
        if self.coupled:
            chunk = MIXED_CHUNK[layout]
            told |= {"mode": MeshMode.COUPLED_CHUNKED, "coupled": (self.spec(True),) * self.coupled}
            return SimConfig(**told, chunk_tokens=chunk, batch_tokens=chunk)
        told |= {"prefill": (self.spec(False),) * self.prefill, "decode": (self.spec(True),) * self.decode}
        return SimConfig(**told, chunk_tokens=CHUNK[layout], batch_tokens=BATCH[layout], long_tokens=CHUNK[layout])


def serve(setup: SetUp, requests: Iterator[SimRequest]) -> Told:
    """What came of it."""
    records: list[Record] = []
    idle: list[float] = []

    def sampled(sample: MeshSample) -> None:
        pools = sample.pools.values()
        if sample.active:
            idle.append(sum(not (one.queued or one.running) for one in pools) / len(pools))

    run(replace(setup.config(), sample_s=1.0), requests, sink=records.append, samples=sampled)
    assert all(one.outcome == DONE for one in records), [one.reason for one in records if one.outcome != DONE]
    end_s = max(one.finish_s for one in records)
    ends = sorted(one.finish_s for one in records)
    tokens = sum(one.output_tokens for one in records)
    good = sum(one.ttft_s <= SLO_TTFT_S and not one.mean_tbt_s > SLO_TOKEN_S for one in records)
    made = sorted(one.mean_tbt_s for one in records if one.mean_tbt_s > 0)
    return {
        "name": setup.name,
        "nodes": setup.nodes,
        "mtp": bool(setup.accept),
        "requests": len(records),
        "ttft_p50_s": _at([one.ttft_s for one in records], 0.50),
        "ttft_p99_s": _at([one.ttft_s for one in records], 0.99),
        "tbt_p99_s": _at([one.tbt_s for one in records if one.tbt_s > 0], 0.99),
        "row_tokens_s": 1 / made[len(made) // 2],
        "good": good / len(records),
        "tokens_node_s": tokens / end_s / setup.nodes,
        "end_s": end_s,
        "p90_end_s": ends[math.ceil(0.9 * len(ends)) - 1],
        "idle": sum(idle) / max(1, len(idle)),
    }


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def four(nodes: int) -> list[SetUp]:
    """The four set-ups of instances that are a node each; of one node, halves of it and the whole."""
    if nodes == 1:
        apart = [SetUp(layout, prefill=1, decode=1, gpus=4, unbounded=True) for layout in LAYOUTS]
        return apart + [SetUp(layout, coupled=1) for layout in LAYOUTS]
    apart = [SetUp(layout, prefill=1, decode=nodes - 1) for layout in LAYOUTS]
    return apart + [SetUp(layout, coupled=nodes) for layout in LAYOUTS]


RATES = (0.2, 0.4, 0.6)


def rollouts(nodes: int) -> list[Told]:
    """Each set-up with drafts and without."""
    pairs = [(setup, replace(setup, accept=())) for setup in four(nodes)]
    return [_told(setup, rollout(nodes)) for pair in pairs for setup in pair]


def onlines(nodes: int) -> list[Told]:
    """Each set-up at each rate."""
    return [_told(setup, online(nodes, rate)) | {"rate": rate} for setup in four(nodes) for rate in RATES]


def chances() -> list[Told]:
    """The rollout on one node, all in one, CP: by what is kept of the head's tokens."""
    kinds: dict[str, dict[str, Any]] = {
        "0.6, 0.4, 0.3": {"accept": (0.6, 0.4, 0.3)},
        "0.85": {"accept": (0.85,)},
        "0.85, 0.7, 0.55": {},
        "0.9, 0.85, 0.8": {"accept": (0.9, 0.85, 0.8)},
        "0.85, 0.7, 0.55, the live policy": {"adapts": True},
    }
    return [_told(SetUp("CP", coupled=1, **told), rollout(1)) | {"accept": name} for name, told in kinds.items()]


def _told(setup: SetUp, requests: Iterator[SimRequest]) -> Told:
    began = time.monotonic()
    found = serve(setup, requests)
    print(f"{found['name']}, drafts {setup.accept}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return found


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def tables(told: Told) -> str:
    """All tables of a run."""
    parts = ["## What fits"]
    shown = [
        [one["gpu"], f"{one['gpus']}", one["layout"], f"{one['weights_gib']:.0f} of {one['room_gib']:.0f}",
         f"{one['kv_tokens'] / 1000:,.0f}k" if one["kv_tokens"] else "does not fit"]
        for one in told["fits"]
    ]  # fmt: skip
    parts.append(table(["GPU", "GPUs of an instance", "layout", "weights a GPU, GiB", "tokens of KV"], shown))
    for nodes, title in ((2, "Two nodes, an instance a node"), (1, "One node; halves with twice the memory")):
        parts += [f"## {title}", "**Rollout**", _rollout_table(told[f"rollout_{nodes}"])]
        parts += ["**Online**", _online_table(told[f"online_{nodes}"])]
    parts.append("## By what is kept of the head's tokens: the rollout on one node, all in one, CP")
    plain = next(one for one in told["rollout_1"] if one["name"] == "all in one, 1, CP" and not one["mtp"])
    shown = [
        [one["accept"], f"{one['row_tokens_s']:.0f}", f"{one['end_s']:.0f}", f"{plain['end_s'] / one['end_s']:.2f}"]
        for one in told["chances"]
    ]
    parts.append(table(["kept", "tokens/s a row", "end, s", "times as fast as without"], shown))
    return "\n\n".join(parts)


def _rollout_table(rows: Sequence[Told]) -> str:
    shown = [
        [one["name"], "MTP" if one["mtp"] else "none", f"{one['ttft_p50_s']:.2f} / {one['ttft_p99_s']:.2f}",
         f"{1000 * one['tbt_p99_s']:.0f}", f"{one['row_tokens_s']:.0f}", f"{one['tokens_node_s']:,.0f}",
         f"{one['p90_end_s']:.0f} / {one['end_s']:.0f}", f"{one['idle']:.0%}"]
        for one in rows
    ]  # fmt: skip
    head = ["set-up", "drafts", "TTFT P50 / P99, s", "TBT P99, ms", "tokens/s a row", "tokens/s a node",
            "90% / all done, s", "idle"]  # fmt: skip
    return table(head, shown)


def _online_table(rows: Sequence[Told]) -> str:
    shown = [
        [one["name"], f"{one['rate']:g}", f"{one['ttft_p50_s']:.2f} / {one['ttft_p99_s']:.2f}",
         f"{1000 * one['tbt_p99_s']:.0f}", f"{one['row_tokens_s']:.0f}", f"{one['good']:.0%}"]
        for one in rows
    ]  # fmt: skip
    head = ["set-up", "requests/s a node", "TTFT P50 / P99, s", "TBT P99, ms", "tokens/s a row", "goodput"]
    return table(head, shown)


BEGIN, END = "<!-- filled by benchmarks.one_node --docs -->", "<!-- until here -->"


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
    told: Told = {"kind": "one-node", "fits": fits()}
    for nodes in (1, 2):
        told[f"rollout_{nodes}"], told[f"online_{nodes}"] = rollouts(nodes), onlines(nodes)
    told["chances"] = chances()
    shown = tables(told)
    print(shown)
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if args.docs:
        fill(args.docs, shown)


if __name__ == "__main__":
    main()
