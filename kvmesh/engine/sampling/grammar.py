"""Grammars of requests: which tokens may come next in an answer, computed by llguidance.

What a grammar allows follows from the grammar and the answer's tokens alone, so it is made anew wherever a row goes
(docs/adr/0038-grammars-go-with-the-tokens.md). A grammar is compiled by `GrammarCompiler`, on threads of its own;
`AnswerGrammar` follows one answer; `MaskMaker` computes the masks of a step's rows beside the forward.

A mask is a row of bits, int32 `[ceil(vocab / 32)]`: bit `t % 32` of word `t // 32` says whether token t may come next.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvmesh.errors import GrammarFailed, InvalidRequest
from kvmesh.grammar_limits import parser_limits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Mask = npt.NDArray[np.int32]
WORD_BITS = 32
KEPT_GRAMMARS, KEPT_BYTES = 256, 32 << 20  # that one process keeps compiled, and of their texts
COMPILERS = 2  # threads
SHOWN_CHARS = 300  # of llguidance's words in an error


def mask_words(vocab: int) -> int:
    """Returns how many int32 words a mask of that vocabulary has."""
    return -(-vocab // WORD_BITS)


class GrammarCompiler:
    """Compiles grammars for the model in `folder`, whose vocabulary has `vocab` tokens, of which `eos` end an answer.
    The tokenizer is read with the first grammar. Compiled grammars are kept, by hash, the last used ones. Any thread
    may call."""

    def __init__(self, folder: Path | str, vocab: int, eos: Sequence[int]) -> None:
        self._path = Path(folder) / "tokenizer.json"
        self.vocab, self.eos = vocab, tuple(sorted(set(eos)))
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[int, Future[LLMatcher]]] = OrderedDict()
        self._bytes = 0
        self._threads: ThreadPoolExecutor | None = None
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Begins to compile a grammar, unless it is known. The result is never to be changed; it raises InvalidRequest
        for a grammar that does not compile here."""
        text = grammar.encode()
        key = hashlib.blake2b(text, digest_size=16).digest()
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._kept.move_to_end(key)
                return known[1]
            if self._threads is None:
                self._threads = ThreadPoolExecutor(COMPILERS, "grammar")
            made = self._threads.submit(self._compiled, grammar)
            self._kept[key] = (len(text), made)
            self._bytes += len(text)
            while len(self._kept) > 1 and (len(self._kept) > KEPT_GRAMMARS or self._bytes > KEPT_BYTES):
                self._bytes -= self._kept.popitem(last=False)[1][0]
            return made

    def begin(self, grammar: str, answer: Sequence[int], *, may_end: bool = True) -> AnswerGrammar:
        """Returns what follows an answer of which these tokens are known already. With `may_end` False it ends only
        where nothing else is possible."""
        return AnswerGrammar(self.compile(grammar), answer, self.eos, may_end=may_end)

    def close(self) -> None:
        """Compiles nothing more."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        tokenizer = self._made_tokenizer()
        try:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
            if not matcher.is_error():
                matcher.compute_bitmask()  # the lexer is built with the first mask: that is compiling, too
        except BaseException as error:  # a panic in Rust is no Exception
            raise InvalidRequest(f"grammar: {_brief(f'{type(error).__name__}: {error}')}", field="grammar") from None
        if matcher.is_error():
            raise InvalidRequest(f"grammar: {_brief(matcher.get_error())}", field="grammar")
        return matcher

    def _made_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = self._read_tokenizer()
            return self._tokenizer

    def _read_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self.eos:
            raise InvalidRequest("grammar: the model names no end token, so no answer could end", field="grammar")
        try:
            text = self._path.read_text()
        except OSError as error:
            why = f"the model's tokenizer.json cannot be read: {error.strerror}"
            raise InvalidRequest(f"grammar: {why}", field="grammar") from None
        try:
            return LLTokenizer(text, n_vocab=self.vocab, eos_token=list(self.eos))
        except BaseException as error:  # a panic in Rust is no Exception
            why = f"the model's tokenizer cannot be used: {_brief(str(error))}"
            raise InvalidRequest(f"grammar: {why}", field="grammar") from None


def _brief(text: str) -> str:
    """Returns llguidance's words on one line."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARS else line[: SHOWN_CHARS - 3] + "..."


class AnswerGrammar:
    """Follows one answer through its grammar. It belongs to the row and goes where the row goes, like a History: the
    sampler adds each token that it samples for the row. `add` only notes a token; `fill` does the work, on one thread
    at a time."""

    __slots__ = ("_compiled", "_eos", "_matcher", "_may_end", "_new")

    def __init__(
        self, compiled: Future[LLMatcher], answer: Sequence[int], eos: Sequence[int], *, may_end: bool = True
    ) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._new = list(answer)
        self._eos = eos
        self._may_end = may_end

    def add(self, token_id: int) -> None:
        """Notes one more token of the answer."""
        self._new.append(token_id)

    def fill(self, mask: Mask) -> None:
        """Writes which tokens may come next into `mask [words]`. Raises GrammarFailed when the answer has left the
        grammar, or a limit was reached, and InvalidRequest for a grammar that does not compile."""
        matcher = self._caught_up()
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarFailed(f"grammar: {_brief(matcher.get_error())}", field="grammar")
        if not self._may_end:
            self._take_ends(mask)

    def _caught_up(self) -> LLMatcher:
        if self._matcher is None:
            self._matcher = self._compiled.result().deep_copy()
        if self._new:
            self._matcher.consume_tokens(self._new)
            self._new.clear()
        return self._matcher

    def ahead(self, tokens: Sequence[int]) -> list[AnswerGrammar]:
        """Returns what this will be once the first, the first two ... of these tokens are the answer's, up to the first
        that the grammar forbids. It is called by whoever might call `fill`. A grammar that does not compile, or has
        failed, forbids all."""
        try:
            matcher = self._caught_up()
        except InvalidRequest:
            return []
        found: list[AnswerGrammar] = []
        for token in tokens[: 0 if matcher.is_error() else matcher.validate_tokens(list(tokens))]:
            matcher = matcher.deep_copy()
            matcher.consume_tokens([token])
            later = AnswerGrammar(self._compiled, (), self._eos, may_end=self._may_end)
            later._matcher = matcher
            found.append(later)
        return found

    def _take_ends(self, mask: Mask) -> None:
        """Forbids to end, unless nothing else is allowed."""
        words, bits = [token // WORD_BITS for token in self._eos], mask.view(np.uint32)
        kept = bits[words]
        for token in self._eos:
            bits[token // WORD_BITS] &= np.uint32(~(1 << token % WORD_BITS) & 0xFFFFFFFF)
        if not bits.any():
            bits[words] = kept


class StepMasks(NamedTuple):
    """Holds the masks of a step's rows with a grammar, in order: `bits [rows, words]`, how many tokens each allows, and
    of each row the one token that it can have, or -1. `failed` says by the row's place why its grammar has no answer:
    its mask allows everything."""

    bits: Mask
    allowed: npt.NDArray[np.int64]
    forced: npt.NDArray[np.int64]
    failed: dict[int, str]


class MaskMaker:
    """Computes masks on a thread beside the one that launches the forward."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._helpers: ThreadPoolExecutor | None = None

    def begin(self, grammars: Sequence[AnswerGrammar], vocab: int) -> Callable[[], StepMasks]:
        """Begins to compute the masks of these rows, and returns what waits for them. Nobody adds tokens to them
        meanwhile."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "masks")
        return self._thread.submit(self._made, list(grammars), vocab).result

    def _made(self, grammars: Sequence[AnswerGrammar], vocab: int) -> StepMasks:
        bits = np.empty((len(grammars), mask_words(vocab)), np.int32)
        threads = min(len(grammars) // ROWS_A_THREAD, (os.cpu_count() or 1) // 2, MASK_THREADS)
        if threads > 1:
            if self._helpers is None:
                self._helpers = ThreadPoolExecutor(MASK_THREADS, "masks")
            whys = list(self._helpers.map(_filled, grammars, bits, chunksize=-(-len(grammars) // threads)))
        else:
            whys = list(map(_filled, grammars, bits))
        allowed = np.bitwise_count(bits).sum(-1, dtype=np.int64)
        forced = np.full(len(grammars), -1, np.int64)
        for place in np.flatnonzero(allowed == 1).tolist():
            word = int(np.flatnonzero(bits[place])[0])
            forced[place] = word * WORD_BITS + int(bits[place, word].view(np.uint32)).bit_length() - 1
        failed = {place: why for place, why in enumerate(whys) if why}
        for place in np.flatnonzero(allowed == 0).tolist():
            failed.setdefault(place, "grammar: no token may come next")
        bits[list(failed)] = -1
        forced[list(failed)] = -1
        allowed[list(failed)] = vocab
        return StepMasks(bits, allowed, forced, failed)


ROWS_A_THREAD, MASK_THREADS = 16, 8


def _filled(grammar: AnswerGrammar, mask: Mask) -> str:
    """Fills one mask; returns why that failed, or ""."""
    try:
        grammar.fill(mask)
    except InvalidRequest as error:
        return error.message
    except BaseException as error:  # whatever it was, it is this row's alone; a panic in Rust is no Exception
        return f"grammar: {type(error).__name__}: {_brief(str(error))}"
    return ""
