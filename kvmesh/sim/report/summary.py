"""What a run comes to, added up record by record: nothing is kept of a request but counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvmesh.sim.report.records import DONE, GRAIN_S, REFUSED, RIGHT_WITHIN, MeshSample, Record
from kvmesh.sim.report.sketch import BinnedSums, Sketch, tidy

TTFT_SLO_S = 30.0
TBT_SLOS_S = (0.1, 0.2, 0.3)
POOL_FIGURES = ("instances", "queued", "running", "load", "max_load", "used_blocks", "stored_blocks")

DEFINITIONS = {
    "ttft_s": "arrival → first token at decode, over the requests that are done",
    "tbt_s": "of a request: mean of its longest 10% token intervals (at least one); over those done with two tokens",
    "mean_tbt_s": "of a request: mean of its token intervals",
    "e2e_s": "arrival → last token",
    "queue_s": "arrival → first step that computes its prompt",
    "hit_rate": "by tokens: input tokens that were not computed / input tokens, over the requests that are done",
    "goodput": "share of all requests, refused and failed ones included, that are done with TTFT and TBT both at most "
    "the SLO (the paper's effective request capacity); a request of one token has no TBT and keeps any. "
    "A second: that share of the arrivals a second",
    "within_own_slo": "the same, by the SLOs that the requests bear themselves (the run's where they bear none)",
    "prefill_gpu_s": "seconds of an instance's steps that computed prompts, each step's time shared by its tokens",
    "ttft_error": "|predicted - real| / real of TTFT, over the requests that are done",
    "instances": "requests that are done and their tokens, by the instance of their last attempt: prompt tokens, and "
    "those of them that were computed, at prefill; answer tokens at decode",
    "left_cached": "of the input tokens that are full blocks of the prompt before in the same session: the share that "
    "was not computed again, over the requests that are done (the last answer, which lies at decode, is left out: to "
    "fetch a short one takes longer than to compute it)",
    "retry": "of refusals for TTFT: seconds told / what they had to be (waits under "
    f"{GRAIN_S:g} s count as that); right: share told within a factor of {RIGHT_WITHIN:g} of it; placed: share of "
    "those that came again when told that were taken then",
    "percentiles": "within 0.5% of a value of their rank; means and greatest values are exact",
}


class Summary:
    """One run. `ttft_slo_s` and `tbt_slos_s`: what goodput is judged by; the last of `tbt_slos_s` is that of requests
    that bear none."""

    def __init__(self, *, ttft_slo_s: float = TTFT_SLO_S, tbt_slos_s: Sequence[float] = TBT_SLOS_S) -> None:
        self.ttft_slo_s = ttft_slo_s
        self.tbt_slos_s = tuple(tbt_slos_s)
        self.requests = 0
        self.outcomes: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.kept = [0] * len(self.tbt_slos_s)
        self.kept_own = 0
        self.tokens: Counter[str] = Counter()
        self.prefill_gpu_s = 0.0
        self.retries = 0
        self.first_s, self.arrived_s, self.last_s = math.inf, 0.0, 0.0  # first and last arrival, last end
        names = ("ttft_s", "tbt_s", "mean_tbt_s", "e2e_s", "queue_s", "ttft_error")
        self.sketches = {name: Sketch() for name in names}
        self.lanes: dict[str, tuple[Counter[str], Sketch]] = {}
        self.course = BinnedSums()
        self.pools: dict[str, BinnedSums] = {}
        self.wire_bytes = 0
        self.instances: dict[str, dict[str, Counter[str]]] = {}  # pool → instance → sums
        self.left: Counter[str] = Counter()  # tokens "left", and "cached" of them
        self.waits: Counter[str] = Counter()  # "told", "judged", "right", "came", "placed"
        self.wait_ratio = Sketch()

    # ── what comes in ────────────────────────────────────────────────────────────────────────────

    def add(self, record: Record) -> None:
        """A request that has ended."""
        self.requests += 1
        self.outcomes[record.outcome] += 1
        self.first_s = min(self.first_s, record.at_s)
        self.arrived_s = max(self.arrived_s, record.at_s)
        self.last_s = max(self.last_s, record.at_s)
        self.retries += record.retries
        self.prefill_gpu_s += record.prefill_gpu_s
        counts, lane_ttft = self.lanes.setdefault(record.lane.value, (Counter(), Sketch()))
        counts[record.outcome] += 1
        figures = {"arrived": 1.0, record.outcome: 1.0}
        if record.outcome == DONE:
            lane_ttft.add(record.ttft_s)
            kept = self._done(record)
            figures.update(ttft=record.ttft_s, input=record.input_tokens, cached=record.cached_tokens, kept=kept)
        else:
            (self.refused if record.outcome == REFUSED else self.failed)[record.reason or "unnamed"] += 1
        self.course.add(record.at_s, figures)
        if record.waits:
            self._waited(record)

    def _waited(self, record: Record) -> None:
        """Every refusal but, where its client came no more, the last was followed by another try."""
        for at, wait in enumerate(record.waits):
            self.waits["told"] += 1
            self.waits["came"] += at < record.retries
            self.waits["placed"] += wait.placed
            if math.isfinite(wait.right_s):
                self.waits["judged"] += 1
                self.waits["right"] += wait.is_right
                self.wait_ratio.add(wait.ratio)

    def _count(self, record: Record) -> None:
        """What its instances have done."""
        prefill, decode = ("prefill", "decode") if record.prefill != record.decode else ("coupled", "coupled")
        computed = record.input_tokens - record.cached_tokens
        for pool, name, tokens in (
            (prefill, record.prefill, {"input": record.input_tokens, "computed": computed}),
            (decode, record.decode, {"output": record.output_tokens}),
        ):
            sums = self.instances.setdefault(pool, {}).setdefault(name, Counter())
            sums.update(tokens)
            sums["requests"] += pool != "coupled" or "input" in tokens
        if record.left_tokens:
            self.left["left"] += record.left_tokens
            self.left["cached"] += min(record.left_tokens, record.cached_tokens)

    def _done(self, record: Record) -> bool:
        """Whether it kept the greatest SLO."""
        self.last_s = max(self.last_s, record.finish_s)
        self._count(record)
        self.tokens.update(
            input=record.input_tokens,
            output=record.output_tokens,
            cached=record.cached_tokens,
            pulled=record.pulled_tokens,
        )
        for name in ("ttft_s", "tbt_s", "mean_tbt_s", "queue_s"):
            self.sketches[name].add(getattr(record, name))
        self.sketches["e2e_s"].add(record.finish_s - record.at_s)
        if record.ttft_s > 0:
            self.sketches["ttft_error"].add(abs(record.predicted_ttft_s - record.ttft_s) / record.ttft_s)
        slowest = 0.0 if math.isnan(record.tbt_s) else record.tbt_s
        for at, bound in enumerate(self.tbt_slos_s):
            self.kept[at] += record.ttft_s <= self.ttft_slo_s and slowest <= bound
        own_ttft = record.ttft_slo_s or self.ttft_slo_s
        own_tbt = record.tbt_slo_s or (self.tbt_slos_s[-1] if self.tbt_slos_s else math.inf)
        kept = record.ttft_s <= own_ttft and slowest <= own_tbt
        self.kept_own += kept
        return kept

    def sample(self, sample: MeshSample) -> None:
        """The pools at one moment."""
        self.wire_bytes = max(self.wire_bytes, sample.wire_bytes)
        for name, pool in sample.pools.items():
            figures = {one: float(getattr(pool, one)) for one in POOL_FIGURES}
            self.pools.setdefault(name, BinnedSums()).add(sample.at_s, {"samples": 1.0, **figures})

    # ── what comes out ───────────────────────────────────────────────────────────────────────────

    @property
    def duration_s(self) -> float:
        """First arrival to last end."""
        return max(0.0, self.last_s - self.first_s) if self.requests else 0.0

    @property
    def requests_per_s(self) -> float:
        """Arrivals, from the first to the last; nan of fewer than two."""
        span_s = self.arrived_s - self.first_s
        return (self.requests - 1) / span_s if span_s > 0 else math.nan

    @property
    def hit_rate(self) -> float:
        """By tokens; nan of none."""
        return self.tokens["cached"] / self.tokens["input"] if self.tokens["input"] else math.nan

    @property
    def left_cached(self) -> float:
        """Share of what earlier turns have left; nan where there is none."""
        return self.left["cached"] / self.left["left"] if self.left["left"] else math.nan

    @property
    def right_share(self) -> float:
        """Of refusals whose Retry-After can be judged: the share that was right; nan of none."""
        return self.waits["right"] / self.waits["judged"] if self.waits["judged"] else math.nan

    @property
    def placed_share(self) -> float:
        """Of refused clients that came again when they were told to: the share that was taken then; nan of none."""
        return self.waits["placed"] / self.waits["came"] if self.waits["came"] else math.nan

    def share(self, pool: str, name: str, what: str = "requests") -> float:
        """Of one instance, in all that its pool has done; nan where that is nothing."""
        sums = self.instances.get(pool, {})
        whole = sum(one[what] for one in sums.values())
        return sums.get(name, Counter[str]())[what] / whole if whole else math.nan

    def busiest(self, pool: str, what: str = "requests") -> float:
        """The greatest share that an instance of this pool has had."""
        return max((self.share(pool, name, what) for name in self.instances.get(pool, {})), default=math.nan)

    @property
    def goodput(self) -> dict[float, float]:
        """TBT SLO in seconds → share of all requests."""
        return {bound: kept / max(1, self.requests) for bound, kept in zip(self.tbt_slos_s, self.kept, strict=True)}

    def quantile(self, name: str, share: float) -> float:
        """The quantile of `ttft_s`, `tbt_s`, `mean_tbt_s`, `e2e_s`, `queue_s` or `ttft_error`; `share` in 0..1."""
        return self.sketches[name].quantile(share)

    def mean(self, name: str) -> float:
        """Returns the mean of what `quantile` takes by this name."""
        return self.sketches[name].mean

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON: what `kvmesh sim run` writes and its report is made of."""
        return {
            "requests": self.requests,
            "outcomes": dict(self.outcomes),
            "refused": dict(self.refused),
            "failed": dict(self.failed),
            "retries": self.retries,
            "duration_s": tidy(self.duration_s),
            "requests_per_s": tidy(self.requests_per_s),
            "ttft_slo_s": self.ttft_slo_s,
            "goodput": [
                {"tbt_slo_s": bound, "share": tidy(share), "per_s": self._per_s(share)}
                for bound, share in self.goodput.items()
            ],
            "within_own_slo": tidy(self.kept_own / max(1, self.requests)),
            "hit_rate": tidy(self.hit_rate),
            "tokens": {name: self.tokens[name] for name in ("input", "output", "cached", "pulled")},
            "prefill_gpu_s": tidy(self.prefill_gpu_s),
            "wire_bytes": self.wire_bytes,
            **{name: sketch.to_json() for name, sketch in self.sketches.items()},
            "lanes": {
                lane: {"outcomes": dict(counts), "ttft_s": ttft.to_json()}
                for lane, (counts, ttft) in self.lanes.items()
            },
            "instances": {
                pool: {name: dict(sums) for name, sums in sorted(found.items())}
                for pool, found in sorted(self.instances.items(), reverse=True)
            },
            "left_cached": tidy(self.left_cached),
            "retry": {
                **{name: self.waits[name] for name in ("told", "came", "judged")},
                "right": tidy(self.right_share),
                "placed": tidy(self.placed_share),
                "told_over_right": self.wait_ratio.to_json(),
            },
            "cdf": {name: _points(self.sketches[name]) for name in ("ttft_s", "tbt_s")},
            "course": self._course(),
            "pools": {name: _pool(course) for name, course in self.pools.items()},
            "definitions": DEFINITIONS,
        }

    def _per_s(self, share: float) -> float | None:
        return tidy(share * self.requests_per_s)

    def _course(self) -> dict[str, Any]:
        """By the time of arrival: rates a second, mean TTFT, hit rate, share within the SLO."""
        width = self.course.width_s
        told: dict[str, list[float | None]] = {name: [] for name in _COURSE}
        for at_s, sums in self.course.rows():
            done, arrived = sums.get(DONE, 0.0), sums.get("arrived", 0.0)
            told["at_s"].append(at_s)
            told["arrived_per_s"].append(tidy(arrived / width))
            told["refused_per_s"].append(tidy(sums.get(REFUSED, 0.0) / width))
            told["ttft_s"].append(_ratio(sums.get("ttft", 0.0), done))
            told["hit_rate"].append(_ratio(sums.get("cached", 0.0), sums.get("input", 0.0)))
            told["within_slo"].append(_ratio(sums.get("kept", 0.0), arrived))
        return {"width_s": width, **told}


_COURSE = ("at_s", "arrived_per_s", "refused_per_s", "ttft_s", "hit_rate", "within_slo")


def _ratio(part: float, whole: float) -> float | None:
    return tidy(part / whole) if whole else None


def _points(sketch: Sketch) -> list[list[float | None]]:
    return [[tidy(value), tidy(share)] for value, share in sketch.cdf()]


def _pool(course: BinnedSums) -> dict[str, Any]:
    """Means over each stretch of time."""
    told: dict[str, list[float | None]] = {name: [] for name in ("at_s", *POOL_FIGURES)}
    for at_s, sums in course.rows():
        told["at_s"].append(at_s)
        for name in POOL_FIGURES:
            told[name].append(_ratio(sums.get(name, 0.0), sums.get("samples", 0.0)))
    return {"width_s": course.width_s, **told}
