"""docs/faults.md names tests that exist, some for each fault."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_each_fault_has_a_test_and_each_test_is_there() -> None:
    rows = [line for line in (ROOT / "docs" / "faults.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 12
    for row in rows:
        named = NAMED.findall(row)
        assert named and row.count("tests/") == len(named), row
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"
