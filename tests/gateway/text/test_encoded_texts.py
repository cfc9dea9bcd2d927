"""Texts in pieces have the ids that they have as a whole."""

from __future__ import annotations

import random
import threading

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvmesh.kvcache.keys import pack_tokens
from kvmesh.services.gateway.text.encoded_texts import PIECE_CHARS, EncodedTexts, divides
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from tests.support.paths import ROOT

DEMO = Tokenizer.load(ROOT / "examples" / "demo-model")
SPECIAL = list(DEMO.special_texts)
words = st.lists(
    st.sampled_from(
        ["the", " cat", "\n\n", "  ", "42", " 1999", "'ll", "é", "語", "🙂", "a\u0301", "\t", ".", *SPECIAL]
    )
    | st.text(max_size=8),
    max_size=60,
)


@given(words, st.integers(1, 12))
def test_pieces_join_to_the_whole(parts: list[str], times: int) -> None:
    text = "".join(parts) * times
    texts = EncodedTexts(DEMO, 1 << 20)
    whole = DEMO.encode(text, add_special_tokens=False)
    for _ in range(2):  # tokenized, then known
        found = texts.encode_pieces(texts.cut(text))
        assert b"".join(one.packed for one in found) == pack_tokens(whole)
        assert sum(one.special for one in found) == DEMO.count_special(whole)


def test_texts_of_one_beginning_have_pieces_in_common() -> None:
    rng = random.Random(1)
    begin = " ".join("".join(rng.choices("abcdef", k=5)) for _ in range(2000))
    texts = EncodedTexts(DEMO, 1 << 22)
    assert texts.divides
    known = set(texts.cut(begin + " one end"))
    assert sum(len(one) for one in texts.cut(begin + " and quite another") if one not in known) <= PIECE_CHARS + 64
    assert not known & set(texts.cut(begin[::-1]))


def test_memory_is_bounded_and_threads_agree() -> None:
    texts = EncodedTexts(DEMO, 64 << 10)
    rng = random.Random(2)
    bodies = [" ".join("".join(rng.choices("abcdef", k=5)) for _ in range(400)) for _ in range(40)]
    wrong = []

    def work() -> None:
        for body in bodies:
            found = b"".join(one.packed for one in texts.encode_pieces(texts.cut(body)))
            if found != pack_tokens(DEMO.encode(body, add_special_tokens=False)):
                wrong.append(body)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert 0 < texts.held_bytes <= 64 << 10


def _made(cutter: object, normalizer: object = None, **added: bool) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate("abĠ")}, merges=[]))
    made.pre_tokenizer = cutter
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    if added:
        made.add_special_tokens([tokenizers.AddedToken("<s>", **added)])
    return made


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (_made(pre_tokenizers.ByteLevel(add_prefix_space=False)), True),
        (_made(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()), True),
        (_made(pre_tokenizers.ByteLevel(add_prefix_space=True)), False),
        (_made(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)), False),
        (_made(pre_tokenizers.Metaspace()), False),
        (_made(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()), False),
        (_made(pre_tokenizers.ByteLevel(add_prefix_space=False), rstrip=True), False),
        (_made(pre_tokenizers.ByteLevel(add_prefix_space=False), single_word=True), False),
        (
            _made(
                pre_tokenizers.Sequence(
                    [
                        pre_tokenizers.Split(tokenizers.Regex(r"[a-z]+ [a-z]+|."), "isolated"),
                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                    ]
                )
            ),
            False,  # its pattern joins words
        ),
    ],
)
def test_only_what_cuts_at_words_is_divided(made: tokenizers.Tokenizer, expected: bool) -> None:
    assert divides(made) is expected
