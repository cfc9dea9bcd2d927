"""How long one instance's hardware takes for a step of the model it runs. Seconds of virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Times(Protocol):
    """One instance's hardware running one model. A piece is (tokens computed, tokens cached before them)."""

    def prefill_s(self, pieces: Sequence[tuple[int, int]]) -> float:
        """One step that computes these pieces of prompts together."""

    def decode_s(self, batch: int, context_tokens: float) -> float:
        """One step of `batch` rows whose contexts have so many tokens in all."""

    def mixed_s(self, pieces: Sequence[tuple[int, int]], batch: int, context_tokens: float) -> float:
        """One step of both: chunked prefill beside decoding rows."""


@dataclass(frozen=True)
class NodeSpec:
    """One instance as the simulator builds it. Sizes in tokens of KV, rates in bytes a second."""

    times: Times
    kv_tokens: int  # what the device memory holds beside the weights
    dram_tokens: int  # of the node store
    ssd_tokens: int  # 0: none
    nic_bytes_per_s: float  # each way
    ssd_read_bytes_per_s: float
    kv_bytes_per_token: int
