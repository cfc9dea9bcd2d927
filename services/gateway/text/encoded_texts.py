"""Remembers the token ids of pieces of texts, so that a text which begins as others did is tokenized only where it is
new.

A tokenizer of a byte-level BPE first cuts a text by a pattern, from left to right, and never joins tokens over such a
cut. Between an ASCII letter and a space or line feed every known pattern cuts, whatever stands before or behind: there
a text may be taken apart, and its parts' ids joined are the whole's. A text is cut at the first such place after every
`PIECE_CHARS`, counted from the last cut, so that two texts of one beginning have their first pieces in common. For a
tokenizer of another make (`divides` is False) a text is one piece.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import tokenizers

from kvmesh.kvcache.keys import TOKEN_BYTES, pack_tokens
from kvmesh.services.gateway.text.tokenizer import Tokenizer

PIECE_CHARS = 512
_ENTRY_BYTES = 400  # of Python's objects around an entry
_CUT = re.compile(r"(?<=[A-Za-z])(?=[ \n])")
_PROBES = ("a b", "word\nword", "It's I'll we\n\n  x", "aB cD\n1 2 a  b", "x1 y.z a\n")


class EncodedText(NamedTuple):
    """Token ids, packed as `pack_tokens` does, and how many of them are special tokens."""

    packed: bytes
    special: int

    @property
    def tokens(self) -> int:
        """How many ids there are."""
        return len(self.packed) // TOKEN_BYTES


class EncodedTexts:
    """The pieces that were used last, up to `max_bytes` of memory. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[str, EncodedText] = OrderedDict()
        self._lock = threading.Lock()
        self.divides = divides(tokenizer.inner)
        self.held_bytes = 0

    def encode_pieces(self, pieces: Sequence[str]) -> list[EncodedText]:
        """Returns the ids of each of the pieces that `cut` gives; joined they are the whole text's, without the special
        tokens that a tokenizer adds around it."""
        with self._lock:
            found = [self._take(piece) for piece in pieces]
        missing = list(dict.fromkeys(piece for piece, one in zip(pieces, found, strict=True) if one is None))
        made = dict(zip(missing, map(self._entry, self._tokenizer.encode_all(missing)), strict=True)) if missing else {}
        if made:
            with self._lock:
                for piece, entry in made.items():
                    self._put(piece, entry)
        return [made[piece] if one is None else one for piece, one in zip(pieces, found, strict=True)]

    def cut(self, text: str) -> list[str]:
        """Returns the pieces of a text: two texts of one beginning have their first pieces in common."""
        pieces, at = [], 0
        while self.divides and (found := _CUT.search(text, at + PIECE_CHARS)) is not None:
            pieces.append(text[at : found.start()])
            at = found.start()
        pieces.append(text[at:])
        return pieces

    def _entry(self, ids: list[int]) -> EncodedText:
        return EncodedText(pack_tokens(ids), self._tokenizer.count_special(ids))

    def _take(self, piece: str) -> EncodedText | None:
        found = self._pieces.get(piece)
        if found is not None:
            self._pieces.move_to_end(piece)
        return found

    def _put(self, piece: str, entry: EncodedText) -> None:
        size = _size(piece, entry)
        if piece in self._pieces or size > self._max_bytes // 4:
            return
        self._pieces[piece] = entry
        self.held_bytes += size
        while self.held_bytes > self._max_bytes:
            old, gone = self._pieces.popitem(last=False)
            self.held_bytes -= _size(old, gone)


def _size(piece: str, entry: EncodedText) -> int:
    return _ENTRY_BYTES + 4 * len(piece) + len(entry.packed)  # 4: a wide character, the worst


def divides(inner: tokenizers.Tokenizer) -> bool:
    """Decides whether texts of a tokenizer may be taken apart between a letter and a space. What is not known to allow
    it does not."""
    told: dict[str, Any] = json.loads(inner.to_str())
    model, normalizer, cutter = told["model"], told.get("normalizer"), told.get("pre_tokenizer")
    if model.get("type") != "BPE" or model.get("dropout") or cutter is None:
        return False
    if normalizer is not None and normalizer["type"] != "NFC":  # others add or fold spaces
        return False
    steps = cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" not in kinds or not kinds <= {"ByteLevel", "Split", "Digits"}:
        return False
    if any(step.get("add_prefix_space") for step in steps):
        return False
    if not any(step["type"] == "Split" or step.get("use_regex", True) for step in steps):
        return False  # nothing cuts
    for token in told.get("added_tokens", ()):
        text = token["content"]
        if token.get("rstrip") or token.get("single_word") or any(map(str.isspace, text)):
            return False
    return all(map(_cuts_at_words, [inner] * len(_PROBES), _PROBES))


def _cuts_at_words(inner: tokenizers.Tokenizer, text: str) -> bool:
    starts = {start for _, (start, _) in inner.pre_tokenizer.pre_tokenize_str(text)}
    return starts >= {found.start() for found in _CUT.finditer(text)}
