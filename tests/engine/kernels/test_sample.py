"""Draws by the kernels against the definition, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.engine.batch import SampleParams
from kvmesh.engine.sampling.filters import Filters
from kvmesh.engine.sampling.noise import uniform
from tests.support.engine import oracle
from tests.support.engine.interpreter import few_parts

VOCAB = 2 * 2048 + 77  # three chunks, the last in part
PARAMS = [
    SampleParams(temperature=1.0, seed=1),
    SampleParams(temperature=0.01, seed=2),
    SampleParams(temperature=50.0, seed=3),
    SampleParams(temperature=1.0, seed=4, min_p=0.2),
    SampleParams(temperature=4.0, seed=5, min_p=0.01),
    SampleParams(temperature=1.0, seed=6, min_p=1.0),
]


def drawn(logits: torch.Tensor, params: list[SampleParams]) -> list[int]:
    """Of rows in an order of their own, one of the batch's left out."""
    from kvmesh.engine.kernels.sample import draw

    device = logits.device
    rows = torch.arange(len(params), device=device).flip(0)
    asked = [params[row] for row in rows.tolist()]
    temperature = torch.tensor([[p.temperature] for p in asked], dtype=torch.float64, device=device)
    noise = torch.tensor([uniform(p.seed, p.token_index) for p in asked], dtype=torch.float64, device=device)
    min_p = torch.tensor([p.min_p for p in asked], dtype=torch.float64, device=device)
    tokens = draw(logits, rows, logits.amax(-1), temperature, min_p, noise).tolist()
    return list(reversed(tokens))


@pytest.mark.parametrize("kind", ["spread", "ties", "peaks", "masked"])
def test_tokens_are_those_of_the_definition(kind: str, device: torch.device) -> None:
    made = torch.Generator().manual_seed(len(kind))
    logits = torch.randn(len(PARAMS) + 1, VOCAB, generator=made) * 3
    if kind == "ties":  # 0 and -0 among them, which are equals
        logits = logits.round()
    elif kind == "peaks":
        logits[:, ::500] += 30
    elif kind == "masked":
        logits[:, 1::2] = -torch.inf
    expected = [oracle.token(row.double().numpy(), p) for row, p in zip(logits, PARAMS, strict=False)]
    assert drawn(logits.to(device), PARAMS) == expected


def test_every_part_of_the_vocabulary_is_drawn_by_its_weight(device: torch.device) -> None:
    """All weights equal: the noise is the token's place, the first and the last among them."""
    logits = torch.zeros(4, VOCAB, device=device)
    params = [SampleParams(temperature=1.0, seed=seed) for seed in range(4)]
    places = [int(uniform(p.seed, 0) * VOCAB) for p in params]
    assert drawn(logits, params) == places
    from kvmesh.engine.kernels.sample import draw

    ends = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64, device=device)
    two = torch.arange(2, device=device)
    heat = torch.ones(2, dtype=torch.float64, device=device)
    assert draw(logits, two, logits.amax(-1), heat, torch.zeros_like(heat), ends).tolist() == [0, VOCAB - 1]


def test_a_row_that_is_not_finite_ends_too(device: torch.device) -> None:
    logits = torch.zeros(3, 300, device=device)
    logits[0, 5], logits[1, 7] = torch.nan, torch.inf
    logits[2] = -torch.inf
    params = [SampleParams(temperature=1.0, seed=seed, min_p=0.5) for seed in range(3)]
    with np.errstate(all="ignore"):
        tokens = drawn(logits, params)
    assert all(0 <= token < 300 for token in tokens)


# ── top_k and top_p ───────────────────────────────────────────────────────────────────────────────

KINDS = ("spread", "ties", "flat", "equal", "peaks", "masked", "deep", "one peak")


def some_logits(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    noise = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    if kind == "ties":
        return (noise * 3).round()
    if kind == "flat":
        return noise * 1e-4
    if kind == "equal":
        return torch.full_like(noise, 2.5)
    if kind == "deep":  # most weights are denormal or 0
        return noise * 400
    logits = noise * 3
    if kind == "peaks":
        logits[:, ::50] += 30
    elif kind == "masked":
        logits[:, 1::2] = -torch.inf
    elif kind == "one peak":
        logits[:, vocab // 2] = 40.0
    return logits


def cuts(logits: torch.Tensor, params: list[SampleParams]) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of each row are kept: by the CPU's filters, by the kernels."""
    from kvmesh.engine.kernels.sample import cut

    filters, device, vocab = Filters(params, logits.shape[-1]), logits.device, logits.shape[-1]
    filters.receive(torch.from_numpy(array) for array in list(filters.arrays))
    heat = torch.tensor([[p.temperature] for p in params], dtype=torch.float64)
    x = logits.cpu().double()
    weights = ((x - x.amax(-1, keepdim=True)) / heat).exp()
    expected = weights >= filters.cut(weights)[:, None]
    given_ = (logits, torch.arange(len(params), device=device), logits.amax(-1), heat.to(device))
    least = filters.min_p.to(device)
    for limits, none, counts in ((filters.top_k, vocab, True), (filters.top_p, 1, False)):
        if bool((limits < none).any()):
            least = cut(*given_, least, limits.to(device), counts=counts)
    # The kernels' own weights: exp may differ in a last bit.
    own = ((logits.double() - logits.double().amax(-1, keepdim=True)) / heat.to(device)).cpu().numpy()
    own = np.exp(own) if device.type == "cpu" else torch.from_numpy(own).to(device).exp().cpu().numpy()
    kept = own >= least.cpu().numpy()[:, None]
    differing = np.where(expected.numpy() != kept, weights.numpy(), 0.0).sum(-1)
    assert (differing <= 1e-12 * weights.numpy().sum(-1)).all(), (params, differing)
    return expected.numpy(), kept


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from([1, 2, 31, 256, 700]),
    seed=st.integers(0, 2**20),
    asked=st.lists(
        st.tuples(
            st.sampled_from([0.05, 0.7, 1.0, 2.0, 50.0]),
            st.one_of(st.just(0), st.sampled_from([1, 2, 50, 200, 699, 700, 5000]), st.integers(1, 700)),
            st.one_of(st.just(1.0), st.sampled_from([5e-324, 1e-6, 0.5, 1 - 2.0**-53]), st.floats(0.01, 0.9999)),
            st.sampled_from([0.0, 0.0, 1e-3, 0.3, 1.0]),
        ),
        min_size=1,
        max_size=3,
    ),
)
@example(kind="deep", vocab=300, seed=1, asked=[(1.0, 10, 1.0, 0.0), (1.0, 250, 1.0, 0.0)])  # weights far below 2**-64
def test_what_top_k_and_top_p_leave_is_what_the_cpu_leaves(
    device: torch.device, kind: str, vocab: int, seed: int, asked: list[tuple[float, int, float, float]]
) -> None:
    logits = some_logits(kind, len(asked), vocab, seed)
    params = [SampleParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in asked]
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            few_parts(patch)
        expected, kept = cuts(logits.to(device), params)
    for p, one, other in zip(params, expected, kept, strict=True):
        if p.top_p == 1 or p.top_p < 1 - 1e-12:  # between, what counts may be less than a sum's rounding
            assert np.array_equal(one, other), p


@pytest.mark.parametrize("kind", ["spread", "flat"])
def test_cuts_of_several_chunks_and_turns_at_the_sizes_that_are_served(kind: str, device: torch.device) -> None:
    from kvmesh.engine.kernels import sample

    vocab = sample.GATHER + 77
    logits = some_logits(kind, 2, vocab, 3).to(device)
    first, second = SampleParams(temperature=1.0, top_p=0.7), SampleParams(temperature=1.0, top_k=5000, top_p=0.9)
    expected, kept = cuts(logits, [first, second])
    assert np.array_equal(expected, kept)
    assert all(0 < line.sum() < vocab for line in kept)


def test_cuts_of_rows_in_another_order_and_of_rows_that_are_not_finite(device: torch.device) -> None:
    """Rows of the batch beside those asked for; float64 logits; whatever a row holds, it ends and leaves others be."""
    from kvmesh.engine.kernels.sample import cut

    logits = some_logits("spread", 5, 300, 9)
    logits[0, 5], logits[1, 7], logits[4] = torch.nan, torch.inf, -torch.inf
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        if device.type == "cpu":
            few_parts(patch)
        for x in (logits.to(device), logits.double().to(device)):
            rows = torch.tensor([4, 3, 1, 0, 2], device=device)
            heat, low = torch.ones(5, 1, dtype=torch.float64, device=device), torch.zeros(5, device=device).double()
            for limits, counts in ((torch.full((5,), 7), True), (torch.full((5,), 0.8).double(), False)):
                found = cut(x, rows, x.amax(-1), heat, low, limits.to(device), counts=counts).cpu()
                for at, row in ((1, 3), (4, 2)):
                    share = np.sort(np.exp((logits[row].double() - logits[row].double().max()).numpy()))[::-1]
                    place = 6 if counts else int((np.cumsum(share) < limits[0].item() * share.sum()).sum())
                    assert found[at].item() == pytest.approx(share[place], rel=1e-12)
