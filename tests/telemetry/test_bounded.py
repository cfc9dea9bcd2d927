"""What telemetry writes is bounded: two files, a floor of free space, a share of traces; what failed is kept."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context

from kvmesh.cli.trace import read_spans
from kvmesh.cli.up.mesh import cut_log
from kvmesh.telemetry import setup, spans
from kvmesh.telemetry import setup as disk
from kvmesh.telemetry.setup import FreeSpace, TelemetryLimits


def start(folder: Path, log_file: str = "", **limits: Any) -> setup.Telemetry:
    return setup.start(
        "decode", "d", trace_dir=str(folder), otlp_endpoint="", log_level="info", log_file=log_file,
        limits=TelemetryLimits(**limits),
    )  # fmt: skip


def test_traces_take_two_files_and_the_older_one_goes(tmp_path: Path) -> None:
    telemetry = start(tmp_path, trace_max_mb=1)
    for number in range(6_000):
        spans.record("s", Context(), 0, 1, {"number": number, "text": "x" * 200})
    telemetry.shutdown()
    files = list(tmp_path.iterdir())
    assert len(files) == 2 and sum(path.stat().st_size for path in files) <= 1 << 20
    found = [span["attributes"]["number"] for span in read_spans(tmp_path)]
    assert found == list(range(6_000 - len(found), 6_000)) and len(found) > 1_000


def test_logs_take_two_files(tmp_path: Path) -> None:
    telemetry = start(tmp_path / "t", str(tmp_path / "x.log"), log_max_mb=1)
    for number in range(8_000):
        logging.getLogger("kvmesh.test").info("%d %s", number, "x" * 200)
    telemetry.shutdown()
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert len(files) == 2 and sum(path.stat().st_size for path in files) <= 1 << 20


def test_a_floor_is_left_and_comes_back_with_a_margin() -> None:
    free = [1000]

    def statvfs(_path: str) -> os.statvfs_result:
        return os.statvfs_result((1 << 20, 1 << 20, 10_000, free[0], free[0], 0, 0, 0, 0, 255))

    space = FreeSpace(Path("/"), 900, statvfs)
    assert not space.look(0.0) and not space.low
    free[0] = 800
    assert not space.look(0.5), "it looks once a second"
    assert space.look(1.0) and space.low
    free[0] = 950
    assert not space.look(2.0) and space.low
    free[0] = 1200
    assert space.look(3.0) and not space.low
    never = FreeSpace(Path("/"), 0, statvfs)
    free[0] = 0
    assert not never.look(9.0) and not never.low


def test_below_the_floor_spans_stop_the_log_says_so_and_both_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [True]

    def statvfs(_path: str) -> os.statvfs_result:
        free = 1 if full[0] else 9_000
        return os.statvfs_result((1 << 20, 1 << 20, 10_000, free, free, 0, 0, 0, 0, 255))

    monkeypatch.setattr(disk, "LOOK_S", 0.0)
    monkeypatch.setattr(setup, "FreeSpace", lambda folder, floor: FreeSpace(folder, floor, statvfs))
    path = tmp_path / "x.log"
    telemetry = start(tmp_path / "t", str(path))
    log = logging.getLogger("kvmesh.test")
    log.info("left out")
    log.warning("kept")
    spans.record("lost", Context(), 0, 1)
    telemetry.flush()
    full[0] = False
    spans.record("written", Context(), 0, 1)
    log.info("again")
    telemetry.shutdown()
    text = path.read_text()
    assert "left out" not in text and "kept" in text and "again" in text
    assert text.count("no spans are written") == text.count("only warnings are logged") == 1
    assert [span["name"] for span in read_spans(tmp_path / "t")] == ["written"]


def test_a_share_of_traces_is_kept_whole_and_by_their_id(tmp_path: Path) -> None:
    telemetry = start(tmp_path, trace_sample=0.25)
    for _ in range(2_000):
        root = spans.begin("root", Context())
        spans.record("child", spans.context_of(root), 0, 1)
        spans.finish(root)
    telemetry.shutdown()
    found = list(read_spans(tmp_path))
    roots = {span["trace_id"] for span in found if span["name"] == "root"}
    assert 350 < len(roots) < 650 and {span["trace_id"] for span in found} == roots
    assert len(found) == 2 * len(roots)


def test_what_failed_or_was_slow_is_kept_though_its_trace_is_not(tmp_path: Path) -> None:
    telemetry = start(tmp_path, trace_sample=0.0, trace_slow_ms=1)
    remote = spans.context_from(f"00-{'a' * 32}-{'b' * 16}-00")
    for name, parent, error, took_ns in (
        ("fine", Context(), "", 10), ("failed", Context(), "lost", 10), ("slow", remote, "", 2_000_000),
    ):  # fmt: skip
        root = spans.begin(name, parent, start_ns=1_000)
        assert not int(spans.traceparent(root)[-2:], 16) & 1, "others are told that it is not kept"
        spans.record(f"{name} child", spans.context_of(root), 1_000, 1_001)
        spans.finish(root, end_ns=1_000 + took_ns, error=error)
        spans.record(f"{name} late", spans.context_of(root), 1_000, 1_001)
    telemetry.shutdown()
    assert {span["name"] for span in read_spans(tmp_path)} == {
        f"{name}{part}" for name in ("failed", "slow") for part in ("", " child", " late")
    }


def test_held_spans_are_bounded(tmp_path: Path) -> None:
    telemetry = start(tmp_path, trace_sample=0.0)
    roots = [spans.begin("root", Context()) for _ in range(5_000)]
    for root in roots:
        spans.finish(root, error="lost")
    telemetry.shutdown()
    assert len([json.dumps(span) for span in read_spans(tmp_path)]) == 4_096


def test_a_log_that_others_write_is_cut_and_they_write_on(tmp_path: Path) -> None:
    path = tmp_path / "decode-0.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"a" * 400)
        assert not cut_log(path, 1_000)
        log.write(b"b" * 200)
        assert cut_log(path, 1_000)
        log.write(b"after")
    assert path.read_bytes() == b"after" and (tmp_path / "decode-0.log.1").stat().st_size == 600
    assert not cut_log(tmp_path / "none", 1)
