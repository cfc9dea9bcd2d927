"""Runs the tests in one of three speeds. Folders run side by side, four at a time; each is a pytest process.

    --quick   for `make test`: all tests but those marked `slow`, `mesh` or `long`; hypothesis tries a tenth of its
              examples
    --rest    what --quick leaves out: slow tests by folder and properties with a third of their examples, then what
              starts whole meshes, two at a time, then the storms of tests/chaos alone
    --long    for `make test-long`: what both leave out, the tests marked `long`, and properties with all examples
    ARGUMENTS of pytest instead: one pytest process with these, and nothing else

What a folder's tests printed, and which of them took long, is shown as soon as they end. Ctrl-C and SIGTERM end them
all. The exit status is that of the first that failed.

A test that fails has failed: nothing is tried again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
LANES = 4  # for two cores: much of the time of services' tests is waiting
MESH_LANES = 2  # more would be no sooner done, and requests would be refused as what is slow is
OWN_PARTS = 5  # of the meshes that files start themselves: so that all lanes end together
# What takes long first, so that the lanes end together. A process costs seconds by itself: in `make test` the folders
# of a line share one. A folder that is not named gets its own.
QUICK_FIRST = (
    ("blockservice", "storeclient", "ranks", "pool", "membership"),
    ("engine",),
    ("gateway",),
    ("conductor",),
    ("cli",),
    ("audit", "compose", "connectors", "external", "fuzz", "gpu", "mesh", "rdma", "rollout", "rpc", "telemetry", "."),
    ("sim", "coupled"),
    ("store", "kvcache", "tiers"),
    ("decode", "prefill", "picker"),
    ("transfer",),
)  # fmt: skip
REST_FIRST = (
    ("engine",),
    ("kvcache",),
    ("rdma",),
    ("conductor",),
    ("ranks", "prefill"),
    ("sim",),
    (
        *("audit", "compose", "connectors", "coupled", "docs", "drafts", "external", "fuzz", "gpu", "instance"),
        *("membership", "mesh", "picker", "pool", "rollout", "rpc", "telemetry", "."),
    ),
    ("decode", "transfer"),
    ("cli", "gateway"),
    ("blockservice", "store", "storeclient", "tiers"),
)
ALONE = ("chaos",)
QUICK, REST, LONG, PROPERTIES = "--quick", "--rest", "--long", "--properties"
MESH = "mark.mesh"  # in a file with such tests
SHARED = "small_mesh"  # the fixture of one mesh for many: their files go together
SLOWEST = ("--durations=8", "--durations-min=5")
POLL_S = 0.5
SIGN_OF_LIFE_S = 60.0
MOST_TOLD, WIDTH = 8, 160  # of what failed: lines, and characters of each
NO_TESTS = 5  # pytest's status


class Lane:
    """One pytest process and what it prints."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        self.name = name
        self.cpu_s = 0.0
        self.told: list[str] = []  # of each that failed or could not be run: a line that says why
        self._started = time.monotonic()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by `kill`
        self._cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # pytest's own: lanes do not share one
        # Nor a folder for tests' files: a lane that ends removes old ones, and fails where another does so, too.
        cache = ("-o", f"cache_dir={self._cache.name}/c", f"--basetemp={self._cache.name}/t")
        command = [sys.executable, "-m", "pytest", "-q", *cache, *SLOWEST, *arguments]
        # Hundreds of processes are started: without bytecode on disk each compiles all it imports, pytest every test.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=self._output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        print(f"── {name}: pytest {' '.join(arguments)}", flush=True)

    def ended(self) -> bool:
        """And what it took of the CPUs, with all that it started and waited for, is known."""
        if self._process.returncode is None:
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self.cpu_s = used.ru_utime + used.ru_stime
        return self._process.returncode is not None

    def last_line(self) -> str:
        """Of what it has printed so far."""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - 400))
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        self._output.seek(0, os.SEEK_END)
        return lines[-1] if lines else ""

    def show(self) -> int:
        """Print all that it said; its exit status, 0 when there was nothing to run."""
        self._output.seek(0)
        said = self._output.read().decode(errors="replace")
        sys.stdout.write(said)
        self.told = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        took = time.monotonic() - self._started
        status = self._process.returncode
        print(f"── {self.name}: exit status {status} after {took:.0f} s, {self.cpu_s:.0f} s of CPU", flush=True)
        if status and status != NO_TESTS and not self.told:
            self.told = [f"{self.name}: exit status {status}, and no test is named"]
        return 0 if status == NO_TESTS else status

    def kill(self) -> None:
        """End it as Ctrl-C would, then for good."""
        if not self.ended():
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._output.close()
        self._cache.cleanup()


@dataclass
class Outcome:
    """Of several lanes: the statuses of those that did not pass, and a line for each test that failed in them."""

    bad: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def note(self, lane: Lane) -> None:
        status = lane.show()
        if status:
            self.bad.append(status)
            self.told += lane.told


def run(waiting: list[tuple[str, list[str]]], lanes: int, outcome: Outcome) -> None:
    """All of them, so many at once, showing each as it ends."""
    told = time.monotonic()
    running: list[Lane] = []
    try:
        while waiting or running:
            while waiting and len(running) < lanes:
                running.append(Lane(*waiting.pop(0)))
            time.sleep(POLL_S)
            for lane in [lane for lane in running if lane.ended()]:
                running.remove(lane)
                outcome.note(lane)
                lane.kill()
            if time.monotonic() - told > SIGN_OF_LIFE_S:
                told = time.monotonic()
                for lane in running:
                    print(f"── {lane.name}: {lane.last_line()}", flush=True)
    finally:
        for lane in running:
            lane.kill()


def folders(speed: str) -> list[tuple[str, list[str]]]:
    """Processes, and what they run; "." stands for the files of no folder."""
    tests = ROOT / "tests"
    files = sorted(f"tests/{path.name}" for path in tests.glob("test_*.py"))
    found = {path.name for path in tests.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))} - {*ALONE}
    named = QUICK_FIRST if speed == QUICK else REST_FIRST
    rest = sorted({*found, "."} - {name for group in named for name in group})
    lanes = []
    for group in (*named, *((name,) for name in rest)):
        paths = [f"tests/{name}" for name in group if name in found] + (files if "." in group else [])
        lanes.append((" ".join(group), [speed, *paths]))
    return lanes


def meshes() -> list[tuple[str, list[str]]]:
    """Files with tests marked `mesh`: those that share a mesh or are of other folders, which take longest, then those
    of tests/mesh that start their own, in parts of as many."""
    files = sorted(path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py"))
    text = {path: (ROOT / "tests" / path).read_text() for path in files if path.parts[0] not in ALONE}
    found = [path for path in text if MESH in text[path]]
    own = [path for path in found if path.parts[0] == "mesh" and SHARED not in text[path]]
    parts = [[path for path in found if path not in own], *(own[part::OWN_PARTS] for part in range(OWN_PARTS))]
    return [
        (f"meshes {number}", ["-m", "mesh and not long", *(f"tests/{path}" for path in paths)])
        for number, paths in enumerate(parts, 1)
    ]


def stages(speed: str) -> list[tuple[list[tuple[str, list[str]]], int]]:
    """What runs one after the other: names and arguments of pytest processes, and how many of them at once."""
    if speed == QUICK:
        return [(folders(speed), LANES)]
    if speed == LONG:
        return [([("long", ["-m", "long", "tests"])], 1), (folders(PROPERTIES), LANES)]
    return [(folders(speed), LANES), (meshes(), MESH_LANES), ([(name, [f"tests/{name}"]) for name in ALONE], 1)]


def main() -> int:
    if sys.argv[1:] not in ([QUICK], [REST], [LONG]):
        return subprocess.call([sys.executable, "-m", "pytest", "-q", *sys.argv[1:]], cwd=ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # A shell that runs this in the background ignores SIGINT, and children inherit that; tests send it to theirs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    outcome = Outcome()
    for some, lanes in stages(sys.argv[1]):
        run(some, lanes, outcome)
    passed = not outcome.bad
    what = {QUICK: "quick tests", REST: "the rest of the tests", LONG: "long tests"}[sys.argv[1]]
    if not passed:
        print(f"── failed: {len(outcome.told)}, see above")
        for line in outcome.told[:MOST_TOLD]:
            print(line[:WIDTH])
    print(f"── {what}: {'passed' if passed else 'FAILED'} in {time.monotonic() - started:.0f} s")
    return 0 if passed else outcome.bad[0]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
