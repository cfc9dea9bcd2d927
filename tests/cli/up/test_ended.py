"""What came of a request and of predictions, in words."""

from typing import Any

import pytest

from kvmesh.cli import explain, status


def ended(**changes: Any) -> dict[str, Any]:
    return {
        "outcome": "OUTCOME_DONE", "error": "", "blamed": "", "output_tokens": 33, "ttft_us": 120_300, "tbt_us": 12_100,
        "mean_tbt_us": 10_000, "duration_us": 410_000, **changes,
    }  # fmt: skip


def told(**changes: Any) -> dict[str, Any]:
    placement = {"predicted_ttft_ms": 100, "predicted_tbt_ms": 10, "predicted_cached_tokens": 64}
    return {
        "outcome": "placed", "candidates": [], "prompt_blocks": 3, "prompt_tokens": 200, "reported": False,
        "placement": {**placement, "life": {"output_tokens": 40}}, **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("how", "line"),
    [
        (ended(), "In the end: done: TTFT 120 ms, TBT 12.1 ms (its slowest tenth), 33 tokens in 410 ms."),
        (ended(output_tokens=1, tbt_us=0), "In the end: done: TTFT 120 ms, 1 token in 410 ms."),
        (
            ended(outcome="OUTCOME_FAILED", error="handoff_lost", blamed="prefill-1", ttft_us=0, output_tokens=0),
            "In the end: failed (handoff_lost, by prefill-1), without a token, after 410 ms.",
        ),
        (
            ended(outcome="OUTCOME_CANCELLED", error="cancelled"),
            "In the end: cancelled (cancelled): TTFT 120 ms, TBT 12.1 ms (its slowest tenth), 33 tokens in 410 ms.",
        ),
    ],
)
def test_how_it_ended_stands_beside_what_was_expected(how: dict[str, Any], line: str) -> None:
    lines = explain.sentences(told(ended=how))
    assert lines[0] == "Expected: TTFT 100 ms, TBT 10 ms, 64 cached tokens, 40 tokens of answer."
    assert lines[-1] == line


def test_nothing_is_said_of_an_end_that_was_not_reported() -> None:
    assert not any(line.startswith("In the end") for line in explain.sentences(told()))


def test_the_status_tells_how_far_predictions_were_off() -> None:
    errors = [
        {"what": "decode_step", "samples": 9, "bias": -0.1, "p50": 0.1, "p90": 0.25, "p99": 1.0},
        {"what": "ttft", "samples": 9, "bias": 0.1, "p50": 0.2, "p90": 1.5, "p99": 3.0},
    ]
    assert [status.worth(one) for one in errors] == [
        "usually within 10%, 9 of 10 within 25%; runs 10% shorter than predicted",
        "usually within 20%, 9 of 10 within a factor of 2.5; runs 10% longer than predicted",
    ]
