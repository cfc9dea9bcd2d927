"""The tables of benchmarks/threshold.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.errors import ConfigError

Row = dict[str, Any]
BEGIN, END = "<!-- filled by benchmarks.threshold --docs -->", "<!-- until here -->"
FIRST = "1"  # the default


def tables(scenes: Sequence[str], compared: Mapping[str, Sequence[str]], rows: Mapping[str, Row], seed: int) -> str:
    """Mean and P90 of TTFT by rule; ratios of the adapted threshold's mean to those of fixed ones."""
    return "\n\n".join(_table(scenes, rule, thresholds, rows, seed) for rule, thresholds in compared.items())


def _table(scenes: Sequence[str], rule: str, thresholds: Sequence[str], rows: Mapping[str, Row], seed: int) -> str:
    head = " | ".join(thresholds)
    lines = [
        f"**`--fetch {rule}`**: mean / P90 of TTFT in seconds, and the adapted one's mean over fixed ones'",
        "",
        f"| | {head} | over the best | over the worst | over {FIRST} | goodput: {FIRST} | adaptive | changes |",
        f"|---|{'---|' * (len(thresholds) + 6)}",
    ]
    for scene in scenes:
        found = {one: rows[f"{scene} | {rule} {one} | seed={seed}"] for one in thresholds}
        adapted = found["adaptive"]
        fixed = {one: row["mean_s"] for one, row in found.items() if one != "adaptive"}
        ratio = tuple(adapted["mean_s"] / s for s in (min(fixed.values()), max(fixed.values()), fixed[FIRST]))
        best = min(row["mean_s"] for row in found.values())
        cells = [_times(row, best) for row in found.values()]
        cells += [f"{one:.2f}" for one in ratio]
        cells += [f"{found[FIRST]['goodput']:.3f}", f"{adapted['goodput']:.3f}", f"{adapted['changes']}"]
        lines.append(f"| {scene} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(row: Row, best: float) -> str:
    mean = f"{row['mean_s']:.2f}"
    return f"{f'**{mean}**' if row['mean_s'] == best else mean} / {row['p90_s']:.2f}"


def filled(page: str, shown: str) -> str:
    """The page with these tables; ConfigError: it has no place for them."""
    if BEGIN not in page or END not in page:
        raise ConfigError(f"docs: no lines {BEGIN!r} and {END!r}", field="docs")
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n\n{shown}\n\n{END}{rest.split(END, 1)[1]}"
