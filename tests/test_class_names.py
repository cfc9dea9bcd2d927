"""A public class name stands for one class (docs/adr/0034-habits.md). Names that stand for several are counted here:
the count may shrink and not grow."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

MOST_SHARED = 0
CLASS = re.compile(r"^class ([A-Za-z]\w*)", re.M)  # at the top of a file; parsing them all would take seconds


def classes(folders: Iterator[Path]) -> dict[str, set[str]]:
    """Files by the public classes that they define at their top."""
    found: dict[str, set[str]] = defaultdict(set)
    for folder in folders:
        for path in folder.rglob("*.py"):
            if "_pb2" in path.name:
                continue
            for name in CLASS.findall(path.read_text()):
                found[name].add(str(path.relative_to(ROOT)))
    return found


def test_no_class_takes_a_name_that_another_has() -> None:
    shared = {
        name: files for name, files in classes(ROOT / one for one in ("kvmesh", "services")).items() if len(files) > 1
    }
    listed = "\n".join(f"  {name}: {', '.join(sorted(files))}" for name, files in sorted(shared.items()))
    assert len(shared) <= MOST_SHARED, f"{len(shared)} names stand for several classes, {MOST_SHARED} did:\n{listed}"
    assert len(shared) >= MOST_SHARED, f"only {len(shared)} do now: lower MOST_SHARED"
