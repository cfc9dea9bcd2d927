"""docs/conductor-speed.md tells what benchmarks/results/conductor.json says."""

from __future__ import annotations

import json

import pytest

from benchmarks.conductor_page import filled
from kvmesh.errors import ConfigError
from tests.support.paths import ROOT

PAGE, FILE = ROOT / "docs" / "conductor-speed.md", ROOT / "benchmarks" / "results" / "conductor.json"


def test_the_figures_are_those_of_the_file() -> None:
    page = PAGE.read_text()
    assert filled(page, json.loads(FILE.read_text())) == page


@pytest.mark.parametrize("part", ["rows", "events", "memory", "grpc"])
def test_another_figure_in_the_file_is_another_page(part: str) -> None:
    told, page = json.loads(FILE.read_text()), PAGE.read_text()
    changed = {
        "rows": lambda: told["rows"][0]["alone"].update(per_s=1.0),
        "events": lambda: told["events"].update(heartbeats_per_s=1.0),
        "memory": lambda: told["memory"].update(counted_bytes_per_block=1.0),
        "grpc": lambda: told["grpc"][0]["schedule"].update(p99_ms=0.1),
    }
    changed[part]()
    assert filled(page, told) != page


def test_a_page_with_other_places_is_refused() -> None:
    page = PAGE.read_text().replace("<!-- conductor: calls -->", "")
    with pytest.raises(ConfigError, match="places"):
        filled(page, json.loads(FILE.read_text()))
