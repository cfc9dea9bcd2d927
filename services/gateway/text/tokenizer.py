"""A checkpoint's tokenizer: text to ids, ids to text, and what chat templates need to know."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvmesh.errors import CheckpointError
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.services.gateway.text.detokenize import (
    Detokenizer,
    TableDetokenizer,
    WindowDetokenizer,
    byte_level_alphabet,
    byte_level_piece,
    fallback_piece,
)
from kvmesh.services.gateway.text.encoded_texts import EncodedTexts

_WORDS_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Pieces:
    """Bytes of every token, and how many leading spaces of a text the decoder takes away."""

    raw: tuple[bytes, ...]  # as logprobs show them, special tokens included
    shown: tuple[bytes, ...]  # as answers show them: special tokens are empty
    strip: int


class Tokenizer:
    """One tokenizer.json with its tokenizer_config.json. Safe to use from several threads."""

    def __init__(
        self, inner: tokenizers.Tokenizer, config: dict[str, Any], templates: dict[str, str], model_type: str = ""
    ) -> None:
        self._inner = inner
        self._inner.no_truncation()
        self._inner.no_padding()
        self.templates = templates
        """Name to chat template; the usual one is called "default"."""
        self.model_type = model_type
        self.named_tokens = _named_tokens(config)
        """`bos_token`, `eos_token`, ... as chat templates name them."""
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = {token.content: token_id for token_id, token in added.items() if token.special}
        """What a text must hold for the tokenizer to see a special token in it."""
        self.pieces = _pieces(inner, self.special_ids)
        self._tables: dict[frozenset[int], tuple[bytes, ...]] = {}
        self._piece_text = functools.lru_cache(maxsize=8192)(self._decode_one)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read a checkpoint folder. CheckpointError names the file that is missing or broken."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; kvmesh reads Hugging Face tokenizer.json", field="model")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as err:  # tokenizers raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer ({err})", field="model") from None
        special = _json(folder / "special_tokens_map.json")
        config = special | _json(folder / "tokenizer_config.json")
        model_type = _json(folder / "config.json").get("model_type")
        return cls(inner, config, _templates(folder, config), model_type if isinstance(model_type, str) else "")

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: no text of n characters has fewer than n / longest tokens."""
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. The GIL is released while words that are not known are tokenized."""
        return self._encode(self.words, text, add_special_tokens)

    @cached_property
    def words(self) -> EncodedTexts:
        """The words of texts that were tokenized lately."""
        return EncodedTexts(self._inner, self.count_special, _WORDS_BYTES)

    @cached_property
    def _literal_words(self) -> EncodedTexts:
        literal = tokenizers.Tokenizer.from_str(self._inner.to_str())
        literal.encode_special_tokens = True
        return EncodedTexts(literal, self.count_special, _WORDS_BYTES)

    def _encode(self, words: EncodedTexts, text: str, add_special_tokens: bool) -> list[int]:
        before, behind = self.around if add_special_tokens else ([], [])
        return [*before, *unpack_tokens(words.encode_pieces([text])[0].packed), *behind]

    @cached_property
    def around(self) -> tuple[list[int], list[int]]:
        """The special tokens that are written before and behind a text. Raises CheckpointError where they depend on the
        text."""
        for text in ("a", "0", "."):  # not every vocabulary has a letter
            alone, whole = (self._inner.encode(text, add_special_tokens=added).ids for added in (False, True))
            for at in range(len(whole) - len(alone) + 1 if alone else 0):
                if whole[at : at + len(alone)] == alone:
                    return whole[:at], whole[at + len(alone) :]
        raise CheckpointError("tokenizer.json: where it writes special tokens depends on the text", field="model")

    @property
    def inner(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer, to be read alone."""
        return self._inner

    def encode_as_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, in which nothing is a special token whatever it says."""
        return self._encode(self._literal_words, text, add_special_tokens)

    @cached_property
    def _counted(self) -> frozenset[int]:
        """Special tokens that only their own text gives: what stands for unknown characters is not one."""
        model = json.loads(self._inner.to_str())["model"]
        unknown = model.get("unk_id")
        if unknown is None and model.get("unk_token") is not None:
            unknown = self._inner.token_to_id(model["unk_token"])
        return self.special_ids - {unknown}

    def count_special(self, ids: Sequence[int]) -> int:
        """How many of `ids` are special tokens, but for that of unknown characters."""
        return sum(map(self._counted.__contains__, ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens skipped."""
        return self._inner.decode(list(token_ids), skip_special_tokens=True)

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens as they are written."""
        return self._inner.decode(list(token_ids), skip_special_tokens=False)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them; "" for an id without a token."""
        return [self._inner.id_to_token(token_id) or "" for token_id in token_ids]

    def detokenizer(self, context: Sequence[int], *, opens: bool, markers: frozenset[str] = frozenset()) -> Detokenizer:
        """A detokenizer of the text after `context`; `opens`: only special tokens come before it, so that it opens
        the text as a whole. Special tokens show nothing, but for `markers`."""
        shown = frozenset(token_id for text, token_id in self.special_texts.items() if text in markers)
        if self.pieces is None:
            decode = self.decode if not shown else functools.partial(self._decode_with, shown)
            return WindowDetokenizer(decode, context)
        return TableDetokenizer(self._table(shown), self.pieces.strip if opens else 0)

    def _table(self, shown: frozenset[int]) -> Sequence[bytes]:
        """The bytes that tokens show, those of special tokens in `shown` included."""
        assert self.pieces is not None, "asked before"
        if not shown:
            return self.pieces.shown
        table = self._tables.get(shown)
        if table is None:
            raw = self.pieces.raw
            table = tuple(raw[at] if at in shown else piece for at, piece in enumerate(self.pieces.shown))
            self._tables[shown] = table  # as many as families of parsers
        return table

    def _decode_with(self, shown: frozenset[int], token_ids: Sequence[int]) -> str:
        hidden = self.special_ids - shown
        return self._inner.decode([token for token in token_ids if token not in hidden], skip_special_tokens=False)

    def piece(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of one token, special ones as they are written. Part of a character reads as U+FFFD."""
        raw = self.piece_bytes(token_id)
        return raw.decode("utf-8", "replace"), list(raw)

    def piece_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id without a token."""
        if self.pieces is not None:
            return self.pieces.raw[token_id] if token_id < len(self.pieces.raw) else b""
        return self._piece_text(token_id)

    def _decode_one(self, token_id: int) -> bytes:
        return self._inner.decode([token_id], skip_special_tokens=False).encode()


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as err:
        raise CheckpointError(f"{path}: not JSON ({err})", field="model") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object", field="model")
    return found


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {}
    for key, value in config.items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                named[key] = text
    return named


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja wins over tokenizer_config.json, which holds one template or a list of named ones."""
    found: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        for entry in given:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                found[str(entry.get("name", "default"))] = entry["template"]
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            found["default"] = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as err:
            raise CheckpointError(f"{path}: not UTF-8 ({err})", field="model") from None
    return found


def _pieces(inner: tokenizers.Tokenizer, special_ids: frozenset[int]) -> Pieces | None:
    """The table of bytes, or None where the decoder does more than join bytes."""
    decoder = json.loads(inner.to_str()).get("decoder")
    steps = decoder.get("decoders", []) if decoder and decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] if step else "" for step in steps]
    strip = 0
    if kinds == ["ByteLevel"]:
        alphabet = byte_level_alphabet()

        def piece(token: str) -> bytes:
            return byte_level_piece(token, alphabet)
    elif "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replacements = []
        fused = False
        for step in steps:
            if step["type"] == "Replace":
                if fused or "String" not in step["pattern"]:
                    return None
                replacements.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Strip":
                if not fused or step["content"] != " " or step["stop"]:
                    return None
                strip += step["start"]
            fused = fused or step["type"] == "Fuse"

        def piece(token: str) -> bytes:
            return fallback_piece(token, replacements)
    else:
        return None
    vocabulary = inner.get_vocab(with_added_tokens=True)
    raw = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        raw[token_id] = piece(token)
    shown = [b"" if token_id in special_ids else text for token_id, text in enumerate(raw)]
    return Pieces(tuple(raw), tuple(shown), strip)
