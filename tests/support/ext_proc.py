"""A proxy as the endpoint picker sees it: real ext-proc over gRPC, in whichever body mode, whole or in pieces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import envoy_external_processor_pb2 as pb
from kvmesh.rpc.pb import envoy_external_processor_pb2_grpc as pb_grpc
from kvmesh.rpc.pb.envoy_processing_mode_pb2 import ProcessingMode

DESTINATION = "x-gateway-destination-endpoint"
FULL_DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
BUFFERED = ProcessingMode.BUFFERED
NONE = ProcessingMode.NONE
TIMEOUT_S = 30.0


def headers_message(
    headers: Mapping[str, str],
    *,
    end: bool = False,
    mode: int = FULL_DUPLEX,
    response_mode: int = NONE,
    subset: Sequence[str] | None = None,
) -> pb.ProcessingRequest:
    """The first message of a stream."""
    message = pb.ProcessingRequest(protocol_config={"request_body_mode": mode, "response_body_mode": response_mode})
    message.request_headers.end_of_stream = end
    for name, value in headers.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if subset is not None:
        told = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        told.fields["x-gateway-destination-endpoint-subset"].list_value.SetInParent()
        told.fields["x-gateway-destination-endpoint-subset"].list_value.extend(subset)
    return message


def body_message(body: bytes, *, end: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=end))


def response_message(status: int = 200, served: str = "", *, end: bool = False) -> pb.ProcessingRequest:
    """The response's headers, with the endpoint that has answered."""
    message = pb.ProcessingRequest()
    message.response_headers.end_of_stream = end
    message.response_headers.headers.headers.add(key=":status", raw_value=str(status).encode())
    if served:
        message.metadata_context.filter_metadata["envoy.lb"].fields[f"{DESTINATION}-served"].string_value = served
    return message


def post(path: str = "/v1/completions", **headers: str) -> dict[str, str]:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return {":method": "POST", ":path": path, "content-type": "application/json", **given}


@dataclass
class ProxyAnswer:
    """What the picker has answered. `status` is 0 unless it answered in place of an endpoint."""

    endpoints: list[str] = field(default_factory=list)
    body: bytes = b""
    ended: bool = False
    status: int = 0
    error: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, messages: Sequence[pb.ProcessingResponse]) -> ProxyAnswer:
        """Reads messages up to the endpoints and the body, or the error. The header and the metadata must agree."""
        found = cls()
        for one in messages:
            kind = one.WhichOneof("response")
            if kind == "immediate_response":
                told = one.immediate_response
                found.status = told.status.code
                found.error = json.loads(told.body)["error"]
                found.headers = {h.header.key: h.header.raw_value.decode() for h in told.headers.set_headers}
                continue
            side = one.request_headers if kind == "request_headers" else one.request_body
            for option in side.response.header_mutation.set_headers:
                if option.header.key == DESTINATION:
                    found.endpoints = option.header.raw_value.decode().split(",")
                    told_too = one.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
                    assert told_too.split(",") == found.endpoints
            if kind == "request_body":
                streamed = one.request_body.response.body_mutation.streamed_response
                found.body += streamed.body
                found.ended = found.ended or streamed.end_of_stream
        return found


class ProxyStream:
    """One HTTP request of the proxy."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, *messages: pb.ProcessingRequest) -> None:
        for one in messages:
            await self.call.write(one)

    async def read(self, count: int = 1) -> list[pb.ProcessingResponse]:
        """Reads so many messages; fewer where the stream ends."""
        found = []
        for _ in range(count):
            one = await self.call.read()
            if one is grpc.aio.EOF:
                break
            found.append(one)
        return found

    async def end(self) -> list[pb.ProcessingResponse]:
        """Half-closes and reads to the end, which must be without an error of gRPC."""
        await self.call.done_writing()
        rest = []
        while (one := await self.call.read()) is not grpc.aio.EOF:
            rest.append(one)
        assert await self.call.code() is grpc.StatusCode.OK, await self.call.details()
        return rest


class ProxyClient:
    """A connection to one picker."""

    def __init__(self, address: str) -> None:
        self._channel = connect(address)
        self._stub: Any = pb_grpc.ExternalProcessorStub(self._channel)

    async def __aenter__(self) -> ProxyClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._channel.close()

    @property
    def channel(self) -> grpc.aio.Channel:
        return self._channel

    def open(self) -> ProxyStream:
        return ProxyStream(self._stub.Process(timeout=TIMEOUT_S))

    async def ask(
        self, body: Any = None, headers: Mapping[str, str] | None = None, pieces: int = 1, **more: Any
    ) -> ProxyAnswer:
        """Sends one request whole and ends the stream without a response. `body`: bytes, or what becomes JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        stream = self.open()
        await stream.send(headers_message(headers or post(), end=raw is None, **more))
        answers = []
        if raw is not None:
            if more.get("mode", FULL_DUPLEX) != FULL_DUPLEX:
                answers += await stream.read()
                pieces = 1
            step = max(1, -(-len(raw) // pieces))
            parts = [raw[at : at + step] for at in range(0, len(raw), step)] or [b""]
            for number, part in enumerate(parts, 1):
                await stream.send(body_message(part, end=number == len(parts)))
        return ProxyAnswer.of(answers + await stream.end())
