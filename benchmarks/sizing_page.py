"""docs/reports/sizing.md: its tables, out of the file of windows that benchmarks/sizing.py keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.sizing_costs import SATURATED, WIRE, Costs, costs_of, read_windows
from benchmarks.sizing_paper import MOST_INSTANCES, Point, Setup, Workload, at, engines, most_instances, saturates
from benchmarks.sizing_solve import Cost, Fit
from kvmesh.errors import ConfigError

CONDUCTOR = Path(__file__).resolve().parent / "results" / "conductor.json"
_PLACE = re.compile(r"(<!-- sizing: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
EVENTS = {
    "seconds": "a second at rest",
    "conductor_beats": "heartbeat (conductor)",
    "store_beats": "heartbeat (store master)",
    "announcements": "announcement",
    "relayed": "relayed announcement",
    "keys": "announced block",
    "requests": "request",
    "prompt_tokens": "prompt token",
    "blocks": "prompt block",
    "chunks": "prefill step",
    "steps": "step message",
    "tokens": "token",
}
WORK = Workload()
SETUPS = (
    Setup("defaults"),
    Setup("blocks of 512", block=512),
    Setup("beats 1 s, 2 s; announcements 1 s", beat_s=1, store_beat_s=2, announce_s=1),
    Setup("beats 5 s, 10 s; announcements 5 s", beat_s=5, store_beat_s=10, announce_s=5),
    Setup("the same, blocks of 512", block=512, beat_s=5, store_beat_s=10, announce_s=5),
    Setup("the same, 4 conductors", block=512, beat_s=5, store_beat_s=10, announce_s=5, conductors=4),
)
UNPACED = Setup("the same, budgets of 0", beats=0, store_beats=0, words=0)
NODES = 64  # instances on eight nodes of eight GPUs
LARGE = 1000
RPC_PROMPT = 100_000  # tokens, of benchmarks/conductor.py's run over gRPC


@dataclass(frozen=True)
class Made:
    """What the two files say: ours, and that of benchmarks/conductor.py."""

    costs: Costs
    throughput: Sequence[Mapping[str, Any]]
    redis: Mapping[str, float]
    conductor: Mapping[str, Any]


def read_made(path: Path, conductor: Path) -> Made:
    """ConfigError: a file is none of ours, or not all was run."""
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        costs = costs_of(read_windows(told["unit"]), read_windows(told["fleet"]))
        return Made(costs, told["throughput"], told["redis"], json.loads(conductor.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"json={str(path)!r}: {err!r}", field="json") from None


def filled(page: str, made: Made) -> str:
    """The page with every table as `made` has it. ConfigError: a place for a table is missing, or unknown."""
    tables = sections(made)
    places = [name for _, name, _ in _PLACE.findall(page)]
    if sorted(places) != sorted(tables):
        raise ConfigError(f"docs: places {sorted(places)}, tables {sorted(tables)}", field="docs")
    return _PLACE.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", page)


def sections(made: Made) -> dict[str, str]:
    """Every table by the name of its place."""
    return {
        "live": _live(made.costs),
        "fleet": _fleet(made.costs),
        "throughput": _throughput(made.throughput),
        "rest": _rest(made.costs),
        "large": _paper(made.costs, LARGE),
        "nodes": _paper(made.costs, NODES),
        "example": _example(made.costs),
        "check": _check(made),
        "redis": _redis(made.redis),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def micros(cost: Cost) -> str:
    """Microseconds: the median, and the least and the most of the repeats."""
    told = [f"{1e6 * value:,.1f}" if value < 1e-4 else f"{1e6 * value:,.0f}" for value in _values(cost)]
    return f"{told[0]} ({told[1]} to {told[2]})"


def _values(cost: Cost) -> tuple[float, float, float]:
    return cost.median, cost.least, cost.most


def _name(event: str) -> str:
    plain = event.removeprefix("own_").removesuffix("_rest").removesuffix("_grpc")
    return EVENTS[plain] + (" sent" if event.startswith("own_") else "")


def _rows(service: str, one: Fit) -> list[list[str]]:
    found = [[service, _name(event), micros(cost)] for event, cost in one.costs.items()]
    return [[*row, f"{one.error:.0%}" if i == 0 else ""] for i, row in enumerate(found)]


def _live(costs: Costs) -> str:
    rows = [row for service, one in costs.live.items() for row in _rows(service, one)]
    return table(("service", "event", "CPU, µs", "error of the fit"), rows)


def _fleet(costs: Costs) -> str:
    rows = []
    for service, full in costs.full.items():
        calm = costs.fleet[service]
        rows += [[service, _name(event), micros(calm.costs[event]), micros(cost)] for event, cost in full.costs.items()]
        rows.append([service, "error of the fit", f"{calm.error:.0%}", f"{full.error:.0%}"])
    sent = ", ".join(
        f"{EVENTS[event]} {cost.median:,.0f}" for event, cost in costs.fleet[WIRE].costs.items() if event != "seconds"
    )
    text = table(("service", "event", "CPU, µs, calls alone", f"CPU, µs, {SATURATED}"), rows)
    return f"{text}\n\nBytes both ways, TCP's own among them: {sent}."


def _throughput(rows: Sequence[Mapping[str, Any]]) -> str:
    services = list(dict.fromkeys(name for row in rows for name in row["cores"]))
    head = ("services", "requests/s", "tokens/s", "tokens a core second", *(f"{name}" for name in services), "others")
    lines = []
    for row in rows:
        cores = row["cores"]
        ours = sum(value for name, value in cores.items() if name != "client")
        rates = [f"{row['requests_per_s']:.1f}", f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s'] / ours:,.0f}"]
        split = [f"{cores.get(name, 0.0):.2f}" for name in services]
        lines.append([row["services"], *rates, *split, f"{row['others_cores']:.2f}"])
    return table(head, lines)


def _rest(costs: Costs) -> str:
    rows = []
    for setup in (SETUPS[0], UNPACED, *(one for one in SETUPS[1:] if one.block == 64)):
        found = [at(costs, LARGE, setup, WORK, 0.0), *(most_instances(costs, setup, s) for s in ("conductor", "store"))]
        rest = found[0]
        assert isinstance(rest, Point)
        fronts = f"{rest.prefill:.3f}"
        cells = [f"{rest.conductor:.2f}", f"{rest.store:.2f}", fronts, f"{rest.bytes_per_s / 1e6:.1f}"]
        most = [f"{count:,}" if count < MOST_INSTANCES else "-" for count in found[1:]]
        rows.append([setup.name, *cells, *most])
    head = ("set-up", "conductor, cores", "store master, cores", "a front, cores", "MB/s", "most instances: conductor",
            "most instances: store master")  # fmt: skip
    return table(head, rows)


def _paper(costs: Costs, instances: int) -> str:
    rows = []
    for setup in SETUPS:
        rates = {name: saturates(costs, instances, setup, WORK, name) for name in ("conductor", "store")}
        first = min(rates, key=lambda name: rates[name])
        rate = min(rates[first], engines(instances, WORK))
        told = at(costs, instances, setup, WORK, rate)
        cells = [_rate(rates["conductor"]), _rate(rates["store"]), _first(rates, engines(instances, WORK))]
        if rate:
            served = [f"{rate:,.0f}", f"{rate * WORK.answer_tokens:,.0f}", f"{told.gateways:,}"]
            served += [f"{told.prefill:.2f}", f"{told.decode:.2f}", f"{told.bytes_per_s / 1e6:.1f}"]
        else:
            served = ["-"] * 6
        rows.append([setup.name, *cells, *served])
    head = ("set-up", "conductor full at, requests/s", "store master full at", "first", "served, requests/s",
            "tokens/s", "gateways", "prefill front, cores", "decode front, cores", "control, MB/s")  # fmt: skip
    limit = f"Prefill instances by themselves, at {WORK.prefill_per_s:,.0f} prompt tokens/s each: "
    return f"{limit}{engines(instances, WORK):,.0f} requests/s.\n\n{table(head, rows)}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate else "at rest"


def _first(rates: Mapping[str, float], limit: float) -> str:
    first = min(rates, key=lambda name: rates[name])
    if rates[first] > limit:
        return "prefill instances"
    return {"conductor": "conductor", "store": "store master"}[first]


def _example(costs: Costs) -> str:
    """The sum of one row, term by term."""
    setup, rate = SETUPS[0], engines(NODES, WORK)
    of, blocks = costs.full["conductor"], WORK.prompt_tokens // setup.block
    quiet = at(costs, NODES, setup, WORK, 0.0)
    full = at(costs, NODES, setup, WORK, rate)
    bigger = at(costs, NODES, replace(setup, block=512), WORK, rate)
    return "\n".join(
        (
            "```text",
            f"{NODES} instances, {rate:.1f} requests/s, {rate * WORK.answer_tokens:,.0f} tokens/s",
            f"conductor: at rest {of['seconds']:.3f}",
            f"  + {NODES / setup.beat_s:,.0f} heartbeats/s x {1e6 * of['conductor_beats']:,.0f} us "
            f"= {NODES / setup.beat_s * of['conductor_beats']:.3f}",
            f"  + {rate:.1f} requests/s x ({1e6 * of['requests']:,.0f} us + {blocks:.0f} blocks x "
            f"{1e6 * of['blocks']:.2f} us) = {rate * (of['requests'] + blocks * of['blocks']):.3f}",
            "  + relayed announcements and their blocks = "
            f"{full.conductor - quiet.conductor - rate * (of['requests'] + blocks * of['blocks']):.3f}",
            f"  = {full.conductor:.3f} cores",
            f"store master: at rest {quiet.store:.3f}, then {full.store:.3f} cores: "
            f"{full.announcements_per_s:,.0f} announcements/s (blocks of 512: {bigger.store:.3f})",
            f"gateways: {full.gateway:.2f} cores, so {full.gateways} of them at 70 %",
            f"fronts: {full.prefill:.3f} cores of each prefill instance, {full.decode:.3f} of each decode instance",
            f"network: {full.bytes_per_s / 1e6:.2f} MB/s",
            "```",
        )
    )


def _check(made: Made) -> str:
    """What the costs say of a run that they were not solved from."""
    rows = []
    for run in made.conductor["grpc"]:
        told = []
        for of in (made.costs.fleet["conductor"], made.costs.full["conductor"]):
            terms = of["conductor_beats"] * run["heartbeats_per_s"] + of["relayed"] * 10 + of["keys"] * 640
            decision = of["requests"] + of["blocks"] * (RPC_PROMPT // run["block"])
            told.append(of["seconds"] + terms + run["rate"] * decision)
        cells = [f"{one:.2f}" for one in (*told, run["conductor_cpu_share"])]
        rows.append([f"{run['instances']:,}", str(run["block"]), run.get("way", "gRPC"), *cells])
    head = ("instances", "block", "requests by", "by calls alone, cores", f"by {SATURATED}", "measured")
    text = table(head, rows)
    of = made.costs.full["conductor"]
    brain = next(
        row for row in made.conductor["rows"]
        if (row["instances"], row["prompt"], row["block"]) == (LARGE, 4000, 64)
    )  # fmt: skip
    events = made.conductor["events"]
    return (
        f"{text}\n\nOf the costs at {LARGE:,} instances the brain itself has, by `benchmarks/results/conductor.json`: "
        f"{1e6 / brain['flowing']['per_s']:,.0f} of {1e6 * of['requests']:,.0f} µs of a request, "
        f"{1e6 / events['heartbeats_per_s']:,.0f} of {1e6 * of['conductor_beats']:,.0f} µs of a heartbeat, "
        f"{1e6 / events['announcements_per_s']:,.0f} (of 64 + 64 blocks) of {1e6 * of['relayed']:,.0f} µs of a relayed "
        "announcement. The rest is the call: gRPC, its event loop, and messages."
    )


def _redis(told: Mapping[str, float]) -> str:
    each = told["commands_per_s"] / (told["conductors"] + told["masters"])
    return (
        f"{told['conductors']:.0f} conductors and {told['masters']:.0f} store masters ask {told['commands_per_s']:.1f} "
        f"commands a second of their Redis, {each:.1f} each (as Redis counts, those inside scripts too), which takes "
        f"{told['cores']:.3f} of a core. Instances ask it nothing, and requests do not either."
    )
