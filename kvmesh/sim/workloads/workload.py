"""What arrives: requests as the simulator takes them, read from traces and tables one at a time.

A request bears the keys of its full blocks, not its tokens: only which blocks are equal matters to any decision.
Requests come in the order of their times; nothing here holds more than one of them (synthetic ones: synthetic.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Protocol

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import Lane
from kvmesh.sim.workloads import trace


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `keys`: 16 bytes for each full block of the prompt, chained (an equal key means an equal prefix),
    so there are `input_tokens // block_tokens` of them. An SLO of 0 is the default of the conductor."""

    index: int
    at_s: float
    input_tokens: int
    output_tokens: int
    keys: tuple[bytes, ...]
    session: str = ""
    origin: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0
    lane: Lane = Lane.INTERACTIVE
    priority: int = 0
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
    # Blocks behind those of the prompt that it and the answer but for its last token fill, where a later prompt may
    # begin with them: decode keeps them.
    answer_keys: tuple[bytes, ...] = ()
    left_tokens: int = 0  # in full blocks: of the prompt that its session had before, which this one begins with


class Clients(Protocol):
    """Requests of which some come only when others have ended. Each bears an index of its own."""

    def first(self) -> Iterator[SimRequest]:
        """Yields the requests that wait for nobody, in the order of their times."""

    def after(self, index: int, now: float, *, done: bool) -> SimRequest | None:
        """What the client of this request, which has ended now, asks next, now or later. `done`: it was answered."""


class ClosedLoop:
    """So many requests under way at any time: the next one comes when one has ended, whatever its time."""

    def __init__(self, requests: Iterable[SimRequest], in_flight: int) -> None:
        """ConfigError: none in flight."""
        if in_flight < 1:
            raise ConfigError(f"closed={in_flight}: must be at least 1", field="closed")
        self._requests, self._in_flight = iter(requests), in_flight

    def first(self) -> Iterator[SimRequest]:
        """Yields the first `in_flight` requests, all of them at 0."""
        return (replace(one, at_s=0.0) for one in islice(self._requests, self._in_flight))

    def after(self, index: int, now: float, *, done: bool) -> SimRequest | None:
        """Returns the next request, now; see `Clients.after`."""
        one = next(self._requests, None)
        return replace(one, at_s=now) if one is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a file becomes requests. `speed` 2: arrivals twice as dense. `limit`: so many requests at most;
    `skip`: so many of the file's first are left out, the next one arrives at 0. `max_output`: answers are cut to it.
    ConfigError names what cannot be."""

    block_tokens: int = 512
    speed: float = 1.0
    limit: int | None = None
    skip: int = 0
    max_output: int | None = None

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ConfigError(f"block_tokens={self.block_tokens}: must be at least 1", field="block_tokens")
        if not 0 < self.speed < math.inf:
            raise ConfigError(f"speed={self.speed:g}: must be over 0", field="speed")
        for name in ("limit", "skip", "max_output"):
            value, least = getattr(self, name), 0 if name == "skip" else 1
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}: must be at least {least}", field=name)

    def output(self, tokens: int) -> int:
        """An answer has at least one token: the prefill makes it."""
        return max(1, tokens if self.max_output is None else min(tokens, self.max_output))


WHOLE = Reading()

# Odd, so that products with distinct numbers differ modulo 2^128; random, so that all bytes of keys do.
_SPREAD = 0x9E3779B97F4A7C15F39CC0605CEDC835
_MASK = (1 << 128) - 1


def key(number: int) -> bytes:
    """A block key: distinct numbers under 2^128 have distinct ones."""
    return (number * _SPREAD & _MASK).to_bytes(16, "little")


def mooncake(path: Path, reading: Reading = WHOLE, *, trace_block: int = trace.TRACE_BLOCK) -> Iterator[SimRequest]:
    """A trace of Mooncake's format (see trace.py). With blocks smaller than the trace's each id becomes several keys,
    with larger ones each block bears the id of its end; full blocks alone have keys. ConfigError: blocks that do not
    divide, a bad line, or one that is earlier than the one above."""
    block = reading.block_tokens
    if max(block, trace_block) % min(block, trace_block):
        why = f"must divide the trace's {trace_block}, or be a multiple of it"
        raise ConfigError(f"block_tokens={block}: {why}", field="block_tokens")
    parts = max(1, trace_block // block)
    start_ms: float | None = None
    for count, line in enumerate(trace.read(path, trace_block)):
        if reading.limit is not None and count >= reading.skip + reading.limit:
            return
        if count < reading.skip:
            continue
        start_ms = _start(reading, start_ms, line.at_ms)
        ends = range(block, line.input_tokens + 1, block)
        ids = line.hash_ids
        keys = tuple([key(ids[(end - 1) // trace_block] * parts + (end - 1) // block % parts) for end in ends])
        at_s = (line.at_ms - start_ms) / 1000 / reading.speed
        yield SimRequest(count - reading.skip, at_s, line.input_tokens, reading.output(line.output_tokens), keys)


def _start(reading: Reading, start: float | None, at: float) -> float:
    """What counts as 0: the file's own 0, or the first request that is read when some are left out."""
    if start is not None:
        return start
    return at if reading.skip else 0.0
