"""JSON Schema's official suite, where it is present: no grammar of an accepted schema accepts an invalid instance.

`make install-dev`, `make test` and `make test-rest` fetch it; JSON_SCHEMA_SUITE names another copy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts.json_schema_suite import print_counts, run_suite, suite_folder

FETCHED = Path(sys.prefix) / "json-schema-suite"


def test_no_invalid_instance_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    named = os.environ.get("JSON_SCHEMA_SUITE", "")
    folder = suite_folder(Path(named) if named else FETCHED)
    if folder is None:
        assert not named, f"JSON_SCHEMA_SUITE={named!r}: holds no suite"
        pytest.skip(f"{FETCHED} holds no suite: scripts/fetch_json_schema_suite.sh VENV needs the package index")
    counts = run_suite(folder)
    with capsys.disabled():
        print()
        print_counts(counts, files=False)
    assert [text for one in counts.values() for text in one.wrong] == []
    assert sum(one.schemas for one in counts.values()) >= 180
    assert sum(one.valid for one in counts.values()) >= 480
    assert sum(one.invalid for one in counts.values()) >= 400
