"""docs/architecture.md names where each step of a request is in the code; what it names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"
STEP = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)
PLACE = re.compile(r"`((?:services|kvmesh)/[\w/]+\.py):([\w.]+)`")
STEPS = 12


def defined(path: Path) -> set[str]:
    """Names of a file's functions and classes, methods with their class before them."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inside = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{one.name}" for one in inside}
    return found


def steps() -> list[tuple[int, str, list[tuple[str, str]]]]:
    return [(int(n), what, PLACE.findall(where)) for n, what, where in STEP.findall(PAGE.read_text(encoding="utf-8"))]


def test_a_request_takes_twelve_steps() -> None:
    assert [number for number, _, _ in steps()] == list(range(1, STEPS + 1))
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 250


@pytest.mark.parametrize("number", range(1, STEPS + 1))
def test_each_step_is_where_the_page_says(number: int) -> None:
    _, what, places = steps()[number - 1]
    assert what and places, "a step names at least one function"
    for file, name in places:
        assert name in defined(ROOT / file), f"step {number}: {file} has no {name}"


def test_what_is_not_there_is_noticed() -> None:
    assert "Handoff._begin_fill" not in defined(ROOT / "services" / "decode" / "config.py")
