"""`kvmesh sim run`: a workload on machines that are not there, decided by the brains that serve."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from kvmesh.cli import options as command_options
from kvmesh.cli.console import console, one_line_errors
from kvmesh.cli.sim import build as sim_build
from kvmesh.cli.sim import out as sim_out
from kvmesh.cli.sim.options import Deciding, Machines, Options, Unforeseen, Workload, label, sweeps
from kvmesh.cli.sim.progress import progress
from kvmesh.errors import ConfigError

TRACED = 50_000

HELP = """Serve a workload in virtual time: the product's own conductor, prefill planner, decode batcher and stores, \
on GPUs by their datasheets or by what was fitted on live instances.

Prints TTFT, TBT, hit rate, goodput and prefill GPU time; with --out also writes requests.csv (or Parquet), \
summary.json, report.html and trace.json.gz (for ui.perfetto.dev). docs/operate/simulator.md says what is modelled by \
what, and what is assumed. Examples:

    kvmesh sim run --trace conversation_trace.jsonl --prefill 8 --decode 8 --out run/

    kvmesh sim run --trace conversation_trace.jsonl --coupled 16 --coupled-mode chunked --admission off

    kvmesh sim run --sessions 48x6 --gpus 1 --model qwen3-8b --coupled 4 --unknown --sweep routing=round-robin,conductor

    kvmesh sim run --trace conversation_trace.jsonl --sweep speed=1,2,3 --sweep policy=kvcache,random --out sweep/

    kvmesh sim run --synthetic rate=4,applications=50,turns=4,user=800:1.2 --requests 20000 --gpu h800

    kvmesh sim run --csv load.csv --gpu l20 --gpus 1 --model qwen3-8b --prefill 2 --decode 2

    kvmesh sim run --csv long.csv --prefill 1 --prefill-mesh pp=4,tp=8 --decode 1 --decode-mesh dp=2,tp=8

    kvmesh sim run --synthetic rate=6 --requests 600 --prefill 2 --decode 2 --unknown --noise 0.3 --slow p1:20-50:3

    kvmesh sim run --sessions 24x7,think_s=2 --prefill 3 --decode 2 --unknown --noise 0.3 --kill d0:15+5 --join p3:20

    kvmesh sim run --synthetic rate=1 --closed 16 --requests 400 --slo-ttft 2000 --retries 5 --unknown

Any option can be swept: --sweep prefill=6,8,10 (values apart by ';' where they hold commas). A run with the same \
options and seed gives the same figures.
"""

PANELS = (
    (Workload, "Workload"),
    (Machines, "Machines"),
    (Unforeseen, "What the conductor is not told"),
    (Deciding, "Conductor"),
)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where results go: options of the command, not of one run."""

    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="A run for each value; may stand several times.", metavar="NAME=V,V", rich_help_panel="Output"
        ),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Folder for all that is written.", metavar="DIR", rich_help_panel="Output")
    ] = None
    table: Annotated[
        str, typer.Option(help="A row a request: csv, parquet or none.", metavar="KIND", rich_help_panel="Output")
    ] = "csv"
    traced: Annotated[
        int, typer.Option(help="Requests in the Chrome trace; 0: none.", metavar="N", min=0, rich_help_panel="Output")
    ] = TRACED
    as_json: Annotated[
        bool, typer.Option("--json", help="The summaries on standard output.", rich_help_panel="Output")
    ] = False


def command() -> Callable[..., None]:
    """What Typer runs: its options are made from the fields of `Options`."""

    @one_line_errors
    def run(**given: Any) -> None:
        output = Output(**{one.name: given.pop(one.name) for one in fields(Output)})
        sim_build.check_names(**{name: given[name] for name in ("policy", "admission", "fetch")})  # before all else
        serve(Options(**given), output)

    parameters = [_parameter(one, kind, panel) for group, panel in PANELS for one, kind in _fields(group)]
    return command_options.taking(run, "run", [*parameters, *command_options.of_fields(Output)])


def _fields(group: type[Any]) -> Iterator[tuple[Field[Any], Any]]:
    kinds = get_type_hints(group)
    for one in fields(group):
        yield one, kinds[one.name]


def _parameter(one: Field[Any], kind: Any, panel: str) -> inspect.Parameter:
    told = one.metadata
    info = typer.Option(
        *told["flags"], help=told["help"], metavar=told["metavar"], min=told["least"], rich_help_panel=panel
    )
    return command_options.parameter(one.name, kind, one.default, info)


def serve(base: Options, output: Output) -> None:
    """Runs them one after the other, then writes and prints the results."""
    planned = list(sweeps(base, output.sweep or ()))
    sim_out.check_table(output.table)
    for _, options in planned:  # every mistake before the first long run
        sim_build.config_of(options)
        sim_build.count_of(options)
    runs = []
    for chosen, options in planned:
        name = label(chosen)
        folder = output.out / name if output.out is not None and len(planned) > 1 else output.out
        with sim_out.RunFiles(folder, output.table, output.traced) as files:
            runs.append({"name": name, "sweep": chosen, "setup": options.to_json(), **_simulate(options, files, name)})
        if files.left_out:
            told = f"{sim_out.TRACE}: {files.left_out:,} requests after the first {output.traced:,} are left out"
            console(stderr=True).print(told, markup=False)
    _finish(runs, f"kvmesh sim: {base.source}, {base.hardware}", output.out, output.as_json)


def _simulate(options: Options, files: sim_out.RunFiles, name: str) -> dict[str, Any]:
    """One run: its summary as JSON, and how long it took here."""
    from kvmesh.sim.report.summary import Summary
    from kvmesh.sim.run import run as simulate

    bounds_s = options.tbt_bounds_s
    summary = Summary(ttft_slo_s=options.slo_ttft / 1000, tbt_slos_s=bounds_s)

    def ended(record: Any) -> None:
        summary.add(record)
        files.add(record)

    def sampled(sample: Any) -> None:
        summary.sample(sample)
        files.sample(sample)

    changes: list[dict[str, Any]] = []

    def last(system: Any) -> None:
        if options.unforeseen and options.coupled is None:
            changes.extend(one.to_json() for one in system.changes_noticed())

    began = time.monotonic()
    with progress(name, sim_build.count_of(options), "requests") as tell:
        simulate(
            sim_build.config_of(options),
            sim_build.load_of(options),
            sink=ended,
            samples=sampled,
            last=last,
            progress=lambda at_s, done: tell(done, f"{at_s:,.0f} s of virtual time"),
        )
    if not summary.requests:
        raise ConfigError(f"{options.source!r}: holds no request", field="trace")
    told = summary.to_json()
    return {"summary": told | ({"changes": changes} if changes else {}), "wall_s": round(time.monotonic() - began, 2)}


def _finish(runs: list[dict[str, Any]], title: str, out: Path | None, as_json: bool) -> None:
    if out is not None:
        sim_out.write_report(out, runs, title)
    if as_json:
        print(json.dumps({"kind": "sim run", "title": title, "runs": runs}, indent=1))
        return
    sim_out.show(runs, title)
    for run in runs:
        sim_out.show_more(run, many=len(runs) > 1)
    if out is not None:
        console().print(f"\nreport: {out / 'report.html'}", markup=False)
