"""Functions of a model are timed, each for itself, and a model that is timed no more is the one that it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvmesh.engine.runner import DecodeInput, SampleParams
from kvmesh.engine.timing import (
    FunctionClock,
    Piece,
    Replacements,
    attach,
    busy_by_function,
    functions_of,
    kernels_in,
    pieces_of,
)
from kvmesh.engine.work import IN_LAYER
from tests.support.engine.stepper import Stepper

PROMPT = [5 + 7 * i % 90 for i in range(37)]


def ticking(step: int = 10) -> Callable[[], int]:
    """A clock that is so much later at each look."""
    times: Iterator[int] = iter(range(0, 10_000, step))
    return lambda: next(times)


# ── a clock around functions ──────────────────────────────────────────────────────────────────────


def test_time_belongs_to_the_innermost_function() -> None:
    clock = FunctionClock(ticking())
    inner = clock.around("inner", lambda: "answer")
    outer = clock.around("outer", lambda: inner())
    assert outer() == "answer"
    assert clock.pieces == [
        Piece("outer", "outer", 0, 10),
        Piece("inner", "inner", 10, 20),
        Piece("outer", "outer", 20, 30),
    ]


def test_a_function_that_fails_ends_too() -> None:
    clock = FunctionClock(ticking())

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        clock.around("failing", fails)()
    clock.around("next", lambda: None)()
    assert clock.pieces == [Piece("failing", "failing", 0, 10), Piece("next", "next", 20, 30)]


def test_what_is_left_of_the_steps_is_the_rest() -> None:
    pieces = [Piece("mlp", "mlp", 0, 30), Piece("norm", "norm", 40, 45), Piece("mlp", "mlp", 50, 60)]
    assert busy_by_function(pieces, 100) == {"mlp": 40, "norm": 5, "rest": 55}
    assert busy_by_function([*pieces, Piece("rest", "rest", 60, 70)], 100)["rest"] == 55


class Thing:
    def __init__(self) -> None:
        self.value = 1

    def method(self) -> int:
        return 2


def test_replaced_attributes_come_back() -> None:
    thing, parts = Thing(), Replacements()
    method: Any = thing.method
    parts.put(thing, "value", 7)
    parts.put(thing, "value", 8)
    parts.put(thing, "method", lambda: 9)
    assert (thing.value, thing.method()) == (8, 9)
    parts.undo()
    parts.undo()
    assert vars(thing) == {"value": 1}
    assert thing.method == method


# ── real models ───────────────────────────────────────────────────────────────────────────────────


def state(runner: Any) -> list[dict[str, Any]]:
    """The attributes of all that `attach` may change."""
    model = runner.model
    owners = [model, runner.attention, runner._sampler, runner.mesh.tp]
    owners += [thing for layer in model.layers for thing in (layer, layer.attention)]
    return [dict(vars(owner)) for owner in owners]


def answer(stepper: Stepper) -> list[int]:
    pages = stepper.take(64)
    first = stepper.prefill(PROMPT, pages, chunks=(20,))
    return [first, *stepper.decode([DecodeInput(first, len(PROMPT), pages, SampleParams())], 4)[0]]


@pytest.mark.parametrize("name", ["llama2", "qwen3-gqa1-tied", "gemma3"])
def test_a_timed_model_answers_alike_and_is_afterwards_what_it_was(zoo: Callable[[str], Path], name: str) -> None:
    stepper = Stepper(zoo(name))
    runner = stepper.runner
    expected, before = answer(stepper), state(runner)
    clock, parts = FunctionClock(), Replacements()
    attach(runner, clock, parts)
    assert answer(stepper) == expected
    timed = {piece.function for piece in clock.pieces}
    assert timed == {*IN_LAYER, "embedding", "head", "sampling"} - {"collectives"}
    assert all(one.end_ns <= other.start_ns for one, other in zip(clock.pieces, clock.pieces[1:], strict=False))
    layers = len(before[0]["layers"])
    assert sum(piece.function == "write" for piece in clock.pieces) == 6 * layers  # two chunks, four rows
    parts.undo()
    after = state(runner)
    for owner, known in zip(after, before, strict=True):
        assert owner.keys() == known.keys()
        # What begins with an underscore are things that the runner's parts remember from step to step.
        changed = {key for key in owner if not key.startswith("_") and owner[key] is not known[key]}
        assert not changed
    count = len(clock.pieces)
    assert answer(stepper) == expected
    assert len(clock.pieces) == count


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────

LAYER = ["_rms_norm", "gemm_qkv", "_rotate_and_write", "_attend", "_join", "gemm_out", "_rms_norm", "gemm_up"]
LAYER += ["_gated", "gemm_down"]
LAYER_FUNCTIONS = ["norm", "projections", "write", "attention", "attention", "projections", "norm", "mlp"]
LAYER_FUNCTIONS += ["mlp", "mlp"]


def test_products_are_known_by_the_kernels_beside_them() -> None:
    kernels = ["gather", *LAYER, *LAYER, "_rms_norm", "gemm_head", "_sum", "_pick", "copy"]
    head = ["norm", "head", "sampling", "sampling", "sampling"]
    assert functions_of(kernels) == ["embedding", *LAYER_FUNCTIONS, *LAYER_FUNCTIONS, *head]


def test_a_chunk_that_samples_nothing_ends_in_its_mlp() -> None:
    assert functions_of(["gather", *LAYER]) == ["embedding", *LAYER_FUNCTIONS]


def test_greedy_tokens_count_to_the_head() -> None:
    assert functions_of(["_gated", "gemm_down", "_rms_norm", "gemm_head", "argmax"])[2:] == ["norm", "head", "head"]


def test_what_gemma_adds_after_a_norm_counts_to_norms() -> None:
    kernels = ["_attend", "gemm_out", "_rms_norm", "add", "_rms_norm", "gemm_up", "_gated", "gemm_down", "_rms_norm"]
    expected = ["attention", "projections", "norm", "norm", "norm", "mlp", "mlp", "mlp", "norm"]
    assert functions_of(kernels) == expected


def test_sums_over_ranks_change_nothing_around_them() -> None:
    kernels = ["_attend", "gemm_out", "ncclDevKernel_AllReduce", "add", "_rms_norm"]
    assert functions_of(kernels) == ["attention", "projections", "collectives", "projections", "norm"]


def test_no_kernels_no_functions() -> None:
    assert functions_of([]) == []


def kernel(name: str, start_us: float, us: float, stream: int = 7, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": us, "tid": stream}


def test_kernels_of_the_busiest_stream_in_order_and_in_time() -> None:
    trace = {
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [
            kernel("_attend", 5.5, 2.0),
            kernel("_rms_norm", 1.0, 1.25),
            kernel("_move", 2.0, 1.0, stream=9),
            kernel("cudaLaunchKernel", 0.5, 9.0, category="cuda_runtime"),
            {"ph": "M", "name": "process_name"},
        ],
    }
    assert kernels_in(trace) == [("_rms_norm", 1_001_000, 1_002_250), ("_attend", 1_005_500, 1_007_500)]
    assert kernels_in({}) == []


def test_pauses_of_the_device_belong_to_whom_it_waits_for() -> None:
    kernels = [("gather", 110, 120), ("_rms_norm", 150, 160), ("_rms_norm", 190, 195), ("_rms_norm", 510, 520)]
    assert pieces_of(kernels, [(100, 200), (500, 600)]) == [
        Piece("rest", "rest", 100, 110),
        Piece("embedding", "gather", 110, 120),
        Piece("host", "host", 120, 150),
        Piece("norm", "_rms_norm", 150, 160),
        Piece("host", "host", 160, 190),
        Piece("norm", "_rms_norm", 190, 195),
        Piece("host", "host", 500, 510),
        Piece("norm", "_rms_norm", 510, 520),
    ]


def test_kernels_that_overlap_are_not_counted_twice() -> None:
    pieces = pieces_of([("_rms_norm", 0, 10), ("_attend", 8, 15), ("_join", 9, 12)], [(0, 20)])
    assert [(piece.start_ns, piece.end_ns) for piece in pieces] == [(0, 10), (10, 15), (15, 15)]
