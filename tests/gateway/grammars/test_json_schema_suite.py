"""JSON Schema's official suite, where it is present: no grammar of an accepted schema accepts an invalid instance."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.json_schema_suite import run_suite, suite_folder


def test_no_invalid_instance_is_accepted() -> None:
    named = os.environ.get("JSON_SCHEMA_SUITE", "")
    folder = suite_folder(Path(named)) if named else None
    if folder is None:
        pytest.skip("JSON_SCHEMA_SUITE does not name the suite's folder (the json folder of jsonschema's sdist)")
    counts = run_suite(folder)
    assert [text for one in counts.values() for text in one.wrong] == []
    assert sum(one.schemas for one in counts.values()) >= 180
    assert sum(one.valid for one in counts.values()) >= 480
    assert sum(one.invalid for one in counts.values()) >= 400
