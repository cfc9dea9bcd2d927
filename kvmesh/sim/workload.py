"""What arrives: requests as the simulator takes them, read from traces and tables one at a time.

A request bears the keys of its full blocks, not its tokens: only which blocks are equal matters to any decision.
Requests come in the order of their times; nothing here holds more than one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.conductor.domain import Lane


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
    lane: Lane = Lane.INTERACTIVE
    priority: int = 0
    ttft_slo_s: float = 0.0
    tbt_slo_s: float = 0.0
