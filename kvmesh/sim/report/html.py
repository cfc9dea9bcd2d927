"""One page that shows one run or compares several: no script, no other file, light and dark, on a phone as well.

Made of what `kvmesh sim run` writes to summary.json: {"name", "setup": {option: value}, "sweep": {option: value},
"summary": Summary.to_json()}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from kvmesh.sim.report.html_style import STYLE
from kvmesh.sim.report.plots import Chart, Line, draw, number

Run = Mapping[str, Any]
_GOODPUT = (
    ("share", "Goodput against rate", "share within SLO"),
    ("per_s", "Requests a second that keep the SLO", "requests/s within SLO"),
)
DRAWN = 120  # points of a course over time
_RATES = ("speed", "rate")  # what a sweep over arrivals is called


def page(runs: Sequence[Run], title: str = "kvmesh sim") -> str:
    """The whole page; `runs` has at least one."""
    several = len(runs) > 1
    body = [f"<h1>{escape(title)}</h1>", _figures(runs)]
    body.append(_grid(draw(chart) for chart in _compared(runs)))
    for at, run in enumerate(runs):
        inner = _grid(draw(chart) for chart in _own(run)) + _tables(run)
        if several:
            inner = f"<details{' open' if not at else ''}><summary>{escape(run['name'])}</summary>{inner}</details>"
        body.append(f"<section>{inner}</section>")
    body.append(_definitions(runs[0]["summary"].get("definitions", {})))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head>{head}<title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _grid(figures: Iterable[str]) -> str:
    return f'<div class="grid-of">{"".join(figures)}</div>'


# ── figures ───────────────────────────────────────────────────────────────────────────────────────


def _figures(runs: Sequence[Run]) -> str:
    """The table that one looks at first: a row a run."""
    heads = ["run", "requests", "done", "TTFT mean", "P50", "P90", "P99", "TBT P50", "P99", "hit rate"]
    bounds = [one["tbt_slo_s"] for one in runs[0]["summary"]["goodput"]]
    heads += [f"≤ {number(bound * 1000)} ms" for bound in bounds]
    heads += ["prefill GPU"]
    rows = [[escape(run["name"]), *_row(run["summary"])] for run in runs]
    slo = number(runs[0]["summary"]["ttft_slo_s"])
    note = (
        f"Times in seconds. ≤ N ms: goodput, the share of all requests with TTFT within {slo} s and TBT within N ms. "
        "Definitions are at the end of the page."
    )
    return f'<div class="wide">{_table(heads, rows)}</div><p class="note">{note}</p>'


def _row(summary: Mapping[str, Any]) -> list[str]:
    ttft, tbt = summary["ttft_s"], summary["tbt_s"]
    times = [ttft["mean"], ttft["p50"], ttft["p90"], ttft["p99"], tbt["p50"], tbt["p99"]]
    return [
        f"{summary['requests']:,}",
        f"{summary['outcomes'].get('done', 0):,}",
        *map(_number, times),
        _share(summary["hit_rate"]),
        *(_share(one["share"]) for one in summary["goodput"]),
        f"{_number(summary['prefill_gpu_s'])} s",
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else number(value)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _pairs(title: str, told: Mapping[str, Any]) -> str:
    rows = ([escape(str(name).replace("_", " ")), escape(_shown(value))] for name, value in told.items())
    return f"<div><h3>{escape(title)}</h3>{_table(('', ''), rows)}</div>"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "–" if value is None else str(value)


def _tables(run: Run) -> str:
    summary = run["summary"]
    ends = {**summary["outcomes"]}
    for kind in ("refused", "failed"):
        ends.update({f"{kind}: {reason}": count for reason, count in summary[kind].items()})
    flat = {
        name: summary[name] for name in ("duration_s", "requests_per_s", "prefill_gpu_s", "retries", "within_own_slo")
    }
    tokens = {f"{name} tokens": count for name, count in summary["tokens"].items()}
    marks = ("mean", "p50", "p90", "p95", "p99", "max")
    kinds = ("ttft_s", "tbt_s", "mean_tbt_s", "e2e_s", "queue_s", "ttft_error")
    rows = ([kind.replace("_", " "), *(_number(summary[kind][mark]) for mark in marks)] for kind in kinds)
    spread = _table(("", "mean", "P50", "P90", "P95", "P99", "max"), rows)
    inner = _pairs("Set-up", run["setup"]) + _pairs("Ends", ends) + _pairs("Totals", {**flat, **tokens})
    return f'<div class="wide"><h3>Times</h3>{spread}</div><div class="tables">{inner}</div>'


def _definitions(told: Mapping[str, str]) -> str:
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in told.items())
    return f"<section><h3>Definitions</h3><dl>{items}</dl></section>"


# ── charts ────────────────────────────────────────────────────────────────────────────────────────


def _compared(runs: Sequence[Run]) -> list[Chart]:
    charts = []
    for name, title in (("ttft_s", "Time to first token"), ("tbt_s", "Time between tokens (longest 10% of a request)")):
        lines = [Line(run["name"], _pairs_of(run["summary"]["cdf"][name]), at) for at, run in enumerate(runs)]
        first = runs[0]["summary"]
        bounds = [first["ttft_slo_s"]] if name == "ttft_s" else [one["tbt_slo_s"] for one in first["goodput"]]
        marks = [(bound, f"{number(bound)} s") for bound in bounds]
        charts.append(Chart(title, "seconds", "share of requests", lines, True, True, True, marks))
    return [*charts, *_goodput(runs)]


def _pairs_of(points: Iterable[Sequence[float | None]]) -> list[tuple[float, float]]:
    return [(one[0], one[1]) for one in points if one[0] is not None and one[1] is not None]


def _goodput(runs: Sequence[Run]) -> list[Chart]:
    """Share and rate within the SLO over the rate of arrivals: a line for what else was swept, and each bound."""
    if len(runs) < 2 or not any(set(_RATES) & set(run.get("sweep", {})) for run in runs):
        return []
    groups: dict[str, list[Run]] = {}
    for run in runs:
        others = [f"{name} {value}" for name, value in run.get("sweep", {}).items() if name not in _RATES]
        groups.setdefault(", ".join(others), []).append(run)
    bounds = [one["tbt_slo_s"] for one in runs[0]["summary"]["goodput"]]
    charts = []
    for key, title, unit in _GOODPUT:
        if len(groups) == 1:  # a line a bound
            lines = [Line(_within(bound), _rated(runs, at, key), at, dots=True) for at, bound in enumerate(bounds)]
            charts.append(Chart(title, "requests a second", unit, lines, percent=key == "share"))
            continue
        for at, bound in enumerate(bounds):  # a chart a bound
            lines = [
                Line(name, _rated(members, at, key), place, dots=True)
                for place, (name, members) in enumerate(groups.items())
            ]
            named = f"{title}, {_within(bound)}"
            charts.append(Chart(named, "requests a second", unit, lines, percent=key == "share"))
    return charts


def _within(bound_s: float) -> str:
    return f"TBT ≤ {number(bound_s * 1000)} ms"


def _rated(runs: Sequence[Run], at: int, key: str) -> list[tuple[float, float]]:
    """(requests a second, goodput by the bound at place `at`) of each run."""
    told = [run["summary"] for run in runs]
    return sorted((one["requests_per_s"] or 0.0, one["goodput"][at][key] or 0.0) for one in told)


def _own(run: Run) -> list[Chart]:
    """How one run went over time."""
    summary = run["summary"]
    pools = summary["pools"]
    charts = [
        Chart("Load of the pools", "seconds", "predicted time / SLO", _pool_lines(pools, "load", "max_load")),
        Chart("Requests in the pools", "seconds", "requests", _pool_lines(pools, "running", "queued")),
    ]
    course = summary["course"]

    def line(name: str, figure: str, colour: int) -> Line:
        return Line(name, _over(course, figure), colour)

    arrivals = [line("arrived", "arrived_per_s", 0), line("refused", "refused_per_s", 3)]
    width_s = course["width_s"] * _each(len(course["at_s"]))
    note = f"Means over {number(width_s)} s, requests by their arrival."
    hits, kept = [line("hit rate", "hit_rate", 2)], [line("within SLO", "within_slo", 1)]
    return [
        *charts,
        Chart("Hit rate", "seconds", "share of input tokens", hits, percent=True, note=note),
        Chart("Mean TTFT", "seconds", "seconds", [line("TTFT", "ttft_s", 0)], note=note),
        Chart("Arrivals", "seconds", "requests/s", arrivals),
        Chart("Within the SLO", "seconds", "share of requests", kept, percent=True, note=note),
    ]


def _over(course: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    return _thinned(_pairs_of(zip(course["at_s"], course[name], strict=True)))


def _each(points: int) -> int:
    """How many of them become one."""
    return max(1, -(-points // DRAWN))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most DRAWN of them: means of neighbours. More would be a thicket."""
    each = _each(len(points))
    groups = [points[at : at + each] for at in range(0, len(points), each)]
    return [(group[0][0], sum(y for _, y in group) / len(group)) for group in groups]


def _pool_lines(pools: Mapping[str, Any], *names: str) -> list[Line]:
    """The first figure solid, the others dashed, a colour a pool."""
    return [
        Line(f"{pool} {name.replace('_', ' ')}", _over(course, name), at, dashed=name != names[0])
        for at, (pool, course) in enumerate(sorted(pools.items(), reverse=True))
        for name in names
    ]
