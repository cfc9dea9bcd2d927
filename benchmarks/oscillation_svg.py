"""Load curves of prefill and decode, one chart a mode of admission, as one SVG for a page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.sim.report.html import STYLE
from kvmesh.sim.report.plots import HEIGHT, WIDTH, Chart, Line, draw

HEAD = 34
_SVG = re.compile(r"<svg [^>]*>(.*)</svg>", re.S)
_DROPPED = re.compile(r"<circle.*?</circle>", re.S)  # hover titles: an image answers to no pointer


@dataclass(frozen=True)
class Curves:
    """Over seconds: prompts in prefill, rows in decode."""

    at_s: Sequence[float]
    prefill: Sequence[float]
    decode: Sequence[float]


def drawing(modes: Mapping[str, Curves]) -> str:
    """One chart beside the other, all on the same scale."""
    top = max(max(max(one.prefill), max(one.decode)) for one in modes.values())
    parts = []
    for n, (mode, one) in enumerate(modes.items()):
        lines = [
            Line("prompts in prefill", list(zip(one.at_s, one.prefill, strict=True)), 0),
            Line("rows in decode", list(zip(one.at_s, one.decode, strict=True)), 1),
            Line("", [(one.at_s[0], top)], 7),  # a point that holds the scale
        ]
        found = _SVG.search(draw(Chart("", "seconds", "requests", lines)))
        assert found is not None, "a chart with points is drawn as SVG"
        inner = _DROPPED.sub("", found[1])
        at = n * WIDTH
        parts.append(f'<text class="label" x="{at + WIDTH / 2}" y="22" text-anchor="middle">admission {mode}</text>')
        parts.append(f'<svg x="{at}" y="{HEAD}" width="{WIDTH}" height="{HEIGHT}">{inner}</svg>')
    style = "".join(line for line in STYLE.splitlines() if _wanted(line))
    wide, high = len(modes) * WIDTH, HEAD + HEIGHT + 26
    legend = (
        f'<path class="line k0" d="M{wide / 2 - 190} {high - 14}h24"/><text x="{wide / 2 - 160}" y="{high - 10}">'
        f'prompts in prefill, waiting or computed</text><path class="line k1" d="M{wide / 2 + 100} {high - 14}h24"/>'
        f'<text x="{wide / 2 + 130}" y="{high - 10}">rows in decode</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="system-ui, sans-serif">\n'
        f"<style>{style}</style>\n"
        f'<rect width="{wide}" height="{high}" fill="var(--bg)"/>\n{"".join(parts)}{legend}\n</svg>\n'
    )


def _wanted(line: str) -> bool:
    """Rules of lines, axes and colours."""
    return line.startswith((":root", "--", "@media", "svg text", "svg .label", ".grid{", ".line", ".k0", ".k4"))
