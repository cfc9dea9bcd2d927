"""Charts as inline SVG: axes, ticks, lines, legends, hover titles. Colours come from the page's style (classes k0..k7),
so that one drawing serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 460, 270  # of the drawing; the page scales it to its column
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 12, 44
COLOURS = 8
HOVER = 48  # points of a line that answer to a pointer
_TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One line of a chart, in the colour of `colour`; points whose y is None are left out by who makes it."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """What is drawn. `marks`: labelled vertical lines. `steps`: lines rise in steps, as shares of a whole do."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_log: bool = False
    percent: bool = False  # y is a share
    steps: bool = False
    marks: Sequence[tuple[float, str]] = ()
    note: str = ""


def number(value: float) -> str:
    """Short, for a tick or a hover title: three digits that matter."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            divisor = {"G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{value / divisor:.3g}{unit}"
    return f"{value:.0f}" if size >= 100 else f"{value:.3g}"


def nice_ticks(low: float, high: float, count: int = _TICKS) -> list[float]:
    """Round numbers that cover low..high: multiples of 1, 2, 2.5 or 5 times a power of ten."""
    if not high > low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(at * step, 12) for at in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten that cover low..high, with 2 and 5 between them where there are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 3 else (1, 2, 5)
    found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    inside = [one for one in found if low * 0.999 <= one <= high * 1.001]
    below = max((one for one in found if one < low * 0.999), default=None)
    above = min((one for one in found if one > high * 1.001), default=None)
    return [*([below] if below else []), *inside, *([above] if above else [])]


@dataclass
class _Axis:
    """Numbers → places along one side."""

    ticks: Sequence[float]
    least: float  # stands at `start`
    most: float
    start: float
    end: float
    log: bool = False
    place: Callable[[float], float] = field(init=False)

    def __post_init__(self) -> None:
        scale: Callable[[float], float] = math.log10 if self.log else float
        low, high = scale(self.least), scale(self.most)
        rate = (self.end - self.start) / ((high - low) or 1.0)
        floor = self.least
        self.place = lambda value: self.start + (scale(max(value, floor) if self.log else value) - low) * rate


def draw(chart: Chart) -> str:
    """A figure: title, SVG, legend, note. Without any point: says so."""
    points = [point for line in chart.lines for point in line.points if not chart.x_log or point[0] > 0]
    if not points:
        body = '<p class="none">nothing to show</p>'
    else:
        x, y = _axes(chart, points)
        parts = [*_grid(chart, x, y), *_marks(chart, x)]
        for line in chart.lines:
            parts += _line(chart, line, x, y)
        label = escape(f"{chart.title}: {chart.y_label} over {chart.x_label}", quote=True)
        box = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}"'
        body = f"<svg {box}>{''.join(parts)}</svg>{_legend(chart.lines)}"
    note = f'<p class="note">{escape(chart.note)}</p>' if chart.note else ""
    return f"<figure><figcaption>{escape(chart.title)}</figcaption>{body}{note}</figure>"


def _axes(chart: Chart, points: Sequence[Point]) -> tuple[_Axis, _Axis]:
    xs = [x for x, _ in points] + [x for x, _ in chart.marks if x > 0 or not chart.x_log]
    top = 1.0 if chart.percent else max(0.0, *(y for _, y in points)) if len(points) > 1 else max(0.0, points[0][1])
    low, high = min(xs), max(xs)
    x_ticks = log_ticks(low, max(high, low * 1.01)) if chart.x_log else nice_ticks(low, high)
    y_ticks = nice_ticks(0.0, top or 1.0)
    if not chart.x_log:  # the line goes from side to side
        inside = [tick for tick in x_ticks if low <= tick <= high]
        x_ticks, ends = inside, (low, high if high > low else x_ticks[-1])
    else:
        ends = (x_ticks[0], x_ticks[-1])
    x = _Axis(x_ticks, *ends, LEFT, WIDTH - RIGHT, chart.x_log)
    return x, _Axis(y_ticks, y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)


def _grid(chart: Chart, x: _Axis, y: _Axis) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for tick in y.ticks:
        at = y.place(tick)
        text = f"{tick:.0%}" if chart.percent else number(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{right}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    shown = -math.inf
    for tick in x.ticks:
        at = x.place(tick)
        if at - shown < 30:
            continue
        shown = at
        parts.append(f'<path class="grid" d="M{at:.1f} {TOP}V{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
    across, up = (LEFT + right) / 2, (TOP + bottom) / 2
    parts.append(_label(chart.x_label, across, HEIGHT - 8))
    parts.append(_label(chart.y_label, 13, up, f' transform="rotate(-90 13 {up})"'))
    return parts


def _label(text: str, x: float, y: float, more: str = "") -> str:
    return f'<text class="label" x="{x}" y="{y}" text-anchor="middle"{more}>{escape(text)}</text>'


def _marks(chart: Chart, x: _Axis) -> list[str]:
    parts = []
    for row, (value, text) in enumerate(chart.marks):
        at = x.place(value)
        parts.append(f'<path class="mark" d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        near_end = at > WIDTH - 90
        anchor, move = ("end", -4) if near_end else ("start", 4)
        y = HEIGHT - BOTTOM - 8 - 15 * (row % 4)
        parts.append(f'<text class="marked" x="{at + move:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')
    return parts


def _line(chart: Chart, line: Line, x: _Axis, y: _Axis) -> list[str]:
    points = [point for point in line.points if not chart.x_log or point[0] > 0]
    if not points:
        return []
    placed = [(x.place(a), y.place(b)) for a, b in points]
    path = f"M{placed[0][0]:.1f} {placed[0][1]:.1f}"
    for across, up in placed[1:]:
        path += f"H{across:.1f}V{up:.1f}" if chart.steps else f"L{across:.1f} {up:.1f}"
    kind = f"line k{line.colour % COLOURS}" + (" dashed" if line.dashed else "")
    parts = [f'<path class="{kind}" d="{path}"/>']
    every = max(1, len(points) // HOVER)
    for at in range(0, len(placed), every):
        (across, up), (a, b) = placed[at], points[at]
        told = f"{line.name}: {number(b * 100) + '%' if chart.percent else number(b)} at {number(a)}"
        dot = f"dot k{line.colour % COLOURS}" if line.dots else "hover"
        radius = 4 if line.dots else 7
        parts.append(
            f'<circle class="{dot}" cx="{across:.1f}" cy="{up:.1f}" r="{radius}"><title>{escape(told)}</title></circle>'
        )
    return parts


def _legend(lines: Sequence[Line]) -> str:
    if len(lines) < 2:
        return ""
    keys = (
        f'<span><i class="k{line.colour % COLOURS}{" dashed" if line.dashed else ""}"></i>{escape(line.name)}</span>'
        for line in lines
    )
    return f'<div class="legend">{"".join(keys)}</div>'
