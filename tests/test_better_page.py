"""docs/better.md tells what benchmarks/results/better.json says, and what it claims of it is so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.better import LOSS, best
from benchmarks.better_page import BEGIN, END, figure, filled, read_rows
from benchmarks.better_policies import BETTER, PAPER, Policy, better_grid, paper_grid, policy_of
from benchmarks.better_runs import Inputs, Row, Runs, Task, kept, requests_of
from benchmarks.better_tables import TUNED_AT, TUNING_SEED, mean, tables
from benchmarks.paper_setup import PARAMETERS, read
from kvmesh.errors import ConfigError
from tests.support.paths import ROOT

PAGE, ROWS = ROOT / "docs" / "better.md", ROOT / "benchmarks" / "results" / "better.json"


def test_the_tables_and_the_figure_are_those_of_the_rows() -> None:
    made = read_rows(ROWS)
    page = PAGE.read_text()
    assert filled(page, made) == page
    assert (PAGE.parent / "img" / "better.svg").read_text() == figure(made)
    assert json.loads(ROWS.read_text())["inputs"]["parameters"] == json.loads(json.dumps(read(PARAMETERS).told()))


def test_the_tuned_policies_are_the_best_of_their_grids() -> None:
    made = read_rows(ROWS)
    paper = best(paper_grid(), dict(made.rows), None)
    assert (made.paper, made.better) == (paper, best(better_grid(), dict(made.rows), paper))


def test_on_the_second_half_mean_and_p90_are_lower_at_no_less_goodput() -> None:
    made = read_rows(ROWS)
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
    made = read_rows(ROWS)
    for table in tables(made.paper, made.better):
        if table.title.startswith("Synthetic"):
            rows = {name: mean([made.rows[task.key] for task in table.tasks[name]]) for name in (PAPER, BETTER)}
            assert rows[BETTER]["mean_s"] <= 1.01 * rows[PAPER]["mean_s"], table.title
            assert rows[BETTER]["goodput"] >= rows[PAPER]["goodput"] - LOSS, table.title


def test_a_page_without_a_place_and_a_file_without_all_rows_are_refused(tmp_path: Path) -> None:
    made = read_rows(ROWS)
    with pytest.raises(ConfigError, match="docs"):
        filled("nothing", made)
    page = filled(f"a {BEGIN}what was{END} b", made)
    assert page.startswith(f"a {BEGIN}") and page.endswith(f"{END} b") and "what was" not in page
    told = json.loads(ROWS.read_text())
    del told["rows"][Task(made.paper, "second", 1.0, "off").key]
    less = tmp_path / "less.json"
    less.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="was not run"):
        read_rows(less)
    less.write_text("[]")
    with pytest.raises(ConfigError, match=r"less\.json"):
        read_rows(less)


def test_rows_of_other_inputs_are_not_used_again(tmp_path: Path) -> None:
    told = json.loads(ROWS.read_text())
    trace = tmp_path / told["inputs"]["trace"]
    inputs = Inputs(read(PARAMETERS), trace, told["inputs"]["half"])
    assert kept(ROWS, inputs) == told["rows"]
    assert kept(ROWS, replace(inputs, half=7)) == {}
    assert Runs(inputs, ROWS, 1, print).get([Task(policy_of(told["paper"]), "second", 1.0, "off")])


def test_the_halves_follow_one_another(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 1000 * n, "input_length": 600 + n, "output_length": 2, "hash_ids": [0, n]} for n in range(6)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    inputs = Inputs(read(PARAMETERS), trace, 3)
    lengths = [
        [r.input_tokens for r in requests_of(inputs, Task(Policy(), part, 1.0, "off"))] for part in ("first", "second")
    ]
    assert lengths == [[600, 601, 602], [603, 604, 605]]
