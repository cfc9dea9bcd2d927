"""Where a simulation's results go: a folder with a table, a trace, a summary and a report, and the screen."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmesh.cli.console import console, wide_enough
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from kvmesh.sim.report.records import MeshSample, Record

TABLES = ("csv", "parquet", "none")
TRACE = "trace.json.gz"


class RunFiles:
    """Files of one run, written while it goes on: a table of its requests, and their lives as a Chrome trace. Leaving
    makes them whole."""

    def __init__(self, folder: Path | None, table: str, traced: int) -> None:
        """`folder` None: nothing is written. `table`: one of TABLES; `traced`: requests in the trace, 0: none."""
        self._stack = ExitStack()
        self._table: Any = None
        self._trace: Any = None
        if folder is None:
            return
        from kvmesh.sim.report.perfetto import PerfettoTrace
        from kvmesh.sim.report.tables import open_table

        make_folder(folder)
        if table != "none":
            self._table = open_table(folder / f"requests.{table}")
            self._stack.callback(self._table.close)
        if traced:
            file = self._stack.enter_context(gzip.GzipFile(folder / TRACE, "wb", compresslevel=4))
            self._trace = PerfettoTrace(file, traced)  # type: ignore[arg-type]  # a GzipFile is what it writes to
            self._stack.callback(self._trace.close)

    def __enter__(self) -> RunFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def left_out(self) -> int:
        """Requests that the trace has no room for."""
        return self._trace.left_out if self._trace is not None else 0

    def add(self, record: Record) -> None:
        """A request that has ended."""
        if self._table is not None:
            self._table.add(record)
        if self._trace is not None:
            self._trace.add(record)

    def sample(self, sample: MeshSample) -> None:
        """The pools at one moment."""
        if self._trace is not None:
            self._trace.sample(sample)


def make_folder(folder: Path) -> None:
    """ConfigError: it cannot be made, or is a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"out={str(folder)!r}: {err.strerror}", field="out") from None


def check_table(kind: str) -> None:
    """ConfigError: no such kind, or what it needs is missing. Asked before a long run."""
    if kind not in TABLES:
        raise ConfigError(f"table={kind!r}: choose one of {', '.join(TABLES)}", field="table")
    if kind == "parquet":
        from kvmesh.sim.report.tables import need_pyarrow

        need_pyarrow()


def write_report(folder: Path, runs: Sequence[Mapping[str, Any]], title: str) -> None:
    """summary.json and report.html of all runs."""
    from kvmesh.sim.report import html

    make_folder(folder)
    text = json.dumps({"kind": "sim run", "title": title, "runs": runs}, indent=1)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.html").write_text(html.page(runs, title), encoding="utf-8")


def show(runs: Sequence[Mapping[str, Any]], title: str) -> None:
    """A table, a line a run."""
    out = console()
    wide_enough(out)
    bounds = [one["tbt_slo_s"] for one in runs[0]["summary"]["goodput"]]
    heads = ["run", "requests", "done", "refused", "TTFT mean", "P50", "P90", "P99", "TBT P50", "P90", "hit rate"]
    table = _table(*heads, *(f"≤{bound * 1000:g} ms" for bound in bounds), "prefill GPU s", "wall s")
    for run in runs:
        table.add_row(*_cells(run))
    slo_s = runs[0]["summary"]["ttft_slo_s"]
    out.print(f"{title}\n", markup=False)
    out.print(table)
    out.print(
        "\n[dim]TTFT in s, TBT (mean of a request's longest 10% intervals) in ms; hit rate by tokens; ≤ N ms: goodput, "
        f"the share of all requests with TTFT within {slo_s:g} s and TBT within N ms.[/]"
    )


SHOWN_INSTANCES = 16  # of a pool, at most: shares of more say little


def show_more(run: Mapping[str, Any], *, many: bool) -> None:
    """What each instance has done; then, where there is any, what was cached of sessions, how clients were told to come
    again, and when changes were noticed. `many`: other runs are shown, too."""
    told = run["summary"]
    blocks = [
        *(_shares(pool, sums) for pool, sums in told["instances"].items() if 1 < len(sums) <= SHOWN_INSTANCES),
        *_told_sentences(told),
    ]
    changed = _changes(told.get("changes", ()))
    if changed is not None:
        blocks.append(changed)
    out = console()
    if many and blocks:
        out.print(f"\n{run['name']}", markup=False)
    for block in blocks:
        out.print()
        out.print(block)


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left")
    return table


def _shares(pool: str, sums: Mapping[str, Mapping[str, int]]) -> Table:
    """Makes a table with a line for each instance: its requests and tokens, and their shares of the pool's."""
    whats = [
        ("requests", "requests"),
        ("prompt tokens", "input"),
        ("computed", "computed"),
        ("answer tokens", "output"),
    ]
    whats = [(head, what) for head, what in whats if any(what in one for one in sums.values())]
    table = _table(pool, *(cell for head, _ in whats for cell in (head, "")))
    whole = {what: sum(one.get(what, 0) for one in sums.values()) for _, what in whats}
    for name, one in sums.items():
        cells = []
        for _, what in whats:
            count = one.get(what, 0)
            cells += [f"{count:,}", f"{count / whole[what]:.0%}" if whole[what] else "-"]
        table.add_row(name, *cells)
    return table


def _told_sentences(told: Mapping[str, Any]) -> list[str]:
    found = []
    if told["left_cached"] is not None:
        found.append(f"cached of what the turn before had: {told['left_cached']:.1%}")
    retry = told["retry"]
    if retry["told"]:
        ratio = retry["told_over_right"]
        parts = [f"{retry['told']:,} times a client was told to come again"]
        if retry["right"] is not None:
            parts.append(f"right within a factor of two: {retry['right']:.0%}")
            spread = " / ".join(_figure(ratio[name]) for name in ("p50", "p90", "max"))
            parts.append(f"told over right: {spread} (P50 / P90 / greatest)")
        if retry["placed"] is not None:
            parts.append(f"taken when they came: {retry['placed']:.0%} of {retry['came']:,}")
        found.append("; ".join(parts))
    return found


def _changes(changes: Sequence[Mapping[str, Any]]) -> Table | None:
    """Makes a table with a line for each change; None: there was none."""
    if not changes:
        return None
    table = _table("change", "from s", "until s", "able to take", "took", "noticed after s", "back after s")
    for one in changes:
        shares = ("-" if one[name] is None else f"{one[name]:.0%}" for name in ("able", "share"))
        spans = (_figure(one[name]) for name in ("from_s", "until_s"))
        after = ("never" if one[name] is None else f"{one[name]:.1f}" for name in ("noticed_s", "back_s"))
        noticed, back = after
        if one["what"] == "joined":
            noticed = "-"
        if one["until_s"] >= one["run_s"]:
            back = "-"
        table.add_row(f"{one['node']} {one['what']}", *spans, *shares, noticed, back)
    return table


def _cells(run: Mapping[str, Any]) -> list[str]:
    told = run["summary"]
    ttft, tbt, ends = told["ttft_s"], told["tbt_s"], told["outcomes"]
    return [
        run["name"],
        f"{told['requests']:,}",
        f"{ends.get('done', 0):,}",
        f"{ends.get('refused', 0):,}",
        *(_figure(ttft[name]) for name in ("mean", "p50", "p90", "p99")),
        *(_figure(tbt[name], 1000) for name in ("p50", "p90")),
        _figure(told["hit_rate"]),
        *(f"{one['share']:.1%}" for one in told["goodput"]),
        f"{told['prefill_gpu_s'] or 0:,.0f}",
        f"{run['wall_s']:.1f}",
    ]


def _figure(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{value * scale:.3g}" if value * scale < 100 else f"{value * scale:,.0f}"
