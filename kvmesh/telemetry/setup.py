"""Starts logs and traces of one process; a service calls `start` first and `Telemetry.shutdown` last."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from opentelemetry.trace import NoOpTracer, SpanContext, Status, StatusCode, Tracer

from kvmesh.errors import ConfigError
from kvmesh.private_files import private_folder, private_opener
from kvmesh.telemetry import names, spans
from kvmesh.telemetry.printable import printable

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

    from kvmesh.telemetry.sampling import UnsampledSpans
from collections.abc import Callable

# Files that do not fill a disk: a floor of free space, and what is left out below it.

LOOK_S = 1.0  # between two looks at the file system
RESUME = 1.25  # times the floor: writing goes on from here
SHARE = 10  # the floor is at most so many-th a part of the file system

Statvfs = Callable[[str], os.statvfs_result]


class FreeSpace:
    """Watches the free space of the file system of `folder`: it is `low` below `min_free_mb` MiB, or below a tenth of
    the size where that is less; with 0 it never is."""

    def __init__(self, folder: Path, min_free_mb: int, statvfs: Statvfs = os.statvfs) -> None:
        self._folder = str(folder)
        self._floor = min_free_mb << 20
        self._statvfs = statvfs
        self._look_at = 0.0
        self.low = False
        self.free = 0

    def look(self, now: float) -> bool:
        """Looks again if the last look is a second old (`now` in monotonic seconds). Returns whether `low` changed."""
        if not self._floor or now < self._look_at:
            return False
        self._look_at = now + LOOK_S
        try:
            found = self._statvfs(self._folder)
        except OSError:
            return False  # the folder is gone: writing tells
        self.free = found.f_bavail * found.f_frsize
        floor = min(self._floor, found.f_blocks * found.f_frsize // SHARE)
        before, self.low = self.low, self.free < (floor * RESUME if self.low else floor)
        return self.low != before


log = logging.getLogger(__name__)

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Spans wait in memory until the exporter's thread takes them. The queue holds many seconds of a busy
# service, since a full queue drops spans.
_QUEUE_SPANS = 1 << 16
_FILE_DELAY_MS = 500
_OTLP_DELAY_MS = 1_000
_OTLP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class TelemetryLimits:
    """Bounds what telemetry writes, and says which traces are kept; the fields are those of ServiceConfig."""

    trace_max_mb: int = 256
    trace_sample: float = 1.0
    trace_slow_ms: int = 30_000
    log_max_mb: int = 64
    min_free_mb: int = 256

    @classmethod
    def of(cls, config: Any) -> TelemetryLimits:
        """Takes the limits out of a ServiceConfig."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(cls)})


class Telemetry:
    """Logs and traces of this process. `tracer` is a no-op when neither a folder nor a collector was given."""

    def __init__(self, tracer: Tracer, provider: TracerProvider | None, handler: logging.Handler | None) -> None:
        self.tracer = tracer
        self._provider = provider
        self._handler = handler  # None: a handle on what somebody else started and shuts down

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Exports every ended span now. It blocks."""
        return self._provider.force_flush(int(timeout_s * 1000)) if self._provider else True

    def shutdown(self) -> None:
        """Exports what has ended and stops the exporters. It blocks, at most for the collector's timeout."""
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


TRACER = "kvmesh"
_running: Telemetry | None = None


def start(
    service: str,
    instance_id: str,
    *,
    trace_dir: str,
    otlp_endpoint: str,
    log_level: str,
    log_file: str = "",
    limits: TelemetryLimits | None = None,
) -> Telemetry:
    """Begins logging (to standard error or `log_file`) and, where asked for, tracing to files or an OTLP collector.

    A process has one telemetry: while it runs, a further `start` returns a handle on it, whose shutdown does nothing.
    Raises ConfigError for an unknown level or a folder that cannot be written.
    """
    global _running
    names.activate(service)
    if _running:
        return Telemetry(_running.tracer, _running._provider, None)
    limits = limits or TelemetryLimits()
    handler = _log_handler(service, instance_id, log_level, log_file, limits)
    provider = emit = held = None
    if trace_dir or otlp_endpoint:
        try:
            provider, emit, held = _provider(service, instance_id, trace_dir, otlp_endpoint, limits)
        except BaseException:
            logging.getLogger().removeHandler(handler)
            handler.close()
            raise
    tracer = provider.get_tracer(TRACER) if provider else NoOpTracer()
    spans.use(tracer, emit, held.hold if held else None, held.keep if held else None)
    _running = Telemetry(tracer, provider, handler)
    return _running


def _provider(
    service: str, instance_id: str, trace_dir: str, otlp_endpoint: str, limits: TelemetryLimits
) -> tuple[TracerProvider, spans.Emit, UnsampledSpans]:
    # Imported only where wanted: the SDK costs a start half a second on a slow machine.
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    from kvmesh.telemetry.sampling import HeadSampler, UnsampledSpans

    batches: list[BatchSpanProcessor] = []

    def add(exporter: SpanExporter | JsonLinesExporter, delay_ms: int) -> None:
        batch = BatchSpanProcessor(
            cast(SpanExporter, exporter),
            max_queue_size=_QUEUE_SPANS,
            schedule_delay_millis=delay_ms,
            max_export_batch_size=512,
            export_timeout_millis=_OTLP_TIMEOUT_S * 1000,
        )
        batches.append(batch)
        provider.add_span_processor(batch)

    resource = Resource(
        {
            "service.name": service,
            "service.namespace": "kvmesh",
            "service.instance.id": instance_id,
            "process.pid": os.getpid(),
        }
    )
    provider = TracerProvider(sampler=HeadSampler(limits.trace_sample), resource=resource, shutdown_on_exit=False)
    if trace_dir:
        add(_file_exporter(service, instance_id, trace_dir, limits), _FILE_DELAY_MS)
    if otlp_endpoint:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        insecure = not otlp_endpoint.startswith("https://")
        exporter = OTLPSpanExporter(endpoint=otlp_endpoint, insecure=insecure, timeout=_OTLP_TIMEOUT_S)
        add(exporter, _OTLP_DELAY_MS)
    scope = InstrumentationScope(TRACER)

    def emit(
        name: str,
        own: SpanContext,
        parent: SpanContext,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, spans.Value] | None,
        error: str,
    ) -> None:
        span = ReadableSpan(
            name,
            own,
            parent,
            resource,
            attributes,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=start_ns,
            end_time=end_ns,
            instrumentation_scope=scope,
        )
        for batch in batches:
            batch.on_end(span)

    held = UnsampledSpans(batches, emit, limits.trace_slow_ms)
    provider.add_span_processor(held)
    return provider, emit, held


def _file_exporter(service: str, instance_id: str, trace_dir: str, limits: TelemetryLimits) -> JsonLinesExporter:
    path = Path(trace_dir) / f"{service}-{os.getpid()}.jsonl"
    try:
        private_folder(path.parent)
        space = FreeSpace(path.parent, limits.min_free_mb)
        return JsonLinesExporter(path, service, instance_id, limits.trace_max_mb << 20, space)
    except OSError as err:
        raise ConfigError(f"trace_dir={trace_dir!r}: {err.strerror}", field="trace_dir") from None


class JsonLinesExporter:
    """Writes one JSON object a span and line: name, trace_id, span_id, parent, start_ns, end_ns (Unix time), service,
    instance, attributes, status ("" or the error).

    A file that reaches half of `max_bytes` becomes NAME.1.jsonl, which replaces the one before. While `space` is low
    nothing is written.
    """

    def __init__(self, path: Path, service: str, instance_id: str, max_bytes: int, space: FreeSpace) -> None:
        self._path = path
        self._half = max_bytes // 2
        self._space = space
        self._file: BinaryIO = open(path, "ab", opener=private_opener)  # noqa: SIM115
        self._origin = {"service": service, "instance": instance_id}

    def export(self, spans: Sequence[ReadableSpan]) -> object:
        """Appends `spans`."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._space.look(time.monotonic()):
            folder, free = self._path.parent, self._space.free >> 20
            if self._space.low:
                log.warning("no spans are written to %s: %d MiB are free, below the floor of min_free_mb", folder, free)
            else:
                log.warning("spans are written to %s again: %d MiB are free", folder, free)
        if self._space.low:
            return SpanExportResult.FAILURE
        try:
            data = "".join(self._line(span) for span in spans).encode()
            if self._file.tell() + len(data) > self._half and self._file.tell():
                self._file.close()
                self._path.replace(self._path.with_suffix(".1.jsonl"))
                self._file = open(self._path, "ab", opener=private_opener)  # noqa: SIM115
            self._file.write(data)
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
        """Closes the file."""
        self._file.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Returns True, because every `export` flushes."""
        return True


class LineFormatter(logging.Formatter):
    """Formats an event as one line: time, level, service, instance, message, request_id; an exception is shortened to
    its frames."""

    def __init__(self, service: str, instance_id: str) -> None:
        super().__init__()
        self._who = service if instance_id in ("", service) else instance_id

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._who} {record.getMessage()}"
        request_id = getattr(record, "request_id", "")
        if request_id:
            line += f" request_id={request_id}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f" | {_short_traceback(record.exc_info[1])}"
        return printable(line.replace("\r\n", "\n")).replace("\n", " ⏎ ")


def _short_traceback(err: BaseException, frames: int = 8) -> str:
    stack = traceback.extract_tb(err.__traceback__)[-frames:]
    path = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in stack)
    return f"{type(err).__name__}: {err} ({path})"


class _RoomFilter(logging.Filter):
    """Lets only warnings through while the disk of the log is nearly full, and logs that once."""

    def __init__(self, space: FreeSpace) -> None:
        super().__init__()
        self._space = space

    def filter(self, record: logging.LogRecord) -> bool:
        if self._space.look(time.monotonic()):
            text = "only warnings are logged" if self._space.low else "everything is logged again"
            log.warning("%s: %d MiB are free on the log's disk", text, self._space.free >> 20)
        return not self._space.low or record.levelno >= logging.WARNING


def _log_handler(
    service: str, instance_id: str, log_level: str, log_file: str, limits: TelemetryLimits
) -> logging.Handler:
    if log_level.lower() not in LEVELS:
        raise ConfigError(f"log_level={log_level!r}: choose one of {', '.join(LEVELS)}", field="log_level")
    handler: logging.Handler
    if log_file:
        try:
            half = (limits.log_max_mb << 20) // 2
            handler = RotatingFileHandler(log_file, maxBytes=half, backupCount=1, encoding="utf-8")
            handler.addFilter(_RoomFilter(FreeSpace(Path(log_file).absolute().parent, limits.min_free_mb)))
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
