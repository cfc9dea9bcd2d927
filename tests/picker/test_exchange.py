"""What may come when, and that every message of a proxy is answered as its mode wants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import BodyTooLarge, InvalidRequest
from kvmesh.rpc.pb import envoy_external_processor_pb2 as pb
from kvmesh.rpc.pb.envoy_processing_mode_pb2 import ProcessingMode
from kvmesh.services.picker.exchange import ExchangePhase, ProxyExchange
from kvmesh.services.picker.wire import PIECE_BYTES, MetadataNames
from tests.support.ext_proc import (
    BUFFERED,
    FULL_DUPLEX,
    NONE,
    ProxyAnswer,
    body_message,
    headers_message,
    post,
    response_message,
)

ENDPOINTS = ("10.0.0.1:8000", "10.0.0.2:8000")


def exchange(limit: int = 1 << 20) -> ProxyExchange:
    return ProxyExchange(limit, MetadataNames())


def kinds(messages: list[pb.ProcessingResponse]) -> list[str | None]:
    return [one.WhichOneof("response") for one in messages]


def trailers() -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


@given(st.lists(st.binary(max_size=200_000), min_size=1, max_size=4), st.booleans())
def test_a_full_duplex_body_goes_on_as_it_came(parts: list[bytes], with_trailers: bool) -> None:
    one = exchange()
    assert one.take(headers_message(post())) == []
    for number, part in enumerate(parts, 1):
        assert one.take(body_message(part, end=number == len(parts) and not with_trailers)) == []
    if with_trailers:
        assert one.take(trailers()) == []
    assert one.phase is ExchangePhase.DECIDING
    assert one.body == b"".join(parts)
    answers = one.picked(ENDPOINTS)
    found = ProxyAnswer.of(answers)
    assert (found.endpoints, found.body) == (list(ENDPOINTS), b"".join(parts))
    assert kinds(answers)[0] == "request_headers"
    assert (kinds(answers)[-1] == "request_trailers") is with_trailers
    pieces = [
        one.request_body.response.body_mutation.streamed_response for one in answers if one.HasField("request_body")
    ]
    assert all(len(piece.body) <= PIECE_BYTES for piece in pieces)
    ends = [piece.end_of_stream for piece in pieces]
    assert ends == ([False] * len(ends) if with_trailers else [False] * (len(ends) - 1) + [True])
    assert one.body is None  # nothing of it is kept


def test_a_buffered_body_has_the_endpoints_in_its_own_answer() -> None:
    one = exchange()
    assert kinds(one.take(headers_message(post(), mode=BUFFERED))) == ["request_headers"]
    assert one.take(body_message(b"{}")) == []
    assert (one.phase, one.body) == (ExchangePhase.DECIDING, b"{}")
    answers = one.picked(ENDPOINTS)
    assert kinds(answers) == ["request_body"]
    assert ProxyAnswer.of(answers).endpoints == list(ENDPOINTS)


def test_a_body_that_was_cut_is_not_taken_for_one() -> None:
    one = exchange()
    one.take(headers_message(post(), mode=ProcessingMode.BUFFERED_PARTIAL))
    one.take(body_message(b'{"model"', end=False))
    assert (one.phase, one.body) == (ExchangePhase.DECIDING, None)
    assert kinds(one.picked(ENDPOINTS)) == ["request_body"]
    assert kinds(one.take(body_message(b"rest", end=True))) == ["request_body"]


@pytest.mark.parametrize("mode", [NONE, ProcessingMode.STREAMED])
def test_headers_are_enough_where_no_body_is_sent_whole(mode: int) -> None:
    one = exchange()
    assert one.take(headers_message(post(), mode=mode)) == []
    assert one.phase is ExchangePhase.DECIDING
    assert kinds(one.picked(ENDPOINTS)) == ["request_headers"]
    if mode == ProcessingMode.STREAMED:
        assert kinds(one.take(body_message(b"x", end=False))) == ["request_body"]
        assert kinds(one.take(body_message(b"y"))) == ["request_body"]


@pytest.mark.parametrize("response_mode", [NONE, FULL_DUPLEX, ProcessingMode.STREAMED])
def test_the_answer_of_an_endpoint_passes_and_names_it(response_mode: int) -> None:
    one = exchange()
    one.take(headers_message(post(), end=True, response_mode=response_mode))
    one.picked(ENDPOINTS)
    assert kinds(one.take(response_message(503, ENDPOINTS[1]))) == ["response_headers"]
    assert (one.status, one.served, one.response_ended) == (503, ENDPOINTS[1], False)
    assert one.watches_response is (response_mode != NONE)
    if response_mode != NONE:
        piece = pb.ProcessingRequest(response_body=pb.HttpBody(body=b"data: x\n\n", end_of_stream=True))
        (answer,) = one.take(piece)
        streamed = answer.response_body.response.body_mutation.streamed_response
        assert streamed.body == (b"data: x\n\n" if response_mode == FULL_DUPLEX else b"")
        assert one.response_ended


def test_nobody_has_a_body_over_the_limit() -> None:
    one = exchange(10)
    one.take(headers_message(post()))
    one.take(body_message(b"12345", end=False))
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        one.take(body_message(b"678901"))


_MESSAGES = st.sampled_from(
    [
        headers_message(post()),
        headers_message(post(), end=True),
        headers_message(post(), mode=BUFFERED),
        headers_message(post(), mode=NONE),
        body_message(b"x", end=False),
        body_message(b"x"),
        trailers(),
        response_message(),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"x")),
        pb.ProcessingRequest(response_trailers=pb.HttpTrailers()),
        pb.ProcessingRequest(),
    ]
)


@given(st.lists(_MESSAGES, max_size=8))
def test_any_order_is_answered_or_refused_by_name(messages: list[pb.ProcessingRequest]) -> None:
    one, sent = exchange(), 0
    for message in messages:
        try:
            answers = one.take(message)
        except InvalidRequest as err:
            assert err.field  # noqa: PT017 - whether it raises is up to the messages
            return
        if one.phase is ExchangePhase.DECIDING:
            answers += one.picked(ENDPOINTS)
        sent += ENDPOINTS[0] in str(answers)
    assert sent <= 1  # a proxy is told once
