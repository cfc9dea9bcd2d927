"""Spans reach a real OTLP collector over gRPC, and one that is away holds nothing up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvmesh.telemetry import names, setup, spans


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.batches.extend(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(0).wait(5)


def test_the_tree_its_attributes_and_its_service_arrive(collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    telemetry = setup.start("prefill", "prefill-1", trace_dir="", otlp_endpoint=endpoint, log_level="info")
    outer = spans.begin(names.SPAN_PREFILL, Context(), {names.REQUEST_ID: "r1"}, start_ns=1_000)
    spans.record(names.SPAN_QUEUE, spans.context_of(outer), 1_000, 4_000, {names.CACHED_TOKENS: 64})
    spans.record(names.SPAN_TRANSFER, spans.context_of(outer), 2_000, 9_000, error="transfer")
    spans.finish(outer, end_ns=10_000)
    telemetry.shutdown()

    resources = [
        {item.key: item.value.string_value for item in batch.resource.attributes} for batch in servicer.batches
    ]
    assert {(r["service.namespace"], r["service.name"], r["service.instance.id"]) for r in resources} == {
        ("kvmesh", "prefill", "prefill-1")
    }
    found = {span.name: span for batch in servicer.batches for scope in batch.scope_spans for span in scope.spans}
    assert set(found) == {"kvmesh.prefill", "kvmesh.queue", "kvmesh.transfer"}
    outside, queue, transfer = (found[f"kvmesh.{name}"] for name in ("prefill", "queue", "transfer"))
    assert queue.parent_span_id == transfer.parent_span_id == outside.span_id
    assert queue.start_time_unix_nano == outside.start_time_unix_nano
    assert queue.end_time_unix_nano - queue.start_time_unix_nano == 3_000
    assert {item.key: item.value.int_value for item in queue.attributes} == {"kvmesh.cached_tokens": 64}
    assert (transfer.status.code, transfer.status.message) == (2, "transfer")


def test_a_collector_that_is_away_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "_OTLP_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        telemetry = setup.start("prefill", "p", trace_dir="", otlp_endpoint=endpoint, log_level="error")
        spans.record("lost", Context(), 0, 1)
        telemetry.shutdown()  # the test's own timeout is the assertion
