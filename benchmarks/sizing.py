"""CPU of every service per request, prompt block, token and heartbeat; what 1,000 instances take; what saturates first.

`unit`: real meshes, idle (2 and 6 instances, heartbeats as they come and much more often) and under known work (one
token and many, short and long prompts, blocks of 16 and 64, REST and gRPC); CPU seconds of every process are read, and
what one event costs is solved by non-negative least squares, for each repeat apart. `fleet`: a real conductor and a
real store master that 1,000 instances were made known to, called at stated rates. `throughput`: closed loop as services
are added, until this machine's cores are full. `redis`: what leader leases ask of it.

CPU seconds, not wall time: what else runs on the machine changes them by what it does to caches and to a core's other
thread, so run it on a quiet one. docs/reports/sizing.md has the tables and the formulas.

    python -m benchmarks.sizing --json benchmarks/results/sizing.json                           # about 7 minutes
    python -m benchmarks.sizing --json benchmarks/results/sizing.json --only fleet              # one part anew
    python -m benchmarks.sizing --show benchmarks/results/sizing.json
    python -m benchmarks.sizing --json benchmarks/results/sizing.json --docs docs/reports/sizing.md  # fills its tables
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import sizing_unit
from benchmarks.sizing_fleet import fleet
from benchmarks.sizing_page import CONDUCTOR, Made, filled, read_made, sections
from kvmesh.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "examples" / "demo-model"
PARTS = ("unit", "fleet", "throughput", "redis")
INSTANCES = 1000


def main() -> int:
    """0: all is done; 2: a file is missing or none of ours."""
    options = _options()
    try:
        if options.docs is not None:
            _fill(options.docs, options.json)
        elif options.show is not None:
            _show(read_made(options.show, CONDUCTOR))
        else:
            _run(options)
    except ConfigError as err:
        print(f"sizing: {err}", file=sys.stderr)
        return 2
    return 0


def _run(options: argparse.Namespace) -> None:
    results: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        results = json.loads(options.json.read_text())
    results |= {"machine": platform.machine(), "cpus": os.cpu_count()}
    told = {key: getattr(options, key) for key in ("repeats", "idle_s", "fleet_s", "throughput_s", "seed")}
    parts: dict[str, Callable[[], Any]] = {
        "unit": lambda: sizing_unit.told(sizing_unit.unit(MODEL, options.repeats, options.idle_s, options.seed)),
        "fleet": lambda: sizing_unit.told(fleet(INSTANCES, options.repeats, options.fleet_s)),
        "throughput": lambda: sizing_unit.throughput(MODEL, options.throughput_s, options.seed),
        "redis": lambda: sizing_unit.redis(MODEL, options.idle_s),
    }
    for name in options.only or PARTS:
        results[name] = parts[name]()
        results.setdefault("args", {})[name] = told
        if options.json is not None:  # after each: what was measured is not lost with what comes later
            options.json.write_text(json.dumps(_rounded(results), indent=1) + "\n")
    if options.json is not None and all(name in results for name in PARTS):
        _show(read_made(options.json, CONDUCTOR))
    elif options.json is None:
        print(json.dumps(_rounded(results), indent=1))


def _rounded(told: Any) -> Any:
    """Floats to microseconds: more is noise."""
    if isinstance(told, dict):
        return {key: _rounded(value) for key, value in told.items()}
    if isinstance(told, list):
        return [_rounded(value) for value in told]
    return round(told, 6) if isinstance(told, float) else told


def _show(made: Made) -> None:
    for name, text in sections(made).items():
        print(f"\n{name}\n\n{text}")


def _fill(page: Path, file: Path | None) -> None:
    if file is None:
        raise ConfigError("docs: needs json, the file to fill it from", field="json")
    page.write_text(filled(page.read_text(), read_made(file, CONDUCTOR)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="results are kept here; parts that are not run stay as they are")
    parser.add_argument("--show", type=Path, help="print the tables of this file; nothing is run")
    parser.add_argument("--docs", type=Path, help="a page whose tables are filled from --json; nothing is run")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; may be given several times")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=3.0, help="seconds of each idle window")
    parser.add_argument("--fleet-s", type=float, default=2.0, help="seconds of each window of the fleet")
    parser.add_argument("--throughput-s", type=float, default=7.0, help="seconds of each row of throughput")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
