"""docs/faults.md names tests that exist, some for each fault."""

from __future__ import annotations

import re

from tests.support.compose.faults import FAULTS
from tests.support.paths import ROOT

CONTAINERS = "\n## A mesh in containers"
KEYS = "\n## A mesh with TLS and keys"
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_each_fault_has_a_test_and_each_test_is_there() -> None:
    page, _, _ = (ROOT / "docs" / "faults.md").read_text().partition(CONTAINERS)
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for row in rows:
        named = NAMED.findall(row)
        assert named and row.count("tests/") == len(named), row
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"


def test_the_table_of_containers_has_all_that_they_are_struck_with() -> None:
    page = (ROOT / "docs" / "faults.md").read_text().partition(CONTAINERS)[2].partition(KEYS)[0]
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert [cells[1].strip() for cells in rows] == [fault.name for fault in FAULTS]
    for cells in rows:
        assert int(cells[2]) > 0 and (cells[5].strip() == "never" or float(cells[5]) >= 0), cells
