"""Records as a simulation makes them, for tests of what comes after it."""

from __future__ import annotations

from typing import Any

from kvmesh.sim.report.records import DONE, Record


def done(index: int, *, at_s: float = 0.0, ttft_s: float = 0.5, e2e_s: float = 2.0, **more: Any) -> Record:
    """A request that queued a fifth of its TTFT, was prefilled, moved, and decoded."""
    told: dict[str, Any] = {
        "input_tokens": 1000,
        "output_tokens": 20,
        "outcome": DONE,
        "prefill": f"p{index % 2}",
        "decode": f"d{index % 2}",
        "queue_s": 0.2 * ttft_s,
        "prefill_start_s": at_s + 0.2 * ttft_s,
        "prefill_end_s": at_s + 0.8 * ttft_s,
        "kv_end_s": at_s + 0.9 * ttft_s,
        "first_token_s": at_s + ttft_s,
        "finish_s": at_s + max(ttft_s, e2e_s),
        "ttft_s": ttft_s,
        "tbt_s": 0.05,
        "mean_tbt_s": 0.04,
        "predicted_ttft_s": ttft_s,
        "prefill_gpu_s": 0.3,
    }
    return Record(index, f"r{index}", at_s, **{**told, **more})
