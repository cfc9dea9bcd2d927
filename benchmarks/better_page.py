"""docs/reports/better.md: its tables and its figure, out of the file of rows that benchmarks/better.py keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.better_policies import BETTER, LINES, PAPER, SPLIT, Policy, policy_of
from benchmarks.better_runs import SHARES, Row, Task
from benchmarks.better_tables import SHOWN_AT, Shown, tables
from kvmesh.errors import ConfigError
from kvmesh.sim.report.html import STYLE
from kvmesh.sim.report.plots import HEIGHT, WIDTH, Chart, Line, draw

BEGIN, END = "<!-- filled by benchmarks.better --docs -->\n", "<!-- until here -->"
HEAD, FOOT, LEGEND = 34, 48, 22
DRAWN = {PAPER: 0, SPLIT: 2, LINES: 4, BETTER: 1}  # and their colours
_SVG = re.compile(r"<svg [^>]*>(.*)</svg>", re.DOTALL)
_HOVER = re.compile(r"<circle.*?</circle>", re.DOTALL)  # an image answers to no pointer
_STYLES = (":root", "--", "@media", "svg text", "svg .label", ".grid{", ".line", ".k0", ".k4")


@dataclass(frozen=True)
class Made:
    """What the file says."""

    paper: Policy
    better: Policy
    half: int
    rows: Mapping[str, Row]


def read_rows(path: Path) -> Made:
    """ConfigError: it is none of ours, or not all was run."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        made = Made(policy_of(told["paper"]), policy_of(told["better"]), told["inputs"]["half"], told["rows"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"json={str(path)!r}: {err!r}", field="json") from None
    for table in tables(made.paper, made.better):
        for task in (task for tasks in table.tasks.values() for task in tasks):
            if task.key not in made.rows:
                raise ConfigError(f"json={str(path)!r}: {task.key} was not run", field="json")
    return made


def tuned(path: Path) -> tuple[Policy, Policy]:
    """The paper's policy and ours, as that file has them. ConfigError: it is none of ours."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        return policy_of(told["paper"]), policy_of(told["better"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"tuned={str(path)!r}: {err!r}", field="tuned") from None


def filled(page: str, made: Made) -> str:
    """The page with its tables as `made` has them. ConfigError: nothing in it says where."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"docs: no {BEGIN.strip()} ... {END}", field="docs")
    return before + begin + _tables(made) + end + after


def _tables(made: Made) -> str:
    grids, *shown = tables(made.paper, made.better)
    parts = [
        f"Tuned: the paper's policy `{made.paper.name}`, ours `{made.better.name}`. {made.half:,} requests a half.",
        *(_told(table, made) for table in shown),
        _told(grids, made),
    ]
    return "\n" + "\n\n".join(parts) + "\n\n"


def _told(table: Shown, made: Made) -> str:
    return f"**{table.title}**\n\n{table.markdown(made.rows)}"


def figure(made: Made) -> str:
    """Share of all requests that have their first token by then: one chart for each speed and rule of admission."""
    charts = []
    for admission, speed in SHOWN_AT:
        lines = []
        for name, policy in _drawn(made).items():
            row = made.rows[Task(policy, "second", speed, admission).key]
            served = 1 - row["refused"] / row["requests"]
            points = [(max(0.05, at_s), share * served) for at_s, share in zip(row["ttft_s"], SHARES, strict=True)]
            lines.append(Line(name, points, DRAWN[name]))
        charts.append((f"{speed:g}x, admission {admission}", Chart("", "TTFT, s", "requests", lines, True, True)))
    return _drawing(charts)


def _drawn(made: Made) -> dict[str, Policy]:
    shown = next(table for table in tables(made.paper, made.better) if BETTER in table.tasks)
    return {name: shown.tasks[name][0].policy for name in DRAWN}


def _drawing(charts: Sequence[tuple[str, Chart]]) -> str:
    parts = []
    for n, (title, chart) in enumerate(charts):
        found = _SVG.search(draw(chart))
        assert found is not None, "a chart with points is drawn as SVG"
        x, y = n % 2 * WIDTH, n // 2 * (HEAD + HEIGHT)
        parts.append(f'<text class="label" x="{x + WIDTH / 2}" y="{y + 22}" text-anchor="middle">{title}</text>')
        inner = _HOVER.sub("", found[1])
        parts.append(f'<svg x="{x}" y="{y + HEAD}" width="{WIDTH}" height="{HEIGHT}">{inner}</svg>')
    wide, high = 2 * WIDTH, (len(charts) + 1) // 2 * (HEAD + HEIGHT) + FOOT
    for n, (name, colour) in enumerate(DRAWN.items()):
        x, y = 60 + n % 2 * WIDTH, high - FOOT + 14 + n // 2 * LEGEND
        parts.append(f'<path class="line k{colour}" d="M{x} {y}h24"/><text x="{x + 30}" y="{y + 4}">{name}</text>')
    style = "".join(line for line in STYLE.splitlines() if line.startswith(_STYLES))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="system-ui, sans-serif">\n'
        f"<style>{style}</style>\n"
        f'<rect width="{wide}" height="{high}" fill="var(--bg)"/>\n{"".join(parts)}\n</svg>\n'
    )
