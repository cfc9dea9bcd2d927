"""Spans and their W3C context, with and without a running telemetry."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context

from kvmesh.errors import ConfigError
from kvmesh.telemetry import setup, spans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{PARENT}-01"


def read(folder: Path) -> list[dict[str, Any]]:
    files = list(folder.glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def start(tmp_path: Path, **changed: Any) -> setup.Telemetry:
    settings: dict[str, Any] = {"trace_dir": str(tmp_path), "otlp_endpoint": "", "log_level": "info"}
    return setup.start("decode", "decode-0", **{**settings, **changed})


def test_the_header_goes_round() -> None:
    assert spans.traceparent(spans.context_from(HEADER)) == HEADER
    assert spans.traceparent(spans.context_from(HEADER[:-2] + "00")) == HEADER[:-2] + "00"
    later = f"cc-{TRACE}-{PARENT}-01-what-the-future-adds"
    assert spans.traceparent(spans.context_from(later)) == HEADER


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        "garbage",
        HEADER.upper(),
        HEADER + "-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE[:-2]}_1-{PARENT}-01",
        f"00-+{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-0x",
        f"00-{'g' * 32}-{PARENT}-01",
        "00-" + "\u0661" * 32 + f"-{PARENT}-01",
    ],
)
def test_a_malformed_header_begins_a_new_trace(header: str) -> None:
    assert spans.traceparent(spans.context_from(header)) == ""


def test_without_telemetry_spans_do_nothing_and_hand_the_parent_on() -> None:
    parent = spans.context_from(HEADER)
    span = spans.begin("a", parent, {"x": 1})
    assert spans.traceparent(span) == HEADER
    spans.finish(span, error="late")
    assert spans.traceparent(spans.record("b", parent, 1, 2)) == HEADER
    assert spans.traceparent(spans.record("c", Context(), 1, 2)) == ""


def test_spans_land_in_the_file_with_their_times_tree_and_status(tmp_path: Path) -> None:
    telemetry = start(tmp_path)
    begun = time.monotonic_ns()
    outer = spans.begin("outer", spans.context_from(HEADER), {"kvmesh.attempt": 1}, start_ns=begun)
    inside = spans.record("inner", spans.context_of(outer), begun + 1_000, begun + 5_000, {"s": "t", "list": "no"})
    spans.record("leaf", inside, begun + 2_000, begun + 1_000)  # never ends before it starts
    spans.finish(outer, end_ns=begun + 9_000, error="handoff_lost")
    before = time.time_ns()
    telemetry.shutdown()
    found = {span["name"]: span for span in read(tmp_path)}
    outside, inner, leaf = found["outer"], found["inner"], found["leaf"]
    assert (outside["trace_id"], outside["parent"]) == (TRACE, PARENT)
    assert inner["parent"] == outside["span_id"]
    assert leaf["parent"] == inner["span_id"]
    assert {span["trace_id"] for span in found.values()} == {TRACE}
    assert outside["end_ns"] - outside["start_ns"] == 9_000
    assert (inner["start_ns"] - outside["start_ns"], inner["end_ns"] - inner["start_ns"]) == (1_000, 4_000)
    assert leaf["end_ns"] == leaf["start_ns"]
    assert abs(outside["start_ns"] - before) < 60e9
    assert (outside["status"], inner["status"]) == ("handoff_lost", "")
    assert (inner["attributes"], inner["service"], inner["instance"]) == (
        {"s": "t", "list": "no"},
        "decode",
        "decode-0",
    )
    assert spans.traceparent(spans.record("after", Context(), 1, 2)) == "", "a no-op again"


def test_no_span_is_lost_on_shutdown(tmp_path: Path) -> None:
    telemetry = start(tmp_path)
    root = spans.record("root", Context(), 0, 1)
    for _ in range(5_000):
        spans.record("child", root, 1, 2)
    telemetry.shutdown()
    assert len(read(tmp_path)) == 5_001


def test_an_unsampled_parent_is_not_recorded(tmp_path: Path) -> None:
    telemetry = start(tmp_path)
    spans.record("quiet", spans.context_from(HEADER[:-2] + "00"), 0, 1)
    spans.record("told", spans.context_from(HEADER), 0, 1)
    telemetry.shutdown()
    assert [span["name"] for span in read(tmp_path)] == ["told"]


def test_only_kept_traces_are_named_to_callees(tmp_path: Path) -> None:
    assert not spans.is_kept(HEADER), "nothing is traced here"
    telemetry = start(tmp_path)
    root = spans.begin("root", Context())
    assert spans.is_kept(spans.kept(root)), "whatever flags the SDK sets beside that of sampling"
    quiet = spans.context_from(HEADER[:-1] + "0")
    assert spans.kept(quiet) == "" and spans.reserve(quiet) is None
    for kept in ("", "1", HEADER[:-1] + "2", HEADER + "1"):
        assert not spans.is_kept(kept)
    own = spans.reserve(spans.context_of(root))
    assert own is not None
    spans.record("later", spans.context_from(spans.kept(own)), 2, 3)
    spans.record("first", spans.context_of(root), 1, 4, own=own)
    telemetry.shutdown()
    found = {span["name"]: span for span in read(tmp_path)}
    assert found["later"]["parent"] == found["first"]["span_id"]


def test_a_process_has_one_telemetry(tmp_path: Path) -> None:
    first = start(tmp_path)
    second = start(tmp_path / "other")
    second.shutdown()
    spans.record("still", Context(), 0, 1)
    first.shutdown()
    assert [span["name"] for span in read(tmp_path)] == ["still"]
    assert not (tmp_path / "other").exists()


def test_a_folder_that_cannot_be_written_and_an_unknown_level_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trace_dir='.*/file/traces'"):
        start(tmp_path, trace_dir=str(tmp_path / "file" / "traces"))
    with pytest.raises(ConfigError, match="log_level='loud': choose one of debug, info, warning, error"):
        start(tmp_path, log_level="loud")
    start(tmp_path).shutdown()  # neither left anything running
