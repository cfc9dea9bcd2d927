"""`kvmesh trace`: the spans of one request as a tree, from the JSON lines of a run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors, wide_enough
from kvmesh.cli.trace_svg import drawing, ticks
from kvmesh.cli.trace_tree import SpanNode, TimeCoverage, coverage, trees
from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError

_BAR = 32
_WIDE = 110  # columns from which on there is room for bars
_FLUSH_S = 3.0  # services write their spans about once a second, each on its own
# What a reader wants to see beside a span's name, and how it is called there.
_SHOWN = {
    "kvmesh.cached_tokens": "cached",
    "kvmesh.computed_tokens": "computed",
    "kvmesh.chunks": "chunks",
    "kvmesh.stage.busy_ms": "busy",
    "kvmesh.stage.idle_ms": "idle",
    "kvmesh.bubble": "bubble",
    "kvmesh.transfer.bytes": "bytes",
    "kvmesh.transfer.transport": "over",
    "kvmesh.blocks": "blocks",
    "kvmesh.pull.holder": "from",
    "kvmesh.call.path": "by",
    "kvmesh.keys": "keys",
    "kvmesh.lease.tiers": "leased",
    "kvmesh.lease.end": "then",
    "kvmesh.read.count": "reads",
    "kvmesh.read.bytes": "bytes",
    "kvmesh.preemptions": "preemptions",
    "kvmesh.attempt": "attempt",
    "gen_ai.usage.input_tokens": "prompt",
    "gen_ai.usage.output_tokens": "output",
    "error.type": "error",
}


def read_spans(folder: Path) -> Iterator[dict[str, Any]]:
    """Every span in the JSON-lines files of `folder`; a last line that is still being written is left out."""
    seen: set[int] = set()  # inodes: a file that is renamed meanwhile is read once, the one before it too
    for _ in range(3):
        for path in sorted(folder.glob("*.jsonl")):
            with contextlib.suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode in seen:
                    continue
                seen.add(inode)
                for line in file:
                    try:
                        yield json.loads(line)
                    except ValueError:
                        continue


def find_trace(spans: list[dict[str, Any]], wanted: str) -> list[dict[str, Any]]:
    """The spans of the one trace that `wanted` names: a request id, a response id, or the start of a trace id.

    InvalidRequest: none, or several."""
    bare = wanted.removeprefix("chatcmpl-").removeprefix("cmpl-")
    ids = {span["trace_id"] for span in spans if span["attributes"].get("kvmesh.request_id") in (wanted, bare)}
    if not ids and len(wanted) >= 6:
        ids = {span["trace_id"] for span in spans if span["trace_id"].startswith(wanted.lower())}
    if len(ids) != 1:
        why = "no span of this run has it" if not ids else f"{len(ids)} traces have it"
        raise InvalidRequest.of("request_id", wanted, why)
    (trace_id,) = ids
    return [span for span in spans if span["trace_id"] == trace_id]


@one_line_errors
def trace(
    request_id: Annotated[str | None, typer.Argument(help="Request id, response id or trace id.")] = None,
    last: Annotated[bool, typer.Option("--last", help="The request that ended last.")] = False,
    run_dir: RunDir = None,
    trace_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of spans, as `kvmesh serve --trace-dir` writes them, in place of a run's."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The spans, one JSON object a line.")] = False,
    svg: Annotated[Path | None, typer.Option("--svg", help="File to draw the trace to, as SVG.")] = None,
) -> None:
    """Show where the time of one request went: its spans through all services, as a tree.

    Examples:

        kvmesh trace --last

        kvmesh trace chatcmpl-3f2a9c

        kvmesh trace --last --trace-dir /var/lib/kvmesh/traces

        kvmesh trace --last --svg trace.svg

    Below the tree stands how much of the time to the first token no span explains, and where.
    """
    if trace_dir is not None and not trace_dir.is_dir():
        raise ConfigError(f"trace_dir={str(trace_dir)!r}: no such folder", field="trace_dir")
    if bool(request_id) == last:
        raise ConfigError("name a request id, or give --last")
    folder, written = _where(run_dir, trace_dir)
    deadline = time.monotonic() + (_FLUSH_S if written else 0)
    while True:
        late = time.monotonic() > deadline
        try:
            chosen = _choose(folder, request_id)
        except KvmeshError:
            if late:
                raise
        else:
            if late or whole(chosen):
                break
        time.sleep(0.1)
    out = console()
    if as_json:
        for span in sorted(chosen, key=lambda span: span["start_ns"]):
            out.out(json.dumps(span), highlight=False)
        return
    roots = trees(chosen)
    if svg is not None:
        try:
            svg.write_text(drawing(chosen[0]["trace_id"], roots), encoding="utf-8")
        except OSError as err:
            raise ConfigError(f"svg={str(svg)!r}: {err.strerror}", field="svg") from None
    out.print(f"trace {chosen[0]['trace_id']}, {len(chosen)} spans")
    wide_enough(out)
    out.print(_table(roots, out))
    told = coverage(roots)
    if told is not None:
        for line in _untold(told):
            out.print(line, markup=False, highlight=False, soft_wrap=True)


def _untold(told: TimeCoverage) -> list[str]:
    """Says how much of the time is in no span, and where the longer stretches are."""
    share = 100 * told.untold_ns / max(told.ns, 1)
    lines = [f"{told.what} {told.ns / 1e6:.1f} ms, of which {told.untold_ns / 1e6:.1f} ms ({share:.1f}%) in no span"]
    for gap in told.gaps:
        around = ", ".join(filter(None, (gap.after and f"after {gap.after}", gap.before and f"before {gap.before}")))
        at, inside = (gap.start_ns - told.start_ns) / 1e6, f"{gap.inside.name} ({gap.inside.where})"
        lines.append(f"  {gap.ns / 1e6:.1f} ms from {at:.1f} ms on, in {inside}{': ' if around else ''}{around}")
    return lines


def _where(run_dir: Path | None, trace_dir: Path | None) -> tuple[Path, bool]:
    """The folder of spans, and whether services may still write there. ConfigError: there is none."""
    if trace_dir is not None:
        if run_dir is not None:
            raise ConfigError(f"trace_dir={str(trace_dir)!r}: not with --run-dir", field="trace_dir")
        return trace_dir, True
    run = runs.find(run_dir)
    if run_dir is None and not run.running:
        text = f"of the mesh of {run.run_dir}, which has stopped; --trace-dir shows the spans of other services"
        console(stderr=True).print(text, style="dim", markup=False, soft_wrap=True)
    return run.run_dir / "traces", run.running


def _choose(folder: Path, request_id: str | None) -> list[dict[str, Any]]:
    """The spans of the request, or of the one that ended last."""
    spans = list(read_spans(folder))
    if not spans:
        raise ConfigError(f"{folder} holds no spans yet: send a request first")
    if request_id:
        return find_trace(spans, request_id)
    roots = [span for span in spans if span["service"] == "gateway"] or spans
    latest = max(roots, key=lambda span: span["end_ns"])
    return [span for span in spans if span["trace_id"] == latest["trace_id"]]


def whole(spans: list[dict[str, Any]]) -> bool:
    """Has every service written its part of this trace? A placed request has a span at decode, which comes last."""
    known = {span["span_id"] for span in spans}
    names = {span["name"] for span in spans}
    ended = any(span["service"] == "gateway" and span["parent"] not in known for span in spans)
    orphans = any(span["service"] != "gateway" and span["parent"] not in known for span in spans)
    served = {span["parent"] for span in spans if span["name"] == "kvmesh.serve"}
    leased = {
        span["parent"]
        for span in spans
        if span["name"] == "kvmesh.lease" and span["attributes"].get("kvmesh.lease.blocks")
    }
    return ended and not orphans and leased <= served and ("kvmesh.place" not in names or "kvmesh.request" in names)


def _table(roots: list[SpanNode], out: Console) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    wide = out.width >= _WIDE or not out.is_terminal
    for name, justify in (("span", "left"), ("where", "left"), ("start", "right"), ("took", "right")):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    first = min(node.start_ns for node in roots)
    length = max(1, max(_last_end(node) for node in roots) - first)
    if wide:  # a narrow screen shows numbers, not bars
        table.add_column(_axis(length / 1e6), no_wrap=True)
    table.add_column("", style="dim")
    for root in roots:
        _rows(table, root, "", "", first, length, wide)
    return table


def _axis(length_ms: float) -> str:
    """The marks above the bars: each number begins where its time is."""
    line = ""
    for ms in ticks(length_ms, 5):
        text, at = f"{ms:g}", int(ms * _BAR / length_ms)
        if len(line) <= at <= _BAR - len(text) - len(" ms"):
            line = line.ljust(at) + text + " "
    return line + "ms"


def _last_end(node: SpanNode) -> int:
    return max([node.end_ns, *map(_last_end, node.children)])


def _told(name: str, value: Any) -> bool:
    """Is it worth a reader's attention? First attempts and requests without preemption are the rule."""
    return value is not None and not (value == 0 and name in ("attempt", "preemptions"))


def _shown(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value / 1024:,.0f} KiB"
    if name in ("busy", "idle"):
        return f"{name}={value:.1f} ms"
    if name == "bubble":
        return f"{name}={value:.1%}"
    return f"{name}={escape(str(value))}"


def _rows(table: Table, node: SpanNode, head: str, tail: str, first: int, length: int, wide: bool) -> None:
    span = node.span
    attributes = span["attributes"]
    shown = [_shown(name, attributes[key]) for key, name in _SHOWN.items() if _told(name, attributes.get(key))]
    name = escape(str(span["name"]))
    if span["status"]:
        name = f"[red]{name}[/]"
        shown.append(escape(str(span["status"])))
    left = (node.start_ns - first) * _BAR // length
    width = max(1, round((node.end_ns - node.start_ns) * _BAR / length))
    line = "━" * min(width, _BAR - min(left, _BAR - 1))
    if node.pieces:  # a stage of a pipeline: busy in its chunks, idle between them
        name = f"{name} {attributes.get('kvmesh.stage.number', '')}"
        marks = [(piece.start_ns, piece.end_ns) for piece in node.pieces]
        middles = [
            node.start_ns + (2 * at + 1) * (node.end_ns - node.start_ns) // (2 * len(line)) for at in range(len(line))
        ]
        line = "".join("━" if any(start <= at < end for start, end in marks) else "╌" for at in middles)
    bar = " " * min(left, _BAR - 1) + "[cyan]" + line + "[/]"
    table.add_row(
        f"{head}{name}",
        escape(str(span.get("instance") or span["service"])),
        f"{(node.start_ns - first) / 1e6:.1f} ms",
        f"{(node.end_ns - node.start_ns) / 1e6:.1f} ms",
        *((bar,) if wide else ()),
        " ".join(shown),
    )
    children = [] if node.pieces else node.children
    for index, child in enumerate(children):
        final = index == len(children) - 1
        _rows(table, child, tail + ("└─ " if final else "├─ "), tail + ("   " if final else "│  "), first, length, wide)
