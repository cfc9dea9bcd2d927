"""Our figures beside Mooncake's (FAST'25), from one parameter file: `benchmarks/paper_parameters.toml`.

Every figure is a number of whole runs of the simulator on the conversation trace (figure g: on a synthetic workload),
with the brains that serve. docs/reports/paper.md names the assumptions and, where ours differ by more than 30%, the
reason.

    python -m benchmarks.paper                              # all: about 25 runs of one to three minutes each
    python -m benchmarks.paper --only a,e                   # some; their runs alone
    python -m benchmarks.paper --requests 1000              # a quick look: caches are cold, nothing is to be concluded
    python -m benchmarks.paper --json benchmarks/results/paper.json --jobs 2
    python -m benchmarks.paper --show benchmarks/results/paper.json         # what was made before; runs nothing

`--json` keeps what the file has of other figures, if they were made from the same parameters, trace and requests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.paper_figures import FIGURES, WITHIN, Figure, Panel
from benchmarks.paper_runs import Inputs, Told, simulate_all
from benchmarks.paper_setup import PARAMETERS, Case, read
from kvmesh.cli.sim.progress import progress
from kvmesh.errors import ConfigError
from kvmesh.sim.workloads.workload import mooncake

TRACE = Path(__file__).resolve().parents[2] / "shared" / "traces" / "conversation_trace.jsonl"


def main() -> int:
    """0: all figures were made; whether they agree with the paper is for the reader."""
    options = _options()
    try:
        made = _make(options) if options.show is None else _read(options.show)
    except ConfigError as err:
        print(f"paper: {err}", file=sys.stderr)
        return 2
    console = Console()
    for one in made["figures"].values():
        _show(console, one)
    if options.json is not None and options.show is None:
        _write(options.json, made)
    return 0


def _read(path: Path) -> dict[str, Any]:
    """What `--json` wrote."""
    try:
        made: dict[str, Any] = json.loads(path.read_text())
        return {"figures": made["figures"]}
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"show={str(path)!r}: not a file of this benchmark: {err}", field="show") from None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ",".join(figure.name for figure in FIGURES)
    parser.add_argument("--only", default=names, metavar="NAME,...", help=f"of {names}")
    parser.add_argument("--requests", type=int, default=None, metavar="N", help="the first N of each workload")
    parser.add_argument("--trace", type=Path, default=TRACE, metavar="FILE", help="the conversation trace")
    parser.add_argument("--parameters", type=Path, default=PARAMETERS, metavar="FILE")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="runs at a time")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="all numbers, written here")
    parser.add_argument("--show", type=Path, default=None, metavar="FILE", help="print such a file, and run nothing")
    return parser.parse_args()


def _make(options: argparse.Namespace) -> dict[str, Any]:
    if options.jobs < 1:
        raise ConfigError(f"jobs={options.jobs}: must be at least 1", field="jobs")
    chosen = _chosen(options.only)
    inputs = Inputs(read(options.parameters), options.trace, options.requests)
    cases = list(dict.fromkeys(case for figure in chosen for case in figure.cases.values()))
    began = time.monotonic()
    told = _simulate(inputs, cases, options.jobs) if cases else {}
    figures = {}
    for figure in chosen:
        panels = figure.panels(inputs, {name: told[case] for name, case in figure.cases.items()})
        figures[figure.name] = {"title": figure.title, "panels": [_plain(panel) for panel in panels]}
    return {
        "trace": options.trace.name,
        "requests": options.requests,
        "parameters": inputs.parameters.told(),
        "wall_s": round(time.monotonic() - began, 1),
        "figures": figures,
        "runs": {case.name: told[case] for case in cases},
    }


def _chosen(only: str) -> list[Figure]:
    known = {figure.name: figure for figure in FIGURES}
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ConfigError(f"only={name!r}: choose of {', '.join(known)}", field="only")
    return [figure for name, figure in known.items() if name in names]


def _simulate(inputs: Inputs, cases: Sequence[Case], jobs: int) -> dict[Case, Told]:
    at = inputs.parameters
    whole = inputs.limit or sum(1 for _ in mooncake(inputs.trace))
    total = sum(min(whole, at.synthetic.requests) if case.synthetic else whole for case in cases)
    with progress("paper", total, "requests") as tell:
        return simulate_all(
            inputs, cases, jobs, lambda requests, runs: tell(requests, f"{runs} of {len(cases)} runs over")
        )


def _plain(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "unit": panel.unit,
        "base": panel.base,
        "lines": [{**asdict(line), "ratio": panel.ratio(line)} for line in panel.lines],
        "ordered": panel.ordered,
        "within": panel.within,
        "claim": panel.claim,
        "holds": panel.holds,
    }


def verdict(panel: Mapping[str, Any]) -> str:
    """In words; "" where nothing is compared."""
    said = []
    if panel["ordered"] is not None:
        said.append("same order" if panel["ordered"] else "ANOTHER ORDER")
    if panel["within"] is not None:
        said.append(f"ratios {'within' if panel['within'] else 'NOT all within'} {WITHIN:.0%}")
    if panel["claim"]:
        said.append(f"{panel['claim']}: {'yes' if panel['holds'] else 'NO'}")
    return "; ".join(said)


def _show(console: Console, figure: Mapping[str, Any]) -> None:
    for panel in figure["panels"]:
        unit = f", {panel['unit']}" if panel["unit"] else ""
        table = Table(title=panel["title"] + unit, title_justify="left", title_style="bold", caption_justify="left")
        table.caption = verdict(panel)
        table.add_column("")
        for column in ("ours", "paper", "ours / paper"):
            table.add_column(column, justify="right")
        table.add_column("")
        for line in panel["lines"]:
            paper = (
                ""
                if line["paper"] is None
                else f"{line['paper']:,.3g}"
                if line["paper"] < 100
                else f"{line['paper']:,}"
            )
            ratio = "" if line["ratio"] is None else f"{line['ratio']:.2f}"
            table.add_row(line["label"], f"{line['ours']:,.3f}", paper, ratio, line["note"])
        console.print(table)
        console.print()


def _write(path: Path, made: dict[str, Any]) -> None:
    same = ("trace", "requests", "parameters")
    if path.exists():
        old = json.loads(path.read_text())
        if all(json.dumps(old.get(name)) == json.dumps(made[name]) for name in same):
            for name in ("figures", "runs"):
                made[name] = dict(sorted({**old[name], **made[name]}.items()))
            made["wall_s"] = round(made["wall_s"] + old["wall_s"], 1)
    path.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
