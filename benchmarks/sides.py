"""Meshes beside each other that differ in a setting, loaded in turn: what the setting costs.

The meshes run at the same time; the idle ones only beat. Each round loads every mesh once, in another order, with new
prompts. A cost is the median of the rounds' own ratios to the mesh it is compared with, with its interval at 95%.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import progress
from benchmarks.mesh import ROOT, Round, run_mesh
from benchmarks.turns import interval
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings

DEMO = ROOT / "examples" / "demo-model"


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=64, help="in a round")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", default="", help="also write the results here")


def rounds_of(meshes: Mapping[str, Mapping[str, Any]], args: argparse.Namespace) -> dict[str, list[Round]]:
    """Starts a mesh with each of these settings and returns the rounds of each; those of one place in the lists are of
    the same turn. The flags of a mesh are under "flags"."""
    with contextlib.ExitStack() as stack:
        running = {name: start(stack, dict(settings), args) for name, settings in meshes.items()}
        for mesh in running.values():
            mesh.wait_ready(180)
        time.sleep(2)  # registration reaches the gateways; not part of what is measured
        return measure(running, args)


def start(stack: contextlib.ExitStack, settings: dict[str, Any], args: argparse.Namespace) -> Mesh:
    """Starts a mesh, which stops with `stack`; it is not ready yet."""
    flags = settings.pop("flags", {})
    run_dir = stack.enter_context(tempfile.TemporaryDirectory())
    blocks = (8 + (args.prompt_tokens + args.max_tokens) // 16) * args.concurrency
    given: dict[str, Any] = {
        "model": str(DEMO), "http_port": 0, "grpc_port": 0, "run_dir": run_dir, "threads": 1, "log_level": "warning",
        "flags": {"*": {"num_pages": blocks, "num_extents": blocks, **flags}},
    }  # fmt: skip
    return stack.enter_context(Mesh(MeshSettings(**given | settings)))


def measure(meshes: dict[str, Mesh], args: argparse.Namespace) -> dict[str, list[Round]]:
    """Returns the rounds of each mesh, those of one place in the lists from the same turn."""
    rng = random.Random(args.seed)
    found: dict[str, list[Round]] = {name: [] for name in meshes}
    order = list(meshes)
    for n in range(args.rounds + 1):
        for name in order:
            work = [
                ([rng.randrange(20, 250) for _ in range(args.prompt_tokens)], args.max_tokens)
                for _ in range(args.requests)
            ]
            one = asyncio.run(run_mesh(meshes[name], work, args.concurrency))
            if n:  # the first round warms all
                found[name].append(one)
        order = order[1:] + order[:1]
        progress.tell(f"round {n} of {args.rounds}")
    progress.tell("")
    return found


def told(values: Sequence[float]) -> list[float]:
    """Returns the median and its interval."""
    return [statistics.median(values), *interval(values)]


def compare(rounds: dict[str, list[Round]], base: str) -> dict[str, dict[str, list[float]]]:
    """Returns, of each mesh, its figures and those that are relative to the mesh `base`."""
    figures = {
        name: {
            "requests_per_s": [len(one.samples) / one.wall_s for one in some],
            "cpu_us_per_token": [
                1e6 * sum(one.cpu_s.values()) / sum(sample.tokens for sample in one.samples) for one in some
            ],
            "ttft_p50_ms": [statistics.median(sample.ttft for sample in one.samples) for one in some],
        }
        for name, some in rounds.items()
    }
    found: dict[str, dict[str, list[float]]] = {}
    for name, some in figures.items():
        found[name] = {what: told(values) for what, values in some.items()}
        if name != base:
            for what, values in some.items():
                pairs = zip(values, figures[base][what], strict=True)
                found[name][f"{what}_ratio"] = told([value / base for value, base in pairs])
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    for name, figures in found.items():
        for what, (middle, low, high) in figures.items():
            print(f"{name:>10}  {what:<24} {middle:10.3f}  [{low:.3f}, {high:.3f}]")
