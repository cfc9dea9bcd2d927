"""Checks of a grammar by llguidance itself, with a tokenizer of single bytes, so that no checkpoint matters."""

from __future__ import annotations

import functools

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from kvmesh.grammar_limits import parser_limits

END = 256
"""The byte tokenizer's end-of-text token."""


class _Bytes:
    eos_token_id = END
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def byte_tokenizer() -> LLTokenizer:
    """A tokenizer whose token i < 256 is the byte i and whose token 256 ends the text."""
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def matcher(grammar: str) -> LLMatcher:
    """A matcher of `grammar` over bytes; it is in its error state when the grammar does not compile."""
    return LLMatcher(byte_tokenizer(), grammar, log_level=0, limits=parser_limits())


def why_refused(grammar: str) -> str:
    """Why llguidance does not compile `grammar`, on one line; empty when it does and some text meets it."""
    one = matcher(grammar)
    if one.is_error():
        return _short(one.get_error())
    try:
        mask = one.compute_bitmask()
    except ValueError as err:
        return _short(str(err))
    if not any(mask) and not one.is_accepting():
        return "no text can meet it"
    return ""


def _short(error: str) -> str:
    line = next((line.strip() for line in error.splitlines() if line.strip()), "not accepted")
    return line if len(line) <= 200 else line[:197] + "..."
