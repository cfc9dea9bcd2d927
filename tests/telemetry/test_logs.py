"""Logs: one line an event, with time, level, service and request id."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from kvmesh.errors import ConfigError
from kvmesh.telemetry import setup


def test_every_event_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    telemetry = setup.start("decode", "decode-0", trace_dir="", otlp_endpoint="", log_level="info", log_file=str(path))
    log = logging.getLogger("kvmesh.test")
    log.info("placed\nin two lines", extra={"request_id": "r-1"})
    log.debug("too fine")
    try:
        raise ValueError("by\nhand")
    except ValueError:
        log.exception("failed")
    telemetry.shutdown()
    log.error("after the end")
    first, second = path.read_text().splitlines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} INFO    decode-0 placed ⏎ in two lines request_id=r-1", first
    )
    assert re.search(r"ERROR   decode-0 failed \| ValueError: by ⏎ hand \(test_logs.py:\d+ test_every_event", second)


def test_a_log_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_file="):
        setup.start("d", "d", trace_dir="", otlp_endpoint="", log_level="info", log_file=str(tmp_path / "no" / "x"))
