"""Incremental detokenization reads like decoding the whole, whatever the tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.gateway.text.detokenize import TableDetokenizer, WindowDetokenizer
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from tests.support.gateway import tokenizers_made


@functools.cache
def load(make: Callable[[], tokenizers.Tokenizer]) -> Tokenizer:
    return Tokenizer(make(), {}, {})


def grown(tokenizer: Tokenizer, ids: list[int], steps: list[int]) -> list[str]:
    """What each push showed, and the rest; `steps` are the sizes of the pushes, used in turn."""
    detokenizer = tokenizer.detokenizer((), opens=True)
    shown, at = [], 0
    for size in steps * (len(ids) + 1):
        shown.append(detokenizer.push(ids[at : at + size]))
        at += size
        if at >= len(ids):
            break
    return [*shown, detokenizer.finish()]


STEPS = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(ids=st.lists(st.integers(0, 410), max_size=60), steps=STEPS)
def test_any_byte_level_tokens_read_as_decoded_whole(ids: list[int], steps: list[int]) -> None:
    """Random ids make every kind of broken UTF-8, special and added tokens, and ids past the vocabulary."""
    tokenizer = load(tokenizers_made.byte_level)
    assert isinstance(tokenizer.detokenizer((), opens=True), TableDetokenizer)
    assert "".join(grown(tokenizer, ids, steps)) == tokenizer.decode(ids)


@given(text=st.text(max_size=60), steps=STEPS)
def test_any_text_comes_back_and_no_character_is_shown_in_part(text: str, steps: list[int]) -> None:
    tokenizer = load(tokenizers_made.byte_level)
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = grown(tokenizer, ids, steps)
    assert "".join(shown) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in part for part in shown)


@given(text=st.text(max_size=40), steps=STEPS)
def test_sentencepiece_like_text_comes_back(text: str, steps: list[int]) -> None:
    tokenizer = load(tokenizers_made.byte_fallback)
    assert isinstance(tokenizer.detokenizer((), opens=True), TableDetokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(grown(tokenizer, ids, steps)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(259, 275), max_size=30), steps=STEPS)
def test_sentencepiece_like_tokens_read_as_decoded_whole(ids: list[int], steps: list[int]) -> None:
    tokenizer = load(tokenizers_made.byte_fallback)
    assert "".join(grown(tokenizer, ids, steps)) == tokenizer.decode(ids)


def test_an_answer_keeps_the_space_that_a_whole_text_would_lose() -> None:
    tokenizer = load(tokenizers_made.byte_fallback)
    space_fox = tokenizer.encode(" fox", add_special_tokens=False)
    assert tokenizer.detokenizer((), opens=True).push(space_fox).endswith("fox")
    prompt = tokenizer.encode("the", add_special_tokens=False)
    answer = tokenizer.detokenizer(prompt, opens=False)
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    assert answer.push(ids[len(prompt) :]) == " fox"


@given(ids=st.lists(st.integers(0, 10), max_size=30), steps=STEPS, prompt=st.lists(st.integers(2, 10), max_size=8))
def test_decoders_that_are_no_table_go_by_windows(ids: list[int], steps: list[int], prompt: list[int]) -> None:
    tokenizer = load(tokenizers_made.word_piece)
    detokenizer = tokenizer.detokenizer(prompt, opens=False)
    assert isinstance(detokenizer, WindowDetokenizer)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + ids)


def test_windows_wait_for_whole_characters_but_not_for_ever() -> None:
    tokenizer = load(tokenizers_made.byte_level)
    lead = tokenizer.encode("🦊", add_special_tokens=False)
    one_byte = [tokenizer.pieces.raw.index(bytes([byte])) for byte in "🦊".encode()] if tokenizer.pieces else lead
    detokenizer = WindowDetokenizer(tokenizer.decode)
    assert [detokenizer.push([token]) for token in one_byte] == ["", "", "", "🦊"]
    broken = [one_byte[0]] * 40
    assert "".join(detokenizer.push([token]) for token in broken) + detokenizer.finish() == "\ufffd" * 40


def test_pieces_of_tokens_tell_their_bytes() -> None:
    tokenizer = load(tokenizers_made.byte_level)
    assert tokenizer.pieces is not None
    first = tokenizer.pieces.raw.index(bytes(["é".encode()[0]]))
    assert tokenizer.piece(first) == ("\ufffd", [0xC3])
    end = next(iter(t for t in tokenizer.special_ids if tokenizer.pieces.raw[t] == b"<|im_end|>"))
    assert tokenizer.piece(end) == ("<|im_end|>", list(b"<|im_end|>"))
    assert tokenizer.piece(10**6) == ("", [])
    fox = load(tokenizers_made.word_piece)
    assert fox.piece(3) == ("fox", list(b"fox"))


def test_loading_names_the_file(tmp_path: Path) -> None:
    from kvmesh.errors import CheckpointError

    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(tmp_path)
    tokenizers_made.save(tokenizers_made.byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: not a JSON object"):
        Tokenizer.load(tmp_path)


def test_loading_reads_names_and_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    tokenizers_made.save(
        tokenizers_made.byte_level(), tmp_path, chat_template=named, bos_token={"content": "<s>", "special": True}
    )
    loaded = Tokenizer.load(tmp_path)
    assert loaded.templates == {"default": "A", "tool_use": "B"}
    assert loaded.named_tokens == {"eos_token": "<|im_end|>", "bos_token": "<s>"}
    (tmp_path / "chat_template.jinja").write_text("C")
    assert Tokenizer.load(tmp_path).templates["default"] == "C"
