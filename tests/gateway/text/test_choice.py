"""One growing answer: stops, silent tokens, and logprobs that go with the text they belong to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.gateway.text.completion import Completion, Delta
from kvmesh.services.gateway.text.stops import StopMatcher, StopStrings
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from tests.support.gateway import tokenizers_made

TOKENIZER = Tokenizer(tokenizers_made.byte_level(), {}, {})
EOS = TOKENIZER.encode("<|im_end|>", add_special_tokens=False)[0]


def answer(stops: list[str]) -> Completion:
    matcher = StopMatcher(StopStrings(stops)) if stops else None
    return Completion(TOKENIZER.detokenizer((), opens=True), matcher, {EOS})


def feed(grows: Completion, ids: list[int], sizes: list[int], *, logprobs: bool) -> list[Delta]:
    deltas, at = [], 0
    while at < len(ids) and not grows.finish:
        part = ids[at : at + sizes[at % len(sizes)]]
        told = [(-float(token), ((token, -1.0),)) for token in part] if logprobs else []
        deltas.append(grows.push(part, told))
        at += len(part)
    if not grows.finish:
        deltas.append(grows.end("length"))
    return deltas


@given(
    text=st.text("abcé🦊 ", max_size=30),
    stops=st.lists(st.text("abcé", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    logprobs=st.booleans(),
)
def test_text_tokens_and_logprobs_agree(text: str, stops: list[str], sizes: list[int], logprobs: bool) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    grows = answer(stops)
    deltas = feed(grows, ids, sizes, logprobs=logprobs)
    shown = "".join(delta.text for delta in deltas)
    taken = [token for delta in deltas for token in delta.token_ids]
    assert taken == ids[: len(taken)]
    assert grows.count == len(taken)
    assert deltas[-1].finish == grows.finish
    assert [delta.finish for delta in deltas[:-1]] == [""] * (len(deltas) - 1)
    if grows.finish == "length":
        assert (shown, taken) == (text, ids)
    else:
        found = TOKENIZER.decode(taken)
        assert any(stop in found for stop in stops), "the last token taken completes a stop"
        assert not any(stop in TOKENIZER.decode(taken[:-1]) for stop in stops)
        assert text.startswith(shown)
        assert not any(stop in shown for stop in stops)
    if logprobs:
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert [entry.token_id for entry in entries] == taken[: len(entries)]
        assert all(entry.logprob == -float(entry.token_id) for entry in entries)
        covered = b"".join(TOKENIZER.piece_bytes(entry.token_id) for entry in entries)
        assert covered.startswith(shown.encode()), "every shown character has its tokens"
        at = 0
        for delta in deltas:
            at += len(delta.text)
            assert all(entry.start < at or delta.finish for entry in delta.logprobs)


def test_silent_tokens_show_nothing_and_count() -> None:
    grows = answer([])
    ids = TOKENIZER.encode("Hi", add_special_tokens=False)
    delta = grows.push([*ids, EOS])
    assert (delta.text, list(delta.token_ids), grows.count) == ("Hi", [*ids, EOS], len(ids) + 1)
    assert grows.end("stop") == Delta("", (), [], "stop", first=len(ids) + 1)


def test_what_was_held_back_is_shown_at_the_end() -> None:
    grows = answer(["world!"])
    assert "".join(grows.push([token]).text for token in TOKENIZER.encode("my wor", add_special_tokens=False)) == "my "
    assert grows.end("length") == Delta("wor", (), [], "length", first=grows.count)


def test_a_character_that_never_becomes_whole() -> None:
    assert TOKENIZER.pieces is not None
    grows = answer([])
    assert grows.push([TOKENIZER.pieces.raw.index(b"\xf0")]).text == ""
    assert grows.end("length").text == "\ufffd"
