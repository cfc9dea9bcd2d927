"""What a load measured: figures from outcomes, their definitions, and how they are printed. Pure but for `show`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvmesh.cli.load.load import LoadOutcome
from kvmesh.quantiles import quantile

PERCENTILES = (50, 90, 99)
SLOWEST_TOLD = 3  # requests named, so that `kvmesh explain` can be asked about them
SLOWEST = 0.1  # of a request's token intervals, whose mean is its TBT

DEFINITIONS = {
    "ttft_ms": "request sent → first token here",
    "tbt_ms": "of a request: mean of the longest 10% of its token intervals",
    "itl_ms": "every token interval of every request; tokens that arrive together have 0 between them",
    "tpot_ms": "of a request: mean of its token intervals",
    "e2e_ms": "request sent → answer complete",
    "hit_rate": "prompt tokens found cached (usage.prompt_tokens_details.cached_tokens) / prompt tokens, "
    "over the requests that were answered",
    "goodput": "answered requests with TTFT and TBT within the SLO, a second; its share is of all requests sent, "
    "refused and failed ones included",
}


@dataclass(frozen=True)
class LoadSlo:
    """In ms; None: not asked for."""

    ttft_ms: float | None = None
    tbt_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.tbt_ms is not None

    def kept(self, outcome: LoadOutcome) -> bool:
        """Answered, and both within the bound? A single token has no TBT and keeps any."""
        if not outcome.ok or outcome.ttft_s * 1000 > (math.inf if self.ttft_ms is None else self.ttft_ms):
            return False
        slowest = tbt_s(outcome)
        return slowest is None or self.tbt_ms is None or slowest * 1000 <= self.tbt_ms


def intervals(outcome: LoadOutcome) -> list[float]:
    """Seconds between each token and the next: one fewer than tokens. Tokens that came together have 0 between them."""
    wanted = max(0, outcome.completion_tokens - 1)
    return [*outcome.gaps[:wanted], *([0.0] * (wanted - len(outcome.gaps)))]


def tbt_s(outcome: LoadOutcome) -> float | None:
    """Mean of the longest 10% of the token intervals, at least one of them; None: fewer than two tokens."""
    gaps = sorted(intervals(outcome), reverse=True)
    if not gaps:
        return None
    worst = gaps[: max(1, math.ceil(len(gaps) * SLOWEST))]
    return sum(worst) / len(worst)


def _spread(values_s: Iterable[float]) -> dict[str, float] | None:
    """Percentiles and mean, in ms."""
    found = sorted(value * 1000 for value in values_s)
    if not found:
        return None
    told = {f"p{share}": round(quantile(found, share / 100), 3) for share in PERCENTILES}
    return {**told, "mean": round(sum(found) / len(found), 3), "max": round(found[-1], 3)}


def summarise(outcomes: Sequence[LoadOutcome], wall_s: float, slo: LoadSlo) -> dict[str, Any]:
    """Everything that is reported, as plain JSON."""
    good = [one for one in outcomes if one.ok]
    errors = Counter(f"{one.status or '-'} {one.code}" for one in outcomes if not one.ok)
    seconds = max(wall_s, 1e-9)
    output = sum(one.completion_tokens for one in good)
    prompt = sum(one.prompt_tokens for one in good)
    cached = sum(one.cached_tokens for one in good)
    tbts = [(one, tbt_s(one)) for one in good]
    told: dict[str, Any] = {
        "requests": {
            "sent": len(outcomes),
            "answered": len(good),
            "refused_429": sum(one.status == 429 for one in outcomes),
            "failed": sum(not one.ok and one.status != 429 for one in outcomes),
        },
        "errors": dict(errors.most_common()),
        "error_example": next((one.message for one in outcomes if not one.ok), ""),
        "wall_s": round(wall_s, 3),
        "ttft_ms": _spread(one.ttft_s for one in good),
        "tbt_ms": _spread(value for _, value in tbts if value is not None),
        "itl_ms": _spread(gap for one in good for gap in intervals(one)),
        "tpot_ms": _spread(sum(gaps) / len(gaps) for one in good if (gaps := intervals(one))),
        "e2e_ms": _spread(one.total_s for one in good),
        "late_ms": _spread(one.late_s for one in outcomes),
        "throughput": {
            "requests_per_s": round(len(good) / seconds, 3),
            "output_tokens_per_s": round(output / seconds, 1),
            "prompt_tokens_per_s": round(prompt / seconds, 1),
        },
        "tokens": {"prompt": prompt, "cached": cached, "output": output},
        "hit_rate": round(cached / prompt, 4) if prompt else None,
        "slowest": [
            {"request_id": one.request_id, "ttft_ms": round(one.ttft_s * 1000, 3)}
            for one in sorted(good, key=lambda one: -one.ttft_s)[:SLOWEST_TOLD]
        ],
        "definitions": DEFINITIONS,
    }
    if slo:
        kept = sum(slo.kept(one) for one in outcomes)
        told["slo"] = {"ttft_ms": slo.ttft_ms, "tbt_ms": slo.tbt_ms}
        told["goodput"] = {
            "requests_per_s": round(kept / seconds, 3),
            "share": round(kept / len(outcomes), 4) if outcomes else None,
            "requests": kept,
        }
    return told


# ── the screen ────────────────────────────────────────────────────────────────────────────────────

_ROWS = (
    ("ttft_ms", "TTFT"),
    ("tbt_ms", "TBT (worst 10%)"),
    ("itl_ms", "ITL (all gaps)"),
    ("tpot_ms", "TPOT"),
    ("e2e_ms", "E2E"),
)


def show(told: dict[str, Any], extra: Sequence[tuple[str, str]] = ()) -> RenderableType:
    """The report for people; `extra`: further lines (label, text)."""
    if not told["requests"]["sent"]:
        return "[yellow]no request was sent[/]"
    parts: list[RenderableType] = []
    if told["requests"]["answered"]:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("ms", no_wrap=True)
        for name in (*(f"p{share}" for share in PERCENTILES), "mean", "max"):
            table.add_column(name, justify="right", no_wrap=True)
        for key, name in _ROWS:
            if told[key]:
                table.add_row(name, *(milliseconds(value) for value in told[key].values()))
        parts += [table, ""]
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(no_wrap=True, style="bold")
    lines.add_column()
    for label, text in [*_lines(told), *extra]:
        lines.add_row(label, Text.from_markup(text))
    return Group(*parts, lines)


def _lines(told: dict[str, Any]) -> list[tuple[str, str]]:
    requests, through = told["requests"], told["throughput"]
    counted = f"{requests['sent']:,} sent in {told['wall_s']:.1f} s, {requests['answered']:,} answered"
    for key, word in (("refused_429", "refused (429)"), ("failed", "failed")):
        if requests[key]:
            counted += f", [red]{requests[key]:,} {word}[/]"
    found = [("requests", counted)]
    for name, number in told["errors"].items():
        found.append(("", f"[red]{number:,} × {escape(name)}[/]"))
    if told["error_example"]:
        found.append(("", f"[dim]{escape(told['error_example'][:300])}[/]"))
    late = told["late_ms"]
    if late and late["p99"] > 20:
        found.append(("", f"[yellow]this client sent late: p99 {late['p99']:.0f} ms after the planned time[/]"))
    found.append(
        (
            "throughput",
            f"{through['requests_per_s']:,.2f} requests/s, {through['output_tokens_per_s']:,.0f} output tokens/s, "
            f"{through['prompt_tokens_per_s']:,.0f} prompt tokens/s",
        )
    )
    if "goodput" in told:
        slo, good = told["slo"], told["goodput"]
        bounds = [
            f"{name} ≤ {slo[key]:g} ms"
            for key, name in (("ttft_ms", "TTFT"), ("tbt_ms", "TBT"))
            if slo[key] is not None
        ]
        text = f"{good['requests_per_s']:,.2f} requests/s, {good['share']:.1%} of those sent ({', '.join(bounds)})"
        found.append(("goodput", text))
    if told["hit_rate"] is not None:
        tokens = told["tokens"]
        found_of = f"({tokens['cached']:,} of {tokens['prompt']:,})"
        text = f"{told['hit_rate']:.1%} of prompt tokens came from the cache {found_of}"
        found.append(("hit rate", text))
    for label, one in zip(("longest TTFT", "", ""), told["slowest"], strict=False):
        text = f"{milliseconds(one['ttft_ms'])} ms: kvmesh explain {escape(one['request_id'])}"
        found.append((label, text))
    return found


def milliseconds(value: float) -> str:
    """Three figures that matter: 0.123, 1.23, 12.3, 123, 12,345."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
