"""Production traces: reading them, prompts made of them, and the hit rate that a perfect cache would reach.

One JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids`: one id for each
`trace_block` tokens of the prompt, the last one for what remains. Ids are chained: an equal id means equal tokens
from the start of the prompt up to and with that block.

A prompt made of such a line keeps exactly that: block tokens depend on nothing but (seed, id), and two ids have
different tokens. Lengths may be scaled, so that a small model's context holds them (see `TraceShape`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.kvcache.keys import KEY_BYTES, Namespace, chain, pack_tokens

TRACE_BLOCK = 512
CUT, SKIP = "cut", "skip"
_MOST_IDS = 2**31  # ids that block tokens spell


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace. `index`: the line's number, from 0."""

    index: int
    at_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def parse(line: str, index: int, trace_block: int = TRACE_BLOCK) -> TraceRequest:
    """One line. ConfigError names line (from 1), field and value."""

    def refuse(field: str, value: Any, why: str) -> ConfigError:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        return ConfigError(f"trace line {index + 1}: {field}={shown}: {why}", field=field)

    try:
        told = json.loads(line)
    except (ValueError, RecursionError):  # the latter: nested too deeply to be a request
        raise refuse("line", line.strip(), "is not JSON") from None
    if not isinstance(told, dict):
        raise refuse("line", told, "must be an object")
    for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
        value: Any = told.get(name)
        allowed = (int, float) if name == "timestamp" else (int,)
        if type(value) not in allowed or not least <= value < 2**53:
            raise refuse(name, value, f"must be a number of at least {least}")
    ids = told.get("hash_ids")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int} or (ids and min(ids) < 0):
        raise refuse("hash_ids", ids, "must be a list of whole numbers")
    length = told["input_length"]
    if len(ids) != -(-length // trace_block):
        why = f"{len(ids)} ids do not fit input_length={length} in blocks of {trace_block}; see --block-tokens"
        raise refuse("hash_ids", ids, why)
    return TraceRequest(index, float(told["timestamp"]), length, told["output_length"], tuple(ids))


def read(path: Path, trace_block: int = TRACE_BLOCK, *, by_time: bool = True) -> Iterator[TraceRequest]:
    """The requests of a file, in its order; empty lines are passed over. ConfigError: unreadable, a bad line, or
    (`by_time`) a timestamp before the one above it."""
    try:
        with path.open(encoding="utf-8") as file:
            before = 0.0
            for index, line in enumerate(file):
                if line.strip():
                    request = parse(line, index, trace_block)
                    if by_time and request.at_ms < before:
                        why = f"earlier than the line above ({before:g})"
                        raise ConfigError(f"trace line {index + 1}: timestamp={request.at_ms:g}: {why}")
                    before = request.at_ms
                    yield request
    except OSError as err:
        raise ConfigError(f"trace={str(path)!r}: {err.strerror}", field="trace") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace={str(path)!r}: is not UTF-8 text", field="trace") from None


def between(
    requests: Iterable[TraceRequest], from_s: float = 0.0, to_s: float | None = None, count: int | None = None
) -> list[TraceRequest]:
    """Returns the requests with from_s <= time < to_s (seconds of the trace), at most `count`."""
    found: list[TraceRequest] = []
    for request in requests:
        if (to_s is not None and request.at_ms >= to_s * 1000) or (count is not None and len(found) >= count):
            break
        if request.at_ms >= from_s * 1000:
            found.append(request)
    return found


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """How lines become prompts.

    A block of the trace becomes `scale` x `trace_block` tokens, which must be a whole number; a last block that is
    not full becomes `scale` x its tokens, rounded down, at least 1, so it never becomes a full one. An answer becomes
    `scale` x its tokens, rounded up, at most `max_output`.

    What exceeds `context_tokens`: the answer is first cut to half of it. With `too_long` = "cut" the prompt then
    keeps as many leading full blocks as leave room for the answer; with "skip", or when no block is left, the
    request is left out. ConfigError names the field that cannot be."""

    scale: Fraction = Fraction(1)
    trace_block: int = TRACE_BLOCK
    context_tokens: int | None = None
    max_output: int | None = None
    too_long: str = CUT

    def __post_init__(self) -> None:
        if self.trace_block < 1:
            raise ConfigError(f"block_tokens={self.trace_block}: must be at least 1", field="block_tokens")
        scaled = self.scale * self.trace_block
        if scaled < 1 or scaled.denominator != 1:
            why = f"makes blocks of {float(scaled):g} tokens from {self.trace_block}; they must be whole"
            raise ConfigError(f"scale_tokens={self.scale}: {why}", field="scale_tokens")
        if self.too_long not in (CUT, SKIP):
            raise ConfigError(f"too_long={self.too_long!r}: choose one of {CUT}, {SKIP}", field="too_long")
        if self.max_output is not None and self.max_output < 1:
            raise ConfigError(f"max_output={self.max_output}: must be at least 1", field="max_output")

    @property
    def block(self) -> int:
        """Tokens that a full block of the trace has in a prompt."""
        return int(self.scale * self.trace_block)

    def prompt_tokens(self, request: TraceRequest) -> int:
        """Length of the prompt before anything is cut."""
        full, rest = divmod(request.input_tokens, self.trace_block)
        return full * self.block + (max(1, int(rest * self.scale)) if rest else 0)

    def output_tokens(self, request: TraceRequest) -> int:
        """Length of the answer before the context limits it."""
        wanted = max(1, -int(-request.output_tokens * self.scale // 1))
        return min(wanted, self.max_output or wanted)


@dataclass(frozen=True, slots=True)
class Made:
    """A request of the trace as it is sent. `hash_ids`: those left after a cut."""

    request: TraceRequest
    hash_ids: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass
class Shaped:
    """All of a slice. `cut`: sent shorter than the trace says; `skipped`: not sent."""

    made: list[Made] = field(default_factory=list)
    cut: int = 0
    skipped: int = 0


def fit(requests: Iterable[TraceRequest], shape: TraceShape) -> Shaped:
    """Lengths of every prompt and answer."""
    found = Shaped()
    for request in requests:
        prompt, output, ids = shape.prompt_tokens(request), shape.output_tokens(request), request.hash_ids
        context = shape.context_tokens
        if context is not None and prompt + output > context:
            if shape.too_long == SKIP:
                found.skipped += 1
                continue
            output = min(output, max(1, context // 2))
            if prompt + output > context:
                ids = ids[: (context - output) // shape.block]
                prompt = len(ids) * shape.block
            if not ids:
                found.skipped += 1
                continue
            found.cut += 1
        found.made.append(Made(request, ids, prompt, output))
    return found


class TokenMaker:
    """Tokens of blocks: a function of (seed, id). They are taken from the middle three quarters of the vocabulary:
    special tokens stand at its ends. The first tokens of a block (two or three) spell its id, lowest digit first, so
    that blocks of two ids never read the same unless they are too short to spell them."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        if vocab_size < 16:
            raise ConfigError(f"vocab={vocab_size}: must be at least 16", field="vocab")
        self._low = vocab_size // 8
        self._width = vocab_size - 2 * self._low
        self._seed = seed
        self._digits = next(n for n in range(1, 32) if self._width**n >= _MOST_IDS)

    def block(self, hash_id: int, tokens: int) -> list[int]:
        """The tokens of one block; a shorter one is the beginning of a longer one."""
        found: list[int] = []
        rest = hash_id
        for _ in range(min(tokens, self._digits)):
            rest, digit = divmod(rest, self._width)
            found.append(self._low + digit)
        return found + self.noise(f"block:{hash_id}", tokens - len(found))

    def noise(self, name: str, tokens: int) -> list[int]:
        """Tokens that depend on the seed and `name` alone; fewer of them are the beginning of more."""
        source = random.Random(f"{self._seed}:{name}")
        return [self._low + int(source.random() * self._width) for _ in range(tokens)]

    def prompt(self, made: Made, block: int) -> list[int]:
        """The whole prompt; `block`: tokens of a full one."""
        tokens: list[int] = []
        for hash_id in made.hash_ids:
            tokens += self.block(hash_id, min(block, made.prompt_tokens - len(tokens)))
        return tokens


@dataclass(frozen=True, slots=True)
class HitRate:
    """What was found of what was asked."""

    blocks: int
    hit_blocks: int
    tokens: int
    hit_tokens: int

    @property
    def by_blocks(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0

    @property
    def by_tokens(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


def ideal(prompts: Iterable[tuple[Sequence[int], int]], block: int) -> HitRate:
    """The best that any cache can do with (hash ids, length in tokens) in this order: unbounded, empty at first, each
    prompt complete before the next comes; of each the longest prefix of blocks seen before counts, the last,
    partly filled block included."""
    seen: set[int] = set()
    blocks = hits = tokens = hit_tokens = 0
    for ids, length in prompts:
        found = next((i for i, one in enumerate(ids) if one not in seen), len(ids))
        seen.update(ids)
        blocks += len(ids)
        hits += found
        tokens += length
        hit_tokens += min(found * block, length)
    return HitRate(blocks, hits, tokens, hit_tokens)


_ANY = Namespace(fingerprint="", kv_dtype="")


def reachable(prompts: Iterable[Sequence[int]], block_tokens: int) -> HitRate:
    """As `ideal`, by the rules of an engine with blocks of `block_tokens`: only full blocks are kept, by their
    chained keys, and at least the last token of a prompt is computed. `prompts`: token ids."""
    seen: set[bytes] = set()
    blocks = hits = tokens = 0
    for prompt in prompts:
        packed = chain(_ANY, pack_tokens(prompt), block_tokens)
        keys = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
        usable = keys[: (len(prompt) - 1) // block_tokens]
        hits += next((i for i, key in enumerate(usable) if key not in seen), len(usable))
        seen.update(keys)
        blocks += -(-len(prompt) // block_tokens)
        tokens += len(prompt)
    return HitRate(blocks, hits, tokens, hits * block_tokens)
