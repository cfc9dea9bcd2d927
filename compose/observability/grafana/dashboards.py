"""Writes dashboards/*.json from panels/*.yaml: `python compose/observability/grafana/dashboards.py`.

A panel is a few lines there and forty in JSON. A query is one of

    {rate: COUNTER, by: "label, label", legend: ...}         a second, over all instances
    {quantiles: HISTOGRAM, by: label, of: [0.5, 0.99], legend: ...}
    {mean: HISTOGRAM, legend: ...}
    {expr: PROMQL, legend: ...}                              RATE: the range of a rate, JOB: the selector that all have
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
HEIGHTS = {"timeseries": 8, "heatmap": 8, "stat": 4}
QUANTILES = (0.5, 0.9, 0.99)

Json = dict[str, Any]


def queries(of: Json) -> Iterator[tuple[str, str]]:
    """Expressions and legends of one query. KeyError: it is none of the four."""
    legend, by = of.get("legend", ""), of.get("by", "")
    if "rate" in of:
        shown = legend or " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",") if label)
        yield f"sum{f' by ({by})' if by else ''} (rate({of['rate']}{{JOB}}[RATE]))", shown
    elif "quantiles" in of:
        labels, before = ("le, " + by, f"{{{{{by}}}}} ") if by else ("le", f"{legend} " if legend else "")
        for q in of.get("of", QUANTILES):
            buckets = f"sum by ({labels}) (rate({of['quantiles']}_bucket{{JOB}}[RATE]))"
            yield f"histogram_quantile({q}, {buckets})", f"{before}p{q * 100:g}"
    elif "mean" in of:
        total, count = (f"sum(rate({of['mean']}_{part}{{JOB}}[RATE]))" for part in ("sum", "count"))
        yield f"{total} / {count}", legend
    else:
        yield of["expr"], legend


def panel(of: Json, number: int, x: int, y: int) -> Json:
    """As Grafana keeps it."""
    kind, unit = of.get("kind", "timeseries"), of["unit"]
    found = [query for one in of["queries"] for query in queries(one)]
    return {
        "id": number,
        "title": of["title"],
        "description": of.get("text", ""),
        "type": kind,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": of.get("width", 8), "h": HEIGHTS[kind]},
        "fieldConfig": {"defaults": {"unit": unit, **looks(kind, unit, of.get("stacked", False))}, "overrides": []},
        "options": options(kind, unit),
        "targets": [target(*query, index, kind) for index, query in enumerate(found)],
    }


def target(expression: str, legend: str, index: int, kind: str) -> Json:
    return {
        "refId": chr(ord("A") + index),
        "datasource": SOURCE,
        "expr": expression.replace("RATE", "$__rate_interval").replace("JOB", 'job="kvmesh"'),
        "legendFormat": legend or "__auto",
        "format": "heatmap" if kind == "heatmap" else "time_series",
    }


def looks(kind: str, unit: str, stacked: bool) -> Json:
    if kind != "timeseries":
        return {"min": 0} if unit == "percentunit" else {}
    stacking = {"mode": "normal", "group": "A"} if stacked else {"mode": "none"}
    fill = 25 if stacked else 0
    return {"custom": {"lineWidth": 1, "fillOpacity": fill, "showPoints": "never", "stacking": stacking}}


def options(kind: str, unit: str) -> Json:
    if kind == "heatmap":
        return {"calculate": False, "yAxis": {"unit": unit}, "color": {"scheme": "Oranges", "mode": "scheme"}}
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    legend = {"displayMode": "table", "placement": "bottom", "calcs": ["mean", "max"]}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}


def laid_out(sections: list[Json]) -> list[Json]:
    """Panels fill lines from the left; each section begins with a row of its own."""
    panels: list[Json] = []
    y = 0
    for section in sections:
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        row = {"id": len(panels) + 1, "type": "row", "title": section["title"], "collapsed": False, "panels": []}
        panels.append({**row, "datasource": SOURCE, "gridPos": place})
        x, y = 0, y + 1
        for one in section["panels"]:
            if x + one.get("width", 8) > WIDTH:
                x, y = 0, y + panels[-1]["gridPos"]["h"]
            panels.append(panel(one, len(panels) + 1, x, y))
            x += one.get("width", 8)
        y += panels[-1]["gridPos"]["h"]
    return panels


def choice(of: Json) -> Json:
    options = [{"text": one, "value": one, "selected": one == of["chosen"]} for one in of["of"]]
    current = {"text": of["chosen"], "value": of["chosen"]}
    shown = {"name": of["name"], "label": of["label"], "type": "custom", "query": ",".join(of["of"])}
    return {**shown, "options": options, "current": current}


def dashboard(of: Json) -> str:
    """The JSON of one file of panels."""
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    links = [{"type": "dashboards", "tags": ["kvmesh"], "title": "kvmesh", "asDropdown": True, "keepTime": True}]
    made = {
        "uid": of["uid"],
        "title": of["title"],
        "tags": ["kvmesh"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "templating": {"list": [source, *map(choice, of.get("choices", []))]},
        "links": links,
        "panels": laid_out(of["sections"]),
    }
    return json.dumps(made, indent=1) + "\n"


def dashboards() -> dict[str, str]:
    """All of them, by file name."""
    sources = sorted((HERE / "panels").glob("*.yaml"))
    return {f"{path.stem}.json": dashboard(yaml.safe_load(path.read_text())) for path in sources}


if __name__ == "__main__":
    for name, text in dashboards().items():
        (HERE / "dashboards" / name).write_text(text)
