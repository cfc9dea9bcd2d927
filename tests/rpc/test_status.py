"""Named errors over a real gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from kvmesh.errors import (
    BY_CODE,
    BodyTooLarge,
    ContextTooLong,
    DeadlinePassed,
    HandoffLost,
    InternalError,
    InvalidRequest,
    KvmeshError,
    Overloaded,
    ProtocolMismatch,
    Unavailable,
)
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2
from kvmesh.rpc.server import Server
from kvmesh.rpc.status import from_detail, from_rpc_error, to_detail

Raise = Callable[[], None]


class Failing:
    """One method of each kind; `fail` is called after the first message went out."""

    def __init__(self) -> None:
        self.fail: Raise = lambda: None

    async def unary(self, request: StringValue, context: Any) -> StringValue:
        self.fail()
        return request

    async def server_stream(self, request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        yield request
        self.fail()

    async def written_stream(self, request: StringValue, context: Any) -> None:
        await context.write(request)
        self.fail()

    async def both(self, requests: AsyncIterator[StringValue], context: Any) -> AsyncIterator[StringValue]:
        async for request in requests:
            yield request
            self.fail()

    def add_to(self, server: grpc.aio.Server) -> None:
        make = {
            "Unary": (grpc.unary_unary_rpc_method_handler, self.unary),
            "Stream": (grpc.unary_stream_rpc_method_handler, self.server_stream),
            "Written": (grpc.unary_stream_rpc_method_handler, self.written_stream),
            "Both": (grpc.stream_stream_rpc_method_handler, self.both),
        }
        handlers: dict[str, Any] = {
            name: handler(call, StringValue.FromString, StringValue.SerializeToString)  # type: ignore[operator]
            for name, (handler, call) in make.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))


@pytest.fixture
async def failing() -> AsyncIterator[tuple[Failing, grpc.aio.Channel]]:
    server, servicer = Server("127.0.0.1", 0), Failing()
    servicer.add_to(server.grpc)
    await server.start()
    async with connect(server.address) as channel:
        yield servicer, channel
    await server.stop(0)


async def call(channel: grpc.aio.Channel, name: str) -> list[str]:
    """The answers of one call of the method; raises the KvmeshError that came back."""
    codec: Any = {
        "request_serializer": StringValue.SerializeToString,
        "response_deserializer": StringValue.FromString,
    }
    hello = StringValue(value="hello")
    answers: Any
    try:
        if name == "Unary":
            return [(await channel.unary_unary("/t.T/Unary", **codec)(hello, timeout=30)).value]
        if name == "Both":
            answers = channel.stream_stream("/t.T/Both", **codec)(iter([hello]), timeout=30)
        else:
            answers = channel.unary_stream(f"/t.T/{name}", **codec)(hello, timeout=30)
        return [answer.value async for answer in answers]
    except grpc.RpcError as err:
        raise from_rpc_error(err) from err


KINDS = ["Unary", "Stream", "Written", "Both"]


@pytest.mark.parametrize("name", KINDS)
async def test_a_message_that_cannot_be_read_is_the_callers_fault(
    failing: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, channel = failing
    bad = b"\x0a\x01\xff"
    if name == "Unary":
        answer = channel.unary_unary("/t.T/Unary")(bad, timeout=30)
    elif name == "Both":
        answer = channel.stream_stream("/t.T/Both")(iter([bad]), timeout=30).read()
    else:
        answer = channel.unary_stream(f"/t.T/{name}")(bad, timeout=30).read()
    with caplog.at_level(logging.WARNING), pytest.raises(grpc.RpcError) as caught:
        await answer
    err = from_rpc_error(caught.value)
    assert (type(err), err.field) == (InvalidRequest, "message")
    assert "UTF-8" in err.message
    assert not caplog.records


@pytest.mark.parametrize("name", KINDS)
async def test_a_named_error_arrives_as_itself(failing: Any, name: str) -> None:
    servicer, channel = failing
    assert await call(channel, name) == ["hello"]

    def fail() -> None:
        raise Overloaded("the queue is full: ü\ud800", field="priority", retry_after_ms=1500)

    servicer.fail = fail
    with pytest.raises(Overloaded) as caught:
        await call(channel, name)
    assert caught.value.message == "the queue is full: ü\\ud800"
    assert (caught.value.field, caught.value.retry_after_ms) == ("priority", 1500)
    cause = caught.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    assert cause.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", KINDS)
async def test_any_other_exception_is_internal_and_logged(
    failing: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    servicer, channel = failing

    def fail() -> None:
        raise ZeroDivisionError("by hand")

    servicer.fail = fail
    with caplog.at_level(logging.ERROR), pytest.raises(InternalError, match="ZeroDivisionError: by hand"):
        await call(channel, name)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert caplog.records[0].exc_info


async def test_an_error_of_a_further_call_is_passed_on(failing: Any) -> None:
    servicer, channel = failing

    class Upstream(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.DEADLINE_EXCEEDED

        def details(self) -> str:
            return "conductor did not answer"

    def fail() -> None:
        raise Upstream

    servicer.fail = fail
    with pytest.raises(DeadlinePassed, match="conductor did not answer"):
        await call(channel, "Unary")


async def test_a_cancelled_call_is_no_error_of_the_service(failing: Any, caplog: pytest.LogCaptureFixture) -> None:
    servicer, _ = failing
    started, ended = asyncio.Event(), asyncio.Event()

    async def endless(request: StringValue, context: Any) -> AsyncIterator[StringValue]:
        try:
            started.set()
            yield request
            await asyncio.Event().wait()
        finally:
            ended.set()

    servicer.server_stream = endless
    server = Server("127.0.0.1", 0)
    servicer.add_to(server.grpc)
    await server.start()
    async with connect(server.address) as own:
        answers: Any = own.unary_stream("/t.T/Stream", StringValue.SerializeToString, StringValue.FromString)(
            StringValue()
        )
        assert (await answers.read()) == StringValue()
        answers.cancel()
        async with asyncio.timeout(30):
            await ended.wait()
    await server.stop(0)
    assert started.is_set()
    assert not caplog.records


async def test_a_method_that_nobody_serves_means_another_protocol(failing: Any) -> None:
    _, channel = failing
    with pytest.raises(ProtocolMismatch):
        await call(channel, "Nothing")


async def test_a_message_over_the_limit_is_too_large_and_no_overload(failing: Any) -> None:
    _, channel = failing
    unary = channel.unary_unary("/t.T/Unary", StringValue.SerializeToString, StringValue.FromString)
    with pytest.raises(grpc.RpcError) as caught:
        await unary(StringValue(value="x" * (65 << 20)), timeout=30)
    assert isinstance(from_rpc_error(caught.value), BodyTooLarge)


async def test_nobody_there_is_unavailable() -> None:
    async with connect("127.0.0.1:1") as channel:
        with pytest.raises(Unavailable):
            await call(channel, "Unary")


@pytest.mark.parametrize("cls", sorted(set(BY_CODE.values()) - {KvmeshError}, key=lambda cls: cls.__name__))
def test_every_error_keeps_its_class_on_the_wire(cls: type[KvmeshError]) -> None:
    back = from_detail(to_detail(cls("why", field="f", retry_after_ms=9)))
    assert type(back) is cls
    assert (back.message, back.field, back.retry_after_ms) == ("why", "f", 9)
    assert cls.grpc_status in grpc.StatusCode.__members__


def test_codes_of_a_later_build_are_understood_as_far_as_possible() -> None:
    known = common_pb2.ErrorDetail(code="moon_phase", message="m", retryable=True)
    assert type(from_detail(known)) is Unavailable
    assert type(from_detail(common_pb2.ErrorDetail(code="moon_phase"))) is InternalError
    assert issubclass(ContextTooLong, InvalidRequest)
    assert issubclass(HandoffLost, Unavailable)


def test_a_long_message_is_cut_to_what_metadata_carries() -> None:
    detail = to_detail(InvalidRequest("x" * 100_000))
    assert len(detail.SerializeToString()) < 2_000
