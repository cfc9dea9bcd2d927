"""Step times: the roofline against arithmetic by hand, fits against the models they came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.costs.file import Costs
from kvmesh.services.conductor.costs.fit import Coefficients
from kvmesh.services.conductor.costs.models import PrefillModel
from kvmesh.sim.fitting.mesh_fit import read_fit
from kvmesh.sim.hardware.hardware import hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.times import Fitted, Roofline, attended, attended_within

SHAPE = shape_of("llama3-70b")
NODE = Roofline(hardware("a800"), 8, SHAPE)
COSTS = Costs(prefill=Coefficients(0.01, 1e-4, 1e-8), decode_step=Coefficients(0.02, 1e-3, 1e-7))


def test_prefill_by_hand() -> None:
    """4,096 tokens of LLaMA3-70B on 8 x A800: matrices, scores and values, and two all-reduces a layer."""
    tokens = 4096
    peak = 8 * 312e12
    linear = 2 * (SHAPE.layer_params * tokens + 128_256 * 8192) / (peak * 0.60)
    pairs = tokens * (tokens + 1) / 2
    scores = 4 * 80 * 64 * 128 * pairs / (peak * 0.50)
    reduce = 160 * (2 * 7 / 8 * tokens * 8192 * 2 / (200e9 * 0.75) + 15e-6)
    assert NODE.prefill_s([(tokens, 0)]) == pytest.approx(0.003 + linear + scores + reduce, rel=1e-9)


def test_a_decode_step_by_hand() -> None:
    """One row reads all weights but the embedding, and its context, an eighth on each GPU."""
    rate = 8 * 2.039e12 * 0.75
    weights = 2 * (SHAPE.layer_params + 128_256 * 8192) / rate
    kv = 10_000 * 327_680 / rate
    reduce = 160 * (2 * 7 / 8 * 8192 * 2 / (200e9 * 0.75) + 15e-6)
    assert NODE.decode_s(1, 10_000) == pytest.approx(0.003 + weights + kv + reduce, rel=1e-9)


def test_weights_are_read_once_whatever_the_number_of_pieces() -> None:
    one = NODE.decode_s(1, 100)
    assert NODE.prefill_s([(1, 100)] * 8) < 1.1 * one
    assert NODE.mixed_s([(64, 0)], 16, 1600) < 1.2 * one
    assert NODE.prefill_s([(512, 0), (512, 0)]) < 2 * NODE.prefill_s([(512, 0)])


def test_mixed_is_both_and_each_alone_is_itself() -> None:
    pieces = [(512, 1024)]
    assert NODE.mixed_s(pieces, 0, 0.0) == NODE.prefill_s(pieces)
    assert NODE.mixed_s([], 8, 9000) == NODE.decode_s(8, 9000)
    both, apart = NODE.mixed_s(pieces, 8, 9000), NODE.prefill_s(pieces) + NODE.decode_s(8, 9000)
    assert max(NODE.prefill_s(pieces), NODE.decode_s(8, 9000)) < both < apart


def test_one_gpu_reduces_nothing_and_eight_are_less_than_eight_times_as_fast() -> None:
    shape = shape_of("llama3-8b")
    one, eight = (Roofline(hardware("a800"), gpus, shape) for gpus in (1, 8))
    for alone, shared in (
        (one.prefill_s([(4096, 0)]), eight.prefill_s([(4096, 0)])),
        (one.decode_s(32, 64_000), eight.decode_s(32, 64_000)),
    ):
        assert shared < alone < 8 * shared


def test_experts_are_read_when_somebody_needs_them() -> None:
    shape = shape_of("deepseek-v3")
    node = Roofline(hardware("h800"), 16, shape, weight_dtype="fp8")
    rate = 16 * 3.35e12 * 0.75
    growth = node.decode_s(256, 0) - node.decode_s(1, 0)
    assert growth > 0.9 * (shape.params - shape.active_params) / rate
    assert node.decode_s(1, 0) < 2 * shape.active_params / rate + 0.01


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 200))
def test_windows_count_what_a_token_sees(computed: int, cached: int, window: int) -> None:
    seen = [min(cached + at + 1, window) for at in range(computed)]
    assert attended_within(window, computed, cached) == sum(seen)
    assert attended(computed, cached) == sum(cached + at + 1 for at in range(computed))


def test_windows_spare_time() -> None:
    node = Roofline(hardware("a100"), 1, shape_of("gemma2-9b"))
    assert node.decode_s(1, 100_000) - node.decode_s(1, 0) < 0.6 * 100_000 * 344_064 / (2.039e12 * 0.75)


def test_states_are_read_and_written_once_a_row_whatever_its_context() -> None:
    """Qwen3-Next on two H200 by hand: 36 linear layers, 12 that read their context."""
    shape = shape_of("qwen3-next-80b-a3b")
    node = Roofline(hardware("h200"), 2, shape)
    read, attend = 2 * 4.8e12 * 0.75, 2 * 989e12 * 0.5
    state = 2 * 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) / read
    rows_s = node._rows_s(7, 0)
    assert rows_s == pytest.approx(7 * state, rel=1e-9)
    assert node._rows_s(7, 70_000) - rows_s == pytest.approx(70_000 * 12 * 2 * 2 * 256 * 2 / read, rel=1e-9)
    # A prompt: pairs of 12 layers, and three multiply-adds for each number of 36 layers' states.
    for n in (8192, 4096):
        pairs_s = 12 * 2 * 16 * 512 * n * (n + 1) / 2 / attend
        delta_s = 6 * 36 * 32 * 128 * 128 * n / attend
        assert node.prefill_s([(n, 0)]) == pytest.approx(node._fixed_s(n, 1) + pairs_s + delta_s, rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20_000), st.integers(0, 100_000), st.integers(1, 2_000))
def test_more_work_never_takes_less(computed: int, cached: int, more: int) -> None:
    for times in (NODE, Fitted(COSTS)):
        base = times.prefill_s([(computed, cached)])
        assert 0 < base <= times.prefill_s([(computed + more, cached)])
        assert base <= times.prefill_s([(computed, cached + more)])
        assert base <= times.mixed_s([(computed, cached)], 4, 4.0 * cached + 4)
        assert times.decode_s(4, cached) <= times.decode_s(4 + more % 7, cached + more)


# ── fitted ────────────────────────────────────────────────────────────────────────────────────────


def test_fits_say_what_the_conductor_would() -> None:
    fitted = Fitted(COSTS)
    model = PrefillModel(COSTS.prefill)
    assert fitted.prefill_s([(700, 300)]) == pytest.approx(model.predict(700, 300))
    assert fitted.decode_s(4, 4000) == pytest.approx(0.02 + 4e-3 + 4e-4)


def test_pieces_of_one_step_pay_its_constant_once() -> None:
    fitted = Fitted(COSTS)
    assert fitted.prefill_s([(100, 0), (100, 0)]) == pytest.approx(2 * fitted.prefill_s([(100, 0)]) - 0.01)
    both = fitted.mixed_s([(100, 0)], 2, 200)
    assert both == pytest.approx(fitted.prefill_s([(100, 0)]) + fitted.decode_s(2, 200) - 0.01)


def test_a_file_of_fits_comes_back(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS.to_json()))
    assert read_fit(file).costs == COSTS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds no object"),
        ("{}", "kvmesh_costs=None: must be 1"),
        ('{"kvmesh_costs": 1, "prefill": {"a": -1, "b": 0, "c": 0}}', "prefill.a=-1: must be a number, at least 0"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_fit(file)
    assert caught.value.message.startswith(f"times={str(file)!r}: ") and words in caught.value.message
    with pytest.raises(ConfigError, match="No such file"):
        read_fit(tmp_path / "gone")
