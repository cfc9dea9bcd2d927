"""Does the simulator predict a mesh that it has not seen serve these requests?

A mesh of 2 prefill and 2 decode instances serves slice A of a trace, `--fit-runs` times; the models are fitted from the
decision logs and from what the client measured (`kvmesh.sim.fitting.calibrate`). Then the simulator serves slice B,
free-running: nothing of a live run of B goes in, no decision, no time. The prediction is printed *before* B is sent for
the first time. Then B is sent to live meshes, `--runs` times, each started anew and warmed up with other prompts, so
that caches are as empty as the simulation's at first.

All processes of a mesh and the client share `--cores` cores (pinned), so steps take longer the more goes on: the fit
holds that, too. Both slices come at the trace's own times (bursts), stretched to `--rate` requests a second.

Told apart from that: the decision log of A, replayed through the brain, must give the same decisions bit for bit.

    python -m benchmarks.fidelity                    # about 9 minutes on two cores; the machine must be quiet
    python -m benchmarks.fidelity --requests 60 --runs 2 --fit-runs 1
    python -m benchmarks.fidelity --json benchmarks/results/fidelity.json --save-fit fit.json
    python -m benchmarks.fidelity --keep runs        # a second time: the same live runs, fitted and predicted again
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from benchmarks import progress
from benchmarks.equal_cores import TRACE
from benchmarks.fidelity_live import Live, Slice, live, slices
from benchmarks.fidelity_predict import FIGURES, WITHIN, Percentiles, Row, compared, fitted, of_outcomes, predicted
from kvmesh.services.conductor.records import journal
from kvmesh.sim.fitting.calibrate import Fit
from kvmesh.sim.fitting.decisions import Replayed, replay
from kvmesh.sim.fitting.mesh_fit import MeshFit
from kvmesh.sim.fitting.observed import Observed, observe, pooled

ROOT = Path(__file__).resolve().parents[1]


def observed_of(run: Live) -> Observed:
    """What its decision log tells of the slice, without the warm-up before it."""
    with run.log.open("rb") as file:
        started_at = journal.header_of(file.readline()).started_at
        file.seek(0)
        return observe(file, run.began_s - started_at)


def again(run: Live) -> Replayed:
    """Every decision of its log, made again."""
    with run.log.open("rb") as file:
        return replay(file)


# ── the screen ────────────────────────────────────────────────────────────────────────────────────


def about(part: Slice) -> str:
    prompt, answer = (sum(getattr(one, name) for one in part.made) for name in ("prompt_tokens", "output_tokens"))
    count = len(part.made)
    return f"slice {part.name}: {count} requests in {part.times[-1]:.0f} s, {prompt / count:.0f} / {answer / count:.0f}"


def show_fit(fit: Fit, percentiles: Sequence[Percentiles], lives: Sequence[Percentiles]) -> None:
    host = fit.host
    print(
        f"\nfitted on A, live {len(lives)} times: {host.cores:g} cores; a step alone takes {host.prefill_alone:.2f} "
        f"(prefill) and {host.decode_alone:.2f} (decode) of what instances report,\n"
        f"a request {host.door_s * 1e3:.1f} ms of a core at the door, {host.handoff_s * 1e3:.1f} ms from prefill into "
        f"the batch, a decode step {host.turn_s * 1e3:.1f} ms for a turn"
    )
    print("the simulation of A after the fit, which was held against means and these percentiles:")
    show_rows(compared(lives, percentiles))


def show_rows(rows: Sequence[Row]) -> None:
    """A line for each percentile, in ms."""
    head = f"{'':10}{'live':>8}{'[least .. most]':>20}"
    print(f"{head}{'predicted':>11}{'error':>8}  within {WITHIN:.0%}  within the live runs")
    for row in rows:
        line = f"{row.what + ' p' + str(row.share):<10}{row.live_s * 1e3:>8.1f}"
        line += f"{f'[{row.least_s * 1e3:.1f} .. {row.most_s * 1e3:.1f}]':>20}"
        print(f"{line}{row.predicted_s * 1e3:>11.1f}{row.error:>+8.0%}  {_yes(row.kept):<10}  {_yes(row.inside)}")


def _yes(held: bool) -> str:
    return "yes" if held else "no"


def show_prediction(percentiles: Sequence[Percentiles]) -> None:
    print("\npredicted of B, before it was sent, ms (median, least .. most over seeds):")
    for figure in FIGURES:
        found = sorted(one[figure] * 1e3 for one in percentiles)
        print(f"{figure[0]} p{figure[1]:<6}{found[len(found) // 2]:>9.1f}   [{found[0]:.1f} .. {found[-1]:.1f}]")


# ── the run ───────────────────────────────────────────────────────────────────────────────────────


def go(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    config = json.loads((args.model / "config.json").read_text())
    first, second = slices(
        args.trace, args.requests, args.rate, scale=Fraction(args.scale), max_output=args.max_output,
        context=config["max_position_embeddings"], vocab=config["vocab_size"],
    )  # fmt: skip
    for part in (first, second):
        print(f"{about(part)} tokens of prompt and answer on average")
    began = time.monotonic()

    def tell(text: str) -> None:
        progress.tell(f"{text}  ({time.monotonic() - began:.0f} s)")

    fitted_on = []
    for n in range(args.fit_runs):
        tell(f"A, live, run {n + 1}/{args.fit_runs}")
        fitted_on.append(live(args.model, first, home / f"A{n or ''}"))
    sim_config, mesh_fit, fit = fitted(
        pooled(list(map(observed_of, fitted_on))), [one for run in fitted_on for one in run.outcomes],
        first.requests(), float(args.cores), lambda done, of: tell(f"fitting, {done}/{of}"),
    )  # fmt: skip
    tell("simulating A")
    of_a = predicted(sim_config, first.requests())
    tell("")
    a_lives = [of_outcomes(one.outcomes) for one in fitted_on]
    show_fit(fit, of_a, a_lives)
    decided = list(map(again, fitted_on))
    print(
        f"\ndecision logs of A, replayed through the brain: {sum(one.decisions for one in decided)} decisions among "
        f"{sum(one.events for one in decided):,} events, {sum(one.different for one in decided)} came out otherwise"
    )
    of_b = predicted(sim_config, second.requests())
    show_prediction(of_b)
    runs = []
    for n in range(args.runs):
        tell(f"B, live, run {n + 1}/{args.runs}")
        runs.append(live(args.model, second, home / f"B{n}"))
    tell("")
    lives = [of_outcomes(one.outcomes) for one in runs]
    rows = compared(lives, of_b)
    used = ", ".join(f"{one.others:.2f}" for one in (*fitted_on, *runs))
    print(f"\ncores that something else on this machine used meanwhile (A, then B): {used}")
    print(f"B, live {args.runs} times (median) and predicted, ms:")
    show_rows(rows)
    print(
        f"{sum(row.kept for row in rows)} of {len(rows)} within {WITHIN:.0%}; {time.monotonic() - began:.0f} s in all"
    )
    if args.save_fit:
        args.save_fit.write_text(json.dumps(mesh_fit.to_json(), indent=1) + "\n")
    found = told(rows, fit, mesh_fit, a_lives, of_a, lives, of_b, decided)
    return found | {"others_cores": [one.others for one in (*fitted_on, *runs)]}


def told(
    rows: Sequence[Row], fit: Fit, mesh_fit: MeshFit, a_lives: Sequence[Percentiles], of_a: Sequence[Percentiles],
    lives: Sequence[Percentiles], of_b: Sequence[Percentiles], decided: Sequence[Replayed],
) -> dict[str, Any]:  # fmt: skip
    """For --json; seconds."""

    def plain(one: Percentiles) -> dict[str, float]:
        return {f"{what} p{share}": value for (what, share), value in one.items()}

    return {
        "rows": [asdict(row) | {"error": row.error, "kept": row.kept, "inside": row.inside} for row in rows],
        "fit": mesh_fit.to_json(),
        "targets": asdict(fit.targets),
        "rounds": [asdict(one) for one in fit.rounds],
        "a_live": list(map(plain, a_lives)),
        "a_simulated": list(map(plain, of_a)),
        "b_live": list(map(plain, lives)),
        "b_predicted": list(map(plain, of_b)),
        "decisions": {
            "made_again": sum(one.decisions for one in decided),
            "different": sum(one.different for one in decided),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo-model")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=200, help="of each slice")
    parser.add_argument("--rate", type=float, default=5.0, help="requests a second")
    parser.add_argument("--scale", default="1/16", help="of all lengths")
    parser.add_argument("--max-output", type=int, default=64)
    parser.add_argument("--cores", type=int, default=2, help="that everything is pinned to")
    parser.add_argument("--fit-runs", type=int, default=3, help="live ones of A, that the models are fitted to")
    parser.add_argument("--runs", type=int, default=5, help="live ones of B")
    parser.add_argument("--keep", type=Path, help="folder: live runs are kept there, and taken from there if they are")
    parser.add_argument("--save-fit", type=Path, help="what was fitted, for kvmesh sim run --times")
    parser.add_argument("--json", default="", help="also write the results here")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    if len(cores) < args.cores:
        raise SystemExit(f"cores={args.cores}: this machine gives {len(cores)}")
    os.sched_setaffinity(0, cores)  # and all that is started from here
    with tempfile.TemporaryDirectory() as folder:
        found = go(args, args.keep or Path(folder))
    if args.json:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        said = {"machine": platform.machine(), "args": given | {"trace": args.trace.name, "model": args.model.name}}
        Path(args.json).write_text(json.dumps(said | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
