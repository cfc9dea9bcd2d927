"""Remembers the token ids of words, so that a tokenizer's library is asked for new words alone: it takes some
microseconds for each, a lookup a small part of one.

A tokenizer of a byte-level BPE first cuts a text by a pattern, from left to right, and never joins tokens over such a
cut. Every known pattern cuts before a space that follows an ASCII character or a Han one, and between an ASCII letter
or a Han character and a line feed or a full-width mark, whatever else stands before or behind: there a text may be
taken apart, and its parts' ids joined are the whole's. What stands between two such places is a word here. For a
tokenizer of another make (`divides` is False) a text is one word.

A text is also cut into pieces, at the first such place after every `PIECE_CHARS`, counted from the last cut, so that
two texts of one beginning have their first pieces in common.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers

from kvmesh.kvcache.keys import TOKEN_BYTES, pack_tokens

PIECE_CHARS = 1024
MOST_CHARS = 64  # of a word that is remembered
_ENTRY_BYTES = 250  # of Python's objects around an entry
_HAN = "\u4e00-\u9fa5"
_SPACED = rf"(?<=[!-~{_HAN}])(?= )"
_MARKED = rf"(?<=[A-Za-z{_HAN}])(?=[\n\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
_CUT = re.compile(f"{_SPACED}|{_MARKED}")
# The same words as by splitting at every cut, but for those that a mark divides: it looks at words, not at characters.
_WORD = re.compile(rf" *[^ ]+(?:(?<![!-~{_HAN}]) +[^ ]*)*| +")
_PART = re.compile(_MARKED)
_PROBES = (
    "a b", "word\nword", "It's I'll we\n\n  x", "aB cD\n1 2 a  b", "x1 y.z a\n",
    "a. B, 'c' 10 20%  \"d\" (e) f/ g- h\n i_ j] {k} l= #m! n? o~ p| q* r: s; t> u^ v` w@ x$ y& z+ z\\ z",
    "\u4e2d\u6587\uff0c\u4e2d a\uff1bb\u3002\n\u6587 \u4e2d\n1\u4e2d\uff1f\uff01 x\u3001\u4e2d\uff1ay",
)  # fmt: skip


class EncodedText(NamedTuple):
    """Token ids, packed as `pack_tokens` does, and how many of them are special tokens."""

    packed: bytes
    special: int

    @property
    def tokens(self) -> int:
        """How many ids there are."""
        return len(self.packed) // TOKEN_BYTES


class EncodedTexts:
    """The words that were used last, within `max_bytes` of memory. Safe to use from several threads. `count_special`
    says how many ids of a list are special tokens."""

    def __init__(
        self, inner: tokenizers.Tokenizer, count_special: Callable[[Sequence[int]], int], max_bytes: int
    ) -> None:
        self._inner = inner
        self._count_special = count_special
        self._half = max_bytes // 2
        # Packed ids. A word found among the old ones becomes a new one; when the new ones fill half of the room they
        # are the old ones. Words with special tokens are not kept.
        self._new: dict[str, bytes] = {}
        self._old: dict[str, bytes] = {}
        self._new_bytes = self._old_bytes = 0
        self._lock = threading.Lock()
        self.divides = divides(inner)

    @property
    def held_bytes(self) -> int:
        """The memory that the words take."""
        return self._new_bytes + self._old_bytes

    def encode_pieces(self, pieces: Sequence[str]) -> list[EncodedText]:
        """Returns the ids of each of the pieces that `cut` gives; joined they are the whole text's, without the special
        tokens that a tokenizer adds around it."""
        texts = [_WORD.findall(piece) if self.divides else [piece] for piece in pieces]
        known = self._new.get
        found = [[*map(known, words)] for words in texts]
        if not any(None in some for some in found):
            return [EncodedText(b"".join(some), 0) for some in found]  # type: ignore[arg-type]
        made = self._encode({
            word for words, some in zip(texts, found, strict=True) for word, one in zip(words, some, strict=True)
            if one is None
        })  # fmt: skip
        return [self._filled(words, some, made) for words, some in zip(texts, found, strict=True)]

    @staticmethod
    def _filled(words: list[str], found: list[bytes | None], made: Mapping[str, EncodedText]) -> EncodedText:
        packed, special = [], 0
        for word, one in zip(words, found, strict=True):
            if one is None:
                one, more = made[word]
                special += more
            packed.append(one)
        return EncodedText(b"".join(packed), special)

    def cut(self, text: str) -> list[str]:
        """Returns the pieces of a text: two texts of one beginning have their first pieces in common."""
        pieces, at = [], 0
        while self.divides and (found := _CUT.search(text, at + PIECE_CHARS)) is not None:
            pieces.append(text[at : found.start()])
            at = found.start()
        pieces.append(text[at:])
        return pieces

    def _encode(self, words: Collection[str]) -> dict[str, EncodedText]:
        """Returns the ids of words that are not among the new ones, and keeps them."""
        parts = {word: _PART.split(word) if self.divides else [word] for word in words}
        made = {}
        unknown = []
        for part in {part for some in parts.values() for part in some}:
            packed = self._new.get(part) or self._old.get(part)
            if packed is None:
                unknown.append(part)
            else:
                made[part] = EncodedText(packed, 0)
        if unknown:
            encoded = self._inner.encode_batch_fast(unknown, add_special_tokens=False)  # releases the GIL
            for part, one in zip(unknown, encoded, strict=True):
                made[part] = EncodedText(pack_tokens(one.ids), self._count_special(one.ids))
        for word, some in parts.items():
            if len(some) > 1:
                made[word] = _joined(made[part] for part in some)
        with self._lock:
            for text, entry in made.items():
                if len(text) <= MOST_CHARS and not entry.special:
                    self._keep(text, entry.packed)
        return made

    def _keep(self, word: str, packed: bytes) -> None:
        size = _ENTRY_BYTES + 4 * len(word) + len(packed)  # 4: a wide character, the worst
        if word in self._new or size > self._half:
            return
        if self._new_bytes + size > self._half:
            self._old, self._old_bytes = self._new, self._new_bytes
            self._new, self._new_bytes = {}, 0
        self._new[word] = packed
        self._new_bytes += size


def _joined(some: Iterable[EncodedText]) -> EncodedText:
    packed, special = zip(*some, strict=True)
    return EncodedText(b"".join(packed), sum(special))


def divides(inner: tokenizers.Tokenizer) -> bool:
    """Decides whether texts of a tokenizer may be taken apart at every `_CUT`. What is not known to allow it does
    not."""
    model = inner.model
    if not isinstance(model, tokenizers.models.BPE) or model.dropout or inner.pre_tokenizer is None:
        return False
    if inner.normalizer is not None and _told(inner.normalizer)["type"] != "NFC":  # others add or fold spaces
        return False
    cutter = _told(inner.pre_tokenizer)
    steps = cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" not in kinds or not kinds <= {"ByteLevel", "Split", "Digits"}:
        return False
    if any(step.get("add_prefix_space") for step in steps):
        return False
    if not any(step["type"] == "Split" or step.get("use_regex", True) for step in steps):
        return False  # nothing cuts
    for token in inner.get_added_tokens_decoder().values():
        if token.rstrip or token.single_word or any(map(str.isspace, token.content)) or _CUT.search(token.content):
            return False
    return all(map(_cuts_at_words, [inner] * len(_PROBES), _PROBES))


def _told(step: tokenizers.normalizers.Normalizer | tokenizers.pre_tokenizers.PreTokenizer) -> dict[str, Any]:
    """Returns a step as tokenizer.json has it."""
    told: dict[str, Any] = json.loads(step.__getstate__())
    return told


def _cuts_at_words(inner: tokenizers.Tokenizer, text: str) -> bool:
    starts = {start for _, (start, _) in inner.pre_tokenizer.pre_tokenize_str(text)}
    return starts >= {found.start() for found in _CUT.finditer(text)}
