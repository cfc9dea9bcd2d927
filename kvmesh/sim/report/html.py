"""One page that shows one run or compares several: no script, no other file, light and dark, on a phone as well.

Made of what `kvmesh sim run` writes to summary.json: {"name", "setup": {option: value}, "sweep": {option: value},
"summary": Summary.to_json()}.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from kvmesh.sim.report.plots import Chart, Line, draw, number

# How the report looks. The colours of lines are those of Okabe and Ito, which most people tell apart.

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1a1d21;--soft:#5b6470;--line:#d9dee4;--card:#f7f8fa;--mark:#9a6b00;
--k0:#0072b2;--k1:#d55e00;--k2:#009e73;--k3:#cc3377;--k4:#b58900;--k5:#4aa3d8;--k6:#7a5bb5;--k7:#6b6f76}
@media (prefers-color-scheme:dark){:root{--bg:#14171b;--fg:#e6e9ed;--soft:#9aa4b0;--line:#343b44;--card:#1c2026;
--mark:#e0b040;--k0:#56a8e8;--k1:#ff8a45;--k2:#2fc79a;--k3:#f07ab0;--k4:#e6c229;--k5:#8fd0f5;--k6:#b39ae6;--k7:#a6adb6}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1240px;margin:0 auto;padding:16px}
h1{font-size:1.5rem;margin:.2em 0 .6em;overflow-wrap:anywhere}
h3{font-size:1rem;margin:1.2em 0 .4em}
summary{font-weight:600;font-size:1.1rem;cursor:pointer;padding:.6em 0;overflow-wrap:anywhere}
section{border-top:1px solid var(--line);margin-top:1.2em;padding-top:.4em}
.grid-of{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:14px;margin-top:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 10px 8px;min-width:0}
figcaption{font-weight:600;margin:0 4px 6px}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--soft);font-size:12.5px}
svg .label{fill:var(--fg)}
svg .marked{fill:var(--mark)}
.grid{stroke:var(--line);stroke-width:1;fill:none}
.mark{stroke:var(--mark);stroke-width:1.2;stroke-dasharray:5 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.dashed{stroke-dasharray:5 4}
.hover{fill:transparent}
.hover:hover{fill:var(--soft);fill-opacity:.4}
.k0{stroke:var(--k0)}.k1{stroke:var(--k1)}.k2{stroke:var(--k2)}.k3{stroke:var(--k3)}
.k4{stroke:var(--k4)}.k5{stroke:var(--k5)}.k6{stroke:var(--k6)}.k7{stroke:var(--k7)}
.dot{fill:var(--card);stroke-width:2}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:4px;font-size:.85rem;color:var(--soft)}
.legend i{display:inline-block;width:18px;height:0;border-top:3px solid;margin:0 6px 4px 0}
.legend i.dashed{border-top-style:dashed}
i.k0{border-color:var(--k0)}i.k1{border-color:var(--k1)}i.k2{border-color:var(--k2)}i.k3{border-color:var(--k3)}
i.k4{border-color:var(--k4)}i.k5{border-color:var(--k5)}i.k6{border-color:var(--k6)}i.k7{border-color:var(--k7)}
.note,.none{color:var(--soft);font-size:.85rem;margin:.4em 4px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.88rem}
th,td{padding:4px 8px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left;padding-left:2px}
thead:has(th:empty:nth-child(2)){display:none}
.tables{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,300px),1fr));gap:0 28px}
.tables table{width:100%}
.tables td:last-child{white-space:normal;overflow-wrap:anywhere}
dl{font-size:.88rem}dt{font-weight:600}dd{margin:0 0 .5em;color:var(--soft)}
"""


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
    """Draws how one run went over time."""
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
    """Returns how many neighbouring points become one."""
    return max(1, -(-points // DRAWN))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns at most DRAWN points, each the mean of some neighbours: more would be a thicket."""
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
