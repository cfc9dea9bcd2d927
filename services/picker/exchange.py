"""One HTTP request as ext-proc tells it: what may come next, what must be answered to each message, when a decision is
due. Pure.

    headers ─→ (body ...) ─→ decision due ─→ endpoints sent ─→ response's headers, body, trailers ─→ over

In full duplex mode nothing is answered until the whole body is here: then headers with the endpoints, and the body as
it came. In the buffered modes each message gets its answer: the headers' is empty, the body's has the endpoints.
Where the proxy sends no body (or in pieces that wait for an answer each) the headers are all that is decided by.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from kvmesh.errors import BodyTooLarge, InvalidRequest
from kvmesh.rpc.pb import envoy_external_processor_pb2 as pb
from kvmesh.rpc.pb.envoy_processing_mode_pb2 import ProcessingMode
from kvmesh.services.picker import wire
from kvmesh.services.picker.wire import MetadataNames, RequestHead

_WAITS_FOR_BODY = (ProcessingMode.FULL_DUPLEX_STREAMED, ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL)


class ExchangePhase(Enum):
    """How far a request is."""

    HEADERS = auto()  # nothing has come
    BODY = auto()
    DECIDING = auto()  # `head`, `body` and `subset` are whole
    SENT = auto()  # the proxy knows its endpoints
    RESPONSE = auto()  # an endpoint has answered


class ProxyExchange:
    """The state of one stream. `head`, `body` and `subset` are of the request; `body` is None when it did not come
    whole. `served` and `status` are of the response, "" and 0 until it has come."""

    def __init__(self, max_body_bytes: int, names: MetadataNames) -> None:
        self._limit = max_body_bytes
        self._names = names
        self._parts: list[bytes] = []
        self._request_mode: int = ProcessingMode.FULL_DUPLEX_STREAMED
        self._response_mode: int = ProcessingMode.FULL_DUPLEX_STREAMED
        self._trailers = False  # the request's body was ended by trailers
        self._ended = False  # the request's body is over
        self.phase = ExchangePhase.HEADERS
        self.silent = False  # the proxy only lets it watch
        self.head = RequestHead({})
        self.body: bytes | None = None
        self.body_bytes = 0
        self.subset: frozenset[str] | None = None
        self.served = ""
        self.status = 0
        self.response_ended = False

    @property
    def watches_response(self) -> bool:
        """Whether the proxy shows the response's body, so that its end is seen."""
        return self._response_mode != ProcessingMode.NONE

    def take(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        """Takes the next message and returns what is answered to it. `phase` is DECIDING afterwards when a decision is
        due: then `picked` is next. Raises InvalidRequest for what must not come now, BodyTooLarge."""
        kind = message.WhichOneof("request")
        if self.phase is ExchangePhase.HEADERS:
            if kind != "request_headers":
                raise self._unexpected(kind)
            return self._begin(message)
        match kind:
            case "request_body" if self.phase is ExchangePhase.BODY or self._passes_on:
                return self._take_body(message.request_body)
            case "request_trailers" if not self._ended or self._passes_on:
                return self._take_trailers()
            case "response_headers" if self.phase is ExchangePhase.SENT:
                self.phase = ExchangePhase.RESPONSE
                self.served = wire.served_of(message.metadata_context, self._names.destination)
                self.status = wire.status_of(RequestHead.of(message.response_headers))
                self.response_ended = message.response_headers.end_of_stream
                return self._told(pb.ProcessingResponse(response_headers=pb.HeadersResponse()))
            case "response_body" if self.phase is ExchangePhase.RESPONSE:
                return self._take_response(message.response_body)
            case "response_trailers" if self.phase is ExchangePhase.RESPONSE:
                self.response_ended = True
                return self._told(pb.ProcessingResponse(response_trailers=pb.TrailersResponse()))
            case _:
                raise self._unexpected(kind)

    def picked(self, endpoints: Sequence[str]) -> list[pb.ProcessingResponse]:
        """Returns what tells the proxy its endpoints, the first choice first."""
        assert self.phase is ExchangePhase.DECIDING, "a decision was due"
        self.phase = ExchangePhase.SENT
        answer = pb.ProcessingResponse(
            dynamic_metadata=wire.destination_metadata(self._names.destination, endpoints),
        )
        if self._request_mode in (ProcessingMode.BUFFERED, ProcessingMode.BUFFERED_PARTIAL) and self._parts:
            wire.destination(answer.request_body.response, endpoints)
            answers = [answer]
        else:
            wire.destination(answer.request_headers.response, endpoints)
            answers = [answer]
            if self._request_mode == ProcessingMode.FULL_DUPLEX_STREAMED and (self._parts or self._trailers):
                whole = b"".join(self._parts)
                if whole or not self._trailers:
                    answers += wire.pass_body(whole, end=not self._trailers)
                if self._trailers:
                    answers.append(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        self._parts.clear()
        self.body = None
        return self._told(*answers)

    # ── messages ──────────────────────────────────────────────────────────────────────────────────

    def _begin(self, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        self.silent = message.observability_mode
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        self.subset = wire.subset_of(message.metadata_context, self._names.subset)
        self.head = RequestHead.of(message.request_headers)
        self._ended = message.request_headers.end_of_stream
        if self._ended or self._request_mode not in _WAITS_FOR_BODY:
            self.phase = ExchangePhase.DECIDING
            return []
        length = self.head.text(b"content-length")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._limit):
            raise self._too_large()
        self.phase = ExchangePhase.BODY
        if self._request_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return []
        return self._told(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))

    @property
    def _passes_on(self) -> bool:
        """Whether pieces of the request's body may come after the decision, which were not waited for."""
        return self.phase in (ExchangePhase.SENT, ExchangePhase.RESPONSE) and not self._ended

    def _take_body(self, told: pb.HttpBody) -> list[pb.ProcessingResponse]:
        self._ended = told.end_of_stream
        if self.phase is not ExchangePhase.BODY:
            return self._told(pb.ProcessingResponse(request_body=pb.BodyResponse()))
        self.body_bytes += len(told.body)
        if self.body_bytes > self._limit:
            raise self._too_large()
        self._parts.append(told.body)
        buffered = self._request_mode != ProcessingMode.FULL_DUPLEX_STREAMED
        if buffered or told.end_of_stream:
            # A buffered body comes at once; one without an end is cut (BUFFERED_PARTIAL), or trailers follow it.
            whole = told.end_of_stream or self._request_mode == ProcessingMode.BUFFERED
            self.body = b"".join(self._parts) if whole else None
            self.phase = ExchangePhase.DECIDING
        return []

    def _take_trailers(self) -> list[pb.ProcessingResponse]:
        self._ended = True
        if self.phase is not ExchangePhase.BODY:
            return self._told(pb.ProcessingResponse(request_trailers=pb.TrailersResponse()))
        self._trailers = True
        self.body = b"".join(self._parts)
        self.phase = ExchangePhase.DECIDING
        if self._request_mode != ProcessingMode.FULL_DUPLEX_STREAMED:
            raise InvalidRequest("ext-proc: trailers came before the buffered body", field="request_trailers")
        return []

    def _take_response(self, told: pb.HttpBody) -> list[pb.ProcessingResponse]:
        self.response_ended = told.end_of_stream
        if self._response_mode == ProcessingMode.FULL_DUPLEX_STREAMED:
            return self._told(*wire.pass_body(told.body, end=told.end_of_stream, response=True))
        return self._told(pb.ProcessingResponse(response_body=pb.BodyResponse()))

    def _told(self, *answers: pb.ProcessingResponse) -> list[pb.ProcessingResponse]:
        return [] if self.silent else list(answers)

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"body: longer than {self._limit} bytes", field="body")

    def _unexpected(self, kind: str | None) -> InvalidRequest:
        if kind is None:
            return InvalidRequest("ext-proc: a message without a request", field="request")
        return InvalidRequest(f"ext-proc: {kind} came out of order, in {self.phase.name.lower()}", field=kind)
