"""The C++ operator of experts against float64, over shapes that fit no block, with each gate, biases and choices that
this rank does not have; on AMX tiles as on plain products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvmesh.engine.config_experts import ExpertsConfig
from kvmesh.engine.cpu import native
from kvmesh.engine.models.experts import ExpertGate, ExpertParts, PackedExperts

REASON = native.why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=f"no C++ operators: {REASON}")
COUNT = 6
GATES = {
    "silu": ExpertGate("silu"),
    "gelu": ExpertGate("gelu_tanh"),
    "clamped": ExpertGate("silu", (1.702, 2.0)),
}


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.ops.kvmesh.use_tiles(0)
    torch.set_num_threads(1)


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def by_hand(parts: ExpertParts, gate: ExpertGate, x: torch.Tensor) -> torch.Tensor:
    """One row's answer in float64, with what `down` is given rounded to bfloat16."""
    g, u = parts.gate.double() @ x, parts.up.double() @ x
    if parts.bias is not None:
        g, u = g + parts.bias[: len(g)].double(), u + parts.bias[len(g) :].double()
    if gate.swiglu is not None:
        alpha, limit = gate.swiglu
        g, u = g.clamp(max=limit), u.clamp(-limit, limit) + 1
        active = g * (alpha * g).sigmoid()
    elif gate.activation == "gelu_tanh":
        active = torch.nn.functional.gelu(g, approximate="tanh")
    else:
        active = g * g.sigmoid()
    answer = parts.down.double() @ (active * u).to(torch.bfloat16).double()
    return answer if parts.down_bias is None else answer + parts.down_bias.double()


def check(experts: ExpertsConfig, hidden: int, tokens: int, gate: ExpertGate) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hidden + tokens)
    inner = experts.inner
    packed, parts = PackedExperts(experts, inner, hidden, gate), []
    for index in range(experts.count):
        biases = (drawn(generator, 2 * inner), drawn(generator, hidden)) if experts.biases else (None, None)
        gates, ups = drawn(generator, inner, hidden) / hidden**0.5, drawn(generator, inner, hidden) / hidden**0.5
        parts.append(ExpertParts(gates, ups, drawn(generator, hidden, inner) / inner**0.5, *biases))
        packed.read(index, parts[-1])
    x = drawn(generator, tokens, hidden)
    chosen = torch.rand(tokens, experts.count, generator=generator).topk(experts.chosen, -1).indices
    weights = torch.rand(tokens, experts.chosen, generator=generator)
    found = packed(x, chosen, weights)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            if experts.scale_input:
                given = (x[token].float() * weight).to(torch.bfloat16).double()
                expected[token] += by_hand(parts[expert], gate, given)
            else:
                expected[token] += by_hand(parts[expert], gate, x[token].double()) * float(weight)
    assert found.dtype == torch.float32 and expected.abs().max() > (0.3 if tokens else -1)
    # A sum that lies at the edge of two bfloat16 numbers may be rounded to the other: 2**-8 of one of `inner` terms.
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=0.02)
    assert (found.double() - expected).abs().mean() < 2e-3
    return found


PLAIN = ExpertsConfig((0,), COUNT, 3, 40)


@pytest.mark.parametrize("tokens", [1, 2, 9, 60])
@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (96, 40), (33, 7), (70, 81)])
def test_experts_answer_as_in_float64(hidden: int, inner: int, tokens: int) -> None:
    check(replace(PLAIN, inner=inner), hidden, tokens, GATES["silu"])


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("tokens", [1, 40])
def test_gates_biases_and_scaled_inputs(gate: str, scale_input: bool, biases: bool, tokens: int) -> None:
    experts = replace(PLAIN, biases=biases, scale_input=scale_input, swiglu=GATES[gate].swiglu)
    check(experts, 72, tokens, GATES[gate])


def test_products_as_tiles_make_them() -> None:
    """Experts of five rows and more go to the tiles, those of fewer do not; mode 2 is plain code that does as tiles."""
    torch.ops.kvmesh.use_tiles(2)
    experts = replace(PLAIN, count=9, inner=64, biases=True)
    on_tiles = check(experts, 96, 12, GATES["silu"])
    torch.ops.kvmesh.use_tiles(0)
    torch.testing.assert_close(on_tiles, check(experts, 96, 12, GATES["silu"]), rtol=2e-2, atol=2e-2)


def test_a_token_s_answer_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(1)
    packed = PackedExperts(PLAIN, 40, 64, GATES["silu"])
    for index in range(COUNT):
        packed.read(index, ExpertParts(*(drawn(generator, *size) for size in ((40, 64), (40, 64), (64, 40)))))
    x, weights = drawn(generator, 33, 64), torch.rand(33, 3, generator=generator)
    chosen = torch.rand(33, COUNT, generator=generator).topk(3, -1).indices
    together = packed(x, chosen, weights)
    alone = [packed(*(part[i : i + 1] for part in (x, chosen, weights))) for i in range(33)]
    assert torch.equal(together, torch.cat(alone))


def test_choices_of_other_ranks_answer_nothing() -> None:
    """The operator has experts [first, first + count) of all."""
    generator = torch.Generator().manual_seed(2)
    packed = PackedExperts(PLAIN, 40, 64, GATES["silu"])
    for index in range(COUNT):
        packed.read(index, ExpertParts(*(drawn(generator, *size) for size in ((40, 64), (40, 64), (64, 40)))))
    x, weights = drawn(generator, 5, 64), torch.rand(5, 2, generator=generator)
    chosen = torch.tensor([[0, 1], [2, 9], [7, 8], [5, 0], [3, 4]])
    expected = packed(x, chosen.where(chosen < COUNT, 0), weights.where(chosen < COUNT, 0.0))
    assert torch.equal(packed(x, chosen, weights), expected) and not expected[2].any() and expected[1].any()
