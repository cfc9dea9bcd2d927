"""What each figure varies, what the paper has there, and whether ours agrees: orderings must, ratios within 30%.

A figure is compared by ratios to one of its own lines (`base`), since absolute times are those of another engine. The
paper's numbers: FAST'25, and its arXiv version where said; the conversation trace and 16 nodes unless said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.paper_runs import Inputs, Told
from benchmarks.paper_setup import Case
from kvmesh.kvcache.eviction import POLICIES as EVICTIONS
from kvmesh.sim import cache
from kvmesh.sim.workloads import trace

WITHIN = 0.30


@dataclass(frozen=True)
class Line:
    """One number. `paper` None: it says nothing there."""

    label: str
    ours: float
    paper: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """Lines of one unit. `base`: the label of the line that ratios are taken to; "": the lines are ratios already."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    base: str = ""
    claim: str = ""  # what the paper says in words, and
    holds: bool | None = None  # whether ours does
    alike: bool = True  # the lines are of one kind, and have an order

    def _of_base(self, line: Line) -> tuple[float, float] | None:
        if line.paper is None:
            return None
        if not self.base:
            return line.ours, line.paper
        base = next(one for one in self.lines if one.label == self.base)
        assert base.paper
        return line.ours / base.ours, line.paper / base.paper

    def ratio(self, line: Line) -> float | None:
        """Ours over the paper's, both relative to the base; None where nothing is compared."""
        both = self._of_base(line)
        return None if both is None or line.label == self.base or not both[1] else both[0] / both[1]

    @property
    def ordered(self) -> bool | None:
        """Whether our lines stand in the paper's order; None: there is none."""
        told = [line for line in self.lines if line.paper is not None]
        if len(told) < 2 or not self.alike:
            return None
        return [x.label for x in sorted(told, key=_paper)] == [x.label for x in sorted(told, key=lambda x: x.ours)]

    @property
    def within(self) -> bool | None:
        """Whether all ratios are within 30%."""
        ratios = [found for line in self.lines if (found := self.ratio(line)) is not None]
        return all(abs(one - 1) <= WITHIN for one in ratios) if ratios else None


def _paper(line: Line) -> float:
    assert line.paper is not None
    return line.paper


@dataclass(frozen=True)
class Figure:
    """`cases`: the runs it needs, by a name of its own; `panels` makes of what they told what is shown."""

    name: str
    title: str
    cases: Mapping[str, Case]
    panels: Callable[[Inputs, Mapping[str, Told]], Sequence[Panel]]


def _ttft(told: Told) -> float:
    return float(told["ttft_s"]["mean"])


# ── a: mean TTFT by policy ───────────────────────────────────────────────────────────────────────

POLICIES = {"random": 19.65, "least_loaded": 5.27, "cache_aware": 3.58, "kvcache": 3.07}


def _policies(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    lines = tuple(
        Line(name, _ttft(told[name]), paper, f"p90 {told[name]['ttft_s']['p90']:.2f} s")
        for name, paper in POLICIES.items()
    )
    return [Panel("mean TTFT by policy, nothing refused", "s", lines, "kvcache")]


# ── b, c: against coupled baselines ──────────────────────────────────────────────────────────────

BASELINES = {"plain": "vLLM", "prefix": "vLLM + prefix cache", "chunked": "vLLM + chunked prefill"}
GAINS = (4.98, 1.57, 0.59)  # over vLLM at TBT within 100, 200, 300 ms
PREFILL_TIMES = {"plain": 1.56, "prefix": 1.43, "chunked": 1.90}
AGAINST = {"ours": Case(), **{name: Case(coupled=name) for name in BASELINES}}


def _capacity(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    at, panels = inputs.parameters, []
    for n, (bound, gain) in enumerate(zip(at.slo.tbt_s, GAINS, strict=True)):
        mine = told["ours"]["capacity"][n]
        lines = tuple(
            Line(f"over {title}", mine / max(told[name]["capacity"][n], 1e-9), 1 + gain if name == "plain" else None,
                 f"{mine:.1%} of requests; {told[name]['capacity'][n]:.1%}")
            for name, title in BASELINES.items()
        )  # fmt: skip
        panels.append(Panel(f"requests with TTFT ≤ {at.slo.ttft_s:g} s, TBT ≤ {bound * 1000:g} ms", "x", lines))
    return panels


def _prefill_time(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    mine = told["ours"]["prefill_gpu_s"]
    lines = tuple(
        Line(BASELINES[name], told[name]["prefill_gpu_s"] / mine, paper, f"{told[name]['prefill_gpu_s']:,.0f} s")
        for name, paper in PREFILL_TIMES.items()
    )
    return [Panel(f"prefill GPU time, ours = 1 ({mine:,.0f} s of nodes)", "x", lines)]


# ── d: global against local cache ────────────────────────────────────────────────────────────────

CACHES = {
    name: Case(policy=name, prefill=10, decode=6, max_output=1) for name in ("kvcache", "cache_aware", "least_loaded")
}


def _global(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    one, other = told["kvcache"], told["cache_aware"]
    blind = told["least_loaded"]
    lines = (
        Line("hit rate", one["hit_rate"] / other["hit_rate"], 2.22, f"{one['hit_rate']:.3f} / {other['hit_rate']:.3f}"),
        Line("prefill GPU time", one["prefill_gpu_s"] / other["prefill_gpu_s"], 0.76),
        Line("hit rate (local: least loaded)", one["hit_rate"] / blind["hit_rate"], None, f"{blind['hit_rate']:.3f}"),
        Line("prefill GPU time (local: least loaded)", one["prefill_gpu_s"] / blind["prefill_gpu_s"]),
    )
    return [Panel("global over local cache, 10 prefill nodes of 3M tokens, answers cut to 1", "x", lines, alike=False)]


# ── e: size of a cache ───────────────────────────────────────────────────────────────────────────

SIZES = (1, 3, 10, 50)  # million tokens


def _sizes(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    block = inputs.parameters.engine.block_tokens
    prompts = [one.hash_ids for one in trace.read(inputs.trace, block)][: inputs.limit]
    most = cache.run(prompts, "lru", None, block_tokens=block).hit_rate

    def share(policy: str, tokens: float) -> float:
        return cache.run(prompts, policy, int(tokens // block), block_tokens=block).hit_rate / most

    lines = [Line(f"lru, {size}M tokens", share("lru", size * 1e6), {3: 0.41}.get(size)) for size in SIZES]
    lines += [Line(f"{policy}, 3M tokens", share(policy, 3e6)) for policy in EVICTIONS if policy != "lru"]
    holds = lines[SIZES.index(50)].ours > 0.95
    title = f"one cache: share of the maximum hit rate ({most:.3f} by blocks, unbounded, whole trace, in file order)"
    return [Panel(title, "", tuple(lines), "", "50M tokens reach almost the maximum", holds)]


# ── f: replicas of hot blocks ────────────────────────────────────────────────────────────────────


def _replicas(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    bands = told["kvcache"]["copies"]
    lines = tuple(
        Line(f"ranks {band['ranks'][0]:,} to {band['ranks'][1]:,} by use: at the end", band["end"], None,
             f"{band['uses']:,.0f} uses each; {band['ever']:.2f} ever had them")
        for band in bands
    )  # fmt: skip
    claim = "the top 100 end with a replica on almost every prefill instance"
    hot = [(band["ranks"][1] - band["ranks"][0] + 1, band["end"]) for band in bands if band["ranks"][1] <= 100]
    mean = sum(count * end for count, end in hot) / max(1, sum(count for count, _ in hot))
    holds = mean >= inputs.parameters.cluster.prefill - 1
    return [Panel("prefill instances that hold a hot block, mean", "", lines, "", claim, holds)]


# ── g: bandwidth ─────────────────────────────────────────────────────────────────────────────────

BANDWIDTHS = (24, 50, 75, 100, 200, 400)  # Gb/s of a node


def _bandwidth(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    def panel(what: str, figure: str) -> Panel:
        lines = tuple(Line(f"{gbps} Gb/s", told[str(gbps)][figure]["mean"]) for gbps in BANDWIDTHS)
        best = lines[-1].ours
        from_100 = max(line.ours for line, gbps in zip(lines, BANDWIDTHS, strict=True) if gbps >= 100)
        knee = next(gbps for line, gbps in zip(lines, BANDWIDTHS, strict=True) if line.ours <= 1.1 * best)
        title = f"{what}, synthetic workload (within 10% of the best from {knee} Gb/s on)"
        holds = from_100 < 2.0 and lines[0].ours > 1.5 * best
        return Panel(title, "s", lines, "", "mean TTFT under 2 s from 100 Gb/s on, sharp congestion below", holds)

    return [panel("mean TTFT", "ttft_s"), panel("mean time until all KV is at decode", "landed_s")]


# ── h: prefill to decode ─────────────────────────────────────────────────────────────────────────

SPLITS = (4, 6, 8, 10, 12)  # prefill nodes of 16


def _split(prefill: int) -> Case:
    return Case() if prefill == 8 else Case(prefill=prefill, decode=16 - prefill)


def _splits(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    at = inputs.parameters
    names = list(told)
    ttft = tuple(Line(name, _ttft(told[name])) for name in names)
    tbt = tuple(Line(name, told[name]["tbt_s"]["mean"] * 1000) for name in names)
    first = at.slo.tbt_s[0]
    kept = tuple(Line(name, told[name]["capacity"][0]) for name in names)
    best = max(range(len(SPLITS)), key=lambda n: kept[n].ours)
    ahead = kept[best].ours - max(kept[0].ours, kept[-1].ours)
    claim = "the best near 8P8D, both ends a point or more worse"
    return [
        Panel("mean TTFT by split", "s", ttft),
        Panel("mean TBT by split", "ms", tbt),
        Panel(f"TTFT ≤ {at.slo.ttft_s:g} s, TBT ≤ {first * 1000:g} ms: share of requests", "", kept, "", claim,
              6 <= SPLITS[best] <= 10 and ahead >= 0.01),
    ]  # fmt: skip


# ── i: refusals ──────────────────────────────────────────────────────────────────────────────────

REFUSED = {"baseline": 4183, "early": 3771, "predicted": 3589}  # of 23,608 of the arXiv trace, which is not released


def _refusals(inputs: Inputs, told: Mapping[str, Told]) -> list[Panel]:
    lines = tuple(
        Line(name, float(told[name]["outcomes"].get("refused", 0)), paper, f"of {told[name]['requests']:,}")
        for name, paper in REFUSED.items()
    )
    return [Panel("requests refused at twice the speed (paper: another trace)", "", lines, "baseline")]


FIGURES = (
    Figure("a", "policies", {name: Case(policy=name) for name in POLICIES}, _policies),
    Figure("b", "capacity", AGAINST, _capacity),
    Figure("c", "prefill time", AGAINST, _prefill_time),
    Figure("d", "global cache", CACHES, _global),
    Figure("e", "cache size", {}, _sizes),
    Figure("f", "replicas", {"kvcache": Case()}, _replicas),
    Figure("g", "bandwidth", {str(b): Case(synthetic=True, nic_gbps=float(b)) for b in BANDWIDTHS}, _bandwidth),
    Figure("h", "split", {f"{p}P{16 - p}D": _split(p) for p in SPLITS}, _splits),
    Figure("i", "refusals", {name: Case(admission=name, speed=2.0) for name in REFUSED}, _refusals),
)
