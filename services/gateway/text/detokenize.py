"""Token ids to text, token by token: characters split over tokens wait until they are whole.

`TableDetokenizer` knows the bytes of every token and decodes UTF-8 incrementally: exact and a dictionary look-up
a token. `WindowDetokenizer` serves tokenizers whose decoder is not a table of bytes: it decodes a small window
again and shows what grew.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

REPLACEMENT = "�"
# Tokens after which a character that is still not whole is shown as it is (UTF-8 has at most 4 bytes).
_PATIENCE = 16
CONTEXT_TOKENS = 6  # of the prompt, enough to tell whether a space belongs between


class Detokenizer(Protocol):
    """The text of one answer."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became readable with these tokens."""
        ...

    def finish(self) -> str:
        """The rest: a character that was never completed becomes U+FFFD."""
        ...


class TableDetokenizer:
    """`pieces[id]` are the bytes that a token adds, empty for those that show nothing. `strip` leading spaces
    belong to the tokenizer, not to the text (sentencepiece, at the very start)."""

    __slots__ = ("_decoder", "_pieces", "_strip")

    def __init__(self, pieces: Sequence[bytes], strip: int = 0) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip

    def push(self, token_ids: Sequence[int]) -> str:
        """What became readable. Ids past the table (padding of the model's vocabulary) show nothing."""
        pieces, size = self._pieces, len(self._pieces)
        raw = b"".join([pieces[token] for token in token_ids if token < size])
        return self._stripped(self._decoder.decode(raw)) if raw else ""

    def finish(self) -> str:
        """The rest, with U+FFFD for an incomplete character."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class WindowDetokenizer:
    """`decode` turns ids into text (special tokens skipped). `context` are the prompt's last tokens, which some
    decoders need to know whether a space belongs between; they are not shown."""

    __slots__ = ("_decode", "_ids", "_shown")

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-CONTEXT_TOKENS:])
        self._shown = len(self._ids)  # tokens of the window whose text has been shown

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became readable."""
        out = ""
        for token in token_ids:
            self._ids.append(token)
            before, after = self._decode(self._ids[: self._shown]), self._decode(self._ids)
            whole = len(after) > len(before) and not after.endswith(REPLACEMENT)
            if not whole and len(self._ids) - self._shown < _PATIENCE:
                continue
            out += after[len(before) :]
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
        return out

    def finish(self) -> str:
        """The rest."""
        before, after = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        self._shown = len(self._ids)
        return after[len(before) :]


def byte_level_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(plain))
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_level_piece(token: str, alphabet: dict[str, int]) -> bytes:
    """Bytes of a byte-level token; one with foreign characters (an added token) stands for itself."""
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def fallback_piece(token: str, replacements: Collection[tuple[str, str]]) -> bytes:
    """Bytes of a sentencepiece-like token: `<0xE2>` is one byte, replacements (▁ to a space) are made."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    for old, new in replacements:
        token = token.replace(old, new)
    return token.encode()
