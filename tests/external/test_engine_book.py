"""What conductors are told of an engine: loads with what others have there, samples that teach, who is to blame."""

from __future__ import annotations

import pytest

from kvmesh.errors import InternalError, InvalidRequest, KvmeshError, Overloaded, RequestCancelled, Unavailable
from kvmesh.external.engine_book import EngineBook, EngineRequest
from kvmesh.external.engine_protocol import EngineLoad
from kvmesh.rpc.pb import conductor_pb2 as pb

MS = 1_000_000


def request(name: str = "r", prompt: int = 100, cached: int = 0, at: int = 0) -> EngineRequest:
    return EngineRequest(name, 0, prompt, cached, at)


def test_a_ttft_teaches_only_where_the_engine_had_nothing_before() -> None:
    book = EngineBook("a")
    alone, first, second = request("alone", cached=32), request("first", at=60 * MS), request("second", at=61 * MS)
    book.begin(alone)
    book.tokens(alone, 1, 50 * MS)
    book.begin(first)
    book.begin(second)
    for one in (first, second):
        book.tokens(one, 1, 90 * MS)
    told = {
        s.request_id: (s.computed_tokens, s.cached_tokens, s.duration_us) for s in book.report(10, 0).prefill_samples
    }
    assert told == {"alone": (68, 32, 50_000), "first": (0, 0, 0), "second": (0, 0, 0)}
    book.polled(EngineLoad(waiting=1, running=3))  # somebody else's prompt waits there
    behind = request("behind", at=100 * MS)
    book.begin(behind)
    book.tokens(behind, 1, 200 * MS)
    assert [s.duration_us for s in book.report(10, 0).prefill_samples] == [0]


def test_loads_hold_what_others_have_there() -> None:
    book = EngineBook("a")
    ours, waits = request(prompt=100), request(prompt=50, cached=16)
    book.begin(ours)
    book.tokens(ours, 3, 1)
    book.begin(waits)
    book.polled(EngineLoad(waiting=4, running=5, used_share=0.25))
    load = book.report(100, 7).load
    assert (load.running_requests, load.queued_requests) == (1 + 3, 1 + 4)
    assert load.queued_tokens == 34 + 4 * 75 and load.context_tokens == 103 + 3 * 75
    assert (load.free_pages, load.store_blocks, load.store_capacity) == (75, 7, 100)


def test_an_engine_with_requests_of_others_is_asked_more_often() -> None:
    book, own = EngineBook("e"), request("r")
    assert book.poll_again_s(1.0) == 1.0
    book.begin(own)
    book.polled(EngineLoad(running=1))
    assert book.poll_again_s(1.0) == 1.0, "its end is seen here"
    book.polled(EngineLoad(running=2))
    assert book.poll_again_s(1.0) == 0.2
    book.polled(EngineLoad(running=1, waiting=1))
    assert book.poll_again_s(1.0) == 0.2
    book.polled(EngineLoad(running=1))
    assert book.poll_again_s(1.0) == 1.0


def test_times_between_tokens_are_a_median_without_prompts_beside_them() -> None:
    book = EngineBook("a")
    one = request()
    book.begin(one)
    book.tokens(one, 1, 0)
    for at in (10, 20, 30, 5_000, 5_010):
        book.tokens(one, 1, at * MS)
    [sample] = book.report(10, 0).decode_samples
    assert (sample.batch, sample.duration_us, sample.context_tokens) == (1, 10_000, 106)
    assert not book.report(10, 0).decode_samples
    book.begin(request("waits"))
    for at in range(6_000, 6_100, 10):
        book.tokens(one, 1, at * MS)
    assert not book.report(10, 0).decode_samples


@pytest.mark.parametrize(
    ("error", "outcome", "blamed"),
    [
        (None, pb.OUTCOME_DONE, ""),
        (RequestCancelled("x"), pb.OUTCOME_CANCELLED, ""),
        (Overloaded("x"), pb.OUTCOME_REFUSED, ""),
        (InvalidRequest("x"), pb.OUTCOME_REFUSED, ""),
        (Unavailable("x"), pb.OUTCOME_FAILED, "a"),
        (InternalError("x"), pb.OUTCOME_FAILED, "a"),
    ],
)
def test_outcomes_and_blame(error: KvmeshError | None, outcome: int, blamed: str) -> None:
    book = EngineBook("a")
    one = request(at=MS)
    book.begin(one)
    for at in (11, 13, 15, 17):
        book.tokens(one, 2, at * MS)
    book.end(one, error, 20 * MS)
    beat = book.report(10, 0)
    [told] = beat.outcomes
    assert (told.outcome, told.blamed, told.output_tokens) == (outcome, blamed, 8)
    assert (told.ttft_us, told.mean_tbt_us, told.duration_us) == (10_000, 1_000, 19_000)
    assert list(beat.finished_request_ids) == ["r"] and not book.report(10, 0).outcomes and not book.live
