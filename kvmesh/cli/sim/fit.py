"""`kvmesh sim fit`: a live mesh's decision log → what `kvmesh sim run --times` simulates that machine by."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.cli.console import console, one_line_errors
from kvmesh.cli.sim.progress import progress
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from kvmesh.sim.fitting.calibrate import Fit
    from kvmesh.sim.fitting.mesh_fit import MeshFit
    from kvmesh.sim.fitting.observed import Observed

HELP = """Fit a live mesh from its conductor's decision log (kvmesh serve conductor --decision-log FILE).

Least squares give the times of prefill and decode steps as instances report them. When all instances are on one \
machine (--cores) their steps stretch each other: then the log's own requests are simulated again and again, and what \
a step takes alone, what a request costs outside of steps and how steps scatter is moved until means and percentiles \
agree. The log must hold a few dozen requests, prefill and decode apart, under a load like the one to be predicted. \
Examples:

    kvmesh sim fit decisions.jsonl --out fit.json --cores 2

    kvmesh sim run --trace b.jsonl --times fit.json --prefill 2 --decode 2 --kv-tokens 65536 --dram-tokens 65536
"""


@one_line_errors
def fit(
    log: Annotated[Path, typer.Argument(help="Decision log of a conductor.", metavar="LOG")],
    out: Annotated[Path, typer.Option(help="The fit is written here.", metavar="FILE")],
    cores: Annotated[
        float, typer.Option(help="That all instances share; 0: each has a machine of its own.", metavar="N", min=0)
    ] = 0.0,
    since: Annotated[
        float, typer.Option(help="Leave out what came in the first seconds of the log.", metavar="SECONDS", min=0)
    ] = 0.0,
    chunk_tokens: Annotated[
        int, typer.Option(help="Of a prefill step of these instances.", metavar="TOKENS", min=1)
    ] = 512,
    rounds: Annotated[int, typer.Option(help="Simulations of the log, with --cores.", metavar="N", min=1)] = 12,
    passes: Annotated[
        int, typer.Option(help="Searches around what these found, of 24 simulations each.", metavar="N", min=0)
    ] = 2,
) -> None:
    """A decision log → fitted times."""
    from kvmesh.sim.fitting.mesh_fit import MeshFit, costs_of

    if cores > (os.cpu_count() or 1) * 1024:
        raise ConfigError(f"cores={cores:g}: must be at most {(os.cpu_count() or 1) * 1024}", field="cores")
    observed = _observed(log, since)
    costs = costs_of(observed)
    told: dict[str, Any] = {"log": log.name, "since_s": since, "requests": len(observed.done())}
    if not cores:
        mesh = MeshFit(costs, told=told)
    else:
        found = _calibrated(observed, MeshFit(costs), cores, chunk_tokens, rounds, passes)
        mesh = MeshFit(costs, found.host, told | {"measured": asdict(found.targets), "simulated": asdict(found.found)})
    try:
        out.write_text(json.dumps(mesh.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"out={str(out)!r}: {err.strerror}", field="out") from None
    _show(mesh)
    console().print(f"\nwritten: {out}", markup=False)


def _observed(log: Path, since: float) -> Observed:
    from kvmesh.sim.fitting.observed import observe

    try:
        with log.open("rb") as file:
            found = observe(file, since)
    except OSError as err:
        raise ConfigError(f"log={str(log)!r}: {err.strerror}", field="log") from None
    if not found.prefills or not found.rows:
        why = "no prompt or no decode step is reported in it" + (f" after {since:g} s" if since else "")
        raise ConfigError(f"log={str(log)!r}: {why}", field="log")
    return found


def _calibrated(observed: Observed, mesh: MeshFit, cores: float, chunk_tokens: int, rounds: int, passes: int) -> Fit:
    from kvmesh.sim.fitting.calibrate import calibrate, residuals_of, targets_of
    from kvmesh.sim.fitting.mesh_fit import MeshFit, config_of
    from kvmesh.sim.host import HostModel

    residuals = residuals_of(observed, mesh.costs)
    targets = targets_of(observed, residuals)
    chunks = {"chunk_tokens": chunk_tokens, "batch_tokens": chunk_tokens, "long_tokens": chunk_tokens}
    config = config_of(observed, MeshFit(mesh.costs, HostModel(cores=cores)), **chunks)
    with progress("fitting", rounds + passes, "rounds") as tell:
        return calibrate(
            config,
            observed.requests(),
            targets,
            residuals,
            rounds=rounds,
            passes=passes,
            progress=lambda done, of: tell(done, ""),
        )


def _show(mesh: MeshFit) -> None:
    screen = console()
    for name, what in (("prefill", "tokens, pairs"), ("decode_step", "rows, context tokens")):
        found = getattr(mesh.costs, name)
        bend = f" + {found.d:.3g} beyond {found.knee:g} rows" if found.d else ""
        screen.print(
            f"{name:<12} {found.a:.3g} s + {found.b:.3g} and {found.c:.3g} for each of {what}{bend}", markup=False
        )
    host = mesh.host
    if host is None:
        return
    screen.print(
        f"shared       {host.cores:g} cores; a step alone: {host.prefill_alone:.2f} (prefill) and "
        f"{host.decode_alone:.2f} (decode) of that; at the door {host.door_s * 1e3:.1f} ms of a core, into the batch "
        f"{host.handoff_s * 1e3:.1f} ms, for a decode step's turn {host.turn_s * 1e3:.1f} ms",
        markup=False,
    )
    measured, simulated = mesh.told["measured"], mesh.told["simulated"]
    for name, title in (("ttft_s", "TTFT"), ("tbt_s", "TBT"), ("interval_s", "interval"), ("prefill_s", "prefill")):
        screen.print(
            f"mean {title:<9} {measured[name] * 1e3:,.1f} ms measured, {simulated[name] * 1e3:,.1f} ms simulated",
            markup=False,
        )
