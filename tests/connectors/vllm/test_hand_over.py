"""The scheduler's side of a push: what is held and told, what of it is taken, and why the rest is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvmesh.connectors.vllm.book import HandoffSide, RequestBook, Scheduled
from kvmesh.connectors.vllm.remote import MAX_RANKS, PageSharing, PushRank, RemotePrefill
from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import Namespace

BLOCK = 4
SPACE = Namespace(fingerprint="ab", kv_dtype="auto")
RANKS = (PushRank("10.0.0.1:7101", "vllm:0:1:a"), PushRank("10.0.0.1:7102", "vllm:1:1:b"))
SIDE = HandoffSide("p", PageSharing(BLOCK, "layout", len(RANKS)), RANKS)
TICKET = bytes(range(16))
TOKENS = list(range(10))  # two blocks and a half


def book(side: HandoffSide | None = SIDE, **more: bool) -> RequestBook:
    return RequestBook(BLOCK, lookup_s=0.3, pause_s=5.0, handoff=side, **{"pool": False, **more})


def handed_over(tokens: list[int] = TOKENS, space: Namespace = SPACE, **more: Any) -> RemotePrefill:
    made = book()
    made.add("p1", space, len(tokens))
    found = made.hand_over("p1", tokens, len(tokens), list(range(50, 50 + len(tokens))), TICKET)
    assert found is not None
    return replace(found, **more)


def asked(source: RemotePrefill, tokens: list[int] = TOKENS, local: int = 0, side: HandoffSide | None = SIDE) -> Any:
    made = book(side)
    made.add("d", SPACE, len(tokens), source)
    return made, made.match("d", tokens, local, 0.0)


def test_pages_of_the_prompt_are_held_and_told() -> None:
    made = book()
    made.add("p1", SPACE, len(TOKENS))
    told = made.hand_over("p1", [*TOKENS, 77], 11, [50, 51, 52, 53], TICKET)
    assert told is not None and (told.tokens, told.ranks, told.engine_id) == (10, RANKS, "p")
    orders = made.handoffs()
    assert [(one.request_id, one.ticket, one.block_ids) for one in orders.holds] == [("p1", TICKET, (50, 51, 52))]
    assert made.handoffs().holds == ()
    params = told.params()
    assert params["do_remote_prefill"] and params["remote_host"] == "10.0.0.1" and params["remote_port"] == 7101
    assert RemotePrefill.of(params) == told


@pytest.mark.parametrize(("computed", "pages"), [(9, 3), (0, 0), (10, 2)])
def test_pages_that_the_request_does_not_have_any_more_are_not_told(computed: int, pages: int) -> None:
    made = book()
    made.add("p1", SPACE, len(TOKENS))
    assert made.hand_over("p1", TOKENS, computed, list(range(pages)), TICKET) is None
    assert made.hand_over("unknown", TOKENS, 10, [1, 2, 3], TICKET) is None
    assert made.handoffs().holds == ()


def test_only_a_producer_with_push_hands_over() -> None:
    for made in (book(None), book(saves=False)):
        made.add("p1", SPACE, len(TOKENS))
        assert made.hand_over("p1", TOKENS, 10, [1, 2, 3], TICKET) is None


def test_what_is_kept_elsewhere_is_received_with_its_partial_block() -> None:
    source = handed_over()
    made, match = asked(source, local=4)
    assert (match.tokens, match.ask, match.refused) == (6, (), "")
    assert made.match("d", TOKENS, 4, 9.0).tokens == 6  # no pages were free: vLLM asks again
    made.allocated("d", [60, 61, 62, 63], 6)
    (order,) = made.handoffs().receives
    assert (order.source, order.first_block, order.block_ids) == (source, 1, (61, 62))
    made.received(["d"], set(), False, 1.0)
    made.finish("d")
    assert made.handoffs().releases == ()  # the worker tells, when its load is over


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ranks": RANKS[:1]}, "tp_size=1 there and 2 here"),
        ({"block_tokens": 8}, "block size 8 there and 4 here"),
        ({"layout": "x"}, "the pages have another layout there"),
        ({"tokens": 11}, "11 tokens there and a prompt of 10 here"),
        ({"digest": "f" * 64}, "tokens, adapter, cache salt, weights or configuration differ"),
        ({"tokens": 9}, "tokens, adapter"),
    ],
)
def test_what_differs_is_said_and_computed(change: dict[str, Any], why: str) -> None:
    source = replace(handed_over(), **change)
    made, match = asked(source)
    assert match.tokens == 0 and why in match.refused
    assert made.handoffs().releases == (source,)
    assert made.match("d", TOKENS, 0, 1.0).refused == ""  # once


def test_the_digest_has_tokens_adapter_and_salt() -> None:
    digests = {
        handed_over(tokens, space).digest
        for tokens in (TOKENS, TOKENS[:9], [*TOKENS[:9], 8])
        for space in (SPACE, replace(SPACE, lora="l"), replace(SPACE, tenant_salt="s"), replace(SPACE, weights_epoch=1))
    }
    assert len(digests) == 12
    assert handed_over([1]).digest != handed_over([2]).digest  # less than a block


def test_an_engine_that_takes_nothing_says_so() -> None:
    _, match = asked(handed_over(), side=None)
    assert "push, kv_role" in match.refused


def test_what_vllm_has_itself_is_released_and_not_received() -> None:
    source = handed_over()
    made, match = asked(source, local=12)
    assert (match.tokens, match.refused) == (0, "")
    assert made.handoffs().releases == (source,)


def test_a_request_that_ends_before_it_is_admitted_releases() -> None:
    source = handed_over()
    made, _ = asked(source)
    made.finish("d")
    assert made.handoffs().releases == (source,) and len(made) == 0
    made.drop(source)  # of a request whose KV does not follow from tokens
    assert made.handoffs().releases == (source,)


def test_a_push_that_failed_is_looked_up_in_the_pool_and_saved() -> None:
    """Prefill may have saved it before it died. What did not come is saved when it is computed."""
    made = book(pool=True)
    made.add("d", SPACE, len(TOKENS), handed_over())
    assert made.match("d", TOKENS, 0, 0.0).tokens == 10
    made.allocated("d", [60, 61, 62], 10)
    made.received(["d"], {61, 62}, False, 1.0, {"d"})
    _, (save,) = made.step([Scheduled("d", TOKENS, 10, [60, 61, 62])])
    assert save.block_ids == (61,)  # prefill has saved the first one
    assert len(made.match("d", TOKENS, 0, 2.0).ask) == 2


def test_a_rank_whose_push_failed_says_so_before_the_last_one_ends() -> None:
    made = book(pool=True)
    made.add("d", SPACE, len(TOKENS), handed_over())
    assert made.match("d", TOKENS, 0, 0.0).tokens == 10
    made.allocated("d", [60, 61, 62], 10)
    made.received([], {61, 62}, False, 0.5, {"d"})
    made.received(["d"], set(), False, 1.0)
    _, (save,) = made.step([Scheduled("d", TOKENS, 10, [60, 61, 62])])
    assert save.block_ids == (61,)
    made.add("e", SPACE, len(TOKENS), handed_over())
    assert "engine p ran out of time" in made.match("e", TOKENS, 0, 5.4).refused


def test_an_engine_that_ran_out_of_time_is_left_alone_for_a_while() -> None:
    made = book()
    for name in ("d", "e", "f"):
        made.add(name, SPACE, len(TOKENS), handed_over())
    assert made.match("d", TOKENS, 0, 0.0).tokens == 10
    made.allocated("d", [1, 2, 3], 10)
    made.received(["d"], {1, 2, 3}, False, 1.0, {"d"})
    assert "engine p ran out of time" in made.match("e", TOKENS, 0, 5.9).refused
    assert made.match("f", TOKENS, 0, 6.0).tokens == 10


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"remote_ranks": None}, "remote_ranks='None': must be a list of 1 to 1024 pairs"),
        ({"remote_ranks": [["a:1", "e"]] * (MAX_RANKS + 1)}, "must be a list"),
        ({"remote_ranks": ["a:1"]}, "must be an address and an engine"),
        ({"remote_ranks": [["http://a", "e"]]}, "must be HOST:PORT"),
        ({"remote_ranks": [["a:1,b:2", "e"]]}, "must be one address"),
        ({"remote_ranks": [["a:1", ""]]}, "must be a text of 1 to 512"),
        ({"remote_request_id": "x" * 513}, "remote_request_id='xxx"),
        ({"remote_engine_id": 5}, "remote_engine_id='5'"),
        ({"remote_ticket": "zz" * 16}, "remote_ticket='zz"),
        ({"remote_ticket": "00"}, "must be 16 bytes in hex"),
        ({"remote_digest": "00" * 16}, "must be 32 bytes in hex"),
        ({"remote_num_tokens": True}, "remote_num_tokens='True'"),
        ({"remote_num_tokens": 1 << 40}, "must be a number in 1"),
        ({"remote_block_size": -1}, "remote_block_size='-1'"),
        ({"remote_layout": "a\nb"}, "remote_layout"),
    ],
)
def test_what_is_wrong_with_parameters_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match="remote_") as caught:
        RemotePrefill.of({**handed_over().params(), **change})
    assert text in caught.value.message
