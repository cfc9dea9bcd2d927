"""When a request passed which border, in CLOCK_MONOTONIC nanoseconds; 0 = not yet. Durations come from here."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.decode.tbt_histogram import TbtHistogram


@dataclass(slots=True)
class Timeline:
    """Borders are taken where the thing happens: copies and steps at the rank, messages where they arrive here."""

    received: int = 0  # Start arrived
    asked: int = 0  # StartPrefill was handed to the stream
    begin_fill: int = 0  # BeginFill arrived
    landing: int = 0  # Landing was sent
    first: int = 0  # first token arrived
    filled: int = 0  # last end mark arrived
    load_start: int = 0  # extents → pages, first time only
    load_end: int = 0
    joined: int = 0  # into the batch, first time only
    second: int = 0  # the step that made the second token ended
    ended: int = 0  # the client was told the end
    writer_lost: int = 0  # prefill, or the way to it, failed what had not ended yet
    queue_us: int = 0  # as prefill told
    prefill_us: int = 0
    transfer_us: int = 0
    transfer_bytes: int = 0
    cached_tokens: int = 0
    pull_us: int = 0
    pull_bytes: int = 0
    pulled_tokens: int = 0
    host_tokens: int = 0
    at_decode_tokens: int = 0  # of the prompt, whose KV lay in our own store when it landed
    pulled_blocks: int = 0  # fetched by us from other nodes for this request
    preemptions: int = 0
    gaps: TbtHistogram = field(default_factory=TbtHistogram)  # between tokens

    @property
    def admit_us(self) -> int:
        return _us(self.received, self.asked)

    @property
    def reserve_us(self) -> int:
        return _us(self.begin_fill, self.landing)

    @property
    def load_us(self) -> int:
        return _us(self.load_start, self.load_end)

    @property
    def first_decode_us(self) -> int:
        return _us(self.joined, self.second)

    @property
    def exposed_transfer_us(self) -> int:
        """First token here → KV complete here; 0 when the KV was first."""
        return _us(self.first, self.filled)


def _us(start: int, end: int) -> int:
    return max(0, end - start) // 1000 if start and end else 0
