"""Every request's life as a Chrome trace: drop the file on ui.perfetto.dev.

One process an instance; below it as many tracks as requests overlap there. On the prefill instance a request is its
queue and its prefill, on the decode instance the rest of its KV, its wait for the batch and its tokens; an arrow leads
from one to the other. Refusals are marks of the conductor; the pools' queues and loads are counters.

Written while the simulation runs: what is held is how the latest requests lie in their tracks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from typing import Any, BinaryIO

import orjson

from kvmesh.sim.report.records import DONE, MeshSample, Record

KEPT = 256  # stays of a track that are remembered; whoever began before them goes into another one
CONDUCTOR = "conductor"


class _Track:
    """The stays in one line of the picture, which must not overlap."""

    def __init__(self) -> None:
        self._stays: list[tuple[float, float]] = []  # sorted, disjoint
        self._forgotten_s = -math.inf  # nothing is known of before

    def takes(self, start_s: float, end_s: float) -> bool:
        """Whether it was free all the time; then it is no more."""
        if start_s < self._forgotten_s:
            return False
        at = bisect_left(self._stays, (start_s, end_s))
        if at and self._stays[at - 1][1] > start_s:
            return False
        if at < len(self._stays) and self._stays[at][0] < end_s:
            return False
        insort(self._stays, (start_s, end_s))
        if len(self._stays) > KEPT:
            self._forgotten_s = self._stays.pop(0)[1]
        return True


class PerfettoTrace:
    """Writes to `file` until `close`. After `most` requests the others are left out (`left_out` counts them)."""

    def __init__(self, file: BinaryIO, most: int = 50_000) -> None:
        self._file = file
        self._most = most
        self._written = 0
        self.left_out = 0
        self._processes: dict[str, int] = {}
        self._tracks: dict[str, list[_Track]] = {}
        self._file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        self._first = True
        self._process(CONDUCTOR)

    def add(self, record: Record) -> None:
        """A request that has ended."""
        if self._written >= self._most:
            self.left_out += 1
            return
        self._written += 1
        if record.outcome == DONE:
            self._life(record)
        else:
            name = f"{record.outcome}: {record.reason}"
            args = {"request": record.request_id, "input_tokens": record.input_tokens}
            self._event("i", name, CONDUCTOR, 0, record.at_s, s="p", args=args)

    def _life(self, record: Record) -> None:
        start, prefilled = record.prefill_start_s, record.prefill_end_s
        came = max(prefilled, record.kv_end_s) if math.isfinite(record.kv_end_s) else prefilled
        first = max(came, record.first_token_s)
        args = {
            "request": record.request_id,
            "input_tokens": record.input_tokens,
            "cached_tokens": record.cached_tokens,
            "pulled_tokens": record.pulled_tokens,
            "output_tokens": record.output_tokens,
            "ttft_s": _finite(record.ttft_s),
            "predicted_ttft_s": _finite(record.predicted_ttft_s),
            "tbt_s": _finite(record.tbt_s),
        }
        title = f"request {record.index}"
        parts = [("queue", record.at_s, start), ("prefill", start, prefilled)]
        track = self._stay(record.prefill, title, parts, args)
        arrow: dict[str, Any] = {"cat": "handoff", "id": record.index}
        self._event("s", "handoff", record.prefill, track, prefilled, back_us=0.001, **arrow)
        parts = [("kv", prefilled, came), ("join", came, first), ("decode", first, record.finish_s)]
        track = self._stay(record.decode, title, parts, args)
        self._event("f", "handoff", record.decode, track, prefilled, bp="e", **arrow)

    def _stay(self, instance: str, title: str, parts: list[tuple[str, float, float]], args: dict[str, Any]) -> int:
        """One request at one instance, in a track that is free; returns the track."""
        start, end = parts[0][1], parts[-1][2]
        tracks = self._tracks.setdefault(instance, [])
        place = next((at for at, one in enumerate(tracks) if one.takes(start, end)), None)
        if place is None:
            tracks.append(_Track())
            tracks[-1].takes(start, end)
            place = len(tracks) - 1
        self._event("X", title, instance, place, start, until_s=end, args=args)
        for name, begins, ends in parts:
            if ends > begins:
                self._event("X", name, instance, place, begins, until_s=ends)
        return place

    def sample(self, sample: MeshSample) -> None:
        """The pools as counters."""
        for name, pool in sample.pools.items():
            if self._written < self._most:
                figures = {"queued": pool.queued, "running": pool.running}
                self._event("C", f"{name} requests", CONDUCTOR, 0, sample.at_s, args=figures)
                self._event("C", f"{name} load", CONDUCTOR, 0, sample.at_s, args={"load": _finite(pool.load)})

    def _process(self, name: str) -> int:
        if name not in self._processes:
            number = self._processes[name] = len(self._processes) + 1
            for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": number})):
                self._write({"ph": "M", "name": what, "pid": number, "tid": 0, "args": args})
        return self._processes[name]

    def _event(
        self,
        phase: str,
        name: str,
        process: str,
        track: int,
        at_s: float,
        *,
        until_s: float | None = None,
        back_us: float = 0.0,
        **more: Any,
    ) -> None:
        at_us = round(at_s * 1e6, 3)
        event = {"ph": phase, "name": name, "pid": self._process(process), "tid": track, "ts": at_us - back_us, **more}
        if until_s is not None:
            event["dur"] = round(until_s * 1e6, 3) - at_us
        self._write(event)

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write((b"" if self._first else b",\n") + orjson.dumps(event))
        self._first = False

    def close(self) -> None:
        """The JSON is whole; the file stays open."""
        self._file.write(b"\n]}\n")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
