"""Texts in pieces have the ids that they have as a whole."""

from __future__ import annotations

import json
import random
import threading
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvmesh.kvcache.keys import pack_tokens
from kvmesh.services.gateway.text.encoded_texts import PIECE_CHARS, EncodedTexts, divides
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from tests.support.paths import ROOT

DEMO = Tokenizer.load(ROOT / "examples" / "demo-model")
SPECIAL = list(DEMO.special_texts)
words = st.lists(
    st.sampled_from(
        [
            "the",
            " cat",
            "\n\n",
            "  ",
            "42",
            " 1999",
            "'ll",
            "é",
            "語",
            "🙂",
            "a\u0301",
            "\t",
            ".",
            "! ",
            "/ ",
            "\r\n",
            "。",
            "，",
            "文",
            " \n",
            "A",
            "\u00a0",
            "\u3000",
            *SPECIAL,
        ]
    )
    | st.text(max_size=8),
    max_size=60,
)


@given(words, st.integers(1, 12))
def test_pieces_join_to_the_whole(parts: list[str], times: int) -> None:
    text = "".join(parts) * times
    texts = EncodedTexts(DEMO.inner, DEMO.count_special, 1 << 20)
    whole = DEMO.inner.encode(text, add_special_tokens=False).ids
    for _ in range(2):  # tokenized, then known
        found = texts.encode_pieces(texts.cut(text))
        assert b"".join(one.packed for one in found) == pack_tokens(whole)
        assert sum(one.special for one in found) == DEMO.count_special(whole)


SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
# How published families cut a text before BPE.
PATTERNS = {
    "gpt2": ["'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"],
    "llama3": [rf"{SUFFIX}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"],
    "qwen2": [rf"{SUFFIX}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"],
    "o200k": [
        rf"{BEFORE}{UPPER}*{LOWER}+{SUFFIX}?|{BEFORE}{UPPER}+{LOWER}*{SUFFIX}?|\p{{N}}{{1,3}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
    ],
    "deepseek_v3": [
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + TAIL,
    ],
}


@cache
def trained(folder: Path, family: str) -> Tokenizer:
    """A small byte-level BPE that cuts as a family does."""
    made = tokenizers.Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in PATTERNS[family]]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    lines = (ROOT / "docs" / "concepts.md").read_text() + "中文。\n文，中 cat，the 中 文、" * 50
    made.train_from_iterator([lines], trainer)
    made.add_special_tokens(["<|end|>"])
    (folder / family).mkdir()
    made.save(str(folder / family / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / family / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder / family)


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("family", PATTERNS)
def test_words_of_published_families_join_to_the_whole(families: Path, family: str) -> None:
    made = trained(families, family)
    assert divides(made.inner)

    @settings(max_examples=40)
    @given(words, st.sampled_from([1, 3000]))
    def joins(parts: list[str], room: int) -> None:
        text = "".join(parts)
        texts = EncodedTexts(made.inner, made.count_special, room << 8)
        for _ in range(2):
            found = texts.encode_pieces(texts.cut(text))
            assert b"".join(one.packed for one in found) == pack_tokens(
                made.inner.encode(text, add_special_tokens=False).ids
            )

    joins()


def test_a_known_word_is_not_tokenized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Watched:
        """What `EncodedTexts` asks the library for."""

        @staticmethod
        def encode_batch_fast(some: list[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
            asked.extend(some)
            return DEMO.inner.encode_batch_fast(some, add_special_tokens=add_special_tokens)

    texts = EncodedTexts(DEMO.inner, DEMO.count_special, 1 << 20)
    monkeypatch.setattr(texts, "_inner", Watched)
    for text in ("one two. three\nfour", " two. three", "four: two. one\nfour", "。one two."):
        texts.encode_pieces(texts.cut(text))
    assert sorted(asked) == sorted(["one", " two.", " three", "\nfour", "four:", " one", "。one"])


def test_texts_of_one_beginning_have_pieces_in_common() -> None:
    rng = random.Random(1)
    begin = " ".join("".join(rng.choices("abcdef", k=5)) for _ in range(2000))
    texts = EncodedTexts(DEMO.inner, DEMO.count_special, 1 << 22)
    assert texts.divides
    known = set(texts.cut(begin + " one end"))
    assert sum(len(one) for one in texts.cut(begin + " and quite another") if one not in known) <= PIECE_CHARS + 64
    assert not known & set(texts.cut(begin[::-1]))


def test_memory_is_bounded_and_threads_agree() -> None:
    texts = EncodedTexts(DEMO.inner, DEMO.count_special, 64 << 10)
    rng = random.Random(2)
    bodies = [" ".join("".join(rng.choices("abcdef", k=5)) for _ in range(400)) for _ in range(40)]
    wrong = []

    def work() -> None:
        for body in bodies:
            found = b"".join(one.packed for one in texts.encode_pieces(texts.cut(body)))
            if found != pack_tokens(DEMO.inner.encode(body, add_special_tokens=False).ids):
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


@pytest.mark.parametrize(
    ("content", "expected"), [("\uff5cUser\uff5c", True), ("\u4e2d\uff0c\u6587", False), ("a b", False)]
)
def test_an_added_token_is_not_taken_apart(content: str, *, expected: bool) -> None:
    made = _made(pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.add_tokens([tokenizers.AddedToken(content)])
    assert divides(made) is expected


@pytest.mark.parametrize("letters", ["ab", "01"])
def test_special_tokens_stand_around_a_text_where_the_library_writes_them(letters: str) -> None:
    inner = tokenizers.Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)])
    made = Tokenizer(inner, {}, {})
    assert made.around == ([2], [3])
    for text in (letters, ""):
        assert made.encode(text, add_special_tokens=True) == inner.encode(text, add_special_tokens=True).ids
