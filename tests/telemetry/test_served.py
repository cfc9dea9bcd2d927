"""A servicer's call has a span if its request names a kept trace, and costs nothing else."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.cli.trace import read_spans
from kvmesh.errors import InvalidRequest
from kvmesh.telemetry import setup, spans
from kvmesh.telemetry.served import served

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Counting:
    @served("kvmesh.locate", lambda request: len(request.keys))
    async def Find(self, request: Any, context: Any) -> int:  # noqa: N802
        if not request.keys:
            raise InvalidRequest("keys: none", field="keys")
        return len(request.keys)


async def test_kept_traces_have_a_span_from_when_the_call_came(tmp_path: Path) -> None:
    telemetry = setup.start("store", "s", trace_dir=str(tmp_path), otlp_endpoint="", log_level="error")
    try:
        begun = time.monotonic()
        queued = SimpleNamespace(arrived=begun - 1.0)
        for flags in ("01", "00"):
            header = f"00-{TRACE}-{PARENT}-{flags}"
            assert await Counting().Find(SimpleNamespace(keys=[1, 2], traceparent=header), queued) == 2
        with pytest.raises(InvalidRequest):
            await Counting().Find(SimpleNamespace(keys=[], traceparent=f"00-{TRACE}-{PARENT}-01"), None)
        assert await Counting().Find(SimpleNamespace(keys=[1], traceparent=""), None) == 1
    finally:
        telemetry.shutdown()
    found = sorted(read_spans(tmp_path), key=lambda span: span["start_ns"])
    assert [(span["trace_id"], span["parent"], span["status"]) for span in found] == [
        (TRACE, PARENT, ""), (TRACE, PARENT, "keys: none")
    ]  # fmt: skip
    assert [span["attributes"] for span in found] == [
        {"kvmesh.keys": 2, "kvmesh.call.path": "fast path"}, {"kvmesh.keys": 0, "kvmesh.call.path": "grpc"}
    ]  # fmt: skip
    assert abs(found[0]["start_ns"] - spans.wall_ns(int((begun - 1.0) * 1e9))) < 1_000
