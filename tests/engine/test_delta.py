"""The gated delta rule and its convolution against the recurrence in float64, in torch and in C++ (Triton:
kernels/test_delta.py), and a prompt cut anywhere against the whole of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.engine.attention import delta
from kvmesh.engine.attention.delta import Runs, StateSlots
from kvmesh.engine.cpu import native
from tests.support.engine.delta_oracle import DeltaCase, convolved, delta_by_token, runs_of

Form = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]
CPU = torch.device("cpu")
REASON = native.why_not()
needs_native = pytest.mark.skipif(bool(REASON), reason=f"no C++ operators: {REASON}")
FORMS = ["torch", pytest.param("native", marks=needs_native)]
# Sizes of keys and of values, repeats and the kernel all differ.
CASES = (DeltaCase(), DeltaCase(key_heads=1, repeats=3, key_dim=16, value_dim=7, kernel=2), DeltaCase(repeats=1))


@pytest.fixture(params=FORMS, scope="module")
def form(request: pytest.FixtureRequest) -> Form:
    """The convolution and the rule in one of their forms."""
    if request.param == "torch":
        return delta.torch_convolve, delta.torch_delta_rule
    return delta.convolve, delta.delta_rule


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=12)
@given(lengths=st.lists(st.integers(1, 150), max_size=3), rows=st.integers(0, 3), seed=st.integers(0, 2**16))
def test_a_ragged_step_equals_the_recurrence(
    form: Form, case: DeltaCase, lengths: list[int], rows: int, seed: int
) -> None:
    """Rows and spans of one step, over slots in no order; slots of nobody stay."""
    convolve, rule = form
    lengths = [1] * rows + lengths
    if not lengths:
        return
    inputs, count = case.inputs(sum(lengths), seed), len(lengths)
    shuffled = torch.randperm(count + 2, generator=torch.Generator().manual_seed(seed))
    slots, of_nobody = shuffled[:count], shuffled[count:]
    runs, named = Runs(lengths, CPU), runs_of(lengths, slots.tolist())
    states, known = case.states(count + 2, seed)
    wanted_states, wanted_known = states.clone(), known.clone()

    mixed = convolve(inputs.x, inputs.weight, StateSlots(known, slots), runs)
    wanted = convolved(inputs.x, inputs.weight, wanted_known, named)
    torch.testing.assert_close(mixed, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(known, wanted_known)

    out = rule(mixed, inputs.log_decay, inputs.rate, StateSlots(states, slots), runs)
    exact = delta_by_token(case, mixed, inputs.log_decay, inputs.rate, wanted_states, named)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(states, wanted_states, rtol=1e-4, atol=2e-5)
    assert torch.equal(states[of_nobody], wanted_states[of_nobody])


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(1, 199), max_size=5, unique=True), seed=st.integers(0, 2**16))
def test_a_prompt_cut_anywhere_equals_the_whole(form: Form, cuts: list[int], seed: int) -> None:
    convolve, rule = form
    case, length, slot = DeltaCase(), 200, torch.tensor([0])
    inputs = case.inputs(length, seed)

    def computed(pieces: list[int]) -> tuple[torch.Tensor, ...]:
        states, known = (part.zero_() for part in case.states(1, seed))
        outs, at = [], 0
        for size in pieces:
            part, runs = slice(at, at + size), Runs([size], CPU)
            mixed = convolve(inputs.x[part], inputs.weight, StateSlots(known, slot), runs)
            gates = inputs.log_decay[part], inputs.rate[part]
            outs.append(rule(mixed, *gates, StateSlots(states, slot), runs))
            at += size
        return torch.cat(outs), states, known

    ends = [0, *sorted(cuts), length]
    pieces = [end - start for start, end in itertools.pairwise(ends)]
    whole = computed([length])
    for cut in (pieces, [150, *[1] * 50]):  # and a prompt that goes on token by token
        for some, all_of_it in zip(computed(cut), whole, strict=True):
            torch.testing.assert_close(some, all_of_it, rtol=1e-4, atol=2e-5)


def test_strong_decay_and_equal_keys_stay_finite(form: Form) -> None:
    """Decays whose product over a chunk is below any float32, and keys that are all one: the system is as badly
    conditioned as it gets."""
    case, slot = DeltaCase(), torch.tensor([0])
    inputs = case.inputs(130, 5)
    x = inputs.x[:1].expand_as(inputs.x).contiguous()
    for log_decay, rate in ((-30.0, 0.5), (0.0, 1.0), (-1e-3, 1.0)):
        gates = torch.full_like(inputs.log_decay, log_decay), torch.full_like(inputs.rate, rate)
        states, wanted = case.states(1, 6)[0], case.states(1, 6)[0]
        out = form[1](x, *gates, StateSlots(states, slot), Runs([130], CPU))
        exact = delta_by_token(case, x, *gates, wanted, runs_of([130], [0]))
        torch.testing.assert_close(out, exact, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(states, wanted, rtol=1e-4, atol=2e-5)


@needs_native
@pytest.mark.parametrize("threads", [1, 2])
def test_bfloat16_is_rounded_once(threads: int) -> None:
    """The operators' answers are those of torch's form to a rounding; inputs that are kept are bit for bit the same."""
    case, lengths, slots = DeltaCase(value_dim=33), [1, 1, 37, 5], torch.tensor([3, 0, 2, 4])
    inputs, runs = case.inputs(sum(lengths), 8, torch.bfloat16), Runs(lengths, CPU)
    states, known = case.states(5, 8, torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kept, moved = known.clone(), states.clone()
        mixed = delta.convolve(inputs.x, inputs.weight, StateSlots(kept, slots), runs)
        out = delta.delta_rule(mixed, inputs.log_decay, inputs.rate, StateSlots(moved, slots), runs)
    finally:
        torch.set_num_threads(before)
    wanted = delta.torch_convolve(inputs.x, inputs.weight, StateSlots(known, slots), runs)
    torch.testing.assert_close(mixed, wanted, rtol=2.0**-7, atol=1e-6)
    assert torch.equal(kept, known)
    wanted = delta.torch_delta_rule(mixed, inputs.log_decay, inputs.rate, StateSlots(states, slots), runs)
    torch.testing.assert_close(out, wanted, rtol=2.0**-7, atol=1e-4)
    torch.testing.assert_close(moved, states, rtol=1e-4, atol=2e-5)
