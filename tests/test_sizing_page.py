"""docs/sizing.md tells what benchmarks/results/sizing.json says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.sizing_costs import read_windows
from benchmarks.sizing_page import CONDUCTOR, LARGE, SETUPS, UNPACED, WORK, filled, micros, read_made, sections
from benchmarks.sizing_paper import at, engines, saturates
from benchmarks.sizing_solve import Cost
from kvmesh.errors import ConfigError
from tests.support.paths import ROOT

PAGE, FILE = ROOT / "docs" / "sizing.md", ROOT / "benchmarks" / "results" / "sizing.json"


def test_the_tables_are_those_of_the_file() -> None:
    page = PAGE.read_text()
    assert filled(page, read_made(FILE, CONDUCTOR)) == page


def test_another_figure_in_the_file_is_another_page(tmp_path: Path) -> None:
    told = json.loads(FILE.read_text())
    told["fleet"][0]["cpu_s"]["conductor"] *= 3
    for run in told["throughput"]:
        run["tokens_per_s"] *= 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps(told))
    page = PAGE.read_text()
    assert filled(page, read_made(other, CONDUCTOR)) != page


def test_a_page_with_other_places_and_a_file_without_a_part_are_refused(tmp_path: Path) -> None:
    made = read_made(FILE, CONDUCTOR)
    page = PAGE.read_text()
    with pytest.raises(ConfigError, match="places"):
        filled(page.replace("<!-- sizing: rest -->", ""), made)
    with pytest.raises(ConfigError, match="places"):
        filled(page + "\n<!-- sizing: nothing -->\n<!-- end -->", made)
    told = json.loads(FILE.read_text())
    del told["fleet"]
    less = tmp_path / "less.json"
    less.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"less\.json.*fleet"):
        read_made(less, CONDUCTOR)


def test_the_file_has_every_window_as_often() -> None:
    told = json.loads(FILE.read_text())
    for part in ("unit", "fleet"):
        windows = read_windows(told[part])
        repeats = {window.group: [w.repeat for w in windows if w.group == window.group] for window in windows}
        assert len({tuple(some) for some in repeats.values()}) == 1, repeats
        assert all(cpu >= 0 for window in windows for cpu in window.cpu_s.values())
    assert all(row["tokens_per_s"] > 0 for row in told["throughput"])


def test_what_the_page_advises_helps() -> None:
    """Longer intervals, larger blocks and more conductors each let the conductor take more, or as much."""
    costs = read_made(FILE, CONDUCTOR).costs
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
    tables = sections(read_made(FILE, CONDUCTOR))
    for place in ("large", "nodes"):
        assert all(setup.name in tables[place] for setup in SETUPS)


@pytest.mark.parametrize(
    ("cost", "text"),
    [(Cost(12e-6, 1e-6, 13.26e-6), "12.0 (1.0 to 13.3)"), (Cost(1.5e-3, 1e-3, 2e-3), "1,500 (1,000 to 2,000)")],
)
def test_costs_are_told_in_microseconds(cost: Cost, text: str) -> None:
    assert micros(cost) == text
