"""What `kvmesh explain` tells of the life that was laid out."""

from __future__ import annotations

from typing import Any

from kvmesh.cli.explain import sentences

LIFE = {
    "pull_start_ms": 1_250,
    "fetched_ms": 1_400,
    "prefill_start_ms": 2_000,
    "prefill_end_ms": 2_600,
    "first_token_ms": 2_610,
    "end_ms": 5_000,
    "output_tokens": 80,
}


def told(**life: int) -> str:
    placement: dict[str, Any] = {"predicted_ttft_ms": 2_610, "predicted_tbt_ms": 30, "life": LIFE | life}
    answer = {"outcome": "placed", "candidates": [], "placement": placement, "reported": False, "prompt_blocks": 9}
    return next((line for line in sentences(answer) if line.startswith("Laid out")), "")


def test_when_the_blocks_move_and_when_it_is_computed() -> None:
    assert told() == (
        "Laid out: blocks are fetched from 1,250 ms, until 1,400 ms; prefill computes from 2,000 to 2,600 ms; "
        "first token at 2,610 ms; the last at 5,000 ms."
    )
    assert told(pull_start_ms=0).startswith("Laid out: blocks are fetched at once, until 1,400 ms; prefill")
    assert told(fetched_ms=0, output_tokens=0).startswith("Laid out: prefill computes from 2,000 to 2,600 ms; first")
    assert told(prefill_end_ms=0) == "", "an older conductor does not tell"
