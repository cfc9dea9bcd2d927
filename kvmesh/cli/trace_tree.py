"""The spans of one trace as a tree, and the time that no span explains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

_LEAST_NS = 500_000  # a shorter gap is not named
_LEAST_SHARE = 0.01  # of what is looked at, likewise
_STAGE = "kvmesh.stage"


@dataclass
class SpanNode:
    """A span and what happened inside it."""

    span: dict[str, Any]
    children: list[SpanNode] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.span["name"])

    @property
    def where(self) -> str:
        """The instance, or the service, that it was in."""
        return str(self.span.get("instance") or self.span["service"])

    @property
    def start_ns(self) -> int:
        return int(self.span["start_ns"])

    @property
    def end_ns(self) -> int:
        return int(self.span["end_ns"])

    @property
    def pieces(self) -> list[SpanNode]:
        """The spans that are shown in this one's own row: the chunks of a pipeline's stage."""
        return self.children if self.name == _STAGE else []

    def rows(self, depth: int = 0) -> Iterator[tuple[int, SpanNode]]:
        """Yields (depth, span) as `all` does, without what is shown in another's row."""
        yield depth, self
        for child in [] if self.pieces else self.children:
            yield from child.rows(depth + 1)

    def all(self, depth: int = 0) -> Iterator[tuple[int, SpanNode]]:
        """Yields (depth, span) of this span and everything below it, in order."""
        yield depth, self
        for child in self.children:
            yield from child.all(depth + 1)


def trees(spans: list[dict[str, Any]]) -> list[SpanNode]:
    """The roots of one trace, everything in order of time. A span whose parent is not here is a root."""
    nodes = {span["span_id"]: SpanNode(span) for span in spans}
    roots: list[SpanNode] = []
    for node in nodes.values():
        parent = nodes.get(node.span["parent"])
        (parent.children if parent else roots).append(node)
    for node in nodes.values():
        node.children.sort(key=lambda child: (child.start_ns, -child.end_ns))
    return sorted(roots, key=lambda node: node.start_ns)


@dataclass(frozen=True)
class Gap:
    """Time in `inside`, a span that has others below it, in which none of these runs. `after` and `before` are the ones
    around it; "" at the ends."""

    start_ns: int
    end_ns: int
    inside: SpanNode
    after: str
    before: str

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class TimeCoverage:
    """How much of the time from `start_ns` to `end_ns` ("TTFT", or "request") is in spans that have no others below
    them. `gaps` are the longer stretches that are not, the first one first; `untold_ns` is all of it."""

    what: str
    start_ns: int
    end_ns: int
    untold_ns: int
    gaps: tuple[Gap, ...]

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


def coverage(roots: list[SpanNode]) -> TimeCoverage | None:
    """Looks at the TTFT of the gateway's span; at the whole request where there was no first token. None: the trace has
    no span of a gateway."""
    found = [node for root in roots for _, node in root.all() if "gen_ai.operation.name" in node.span["attributes"]]
    if not found:
        return None
    gateway = found[0]
    ttft_ms = gateway.span["attributes"].get("kvmesh.ttft_ms")
    end = gateway.end_ns if ttft_ms is None else gateway.start_ns + math.ceil(ttft_ms * 1e6)
    nodes = [node for _, node in gateway.all()]
    leaves = sorted((node for node in nodes if not node.children), key=lambda node: node.start_ns)
    gaps, untold = [], 0
    for start, until in _uncovered(leaves, gateway.start_ns, end):
        untold += until - start
        if until - start < max(_LEAST_NS, (end - gateway.start_ns) * _LEAST_SHARE):
            continue
        around = [node for node in nodes if node.children and node.start_ns <= start and until <= node.end_ns]
        ended = [node for node in leaves if node.end_ns <= start]
        begun = [node for node in leaves if node.start_ns >= until]
        after = max(ended, key=lambda node: node.end_ns).name if ended else ""
        gaps.append(Gap(start, until, around[-1] if around else gateway, after, begun[0].name if begun else ""))
    return TimeCoverage("request" if ttft_ms is None else "TTFT", gateway.start_ns, end, untold, tuple(gaps))


def _uncovered(spans: Iterable[SpanNode], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the stretches of [start, end) in none of these spans, which are in order of their starts."""
    at = start
    for node in spans:
        if node.start_ns >= end:
            break
        if node.start_ns > at:
            yield at, node.start_ns
        at = max(at, node.end_ns)
    if at < end:
        yield at, end
