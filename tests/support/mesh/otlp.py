"""A real OTLP/gRPC collector that keeps what it receives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Span:
    name: str
    service: str
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    error: bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's own name
        with self._lock:
            for resource in request.resource_spans:
                service = value(next(a.value for a in resource.resource.attributes if a.key == "service.name"))
                for scope in resource.scope_spans:
                    self._spans += [read(span, service) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[Span]:
        with self._lock:
            return [s for s in self._spans if s.trace_id == trace_id]


def value(v: Any) -> Any:
    kind = v.WhichOneof("value")
    if kind == "array_value":
        return [value(x) for x in v.array_value.values]
    return getattr(v, kind) if kind else None


def read(span: Any, service: str) -> Span:
    return Span(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {a.key: value(a.value) for a in span.attributes},
        span.status.code == 2,
    )


@contextmanager
def collector() -> Iterator[tuple[Collector, str]]:
    """The collector and its endpoint."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    keeper = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(keeper, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield keeper, f"http://127.0.0.1:{port}"
    finally:
        server.stop(1).wait(5)
