"""Pages of documentation say what is so: their figures are those of the files that were measured, what they name
exists, and what they show runs as it stands there."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.better import LOSS, best
from benchmarks.better_page import BEGIN, END, figure, read_rows
from benchmarks.better_page import filled as better_filled
from benchmarks.better_policies import BETTER, PAPER, Policy, better_grid, paper_grid, policy_of
from benchmarks.better_runs import Inputs, Row, Runs, Task, kept, requests_of
from benchmarks.better_tables import TUNED_AT, TUNING_SEED, mean, tables
from benchmarks.conductor_page import filled as conductor_filled
from benchmarks.paper_setup import PARAMETERS, read
from benchmarks.sizing_costs import read_windows
from benchmarks.sizing_page import CONDUCTOR, LARGE, SETUPS, UNPACED, WORK, micros, read_made, sections
from benchmarks.sizing_page import filled as sizing_filled
from benchmarks.sizing_paper import at, engines, saturates
from benchmarks.sizing_solve import Cost
from kvmesh.engine import models
from kvmesh.errors import ConfigError
from kvmesh.transfer.transports import wire
from tests.support.compose.faults import FAULTS
from tests.support.paths import ROOT
from tests.transfer.conftest import over

DOCS = [page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts]

# ── all pages ────────────────────────────────────────────────────────────────────────────────────────────────────────

A_FILE = re.compile(
    r"(?<![\w./-])(?:tests|kvmesh|services|scripts|benchmarks|compose|protos)/[\w./-]+\.(?:py|sh|cpp|h|proto|ya?ml|json)\b"
)


def test_every_file_that_a_page_names_is_there() -> None:
    """Decisions (docs/adr) and the change log speak of their time; results may be somebody's own."""
    missing = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in (*ROOT.glob("*.md"), *DOCS, *(ROOT / "compose").rglob("*.md"))
        if page.name != "CHANGELOG.md"
        for name in A_FILE.findall(page.read_text())
        if not name.startswith("benchmarks/results/") and not (ROOT / name).exists()
    }
    assert not missing


# ── docs/reports/better.md ───────────────────────────────────────────────────────────────────────────────────────────

BETTER_MD, BETTER_JSON = ROOT / "docs" / "reports" / "better.md", ROOT / "benchmarks" / "results" / "better.json"


def test_the_tables_and_the_figure_are_those_of_the_rows() -> None:
    made = read_rows(BETTER_JSON)
    page = BETTER_MD.read_text()
    assert better_filled(page, made) == page
    assert (BETTER_MD.parent / "img" / "better.svg").read_text() == figure(made)
    parameters = json.loads(BETTER_JSON.read_text())["inputs"]["parameters"]
    assert parameters == json.loads(json.dumps(read(PARAMETERS).told()))


def test_the_tuned_policies_are_the_best_of_their_grids() -> None:
    made = read_rows(BETTER_JSON)
    paper = best(paper_grid(), dict(made.rows), None)
    assert (made.paper, made.better) == (paper, best(better_grid(), dict(made.rows), paper))


def test_on_the_second_half_mean_and_p90_are_lower_at_no_less_goodput() -> None:
    made = read_rows(BETTER_JSON)
    speeds = set()
    for table in tables(made.paper, made.better):
        if not table.title.startswith("Second half"):
            continue
        rows = {name: mean([made.rows[task.key] for task in table.tasks[name]]) for name in (PAPER, BETTER)}
        for name in ("mean_s", "p90_s"):
            assert rows[BETTER][name] < rows[PAPER][name], table.title
        assert rows[BETTER]["goodput"] >= rows[PAPER]["goodput"] - LOSS, table.title
        speeds |= {task.speed for task in table.tasks[BETTER]}
    assert speeds == {1.0, 2.0, 3.0}


def test_the_best_is_the_fastest_that_loses_neither_goodput_nor_the_synthetic_workload() -> None:
    paper, hasty, odd, able = (Policy(size_weight=float(n)) for n in range(4))
    told = {paper: (3.0, 0.9, 1.0), hasty: (1.0, 0.8, 0.9), odd: (1.5, 0.9, 1.1), able: (2.0, 0.9, 1.0)}
    rows: dict[str, Row] = {}
    for one, (mean_s, goodput, synthetic_s) in told.items():
        for how, speed in TUNED_AT:
            rows[Task(one, "first", speed, how).key] = {"mean_s": mean_s, "goodput": goodput}
        rows[Task(one, "synthetic", 1.0, "off", TUNING_SEED).key] = {"mean_s": synthetic_s}
    assert best([hasty, odd, able], rows, paper) == able
    assert best([hasty, odd, able], rows, None) == hasty
    assert best([hasty], rows, paper) == hasty  # none is able


def test_the_synthetic_workload_is_not_lost() -> None:
    made = read_rows(BETTER_JSON)
    for table in tables(made.paper, made.better):
        if table.title.startswith("Synthetic"):
            rows = {name: mean([made.rows[task.key] for task in table.tasks[name]]) for name in (PAPER, BETTER)}
            assert rows[BETTER]["mean_s"] <= 1.01 * rows[PAPER]["mean_s"], table.title
            assert rows[BETTER]["goodput"] >= rows[PAPER]["goodput"] - LOSS, table.title


def test_a_page_without_a_place_and_a_file_without_all_rows_are_refused(tmp_path: Path) -> None:
    made = read_rows(BETTER_JSON)
    with pytest.raises(ConfigError, match="docs"):
        better_filled("nothing", made)
    page = better_filled(f"a {BEGIN}what was{END} b", made)
    assert page.startswith(f"a {BEGIN}") and page.endswith(f"{END} b") and "what was" not in page
    told = json.loads(BETTER_JSON.read_text())
    del told["rows"][Task(made.paper, "second", 1.0, "off").key]
    less = tmp_path / "less.json"
    less.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="was not run"):
        read_rows(less)
    less.write_text("[]")
    with pytest.raises(ConfigError, match=r"less\.json"):
        read_rows(less)


def test_rows_of_other_inputs_are_not_used_again(tmp_path: Path) -> None:
    told = json.loads(BETTER_JSON.read_text())
    trace = tmp_path / told["inputs"]["trace"]
    inputs = Inputs(read(PARAMETERS), trace, told["inputs"]["half"])
    assert kept(BETTER_JSON, inputs) == told["rows"]
    assert kept(BETTER_JSON, replace(inputs, half=7)) == {}
    assert Runs(inputs, BETTER_JSON, 1, print).get([Task(policy_of(told["paper"]), "second", 1.0, "off")])


def test_the_halves_follow_one_another(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * n, "input_length": 600 + n, "output_length": 2, "hash_ids": [0, n]} for n in range(6)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    inputs = Inputs(read(PARAMETERS), trace, 3)
    lengths = [
        [r.input_tokens for r in requests_of(inputs, Task(Policy(), part, 1.0, "off"))] for part in ("first", "second")
    ]
    assert lengths == [[600, 601, 602], [603, 604, 605]]


# ── docs/conductor-speed.md ──────────────────────────────────────────────────────────────────────────────────────────

CONDUCTOR_MD, CONDUCTOR_JSON = ROOT / "docs" / "conductor-speed.md", ROOT / "benchmarks" / "results" / "conductor.json"


def test_the_conductors_figures_are_those_of_the_file() -> None:
    page = CONDUCTOR_MD.read_text()
    assert conductor_filled(page, json.loads(CONDUCTOR_JSON.read_text())) == page


@pytest.mark.parametrize("part", ["rows", "events", "memory", "grpc"])
def test_another_figure_of_the_conductor_is_another_page(part: str) -> None:
    told, page = json.loads(CONDUCTOR_JSON.read_text()), CONDUCTOR_MD.read_text()
    changed = {
        "rows": lambda: told["rows"][0]["alone"].update(per_s=1.0),
        "events": lambda: told["events"].update(heartbeats_per_s=1.0),
        "memory": lambda: told["memory"].update(counted_bytes_per_block=1.0),
        "grpc": lambda: told["grpc"][0]["schedule"].update(p99_ms=0.1),
    }
    changed[part]()
    assert conductor_filled(page, told) != page


def test_a_page_of_the_conductor_with_other_places_is_refused() -> None:
    page = CONDUCTOR_MD.read_text().replace("<!-- conductor: calls -->", "")
    with pytest.raises(ConfigError, match="places"):
        conductor_filled(page, json.loads(CONDUCTOR_JSON.read_text()))


# ── docs/reports/sizing.md ───────────────────────────────────────────────────────────────────────────────────────────

SIZING_MD, SIZING_JSON = ROOT / "docs" / "reports" / "sizing.md", ROOT / "benchmarks" / "results" / "sizing.json"


def test_the_tables_of_sizing_are_those_of_the_file() -> None:
    page = SIZING_MD.read_text()
    assert sizing_filled(page, read_made(SIZING_JSON, CONDUCTOR)) == page


def test_another_figure_of_sizing_is_another_page(tmp_path: Path) -> None:
    told = json.loads(SIZING_JSON.read_text())
    told["fleet"][0]["cpu_s"]["conductor"] *= 3
    for run in told["throughput"]:
        run["tokens_per_s"] *= 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps(told))
    page = SIZING_MD.read_text()
    assert sizing_filled(page, read_made(other, CONDUCTOR)) != page


def test_a_page_of_sizing_with_other_places_and_a_file_without_a_part_are_refused(tmp_path: Path) -> None:
    made = read_made(SIZING_JSON, CONDUCTOR)
    page = SIZING_MD.read_text()
    with pytest.raises(ConfigError, match="places"):
        sizing_filled(page.replace("<!-- sizing: rest -->", ""), made)
    with pytest.raises(ConfigError, match="places"):
        sizing_filled(page + "\n<!-- sizing: nothing -->\n<!-- end -->", made)
    told = json.loads(SIZING_JSON.read_text())
    del told["fleet"]
    less = tmp_path / "less.json"
    less.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"less\.json.*fleet"):
        read_made(less, CONDUCTOR)


def test_the_file_has_every_window_as_often() -> None:
    told = json.loads(SIZING_JSON.read_text())
    for part in ("unit", "fleet"):
        windows = read_windows(told[part])
        repeats = {window.group: [w.repeat for w in windows if w.group == window.group] for window in windows}
        assert len({tuple(some) for some in repeats.values()}) == 1, repeats
        assert all(cpu >= 0 for window in windows for cpu in window.cpu_s.values())
    assert all(row["tokens_per_s"] > 0 for row in told["throughput"])


def test_what_the_page_advises_helps() -> None:
    """Longer intervals, larger blocks and more conductors each let the conductor take more, or as much."""
    costs = read_made(SIZING_JSON, CONDUCTOR).costs
    rates = [saturates(costs, LARGE, setup, WORK, "conductor") for setup in SETUPS]
    defaults, larger, longer, longest, both, several = rates
    assert 0 < defaults <= larger and defaults <= longer <= longest <= both < several
    unpaced = at(costs, LARGE, UNPACED, WORK, 0.0)
    assert unpaced.conductor < 0.4 and unpaced.store < 0.5, "1,000 instances fill neither, paced or not"
    for service in ("conductor", "store"):
        paced, as_they_come = (saturates(costs, LARGE, setup, WORK, service) for setup in (SETUPS[0], UNPACED))
        assert 0 < as_they_come < paced, f"{service}: pacing leaves more for requests"
        rest = getattr(at(costs, LARGE, SETUPS[0], WORK, 0.0), service)
        assert rest < 0.2, "paced, nearly all of a core is left for requests"
    by_hand = replace(SETUPS[0], words=300)
    assert 0 < saturates(costs, LARGE, SETUPS[0], WORK, "store") < saturates(costs, LARGE, by_hand, WORK, "store")
    assert 0 < longest < saturates(costs, LARGE, SETUPS[3], WORK, "store"), "with long ones the conductor is first"
    assert several > engines(LARGE, WORK), "and four of them take what the engines do"


def test_the_page_says_what_saturates() -> None:
    tables = sections(read_made(SIZING_JSON, CONDUCTOR))
    for place in ("large", "nodes"):
        assert all(setup.name in tables[place] for setup in SETUPS)


@pytest.mark.parametrize(
    ("cost", "text"),
    [(Cost(12e-6, 1e-6, 13.26e-6), "12.0 (1.0 to 13.3)"), (Cost(1.5e-3, 1e-3, 2e-3), "1,500 (1,000 to 2,000)")],
)
def test_costs_are_told_in_microseconds(cost: Cost, text: str) -> None:
    assert micros(cost) == text


# ── docs/reports/faults.md ───────────────────────────────────────────────────────────────────────────────────────────

CONTAINERS = "\n## A mesh in containers"
KEYS = "\n## A mesh with TLS and keys"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_each_fault_has_a_test_and_each_test_is_there() -> None:
    page, _, _ = (ROOT / "docs" / "reports" / "faults.md").read_text().partition(CONTAINERS)
    rows = [line for line in page.splitlines() if line.startswith("| ") and "| shown by |" not in line]
    assert len(rows) >= 40
    for row in rows:
        named = NAMED.findall(row)
        assert named and row.count("tests/") == len(named), row
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"


def test_the_table_of_containers_has_all_that_they_are_struck_with() -> None:
    page = (ROOT / "docs" / "reports" / "faults.md").read_text().partition(CONTAINERS)[2].partition(KEYS)[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [cells[1].strip() for cells in rows] == [fault.name for fault in FAULTS]
    for cells in rows:
        assert int(cells[2]) > 0 and (cells[5].strip() == "never" or float(cells[5]) >= 0), cells


# ── docs/reports/parity.md ───────────────────────────────────────────────────────────────────────────────────────────

PARITY_MD = ROOT / "docs" / "reports" / "parity.md"
SITUATIONS = 9


def test_each_cell_has_a_test_that_runs_on_its_family() -> None:
    page = PARITY_MD.read_text()
    tests = dict(re.findall(r"^\| \*\*(\w)\*\* \| `(tests/[\w/]+\.py::\w+)` ", page, re.MULTILINE))
    runs_on = {letter: set(names(*test.split("::"))) for letter, test in tests.items()}
    rows = [line[2:-2].split(" | ") for line in page.splitlines() if re.match(r"\| [a-z0-9_]+ \| [A-Z ]+ \|", line)]
    no_family = {"__init__", "blocks", "dispatch", "experts", "latent", "moe", "mtp", "registry", "token_shares"}
    families = {path.stem for path in Path(models.__file__).parent.glob("*.py")} - no_family
    assert sorted(row[0] for row in rows) == sorted([*families, *families]), "a row for each family and precision"
    for family, *cells in rows:
        assert len(cells) >= SITUATIONS
        for letter in {letter for cell in cells for letter in cell.split()}:
            assert any(name.startswith(family) for name in runs_on[letter]), f"{tests[letter]} not on {family}"


def names(file: str, test: str) -> Iterator[str]:
    """Every text among the parameters of that test."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    for mark in getattr(module, test).pytestmark:
        if mark.name == "parametrize":
            yield from texts(list(mark.args[1]))


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from texts(part)


# ── docs/reference/imports.md ────────────────────────────────────────────────────────────────────────────────────────

IMPORTS_MD = ROOT / "docs" / "reference" / "imports.md"
ROW = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.MULTILINE)


def test_every_public_name_is_where_the_page_says() -> None:
    rows = ROW.findall(IMPORTS_MD.read_text())
    assert len(rows) >= 4
    for module, names in rows:
        found = importlib.import_module(module)
        missing = [name for name in re.findall(r"`(\w+)`", names) if not hasattr(found, name)]
        assert not missing, f"{module} lacks {missing}"


def test_the_page_names_all_that_the_modules_call_public() -> None:
    rows = dict(ROW.findall(IMPORTS_MD.read_text()))
    for module in ("kvmesh.transfer", "kvmesh.storeclient", "kvmesh.kvcache.client"):
        listed = set(re.findall(r"`(\w+)`", rows[module]))
        assert set(importlib.import_module(module).__all__) == listed


# ── docs/transfer.md ─────────────────────────────────────────────────────────────────────────────────────────────────

TRANSFER_MD = (ROOT / "docs" / "transfer.md").read_text(encoding="utf-8")


@over("shm", "tcp")
def test_using_it_runs(tmp_path: Path) -> None:
    section = re.search(r"^## Using it\n(.*?)^## ", TRANSFER_MD, re.M | re.S)
    assert section is not None
    blocks = re.findall(r"^```python\n(.*?)^```", section[1], re.M | re.S)
    assert len(blocks) == 5
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "TransferState.COMPLETED" in done.stdout


def test_the_causes_of_the_page_are_those_that_peers_answer() -> None:
    for cause in wire.CAUSES[1:]:
        assert f"| {cause} |" in TRANSFER_MD, cause


@over("shm", "tcp")
def test_it_needs_neither_torch_nor_grpc_nor_what_serves_models() -> None:
    """Only numpy and msgspec beside the standard library."""
    code = """if True:
        import sys
        import kvmesh.transfer
        roots = {name.partition(".")[0] for name in sys.modules}
        third = {
            name for name in roots
            if "site-packages" in (getattr(sys.modules.get(name), "__file__", None) or "")
            and name != "kvmesh" and not name.startswith(("_", "a1_"))
        }
        print(sorted(third - {"msgspec", "numpy", "typing_extensions"}))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "[]"
