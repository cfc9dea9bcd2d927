"""The Chrome trace: its structure as ui.perfetto.dev reads it."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.sim.report import perfetto
from kvmesh.sim.report.perfetto import PerfettoTrace
from kvmesh.sim.report.records import REFUSED, MeshSample, PoolSample, Record
from tests.support.sim.records import done

Event = dict[str, Any]


def written(records: list[Record], samples: list[MeshSample] = [], most: int = 1000) -> list[Event]:  # noqa: B006
    file = io.BytesIO()
    trace = PerfettoTrace(file, most)
    for record in records:
        trace.add(record)
    for sample in samples:
        trace.sample(sample)
    trace.close()
    events: list[Event] = json.loads(file.getvalue())["traceEvents"]
    return events


def names(events: list[Event]) -> dict[int, str]:
    return {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}


def check_nesting(events: list[Event]) -> None:
    """Slices of one track lie in each other or apart: what overlaps otherwise, the viewer drops."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            tracks[one["pid"], one["tid"]].append(one)
    for slices in tracks.values():
        stack: list[float] = []
        for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
            end = one["ts"] + one["dur"]
            while stack and stack[-1] <= one["ts"] + 1e-3:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-3
            stack.append(end)


def test_a_life_is_told_from_its_queue_to_its_last_token() -> None:
    events = written([done(3, at_s=10.0, ttft_s=1.0, e2e_s=4.0)])
    places = names(events)
    slices = {
        (places[one["pid"]], one["name"]): (round(one["ts"] / 1e6, 3), round(one["dur"] / 1e6, 3))
        for one in events
        if one["ph"] == "X"
    }
    assert slices == {
        ("p1", "request 3"): (10.0, 0.8),
        ("p1", "queue"): (10.0, 0.2),
        ("p1", "prefill"): (10.2, 0.6),
        ("d1", "request 3"): (10.8, 3.2),
        ("d1", "kv"): (10.8, 0.1),
        ("d1", "join"): (10.9, 0.1),
        ("d1", "decode"): (11.0, 3.0),
    }
    check_nesting(events)


def test_an_arrow_leads_from_prefill_to_decode() -> None:
    events = written([done(3, at_s=10.0)])
    start, end = (next(one for one in events if one["ph"] == phase) for phase in "sf")
    assert (start["id"], start["cat"], start["name"]) == (end["id"], end["cat"], end["name"])
    assert (names(events)[start["pid"]], names(events)[end["pid"]], end["bp"]) == ("p1", "d1", "e")
    for arrow in (start, end):  # within a slice of its track: it is bound to that
        around = [
            one for one in events
            if one["ph"] == "X" and (one["pid"], one["tid"]) == (arrow["pid"], arrow["tid"])
            and one["ts"] <= arrow["ts"] <= one["ts"] + one["dur"]
        ]  # fmt: skip
        assert around
    assert start["ts"] <= end["ts"]


def test_refusals_and_pools_stand_at_the_conductor() -> None:
    refused = Record(7, "r7", 1.5, 10, 1, outcome=REFUSED, reason="tbt")
    events = written([refused], [MeshSample(2.0, {"prefill": PoolSample(queued=4, running=2, load=0.5)})])
    mark = next(one for one in events if one["ph"] == "i")
    assert (mark["name"], mark["ts"], mark["s"], names(events)[mark["pid"]]) == (
        "refused: tbt",
        1.5e6,
        "p",
        "conductor",
    )
    counters = {one["name"]: one["args"] for one in events if one["ph"] == "C"}
    assert counters == {"prefill requests": {"queued": 4, "running": 2}, "prefill load": {"load": 0.5}}


def test_times_that_never_came_are_left_out() -> None:
    bare = done(0)
    bare.kv_end_s = bare.predicted_ttft_s = bare.tbt_s = float("nan")
    events = written([bare])
    assert "kv" not in {one["name"] for one in events}
    args = next(one["args"] for one in events if one["name"] == "request 0")
    assert args["predicted_ttft_s"] is None and args["tbt_s"] is None


def test_what_is_too_much_is_counted() -> None:
    file = io.BytesIO()
    trace = PerfettoTrace(file, 2)
    for index in range(5):
        trace.add(done(index))
    trace.close()
    assert trace.left_out == 3
    slices = [one["name"] for one in json.loads(file.getvalue())["traceEvents"] if one["ph"] == "X"]
    assert "request 1" in slices and "request 2" not in slices


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 30), st.floats(0, 30)), min_size=1, max_size=60))
def test_whatever_overlaps_lies_in_tracks_of_its_own(lives: list[tuple[float, float, float]]) -> None:
    records = [
        done(index, at_s=at_s, ttft_s=ttft_s, e2e_s=ttft_s + more) for index, (at_s, ttft_s, more) in enumerate(lives)
    ]
    events = written(sorted(records, key=lambda one: one.finish_s))
    check_nesting(events)
    assert sum(one["ph"] == "X" and one["name"].startswith("request") for one in events) == 2 * len(lives)


def test_tracks_forget_and_still_never_overlap() -> None:
    """A late start before what a track remembers goes elsewhere."""
    records = [done(2 * index, at_s=float(index), ttft_s=0.5, e2e_s=0.9) for index in range(2 * perfetto.KEPT)]
    records.append(done(9998, at_s=0.25, ttft_s=0.5, e2e_s=0.9))
    events = written(records, most=10_000)
    check_nesting(events)
    assert {one["tid"] for one in events if one["ph"] == "X" and one["name"] == "request 9998"} == {1}
