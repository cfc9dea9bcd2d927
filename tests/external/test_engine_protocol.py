"""What an engine is asked, and how what it answers is read: whole, in pieces, and wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import (
    BodyTooLarge,
    InternalError,
    InvalidRequest,
    KvmeshError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from kvmesh.external.engine_protocol import (
    EngineInterface,
    EngineLoad,
    EventLines,
    TokenScore,
    body_of,
    chunk_of,
    error_of,
    load_of,
    model_of,
)
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.rpc.pb import common_pb2, decode_pb2

GENERATE, COMPLETIONS = EngineInterface


def start(**sampling: Any) -> decode_pb2.StartRequest:
    asked = common_pb2.SamplingParams(**{"max_tokens": 8, "top_p": 1.0, **sampling})
    return decode_pb2.StartRequest(token_ids=pack_tokens([5, 6, 7]), sampling=asked)


def test_bodies_hold_what_was_asked_and_no_defaults() -> None:
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    params = {"max_tokens": 8, "temperature": 0.0, "seed": 0, "detokenize": False}
    asked = {"model": "m", "token_ids": [5, 6, 7], "sampling_params": params, **stream}
    assert body_of(start(), GENERATE, "m") == asked
    body = body_of(start(temperature=0.7, top_k=4, logprobs=True, top_logprobs=2, seed=9), COMPLETIONS, "m")
    assert body == {
        "model": "m", "prompt": [5, 6, 7], "return_token_ids": True, "return_tokens_as_token_ids": True,
        "max_tokens": 8, "temperature": 0.7, "seed": 9, "top_k": 4, "logprobs": 2, **stream,
    }  # fmt: skip


def test_an_answer_that_goes_on_has_other_noise_and_its_salt() -> None:
    first, later = (body_of(start(seed=2**63 - 2, answered_tokens=n), GENERATE, "m") for n in (0, 5))
    seeds = [body["sampling_params"]["seed"] for body in (first, later)]
    assert seeds == [2**63 - 2, 3]
    salted = start()
    salted.cache_salt = "ab"
    assert body_of(salted, GENERATE, "m")["cache_salt"] == "ab" and "cache_salt" not in first


@pytest.mark.parametrize("asked", [{"grammar": "{}"}, {"prompt_logprobs": 0}], ids=str)
def test_what_no_engine_is_asked_for_is_refused_by_name(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as told:
        body_of(start(**asked), GENERATE, "m")
    assert told.value.field == next(iter(asked))


@given(
    st.lists(st.binary(min_size=1, max_size=20).filter(lambda one: not set(one) & set(b"\r\n")), max_size=6), st.data()
)
def test_events_are_cut_alike_wherever_the_bytes_are(events: list[bytes], data: st.DataObject) -> None:
    raw = b"".join(b": a comment\ndata: " + one + b"\r\n\n" for one in events)
    lines, found, at = EventLines(), list[bytes](), 0
    while at < len(raw):
        end = data.draw(st.integers(at + 1, len(raw)))
        found += lines.feed(raw[at:end])
        at = end
    assert found == [one.strip() for one in events]


def test_an_event_without_an_end_is_given_up() -> None:
    lines = EventLines(100)
    list(lines.feed(b"data: " + 90 * b"1"))
    with pytest.raises(BodyTooLarge, match="more than 100 bytes"):
        list(lines.feed(b"12345"))


def event(**choice: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "token_ids": [1, 2], "finish_reason": None, **choice}]}).encode()


def test_chunks_of_both_interfaces() -> None:
    chunk = chunk_of(event(finish_reason="stop"))
    assert (chunk.token_ids, chunk.finish, chunk.scores, chunk.done) == ([1, 2], "stop", [], False)
    assert chunk_of(b"[DONE]").done
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}}
    assert chunk_of(json.dumps(usage).encode()).cached_tokens == 8
    want = [TokenScore(-0.5, ((1, -0.5), (7, -2.0))), TokenScore(-3.0, ((9, -0.1),))]
    tops = [[(1, -0.5), (7, -2.0)], [(2, -3.0), (9, -0.1)]]
    by_id: list[dict[str, Any]] = [
        {"token_id": ids[0][0], "logprob": ids[0][1], "top_logprobs": [{"token_id": t, "logprob": p} for t, p in ids]}
        for ids in tops
    ]
    named = [
        {"token": "token_id:1", "logprob": one["logprob"],
         "top_logprobs": [{"token": f"token_id:{t['token_id']}", "logprob": t["logprob"]} for t in one["top_logprobs"]]}
        for one in by_id
    ]  # fmt: skip
    lists = {"token_logprobs": [-0.5, -3.0], "top_logprobs": [{f"token_id:{t}": p for t, p in ids} for ids in tops]}
    forms: list[dict[str, Any]] = [{"content": by_id}, {"content": named}, lists]
    for told in forms:
        found = chunk_of(event(logprobs=told), 2).scores
        assert found[0] == want[0] and found[1].logprob == -3.0 and found[1].top[0] == (9, -0.1)


@pytest.mark.parametrize(
    ("data", "kind", "why"),
    [
        (b"{", InternalError, "not JSON"),
        (b"[1]", InternalError, "no object"),
        (b'{"choices": [{}, {}]}', InternalError, "one at most"),
        (b'{"choices": 3}', InternalError, "one at most"),
        (event(token_ids=[-1]), InternalError, "token_ids"),
        (event(token_ids=[2**32]), InternalError, "token_ids"),
        (event(token_ids=["1"]), InternalError, "token_ids"),
        (event(token_ids=[True]), InternalError, "token_ids"),
        (event(finish_reason=3), InternalError, "finish_reason"),
        (event(token_ids=None, text="hello"), InternalError, "return_token_ids"),
        (b'{"error": {"message": "no room", "code": 400}}', InvalidRequest, "no room"),
        (b'{"error": {"message": "broken"}}', Unavailable, "broken"),
        (b'{"error": "x"}', Unavailable, "x"),
    ],
)
def test_bad_events_have_names(data: bytes, kind: type[KvmeshError], why: str) -> None:
    with pytest.raises(kind, match=why):
        chunk_of(data)


@pytest.mark.parametrize(
    "scores",
    [None, {"content": []}, {"content": [{"logprob": None}] * 2}, {"token_logprobs": [0.0, float("nan")]},
     {"content": [{"logprob": 0.0, "top_logprobs": [{"token": "x", "logprob": 0.0}]}] * 2}],
)  # fmt: skip
def test_scores_that_are_none_are_no_answer(scores: Any) -> None:
    with pytest.raises(InternalError, match="logprobs"):
        chunk_of(event(logprobs=scores), 1)


@pytest.mark.parametrize(
    ("status", "kind", "again"),
    [
        (400, InvalidRequest, False), (422, InvalidRequest, False), (413, InvalidRequest, False),
        (401, Unavailable, True), (404, Unavailable, True), (429, Overloaded, True), (500, Unavailable, True),
        (503, Unavailable, True),
    ],
)  # fmt: skip
def test_statuses_have_names(status: int, kind: type[KvmeshError], again: bool) -> None:
    err = error_of(status, b'{"error": {"message": "because\\nof this"}}')
    assert (
        type(err) is kind and err.retryable is again and err.message == f"the engine answers {status}: because of this"
    )
    assert len(error_of(status, b"<html>" * 1000).message) < 400


METRICS = """
# HELP vllm:num_requests_running Number
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_running{engine="0",model_name="other"} 50.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="1",num_gpu_blocks="100"} 1.0
vllm:e2e_request_latency_seconds_bucket{le="0.3",model_name="m"} 1
"""


def test_loads_of_several_engines_of_one_server() -> None:
    assert load_of(METRICS, "m") == EngineLoad(3, 3, 0.375, 16, 200)
    assert load_of(METRICS, "other").running == 50
    with pytest.raises(InternalError, match="num_requests_running"):
        load_of(METRICS, "third")
    for told, keeps in (("True", True), ("False", False)):
        text = METRICS.replace('engine="1",num_gpu', f'enable_prefix_caching="{told}",engine="1",num_gpu')
        assert load_of(text, "m").keeps_prefixes is keeps


@given(st.text(max_size=200))
def test_no_metrics_break_the_reader(text: str) -> None:
    for line in (f"vllm:num_requests_running{{{text}}} {text}", f'vllm:cache_config_info{{block_size="{text}"}} 1'):
        load = load_of(f"{line}\nvllm:num_requests_running 1e300", "m")
        assert 0 <= load.running <= 1 << 24 and load.blocks == 0


def test_models() -> None:
    body = json.dumps({"data": [{"id": "a", "max_model_len": 40}, {"id": "b"}]}).encode()
    assert (model_of(body, "").name, model_of(body, "").max_context_tokens) == ("a", 40)
    assert (model_of(body, "b").name, model_of(body, "b").max_context_tokens) == ("b", 0)
    with pytest.raises(ModelNotFound, match="it has a, b"):
        model_of(body, "c")
    for bad in (b"{}", b"no", b'{"data": 3}', b'{"data": [{}]}'):
        with pytest.raises(InternalError, match="no list of models"):
            model_of(bad, "")
