"""Messages of ext-proc as the picker reads and writes them. Nothing is decided here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import orjson
from google.protobuf.struct_pb2 import Struct, Value

from kvmesh.errors import InvalidRequest, KvmeshError
from kvmesh.rpc.pb import envoy_base_pb2 as core
from kvmesh.rpc.pb import envoy_external_processor_pb2 as pb
from kvmesh.services.gateway.rest.frames import error_headers, error_json

DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET = "x-gateway-destination-endpoint-subset"
PIECE_BYTES = 60 << 10  # of one streamed answer: Envoy's own frames for it stay below 64 KiB
MAX_SUBSET = 4096
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class MetadataNames:
    """The namespaces of the metadata that proxy and picker tell each other."""

    destination: str = "envoy.lb"
    subset: str = "envoy.lb.subset_hint"


@dataclass(frozen=True, slots=True)
class RequestHead:
    """The headers of a request, names in lower case; of a name that comes twice the last one counts."""

    headers: Mapping[bytes, bytes]

    @classmethod
    def of(cls, told: pb.HttpHeaders) -> RequestHead:
        """Reads Envoy's headers, whose values are in one of two fields."""
        return cls({one.key.lower().encode(): one.raw_value or one.value.encode() for one in told.headers.headers})

    def text(self, name: bytes) -> str:
        """Returns the value of a header, "" when it is not there."""
        return self.headers.get(name, b"").decode("latin-1").strip()

    @property
    def path(self) -> str:
        """The path without its query."""
        return self.text(b":path").partition("?")[0]


def _value(metadata: core.Metadata, namespace: str, key: str) -> Value | None:
    if namespace not in metadata.filter_metadata:
        return None
    fields = metadata.filter_metadata[namespace].fields
    return fields.get(key)


def subset_of(metadata: core.Metadata, namespace: str) -> frozenset[str] | None:
    """Returns the endpoints that the proxy allows; None when it says nothing. A list, or a text with commas. Raises
    InvalidRequest for anything else."""
    found = _value(metadata, namespace, SUBSET)
    if found is None:
        return None
    match found.WhichOneof("kind"):
        case "string_value":
            texts = found.string_value.split(",")
        case None:
            texts = []
        case "list_value" if all(one.WhichOneof("kind") == "string_value" for one in found.list_value.values):
            texts = [one.string_value for one in found.list_value.values]
        case _:
            raise InvalidRequest.of(SUBSET, str(found)[:_SHOWN], "must be a list of ip:port")
    if len(texts) > MAX_SUBSET:
        raise InvalidRequest.of(SUBSET, len(texts), f"must name at most {MAX_SUBSET} endpoints")
    return frozenset(text.strip() for text in texts if text.strip())


def served_of(metadata: core.Metadata, namespace: str) -> str:
    """Returns the endpoint that has answered, as the proxy says; "" when it does not."""
    found = _value(metadata, namespace, SERVED)
    return found.string_value.strip() if found is not None else ""


def status_of(head: RequestHead) -> int:
    """Returns the HTTP status of a response's headers; 0 when they have none."""
    text = head.text(b":status")
    return int(text) if text.isascii() and text.isdigit() and len(text) == 3 else 0


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


def destination(answer: pb.CommonResponse, endpoints: Sequence[str]) -> None:
    """Writes the endpoints into the headers that the proxy sends on. What a client has sent under that name goes."""
    option = answer.header_mutation.set_headers.add()
    option.header.key = DESTINATION
    option.header.raw_value = ",".join(endpoints).encode()
    option.append_action = core.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    answer.clear_route_cache = True


def destination_metadata(namespace: str, endpoints: Sequence[str]) -> Struct:
    """Returns the same endpoints as dynamic metadata."""
    told = Struct()
    told.fields[namespace].struct_value.fields[DESTINATION].string_value = ",".join(endpoints)
    return told


def pass_body(body: bytes, *, end: bool, response: bool = False) -> Iterable[pb.ProcessingResponse]:
    """Yields the messages that send a body on as it is, in full duplex mode."""
    at = 0
    while True:
        piece = body[at : at + PIECE_BYTES]
        at += len(piece)
        answer = pb.ProcessingResponse()
        side = answer.response_body if response else answer.request_body
        side.response.body_mutation.streamed_response.body = piece
        side.response.body_mutation.streamed_response.end_of_stream = end and at >= len(body)
        yield answer
        if at >= len(body):
            return


def immediate(err: KvmeshError) -> pb.ProcessingResponse:
    """Returns the answer that the proxy gives in place of any endpoint: the error as the gateway would write it."""
    answer = pb.ProcessingResponse()
    told = answer.immediate_response
    told.status.code = err.http_status  # type: ignore[assignment]
    told.body = orjson.dumps(error_json(err))
    told.details = err.code
    for name, value in ((b"content-type", b"application/json"), *error_headers(err)):
        option = told.headers.set_headers.add()
        option.header.key = name.decode()
        option.header.raw_value = value
        option.append_action = core.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return answer
