"""Starts logs and traces of one process; a service calls `start` first and `Telemetry.shutdown` last."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from opentelemetry.trace import NoOpTracer, Tracer

from kvmesh.rpc.errors import ConfigError
from kvmesh.telemetry import names, spans

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

log = logging.getLogger(__name__)

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Spans wait in memory until the exporter's thread takes them. The queue holds many seconds of a busy
# service, since a full queue drops spans.
_QUEUE_SPANS = 1 << 16
_FILE_DELAY_MS = 500
_OTLP_DELAY_MS = 1_000
_OTLP_TIMEOUT_S = 5.0


class Telemetry:
    """Logs and traces of this process. `tracer` is a no-op when neither a folder nor a collector was given."""

    def __init__(self, tracer: Tracer, provider: TracerProvider | None, handler: logging.Handler | None) -> None:
        self.tracer = tracer
        self._provider = provider
        self._handler = handler  # None: a handle on what somebody else started and shuts down

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Export every ended span now. Blocking."""
        return self._provider.force_flush(int(timeout_s * 1000)) if self._provider else True

    def shutdown(self) -> None:
        """Export what has ended and stop the exporters. Blocking, bounded by the collector's timeout."""
        global _running
        if self._handler is None:
            return
        _running = None
        spans.use(None)
        if self._provider:
            self._provider.shutdown()
        self._handler.flush()
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()
        self._handler = None


_running: Telemetry | None = None


def start(
    service: str,
    instance_id: str,
    *,
    trace_dir: str,
    otlp_endpoint: str,
    log_level: str,
    log_file: str = "",
) -> Telemetry:
    """Begin logging (standard error, or `log_file`) and, where asked, tracing to files or an OTLP collector.

    A process has one telemetry: while it runs, a further `start` returns a handle on it, whose shutdown does
    nothing. Raises ConfigError for an unknown level or a folder that cannot be written."""
    global _running
    names.activate(service)
    if _running:
        return Telemetry(_running.tracer, _running._provider, None)
    handler = _log_handler(service, instance_id, log_level, log_file)
    provider = None
    if trace_dir or otlp_endpoint:
        try:
            provider = _provider(service, instance_id, trace_dir, otlp_endpoint)
        except BaseException:
            logging.getLogger().removeHandler(handler)
            handler.close()
            raise
    tracer = provider.get_tracer("kvmesh") if provider else NoOpTracer()
    spans.use(tracer)
    _running = Telemetry(tracer, provider, handler)
    return _running


def _provider(service: str, instance_id: str, trace_dir: str, otlp_endpoint: str) -> TracerProvider:
    # Imported only where wanted: the SDK costs a start half a second on a slow machine.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

    def add(exporter: SpanExporter | JsonLinesExporter, delay_ms: int) -> None:
        provider.add_span_processor(
            BatchSpanProcessor(
                cast(SpanExporter, exporter),
                max_queue_size=_QUEUE_SPANS,
                schedule_delay_millis=delay_ms,
                max_export_batch_size=512,
                export_timeout_millis=_OTLP_TIMEOUT_S * 1000,
            )
        )

    resource = Resource(
        {
            "service.name": service,
            "service.namespace": "kvmesh",
            "service.instance.id": instance_id,
            "process.pid": os.getpid(),
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if trace_dir:
        add(_file_exporter(service, instance_id, trace_dir), _FILE_DELAY_MS)
    if otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = not otlp_endpoint.startswith("https://")
        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=insecure, timeout=_OTLP_TIMEOUT_S)
        add(exporter, _OTLP_DELAY_MS)
    return provider


def _file_exporter(service: str, instance_id: str, trace_dir: str) -> JsonLinesExporter:
    path = Path(trace_dir) / f"{service}-{os.getpid()}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return JsonLinesExporter(path, service, instance_id)
    except OSError as err:
        raise ConfigError(f"trace_dir={trace_dir!r}: {err.strerror}", field="trace_dir") from None


class JsonLinesExporter:
    """Writes one JSON object a span and line: name, trace_id, span_id, parent, start_ns, end_ns (Unix time),
    service, instance, attributes, status ("" or the error)."""

    def __init__(self, path: Path, service: str, instance_id: str) -> None:
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._origin = {"service": service, "instance": instance_id}

    def export(self, spans: Sequence[ReadableSpan]) -> object:
        """Append `spans`."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            self._file.write("".join(self._line(span) for span in spans))
            self._file.flush()
        except (OSError, ValueError) as err:
            log.warning("spans lost: %s", err)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def _line(self, span: ReadableSpan) -> str:
        own = span.get_span_context()
        assert own is not None, "an ended span has a context"
        status = (span.status.description or "error") if not span.status.is_ok else ""
        found = {
            "name": span.name,
            "trace_id": f"{own.trace_id:032x}",
            "span_id": f"{own.span_id:016x}",
            "parent": f"{span.parent.span_id:016x}" if span.parent else "",
            "start_ns": span.start_time,
            "end_ns": span.end_time,
            **self._origin,
            "attributes": dict(span.attributes or {}),
            "status": status,
        }
        return json.dumps(found, default=str) + "\n"

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Every `export` has flushed already."""
        return True


class LineFormatter(logging.Formatter):
    """One line an event: time, level, service, instance, message, request_id; an exception shortened to its frames."""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._who = service if instance_id in ("", service) else instance_id

    def format(self, record: logging.LogRecord) -> str:
        """The line of `record`."""
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._who} {record.getMessage()}"
        request_id = getattr(record, "request_id", "")
        if request_id:
            line += f" request_id={request_id}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f" | {_short_traceback(record.exc_info[1])}"
        return line.replace("\r", "").replace("\n", " ⏎ ")


def _short_traceback(err: BaseException, frames: int = 8) -> str:
    stack = traceback.extract_tb(err.__traceback__)[-frames:]
    path = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in stack)
    return f"{type(err).__name__}: {err} ({path})"


def _log_handler(service: str, instance_id: str, log_level: str, log_file: str) -> logging.Handler:
    if log_level.lower() not in LEVELS:
        raise ConfigError(f"log_level={log_level!r}: choose one of {', '.join(LEVELS)}", field="log_level")
    handler: logging.Handler
    if log_file:
        try:
            handler = logging.FileHandler(log_file, encoding="utf-8")
        except OSError as err:
            raise ConfigError(f"log_file={log_file!r}: {err.strerror}", field="log_file") from None
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(service, instance_id))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(LEVELS[log_level.lower()])
    for chatty in ("httpx", "httpcore", "asyncio", "uvicorn.access", "grpc._cython.cygrpc"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return handler
