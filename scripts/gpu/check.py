"""Tells what one GPU does and whether this engine is right and fast on it, in one command:

    python3 -m scripts.gpu.check [--budget 1500] [--stages environment,kernels] [--out FOLDER] [--dry]

It is made for a machine that is there for half an hour: this file needs the standard library alone, every stage is a
process with a limit of its own, results are on disk after each, and what crashes or hangs ends its own stage only.
Stages that only test run side by side, those that measure alone; --budget (seconds) leaves out what no longer fits.

What a stage printed is in FOLDER/STAGE.log, what it measured in FOLDER/check.json. `--dry` runs every stage on a CPU,
Triton's kernels in its interpreter, with sizes that take seconds: it shows that the stages work, and measures nothing.
The packages that a bare machine lacks can be carried along: scripts/gpu/wheels.sh.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "gpu"
BUDGET_S = 1500.0
LEAST_S = 5.0  # a stage with less than that is not begun
TABLE_LINES, WIDTH = 60, 150
DRY_LIMIT_S = 300.0  # seconds on a machine that is free; tests run it beside others
POLL_S = 0.1
PYTEST = ("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-W", "default")
SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "99")
PROFILER = (
    "ncu",
    "--clock-control",
    "none",
    "--launch-count",
    "6",
    "--section",
    "SpeedOfLight",
    "--section",
    "LaunchStats",
)


@dataclass(frozen=True)
class Stage:
    """`command(dry)` is what it runs; `needs` is a program without which it cannot; `alone`: it measures."""

    name: str
    about: str
    limit_s: float
    command: Callable[[bool], Sequence[str]]
    needs: str = ""
    alone: bool = True


def measured(name: str) -> Callable[[bool], Sequence[str]]:
    return lambda dry: (sys.executable, "-m", "scripts.gpu.stages", name, *(("--dry",) if dry else ()))


def pytest_run(*paths: str, dry: Sequence[str] = (), processes: int = 1) -> Callable[[bool], Sequence[str]]:
    """pytest, in several processes where pytest-xdist is installed; a dry run has a few of the tests, or only
    collects."""
    few: Sequence[str] = dry or ("--collect-only", *paths)
    spread = ("-n", str(processes)) if processes > 1 and find_spec("xdist") else ()
    return lambda dry: (sys.executable, *PYTEST, *(few if dry else (*spread, *paths)))


def under(tool: Sequence[str], name: str) -> Callable[[bool], Sequence[str]]:
    """The stage `name` under a tool, which a CPU has no use for."""
    return lambda dry: (*(() if dry else tool), *measured(name)(dry))


KERNELS = "tests/engine/kernels"
STAGES = (
    Stage("environment", "machine, versions, packages that are missing", 60, measured("environment")),
    Stage("kernels", "kernels against float64 oracles, outputs poisoned", 240,
          pytest_run(KERNELS, "tests/engine/test_sampling.py", dry=(f"{KERNELS}/test_write.py",), processes=12),
          alone=False),
    Stage("engine", "whole engines against transformers", 240,
          pytest_run("tests/gpu/test_engine.py", "tests/gpu/test_memory.py", "tests/gpu/test_latent_chunks.py"),
          alone=False),
    Stage("families", "further families against transformers", 240,
          pytest_run("tests/gpu/test_families.py"), alone=False),
    Stage("sanitizer", "one small case of each kernel under memcheck", 180,
          under(SANITIZER, "small"), SANITIZER[0], alone=False),
    Stage("mesh", "whole meshes on this GPU against transformers", 300,
          pytest_run("tests/gpu/test_mesh.py"), alone=False),
    Stage("setup", "what a rank takes of a GPU that it has to itself", 60, pytest_run("tests/gpu/test_setup.py")),
    Stage("ceilings", "copies, products, the bus, the cost of a launch", 60, measured("ceilings")),
    Stage("decode", "decode attention, share of the copy's bandwidth", 120, measured("decode")),
    Stage("drafted", "decode attention with drafts, against plain rows", 90, measured("drafted")),
    Stage("model", "steps of a model of 8B's shape: MBU, MFU", 240, measured("model")),
    Stage("profile", "where the time of a step goes, and what the GPU idles", 120, measured("profile")),
    Stage("prefill", "prefill attention beside torch's SDPA", 90, measured("prefill")),
    Stage("latent", "latent attention: decode and chunks, by sizes of programs", 120, measured("latent")),
    Stage("sampler", "tokens from logits of 256 rows", 60, measured("sampler")),
    Stage("moves", "KV between pages and the host, alone and beside steps", 120, measured("moves")),
    Stage("links", "memory export for RDMA cards, collectives in a graph", 60, measured("links")),
    Stage("counters", "hardware counters of the attention kernels", 120, under(PROFILER, "small"), PROFILER[0]),
)  # fmt: skip

Told = dict[str, Any]


class Running:
    """A stage's process, in a process group of its own."""

    def __init__(self, stage: Stage, out: Path, limit_s: float, dry: bool) -> None:
        self.stage = stage
        self._result, self._log = out / f"{stage.name}.json", out / f"{stage.name}.log"
        self._result.unlink(missing_ok=True)
        environment = os.environ | {"GPU_STAGE_RESULT": str(self._result), "PYTHONUNBUFFERED": "1"}
        if dry:
            environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._started = time.monotonic()
        self._until = self._started + limit_s
        command = stage.command(dry)
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def over(self) -> bool:
        return self._process.poll() is not None or time.monotonic() >= self._until

    def end(self) -> Told:
        """Whatever it left running goes. `status` is passed, failed or timeout."""
        code = self._process.poll()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        told = described(self.stage) | {"status": "timeout" if code is None else "failed" if code else "passed"}
        told |= {"exit": code, "seconds": round(time.monotonic() - self._started, 1)}
        printed = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        if self._result.exists():
            told |= json.loads(self._result.read_text())
            self._result.unlink()
            if code:
                told["lines"] = [*told["lines"], *printed[-1:]]
        else:
            told["lines"] = printed[-4:] if code else printed[-1:]
        return told


def described(stage: Stage) -> Told:
    return {"stage": stage.name, "about": stage.about, "status": "no time", "seconds": 0.0, "lines": []}


def run(stages: Sequence[Stage], out: Path, budget_s: float, dry: bool) -> Iterator[Told]:
    """What became of each, as soon as it is known."""
    until = time.monotonic() + budget_s
    for alone, group in groupby(stages, key=lambda stage: stage.alone):
        for together in [[stage] for stage in group] if alone else [list(group)]:
            running: list[Running] = []
            try:
                for stage in together:
                    limit = min(until - time.monotonic(), DRY_LIMIT_S if dry else stage.limit_s)
                    if limit < LEAST_S:
                        yield described(stage)
                    elif stage.needs and not dry and shutil.which(stage.needs) is None:
                        yield described(stage) | {"status": "missing", "lines": [f"{stage.needs} is not installed"]}
                    else:
                        print(f"{stage.name}: {stage.about} (at most {limit:.0f} s) ...", flush=True)
                        running.append(Running(stage, out, limit, dry))
                while running:
                    for one in [one for one in running if one.over()]:
                        running.remove(one)
                        yield one.end()
                    time.sleep(POLL_S)
            finally:  # Ctrl-C
                for one in running:
                    one.end()


def table(stages: Sequence[Told]) -> list[str]:
    """At most TABLE_LINES lines: one a stage, and of what each tells as many as fit, evenly."""
    told = [list(stage.get("lines", ())) for stage in stages]
    room, kept = TABLE_LINES - len(stages), [0] * len(stages)
    while room > 0 and any(kept[i] < len(lines) for i, lines in enumerate(told)):
        for i, lines in enumerate(told):
            if kept[i] < len(lines) and room > 0:
                kept[i], room = kept[i] + 1, room - 1
    lines = []
    for stage, own, count in zip(stages, told, kept, strict=True):
        lines.append(f"{stage['stage']:<12} {stage['status']:<8} {stage['seconds']:6.1f} s  {stage['about']}")
        lines += [f"    {line}" for line in own[:count]]
    return [line[:WIDTH] for line in lines]


def chosen(names: str) -> list[Stage]:
    known = {stage.name: stage for stage in STAGES}
    wanted = names.split(",") if names else list(known)
    for name in wanted:
        if name not in known:
            sys.exit(f"--stages: {name!r} is none of {', '.join(known)}")
    return [known[name] for name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all stages together")
    parser.add_argument("--stages", default="", help="comma-separated; all of them without it")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--dry", action="store_true", help="on a CPU, small")
    args = parser.parse_args()
    stages = chosen(args.stages)
    if not args.dry and shutil.which("nvidia-smi") is None:
        sys.exit("no NVIDIA GPU is here (there is no nvidia-smi); --dry runs the stages on a CPU, small")
    if args.budget <= 0:
        sys.exit(f"--budget {args.budget:g}: must be above 0 seconds")
    args.out.mkdir(parents=True, exist_ok=True)
    found: list[Told] = []
    for told in run(stages, args.out, args.budget, args.dry):
        found.append(told)
        print(f"    {told['stage']} {told['status']} after {told['seconds']} s", flush=True)
        text = json.dumps({"dry": args.dry, "stages": found}, indent=1)
        (args.out / "check.json").write_text(text + "\n")
    print("\n".join(["", *table(found), f"all of it: {args.out / 'check.json'}"]))
    return 0 if all(told["status"] in ("passed", "missing", "no time") for told in found) else 1


if __name__ == "__main__":
    sys.exit(main())
