"""docs/parity.md names tests that exist, and claims no family for a test that does not run on it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvmesh.engine import models
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "parity.md"
SITUATIONS = 9


def test_each_cell_has_a_test_that_runs_on_its_family() -> None:
    page = PAGE.read_text()
    tests = dict(re.findall(r"^\| \*\*(\w)\*\* \| `(tests/[\w/]+\.py::\w+)` ", page, re.MULTILINE))
    runs_on = {letter: set(names(*test.split("::"))) for letter, test in tests.items()}
    rows = [
        line.strip("| ").split(" | ") for line in page.splitlines() if re.match(r"\| [a-z]+\d? \| [A-Z ]+ \|", line)
    ]
    families = {path.stem for path in Path(models.__file__).parent.glob("*.py")} - {"__init__", "blocks", "registry"}
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
