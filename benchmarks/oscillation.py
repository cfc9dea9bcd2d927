"""Do the loads of prefill and decode swing against each other? Admission by what decode is, and by what it will be.

Short of decode, long of prefill, three times the load that decode can take: then each prompt spends about as long in
prefill as its answer does in decode. Whoever is judged by decode as it *is* on arrival finds it as idle as those left
it who were let in one prefill ago (FAST'25, section 7.4; docs/operate/admission.md). Instances are the paper's
(8 x A800, LLaMA3-70B, benchmarks/paper_parameters.toml), 16 prefill and 1 decode; requests come by chance, Poisson,
prompts log-normal, answers exponential, nothing cached. The TBT SLO is tight, so that decode is limited by time, not by
memory.

    python -m benchmarks.oscillation --json benchmarks/results/oscillation.json --svg docs/operate/img/oscillation.svg
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from benchmarks import progress
from benchmarks.oscillation_svg import Curves, drawing
from benchmarks.paper_setup import Case, config_of, read
from kvmesh.sim.config import SimConfig
from kvmesh.sim.report.records import DONE, MeshSample, Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest, key

MODES = ("baseline", "early", "predicted")
SAMPLE_S = 2.0
WARM = 0.2  # of the time, not counted
SPREAD = 0.5  # of log prompt lengths
FAR_S = 60.0  # how much later decode's load may follow prefill's


@dataclass(frozen=True)
class Load:
    """What arrives: requests a second, mean lengths in tokens, for so many seconds."""

    rate: float
    prompt: int
    answer: int
    seconds: float

    def requests(self, block: int, seed: int) -> Iterator[SimRequest]:
        """No two share a block."""
        rng, at_s, index, blocks = random.Random(seed), 0.0, 0, 0
        while (at_s := at_s + rng.expovariate(self.rate)) < self.seconds:
            prompt = max(block, round(self.prompt * rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD)))
            keys = tuple(key(blocks + n + 1) for n in range(prompt // block))
            blocks += len(keys)
            yield SimRequest(index, at_s, prompt, max(1, round(rng.expovariate(1 / self.answer))), keys)
            index += 1


def simulated(config: SimConfig, load: Load) -> tuple[list[MeshSample], list[Record]]:
    """One run."""
    samples: list[MeshSample] = []
    records: list[Record] = []
    run(config, load.requests(config.block_tokens, config.seed), sink=records.append, samples=samples.append)
    return [one for one in samples if one.at_s < load.seconds], records


def curves(samples: Sequence[MeshSample]) -> Curves:
    """Prompts in prefill (waiting or computed), rows in decode's batch."""
    prefill = [one.pools["prefill"].queued + one.pools["prefill"].running for one in samples]
    return Curves([one.at_s for one in samples], prefill, [one.pools["decode"].running for one in samples])


def told(load: Load, samples: Sequence[MeshSample], records: Sequence[Record], slo_s: float) -> dict[str, Any]:
    """Figures of one run, after its warm-up."""
    steady = [one for one in samples if one.at_s >= WARM * load.seconds]
    found = curves(steady)
    done = [one for one in records if one.outcome == DONE]
    good = [one for one in done if isnan(one.mean_tbt_s) or one.mean_tbt_s <= slo_s]
    lag, least = against(found.prefill, found.decode, round(FAR_S / SAMPLE_S))
    return {
        "requests": len(records),
        "refused": len(records) - len(done),
        "good": len(good),
        "ttft_s": fmean(one.ttft_s for one in done),
        "prompt_tokens": fmean(one.input_tokens for one in good),
        "tbt_s": fmean(one.mean_tbt_s for one in done if not isnan(one.mean_tbt_s)),
        "wasted": sum(one.prefill_gpu_s for one in records if one.outcome != DONE)
        / sum(one.prefill_gpu_s for one in records),
        "good_tokens_per_s": sum(one.output_tokens for one in good) / load.seconds,
        "prefill_mean": fmean(found.prefill),
        "prefill_swing": pstdev(found.prefill) / fmean(found.prefill),
        "decode_mean": fmean(found.decode),
        "decode_swing": pstdev(found.decode) / fmean(found.decode),
        "decode_load_mean": fmean(one.pools["decode"].load for one in steady),
        "decode_load_swing": pstdev([one.pools["decode"].load for one in steady]),
        "least_correlation": least,
        "at_lag_s": lag * SAMPLE_S,
    }


def against(first: Sequence[float], second: Sequence[float], most: int) -> tuple[int, float]:
    """The lag of the second behind the first, 0..most samples, at which they are most opposed, and their correlation
    there (-1..1)."""
    return min(((lag, _correlation(first[: len(first) - lag], second[lag:])) for lag in range(most + 1)), key=_value)


def _value(one: tuple[int, float]) -> float:
    return one[1]


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    x, y, spread = fmean(xs), fmean(ys), pstdev(xs) * pstdev(ys)
    return fmean((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else 0.0


def main() -> None:
    options = _options()
    at, load = read(), Load(options.rate, options.prompt, options.answer, options.seconds)
    slo_s = options.tbt_slo / 1000
    rows: dict[str, dict[str, Any]] = {}
    drawn: dict[str, Curves] = {}
    for mode in MODES:
        progress.tell(f"{mode} ...")
        config = config_of(at, Case(prefill=options.prefill, decode=options.decode, admission=mode))
        config = replace(config, sample_s=SAMPLE_S, conductor=replace(config.conductor, slo_tbt_s=slo_s))
        samples, records = simulated(config, load)
        rows[mode], drawn[mode] = told(load, samples, records, slo_s), curves(samples)
    progress.tell("")
    show(rows)
    if options.svg:
        options.svg.write_text(drawing({mode: drawn[mode] for mode in ("early", "predicted")}))
    if options.json:
        given = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"args": given, "modes": rows}, indent=1) + "\n")


COLUMNS = (
    ("refused", "refused", ",.0f"),
    ("in time", "good", ",.0f"),
    ("tokens/s", "good_tokens_per_s", ".0f"),
    ("prompt", "prompt_tokens", ",.0f"),
    ("TTFT s", "ttft_s", ".1f"),
    ("TBT s", "tbt_s", ".3f"),
    ("wasted", "wasted", ".0%"),
    ("in prefill", "prefill_mean", ".1f"),
    ("swing", "prefill_swing", ".2f"),
    ("rows", "decode_mean", ".1f"),
    ("swing", "decode_swing", ".2f"),
    ("TBT/SLO", "decode_load_mean", ".2f"),
    ("swing", "decode_load_swing", ".2f"),
)


def show(rows: dict[str, dict[str, Any]]) -> None:
    """In time: TBT on average; TTFT is within its SLO for all that are taken. Prompt: tokens of those. Wasted: of all
    prefill time, for requests that were refused after it. Swing: standard deviation, over the mean for prompts and
    rows. TBT/SLO: the conductor's forecast, with those on their way."""
    print(f"{'admission':<10}" + "".join(f"{head:>11}" for head, _, _ in COLUMNS) + "   most opposed at")
    for mode, row in rows.items():
        told = "".join(f"{format(row[name], form):>11}" for _, name, form in COLUMNS)
        print(f"{mode:<10}{told}   {row['least_correlation']:+.2f}, {row['at_lag_s']:.0f} s later")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=16)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--rate", type=float, default=4.5, help="requests a second")
    parser.add_argument("--prompt", type=int, default=32_000, help="tokens, on average")
    parser.add_argument("--answer", type=int, default=400, help="tokens, on average")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--tbt-slo", type=float, default=30.0, help="ms")
    parser.add_argument("--svg", type=Path, help="the load curves")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
