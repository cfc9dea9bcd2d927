"""A trace that nobody sampled is kept when another process names it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.context import Context

from kvmesh.cli.trace import read_spans
from kvmesh.errors import InvalidRequest
from kvmesh.rpc import channels, traces
from kvmesh.rpc.pb import traces_pb2 as pb
from kvmesh.rpc.pb import traces_pb2_grpc as pb_grpc
from kvmesh.rpc.server import Server
from kvmesh.rpc.traces import TraceKeeper, TracesServicer
from kvmesh.telemetry import setup, spans


async def test_what_is_held_of_a_trace_is_written_once_it_is_named(tmp_path: Path) -> None:
    limits = setup.TelemetryLimits(trace_sample=0.0)
    telemetry = setup.start("decode", "d", trace_dir=str(tmp_path), otlp_endpoint="", log_level="error", limits=limits)
    server = Server("127.0.0.1", 0)
    await server.start()
    try:
        ended, other, running = (spans.begin(name, Context()) for name in ("ended", "other", "running"))
        ids = {span: spans.trace_to_keep(span) for span in (ended, other, running)}
        spans.record("child", spans.context_of(ended), 0, 1)
        # What came with a string of this very process is a root of its own in the same trace.
        spans.record("apart", spans.context_from(spans.traceparent(ended)), 0, 1)
        spans.finish(ended)
        spans.finish(other)
        packed = b"".join(ids[span].to_bytes(16, "big") for span in (ended, running))
        async with channels.connect(server.address) as channel:
            answer = await pb_grpc.TracesStub(channel).Keep(
                pb.KeepRequest(trace_ids=packed + bytes(15) + b"x"), timeout=10
            )
        assert answer.known == 2
        spans.record("late", spans.context_of(running), 0, 1)
        spans.finish(running)
    finally:
        await server.stop(0)
        telemetry.shutdown()
    assert {span["name"] for span in read_spans(tmp_path)} == {"ended", "child", "apart", "late", "running"}


@pytest.mark.parametrize("packed", [b"", bytes(15), bytes(16 * (traces.MOST + 1))])
async def test_ids_are_bounded(packed: bytes) -> None:
    with pytest.raises(InvalidRequest, match="trace_ids"):
        await TracesServicer().Keep(pb.KeepRequest(trace_ids=packed), None)


async def test_traces_are_named_to_each_process_in_one_call_and_one_that_is_away_holds_nothing_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named: list[int] = []
    told = asyncio.Event()

    async def keep(self: TracesServicer, request: pb.KeepRequest, context: object) -> pb.KeepResponse:
        named.append(len(request.trace_ids) // traces.ID_BYTES)
        told.set()
        return pb.KeepResponse()

    monkeypatch.setattr(TracesServicer, "Keep", keep)
    server = Server("127.0.0.1", 0)
    await server.start()
    keeper = TraceKeeper()
    try:
        for trace_id in (1, 2, 2, *range(3, 2_000)):
            keeper.keep(trace_id, (server.address, "127.0.0.1:1"))
        await asyncio.wait_for(told.wait(), 10)
    finally:
        await keeper.close()
        await server.stop(0)
    assert named == [traces.MOST]
