"""ext-proc over gRPC: one stream is one HTTP request. Nothing is decided here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from kvmesh.errors import BodyTooLarge, DeadlinePassed, InternalError, InvalidRequest, KvmeshError, Unavailable
from kvmesh.rpc.pb import conductor_pb2
from kvmesh.rpc.pb import envoy_external_processor_pb2 as pb
from kvmesh.rpc.pb import envoy_external_processor_pb2_grpc as pb_grpc
from kvmesh.services.gateway.request_memory import REQUEST_BYTES, RequestMemory, Reservation
from kvmesh.services.picker import wire
from kvmesh.services.picker.catalog import EndpointCatalog
from kvmesh.services.picker.config import PickerConfig
from kvmesh.services.picker.exchange import ExchangePhase, ProxyExchange
from kvmesh.services.picker.picker import EndpointPicker, PickedEndpoints, PickRequest
from kvmesh.services.picker.releases import RequestReleases
from kvmesh.services.picker.wire import MetadataNames
from kvmesh.telemetry import names, spans

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["ExternalProcessor"].full_name


class PickerServicer(pb_grpc.ExternalProcessorServicer):
    """Every stream ends with an answer: endpoints, or one error. `leaving` refuses new ones."""

    def __init__(
        self,
        config: PickerConfig,
        picker: EndpointPicker,
        catalog: EndpointCatalog,
        memory: RequestMemory,
        releases: RequestReleases,
    ) -> None:
        self._config = config
        self._picker = picker
        self._catalog = catalog
        self._memory = memory
        self._releases = releases
        self._names = MetadataNames(config.destination_namespace, config.subset_namespace)
        self.streams = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.stopping = False

    async def Process(  # type: ignore[override]  # noqa: N802 - it writes its answers
        self, request_iterator: AsyncIterator[pb.ProcessingRequest], context: Any
    ) -> None:
        """Serves one request of a proxy."""
        self.streams += 1
        self.idle.clear()
        names.PICKER_STREAMS.set(self.streams)
        try:
            with self._memory.reserve(REQUEST_BYTES) as held:
                await _PickerStream(self, held, context).serve(aiter(request_iterator))
        except KvmeshError as err:  # no room for anything
            await context.write(wire.immediate(err))
        finally:
            self.streams -= 1
            names.PICKER_STREAMS.set(self.streams)
            if not self.streams:
                self.idle.set()


class _PickerStream:
    """One stream."""

    def __init__(self, servicer: PickerServicer, held: Reservation, context: Any) -> None:
        self._servicer = servicer
        self._config = servicer._config
        self._held = held
        self._context = context
        self._exchange = ProxyExchange(self._config.max_body_bytes, servicer._names)
        self._picked: PickedEndpoints | None = None

    async def serve(self, messages: AsyncIterator[pb.ProcessingRequest]) -> None:
        """Reads to the stream's end, or to the first error, which is answered."""
        self._span_start = time.monotonic_ns()
        loop = asyncio.get_running_loop()
        begun = loop.time()
        exchange = self._exchange
        try:
            async with asyncio.timeout_at(begun + self._config.body_timeout_s) as timeout:
                async for message in messages:
                    for answer in exchange.take(message):
                        await self._context.write(answer)
                    if exchange.body_bytes > self._held.size and exchange.phase is ExchangePhase.BODY:
                        self._held.resize(2 * exchange.body_bytes)
                    if exchange.phase is ExchangePhase.DECIDING:
                        timeout.reschedule(None)  # the steps of a decision have deadlines of their own
                        if not exchange.silent:
                            await self._decide()
                        else:
                            exchange.picked(())
                        timeout.reschedule(begun + self._config.stream_timeout_s)
        except TimeoutError:
            if self._picked is None:
                await self._refuse(
                    DeadlinePassed(
                        f"body: not whole within body_timeout_s={self._config.body_timeout_s:g}", field="body"
                    )
                )
        except KvmeshError as err:
            await self._refuse(err)
        except asyncio.CancelledError:
            raise
        except Exception as err:
            log.error("a request of a proxy failed: %s", err, exc_info=err)
            await self._refuse(InternalError(f"the picker failed: {type(err).__name__}"))
        finally:
            self._end()

    async def _decide(self) -> None:
        exchange, start = self._exchange, time.perf_counter()
        parent = spans.context_from(exchange.head.text(b"traceparent"))
        own, attributes = spans.reserve(parent), dict[str, spans.Value]()
        outcome, by, failure = "internal", "none", ""
        try:
            if self._servicer.stopping:
                raise Unavailable("the picker is shutting down", retry_after_ms=1000)
            asked = PickRequest(exchange.head, exchange.body, exchange.subset)
            self._picked = picked = await self._servicer._picker.pick(
                asked, attributes, parent if own is None else spans.context_of(own)
            )
            outcome, by = "picked", picked.by
            attributes[names.ENDPOINTS] = ",".join(picked.addresses)
            if not picked.reserved:
                self._servicer._catalog.enter(picked.addresses[0])
            for answer in exchange.picked(picked.addresses):
                await self._context.write(answer)
        except KvmeshError as err:
            outcome = failure = err.code
            raise
        finally:
            self._held.resize(REQUEST_BYTES)
            attributes[names.OUTCOME] = outcome
            end_ns = time.monotonic_ns()
            spans.record(names.SPAN_PICK, parent, self._span_start, end_ns, attributes, error=failure, own=own)
            names.PICKER_DECISIONS.labels(by=by, outcome=outcome).inc()
            names.PICKER_SECONDS.observe(time.perf_counter() - start)

    async def _refuse(self, err: KvmeshError) -> None:
        if self._exchange.phase is not ExchangePhase.DECIDING:  # else it was counted
            names.PICKER_DECISIONS.labels(by="none", outcome=err.code).inc()
        if isinstance(err, InvalidRequest | BodyTooLarge):
            log.info("a request of a proxy is refused: %s", err.message)
        if not self._exchange.silent:
            await self._context.write(wire.immediate(err))

    def _end(self) -> None:
        """The request is over: what it held is given back, at the conductor, too."""
        picked, exchange = self._picked, self._exchange
        if picked is None:
            return
        answered = exchange.status > 0
        served = exchange.served or (picked.addresses[0] if answered else "")
        if not picked.reserved:
            self._servicer._catalog.leave(picked.addresses[0])
        failed = exchange.status >= 500
        names.PICKER_SERVED.labels(endpoint=self._kind(served, answered=answered, failed=failed)).inc()
        if picked.reserved:
            engine = self._servicer._catalog.at(served)
            # Where the proxy does not show the answer's body its end is not seen: it is taken to last as predicted.
            unseen = answered and not failed and not exchange.response_ended and not exchange.watches_response
            self._servicer._releases.add(
                picked.request_id,
                engine.instance_id if engine is not None else "",
                _outcome(exchange.status),
                picked.stay_s - (time.monotonic_ns() - self._span_start) / 1e9 if unseen else 0.0,
            )

    def _kind(self, served: str, *, answered: bool, failed: bool) -> str:
        assert self._picked is not None, "it has endpoints"
        if not answered or not self._exchange.served:
            return "refused" if failed else "untold"
        if failed:
            return "refused"
        if served == self._picked.addresses[0]:
            return "chosen"
        return "fallback" if served in self._picked.addresses else "other"


def _outcome(status: int) -> conductor_pb2.Outcome.ValueType:
    """Returns how a request has gone by the status of its answer, 0 when none came. What an endpoint refuses (400, 429)
    it has not computed."""
    if not status:
        return conductor_pb2.OUTCOME_CANCELLED
    if status >= 500:
        return conductor_pb2.OUTCOME_FAILED
    return conductor_pb2.OUTCOME_REFUSED if status >= 400 else conductor_pb2.OUTCOME_DONE
