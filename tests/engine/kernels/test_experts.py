"""Grouped products over tokens sorted on the device: against a loop over choices in float64, for every gate, with few
rows and many, and tiles that lie beyond the last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvmesh.engine.models import experts as of_models
from kvmesh.engine.models.experts import LoopedExperts, StackedExperts
from tests.engine.test_moe_vocabulary import BLOCKS, checkpoint_of, drawn_inputs, ours, their_block

GATES = {"silu": 0, "gelu": 1, "clamped": 2}
ALPHA, LIMIT = 1.702, 1.5


def random(*shape: int, device: torch.device, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def by_choices(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: Sequence[torch.Tensor | None],
    gate: str,
    scale_input: bool,
) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            given = x[token].double() * (weight if scale_input else 1.0)
            both = gate_up[expert].double() @ given
            if biases[0] is not None:
                both = both + biases[0][expert].double()
            g, u = both.chunk(2)
            if gate == "clamped":
                g, u = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT) + 1
                active = g * (ALPHA * g).sigmoid()
            else:
                active = torch.nn.functional.silu(g)
                if gate == "gelu":
                    active = torch.nn.functional.gelu(g, approximate="tanh")
            answer = down[expert].double() @ (active * u)
            if biases[1] is not None:
                answer = answer + biases[1][expert].double()
            out[token] += answer * (1.0 if scale_input else weight)
    return out


@pytest.mark.parametrize(
    ("gate", "tokens", "scale_input", "biased"),
    [
        ("silu", 1, False, False),
        ("silu", 90, False, True),  # 64 rows a tile
        ("gelu", 7, False, False),
        ("clamped", 3, False, True),
        ("clamped", 21, True, True),
        ("silu", 0, False, False),
    ],
)
def test_grouped_products(gate: str, tokens: int, scale_input: bool, biased: bool, device: torch.device) -> None:
    from kvmesh.engine.kernels import experts

    count, chosen_count, hidden, inner = 5, 2, 96, 70
    gate_up = random(count, 2 * inner, hidden, device=device, seed=1) / hidden**0.5
    down = random(count, hidden, inner, device=device, seed=2) / inner**0.5
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if biased:
        biases = (random(count, 2 * inner, device=device, seed=3), random(count, hidden, device=device, seed=4))
    x = random(tokens, hidden + 5, device=device, seed=5)[:, :hidden]  # rows lie apart
    drawn = random(tokens, count, device=device, seed=6)
    drawn[:, 3] = -100.0  # an expert that nobody has
    chosen = drawn.topk(chosen_count, -1).indices
    weights = random(tokens, chosen_count, device=device, seed=7).abs()
    assert experts.rows_of_tile(90 * chosen_count, count) == experts.MANY
    found = experts.experts(x, chosen, weights, gate_up, down, *biases, GATES[gate], (ALPHA, LIMIT), scale_input)
    given = (None if bias is None else bias.cpu() for bias in biases)
    expected = by_choices(x.cpu(), chosen, weights, gate_up.cpu(), down.cpu(), tuple(given), gate, scale_input)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("tokens", [1, 6, 50, 400])
def test_tiles_have_each_choice_once_and_are_never_more_than_the_list(
    tokens: int, rows: int, device: torch.device
) -> None:
    from kvmesh.engine.kernels import experts

    for seed, count in enumerate((1, 8, 128)):
        skewed = random(tokens, count, device=device, seed=seed) + torch.arange(count, device=device) * 0.2
        chosen = skewed.topk(min(count, 4), -1).indices
        tiles = experts.row_tiles(chosen, count, rows)
        wanted = torch.bincount(chosen.flatten(), minlength=count)
        assert torch.equal(tiles.counts, wanted) and torch.equal(tiles.row_ends, wanted.cumsum(0))
        assert sorted(tiles.order.tolist()) == list(range(chosen.numel()))
        owned = chosen.flatten()[tiles.order]
        assert torch.equal(owned, owned.sort().values)
        of_each = [-(-had // rows) for had in wanted.tolist()]
        needed = [expert for expert, some in enumerate(of_each) for _ in range(some)]
        assert tiles.owners.tolist() == needed + [count] * (len(tiles.owners) - len(needed))
        assert len(tiles.owners) == experts.most_tiles(chosen.numel(), count, rows) >= len(needed)


class NoReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that make a host wait for the device, as a capture does."""

    READS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.__name__.split(".")[0].strip("_")
        assert name not in [read.strip("_") for read in self.READS], f"the host looks at values: {func}"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_reads() -> Iterator[None]:
    with NoReads():  # type: ignore[no-untyped-call]
        yield


def test_the_host_looks_at_no_values(no_reads: None, device: torch.device) -> None:
    """From the router to the tiles; the kernels themselves are launches."""
    from kvmesh.engine.config_experts import ExpertsConfig
    from kvmesh.engine.kernels import experts
    from kvmesh.engine.models.moe import Router

    x = torch.ones(9, 32, device=device)
    for config in (
        ExpertsConfig((0,), 8, 2, 16, "sigmoid", correction=True, groups=4, groups_kept=2),
        ExpertsConfig((0,), 8, 2, 16, "softmax_of_chosen"),
    ):
        correction = torch.ones(8, device=device) if config.correction else None
        chosen, _ = Router(config, torch.ones(8, 32, device=device), correction)(x)
        experts.row_tiles(chosen, 8, 16)
    with pytest.raises(AssertionError, match="looks at values"):
        torch.bincount(chosen.flatten())


@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_over_kernels_answers_as_one_over_a_loop(
    family: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gpt-oss, Llama 4 and Qwen3-Next are read: biases, clamped gates, scaled inputs, stacked tensors."""
    if device.type == "cuda":
        pytest.skip("the block is the CPU's, and kernels reach none of it: Triton's interpreter runs this")
    from kvmesh.engine.kernels import experts

    checkpoint = checkpoint_of(family, their_block(family), tmp_path)
    looped, x = ours(checkpoint), drawn_inputs()
    monkeypatch.setattr(of_models, "kernels_for", lambda *_: experts)
    stacked = ours(checkpoint)
    assert isinstance(looped.experts, LoopedExperts) and isinstance(stacked.experts, StackedExperts)
    torch.testing.assert_close(stacked(x), looped(x), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("tokens", "biased"), [(1, False), (40, True)])
def test_experts_that_are_cut_whole_add_up(tokens: int, biased: bool, device: torch.device) -> None:
    """Each rank has some of the experts, and nothing to say for choices of the others."""
    from kvmesh.engine.kernels import experts

    count, hidden, inner = 5, 64, 40
    gate_up = random(count, 2 * inner, hidden, device=device, seed=1) / hidden**0.5
    down = random(count, hidden, inner, device=device, seed=2) / inner**0.5
    biases = [random(count, size, device=device, seed=3) if biased else None for size in (2 * inner, hidden)]
    x, weights = random(tokens, hidden, device=device, seed=5), random(tokens, 2, device=device, seed=7).abs()
    chosen = random(tokens, count, device=device, seed=6).topk(2, -1).indices

    def of(first: int, end: int) -> torch.Tensor:
        own = [None if bias is None else bias[first:end] for bias in biases]
        gates = (GATES["silu"], (ALPHA, LIMIT), False)
        return experts.experts(x, chosen, weights, gate_up[first:end], down[first:end], *own, *gates, first, count)

    parts = [of(0, 2), of(2, 3), of(3, 5)]
    torch.testing.assert_close(torch.stack(parts).sum(0), of(0, 5), rtol=1e-5, atol=1e-5)
    assert [bool(part.any()) for part in parts] == [
        bool(((chosen >= first) & (chosen < end)).any()) for first, end in ((0, 2), (2, 3), (3, 5))
    ]


def test_tiles_have_no_choices_of_other_ranks(no_reads: None, device: torch.device) -> None:
    from kvmesh.engine.kernels import experts

    chosen = torch.tensor([[4, 0], [2, 9], [3, 2]], device=device)
    tiles = experts.row_tiles(chosen, 3, 16, first=2)  # 2, 3 and 4
    assert torch.equal(tiles.counts, torch.tensor([2, 1, 1], device=device))
    assert torch.equal(tiles.order[:4], torch.tensor([2, 5, 4, 0], device=device))
    assert torch.equal(tiles.owners, torch.tensor([0, 1, 2], device=device))
    tiles = experts.row_tiles(chosen, 3, 16, first=7)
    assert torch.equal(tiles.counts, torch.tensor([0, 0, 1], device=device))
    assert torch.equal(tiles.owners, torch.tensor([2, 3, 3], device=device))  # there are two tiles too many
