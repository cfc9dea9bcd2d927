"""One trace as a picture: a row a span, time from left to right, and the time that no span explains."""

from __future__ import annotations

from html import escape

from kvmesh.cli.trace_tree import SpanNode, coverage

ROW, HEAD, LABEL, PLOT, RIGHT = 22, 64, 430, 720, 90
# Of each service, and of holders and stores, on a light and on a dark page.
_COLOURS = {
    "gateway": "#4c78a8",
    "conductor": "#b279a2",
    "prefill": "#f58518",
    "decode": "#54a24b",
    "coupled": "#54a24b",
    "store": "#9d755d",
    "pool": "#439894",
}
_OTHER = "#888888"
OPAQUE, FAINT = "", ' fill-opacity=".25"'
_STYLE = """
text{font:12px system-ui,sans-serif;fill:var(--ink)} .dim{fill:var(--dim)} .grid{stroke:var(--grid)}
.gap{fill:#e45756;fill-opacity:.18} .failed{stroke:#e45756;stroke-width:2}
:root{--bg:#ffffff;--ink:#1c1c1c;--dim:#666666;--grid:#dddddd}
@media (prefers-color-scheme:dark){:root{--bg:#181818;--ink:#e8e8e8;--dim:#a0a0a0;--grid:#3a3a3a}}
"""


def ticks(length_ms: float, most: int = 8) -> list[float]:
    """Returns round marks from 0 on, at most `most` of them, for an axis of so many ms."""
    step = 10.0**-3
    while True:
        for one in (1, 2, 5):
            if length_ms / (step * one) < most:
                return [step * one * i for i in range(int(length_ms / (step * one)) + 1)]
        step *= 10


def drawing(trace_id: str, roots: list[SpanNode]) -> str:
    """Returns the SVG."""
    rows = [row for root in roots for row in root.rows()]
    every = [node for root in roots for _, node in root.all()]
    first = min(node.start_ns for node in every)
    length = max(1, max(node.end_ns for node in every) - first)
    high = HEAD + ROW * len(rows) + 30

    def x(ns: int) -> float:
        return LABEL + (ns - first) * PLOT / length

    parts = []
    told = coverage(roots)
    if told is not None:
        share = 100 * (1 - told.untold_ns / max(told.ns, 1))
        text = f"{told.what} {told.ns / 1e6:.1f} ms, {share:.1f}% of it in named spans"
        parts.append(f'<text class="dim" x="12" y="40">{escape(text)}</text>')
        for gap in told.gaps:
            left, wide = x(gap.start_ns), max(1.0, gap.ns * PLOT / length)
            title = f"{gap.ns / 1e6:.1f} ms in no span below {gap.inside.name} ({gap.inside.where})"
            parts.append(
                f'<rect class="gap" x="{left:.1f}" y="{HEAD - 6}" width="{wide:.1f}" height="{high - HEAD - 18}">'
                f"<title>{escape(title)}</title></rect>"
            )
        parts.append(
            f'<path stroke="#e45756" stroke-dasharray="4 3" d="M{x(told.end_ns):.1f} {HEAD - 6}V{high - 24}"/>'
        )
    for ms in ticks(length / 1e6):
        at = x(first + int(ms * 1e6))
        parts.append(f'<path class="grid" d="M{at:.1f} {HEAD - 6}V{high - 24}"/>')
        parts.append(f'<text class="dim" x="{at:.1f}" y="{high - 8}" text-anchor="middle">{ms:g} ms</text>')
    for n, (depth, node) in enumerate(rows):
        y = HEAD + n * ROW
        colour = _COLOURS.get(str(node.span["service"]), _OTHER)
        wide = max(1.5, (node.end_ns - node.start_ns) * PLOT / length)
        failed = ' class="failed"' if node.span["status"] else ""
        name, stage = node.name.removeprefix("kvmesh."), node.span["attributes"].get("kvmesh.stage.number")
        label = name if stage is None else f"{name} {stage}"
        parts.append(
            f'<text x="{12 + 14 * depth}" y="{y + 14}">{escape(label)}</text>'
            f'<text class="dim" x="{LABEL - 110}" y="{y + 14}">{escape(node.where[:16])}</text>'
            f'<rect x="{x(node.start_ns):.1f}" y="{y + 3}" width="{wide:.1f}" height="{ROW - 7}" rx="2" '
            f'fill="{colour}"{failed}{OPAQUE if not node.pieces else FAINT}/>'
        )
        for piece in node.pieces:
            wide = max(0.8, (piece.end_ns - piece.start_ns) * PLOT / length - 0.7)
            told = piece.span["attributes"]
            title = (
                f"tokens {told.get('kvmesh.chunk.start', '')} to {told.get('kvmesh.chunk.end', '')}: "
                f"{(piece.end_ns - piece.start_ns) / 1e6:.1f} ms, "
                f"idle before {told.get('kvmesh.stage.idle_ms', 0):.1f} ms"
            )
            parts.append(
                f'<rect x="{x(piece.start_ns):.1f}" y="{y + 3}" width="{wide:.1f}" height="{ROW - 7}" '
                f'fill="{colour}"><title>{escape(title)}</title></rect>'
            )
        parts.append(
            f'<text class="dim" x="{min(x(node.end_ns), LABEL + PLOT) + 5:.1f}" y="{y + 14}">'
            f"{(node.end_ns - node.start_ns) / 1e6:.1f} ms</text>"
        )
    wide = LABEL + PLOT + RIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}">'
        f'<style>{_STYLE}</style><rect width="{wide}" height="{high}" fill="var(--bg)"/>'
        f'<text x="12" y="22">trace {escape(trace_id)}</text>{"".join(parts)}</svg>\n'
    )
