"""Prompts that begin as earlier ones did: what is known of their beginning is looked up piece by piece, and only what
is new is tokenized and hashed.

A prompt is a sequence of pieces. What it is after a piece (how many tokens, where its chain of block keys stands) is
kept under the piece and what it was before: a known beginning costs one lookup a piece, whatever its blocks.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvmesh.kvcache.keys import KEY_BYTES, TOKEN_BYTES, Namespace, chain_on
from kvmesh.services.gateway.text.encoded_texts import EncodedText, EncodedTexts

Piece = str | bytes  # of a text; or packed ids
_PIECE_IDS = 256
_ENTRY_BYTES = 800  # of Python's objects around an entry

_root = lru_cache(maxsize=256)(Namespace.root)


class PromptStep(NamedTuple):
    """Is what a prompt is after one of its pieces. `tokens` and `special` count from its beginning; `keys` are of the
    blocks that end in this piece, packed; `rest` are the packed ids after the last full block."""

    number: int
    tokens: int
    special: int
    keys: bytes
    digest: bytes
    rest: bytes


class KnownPrompts:
    """Remembers the steps that were used last, up to `max_bytes` of memory. Safe to use from several threads."""

    def __init__(self, texts: EncodedTexts, max_bytes: int) -> None:
        self._texts = texts
        self._max_bytes = max_bytes
        self._numbers = itertools.count(1)
        self._steps: OrderedDict[tuple[object, Piece], PromptStep] = OrderedDict()
        self._lock = threading.Lock()
        self.held_bytes = 0

    def begin(self, namespace: Namespace, block_tokens: int, pieces: Sequence[Piece]) -> list[PromptStep]:
        """Returns the steps that are known, from the first one on."""
        found: list[PromptStep] = []
        steps = self._steps
        before: object = (namespace, block_tokens)
        with self._lock:
            for piece in pieces:
                step = steps.get((before, piece))
                if step is None:
                    break
                steps.move_to_end((before, piece))
                found.append(step)
                before = step.number
        return found

    def finish(
        self, namespace: Namespace, block_tokens: int, pieces: Sequence[Piece], known: Sequence[PromptStep]
    ) -> list[PromptStep]:
        """Returns the steps of all pieces, of which `known` are the first ones'. Raises ValueError for an id that is
        not a u32."""
        found = list(known)
        new = pieces[len(found) :]
        texts = iter(self._texts.encode_pieces([piece for piece in new if isinstance(piece, str)]))
        before: object = found[-1].number if found else (namespace, block_tokens)
        last = found[-1] if found else PromptStep(0, 0, 0, b"", _root(namespace, block_tokens), b"")
        for piece in new:
            encoded = EncodedText(piece, 0) if isinstance(piece, bytes) else next(texts)
            last = self._put((before, piece), self._after(last, encoded, block_tokens))
            found.append(last)
            before = last.number
        return found

    def _after(self, last: PromptStep, piece: EncodedText, block_tokens: int) -> PromptStep:
        packed = last.rest + piece.packed
        keys, digest = chain_on(last.digest, packed, block_tokens)
        rest = packed[len(packed) - len(packed) % (block_tokens * TOKEN_BYTES) :]
        tokens, special = last.tokens + piece.tokens, last.special + piece.special
        return PromptStep(next(self._numbers), tokens, special, keys, digest, rest)

    def _put(self, at: tuple[object, Piece], step: PromptStep) -> PromptStep:
        """Returns what is kept there, which another thread may have put."""
        with self._lock:
            kept = self._steps.setdefault(at, step)
            if kept is step:
                self.held_bytes += _size(at[1], step)
                while (
                    self.held_bytes > self._max_bytes
                ):  # what comes after one that is gone is not found, and goes, too
                    (_, old), gone = self._steps.popitem(last=False)
                    self.held_bytes -= _size(old, gone)
        return kept


def in_pieces(packed: bytes) -> list[Piece]:
    """Returns the pieces of a prompt of which the ids are known."""
    return [packed[at : at + _PIECE_IDS * TOKEN_BYTES] for at in range(0, len(packed), _PIECE_IDS * TOKEN_BYTES)]


def _size(piece: Piece, step: PromptStep) -> int:
    wide = 4 if isinstance(piece, str) else 1  # bytes of a character, at worst
    return _ENTRY_BYTES + wide * len(piece) + len(step.keys) + len(step.rest) + 2 * KEY_BYTES
