"""What users import stays where it is (docs/imports.md)."""

from __future__ import annotations

import importlib
import re

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "imports.md"
ROW = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.MULTILINE)


def test_every_public_name_is_where_the_page_says() -> None:
    rows = ROW.findall(PAGE.read_text())
    assert len(rows) >= 4
    for module, names in rows:
        found = importlib.import_module(module)
        missing = [name for name in re.findall(r"`(\w+)`", names) if not hasattr(found, name)]
        assert not missing, f"{module} lacks {missing}"


def test_the_page_names_all_that_the_modules_call_public() -> None:
    rows = dict(ROW.findall(PAGE.read_text()))
    for module in ("kvmesh.transfer", "kvmesh.storeclient", "kvmesh.kvcache.client"):
        listed = set(re.findall(r"`(\w+)`", rows[module]))
        assert set(importlib.import_module(module).__all__) == listed
