"""Ranks that share a model: what each has of it, and that together they say what one rank says. Real processes over
gloo, one group of two and one of four."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from kvmesh.engine.axes import Axes
from kvmesh.engine.cache_memory import group_shapes, named_by_group, zeroed_memory
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.parallel import ALONE, Cut, ExpertsCut, Group, RankMesh, check_shares, share, share_of
from kvmesh.engine.runner import NOBODY, DecodeInput, PrefillInput, Runner, SampleParams, shard_layout
from kvmesh.engine.sampling.prompt_scores import TokenScores
from kvmesh.engine.stages import stage_layers
from kvmesh.engine.weights import Weights
from kvmesh.errors import ConfigError, RanksLost
from kvmesh.kvcache.layout import ShardLayout
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.given_mesh import GivenMesh
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.engine.rank_processes import run_ranks
from tests.support.engine.stepper import Stepper, sampled_id
from tests.support.reference import Forced, assert_as_close_as_reference, assert_matches_reference

TOKENS = 12
PROMPTS = [[(7 * i * i + 5 * i) % 250 + 3 for i in range(n)] for n in (37, 5)]
# Of one text, a router that rounds to another expert than the reference's decides how far both are from float32.
FORCED = [PROMPTS[0], *([(n * i * i + 3 * i) % 250 + 3 for i in range(37)] for n in (11, 13))]
# Scaled answers; norms over all heads of all ranks; experts, shared ones too; latents, whole at every rank; sinks,
# biased experts; chunks.
LATER = ["granite", "olmo3", "qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "deepseek_v2", "deepseek_v3"]
LATER += ["gpt_oss", "llama4"]
# Norms after sums, windows in some layers, matrices that are stored joined; no cut depends on a rope, nor on a window
# that all layers have, and a cut of biases and of heads that are normed is what the first case shows.
FAMILIES = ["gemma3", "phi3-window", *LATER]
# A norm of both answers, latents beside experts, scaled answers, sinks, chunks in some layers.
STAGED = ["gemma2", "gemma3", "deepseek_v3", "granite", "gpt_oss", "llama4"]
SAMPLED = SampleParams(temperature=0.9, top_p=0.95, seed=11, logprobs=2)


class Rank(Group):
    """One of several that has nobody to talk to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


# ── who has what ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("units", [1, 2, 4, 8, 331])
def test_shares_cover_every_unit_and_neighbours_are_replicas(units: int, size: int) -> None:
    shares = [share(units, rank, size) for rank in range(size)]
    assert {unit for own in shares for unit in own} == set(range(units))
    assert [own.start for own in shares] == sorted(own.start for own in shares)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if units >= size:
        assert sum(map(len, shares)) == units  # none twice


def test_a_fused_matrix_is_cut_as_its_parts_are(zoo: Callable[[str], Path]) -> None:
    """Queries, keys and values in one stored matrix or in three: the same rows, of which no other is read."""
    checkpoint = open_checkpoint(zoo("qwen2-gqa7-yarn-parameters"))
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    whole = Weights(checkpoint, torch.float32, torch.device("cpu"))(*names)
    sections = ((14, 12), (2, 12), (2, 12))
    for rank in range(2):
        weights = Weights(checkpoint, torch.float32, torch.device("cpu"), GivenMesh(Rank(rank, 2)))
        q, k, v = whole[:168], whole[168:192], whole[192:]
        expected = torch.cat([part.chunk(2)[rank] for part in (q, k, v)])
        assert torch.equal(weights(*names, cut=Cut(0, sections)), expected)
        rows = [row for span in Cut(0, sections).spans(weights.mesh.tp) for row in span]
        assert torch.equal(whole[rows], expected)
        [o] = ["model.layers.1.self_attn.o_proj.weight"]
        columns = weights.view(o)[:, rank * 84 : (rank + 1) * 84]
        assert torch.equal(weights(o, cut=Cut(1, ((14, 12),))), columns)


def test_a_model_that_so_many_ranks_cannot_share_is_refused(zoo: Callable[[str], Path]) -> None:
    config = open_checkpoint(zoo("qwen3-gqa4-yarn")).config  # 8 heads, 2 KV heads, 96 inner, 331 words
    for size, why in ((3, "num_attention_heads=8"), (16, "num_attention_heads=8")):
        with pytest.raises(ConfigError, match=f"tensor_parallel={size}: .*{why}"):
            check_shares(config, Axes(tp=size))
    experts = open_checkpoint(zoo("glm4_moe")).config  # 24 columns an expert, 48 of the shared one
    assert experts.experts is not None
    with pytest.raises(ConfigError, match=r"tensor_parallel=4: must divide the shared expert's 6 columns"):
        check_shares(replace(experts, experts=replace(experts.experts, shared_inner=6)), Axes(tp=4))
    few = replace(experts.experts, inner=6, count=3)
    with pytest.raises(ConfigError, match=r"=4: must divide moe_intermediate_size=6, or be at most the 3 experts"):
        check_shares(replace(experts, experts=few), Axes(tp=4))
    check_shares(replace(experts, experts=replace(few, count=4)), Axes(tp=4))
    odd = open_checkpoint(zoo("qwen3-gqa1-tied")).config  # 3 KV heads
    check_shares(odd, Axes(tp=3))
    layouts = [shard_layout(config, "float32", 16, Axes(tp=4), rank) for rank in range(4)]
    assert [(layout.first_head, layout.kv_heads) for layout in layouts] == [(0, 1), (0, 1), (1, 1), (1, 1)]
    own = share_of(config, Axes(tp=4))
    assert (own.heads, own.kv_heads, own.intermediate_size) == (2, 1, 24)
    shared = share_of(experts, Axes(tp=2)).experts
    assert shared is not None and (shared.count, shared.inner, shared.shared_inner) == (12, 12, 24)


# ── together ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Said:
    """What one rank answers for one checkpoint."""

    greedy: list[list[int]]
    sampled: list[int]
    half: list[Forced]  # in bfloat16
    scores: TokenScores | None  # of the first prompt's tokens
    layout: ShardLayout
    last: bool  # the only stage, or the last one of a pipeline, which alone has samples of prompts and scores
    pages: torch.Tensor  # of the first prompt


def answer(path: Path, mesh: RankMesh, cut: ExpertsCut = "auto") -> Said:
    stepper = Stepper(path, mesh=mesh, experts_cut=cut)
    pages = [stepper.take(len(prompt) + TOKENS) for prompt in PROMPTS]
    first = [
        stepper.prefill(PROMPTS[0], pages[0], chunks=(16, 7)),
        stepper.prefill(PROMPTS[1], pages[1]),
    ]
    rows = [
        DecodeInput(token, len(prompt), own, SampleParams())
        for token, prompt, own in zip(first, PROMPTS, pages, strict=True)
    ]
    rest = stepper.decode(rows, TOKENS - 1)
    greedy = [[token, *tokens] for token, tokens in zip(first, rest, strict=True)]
    sampled = [stepper.runner.prefill([PrefillInput(prompt, 0, stepper.take(40), SAMPLED)]) for prompt in PROMPTS]
    found = [sampled_id(token, mesh) for [token] in sampled]
    scores: dict[int, TokenScores] = {}
    asked = PrefillInput(PROMPTS[0], 0, stepper.take(40), targets=PROMPTS[0][1:], top=2)
    stepper.runner.step([asked], NOBODY, on_scores=scores.__setitem__)
    rounded = Stepper(path, dtype="bfloat16", mesh=mesh, experts_cut=cut)
    texts = FORCED if rounded.checkpoint.config.experts else FORCED[:1]
    half = [rounded.forced(text, 25, chunks=(16, 7)) for text in texts]
    kv = stepper.pages[list(pages[0])][:2]
    last = mesh.place.pp == mesh.axes.pp - 1
    return Said(greedy, found, half, scores.get(0), stepper.layout, last, kv.clone())


def grouped_answer(path: Path, mesh: RankMesh) -> list[int]:
    """Greedy tokens of the first prompt, in chunks, from memory of each cache group of a stage."""
    checkpoint = open_checkpoint(path)
    layers = stage_layers(checkpoint.config, mesh.axes, mesh.rank)
    shapes = group_shapes(checkpoint.config, torch.float32, 16, mesh.tp.rank, mesh.tp.size, layers)
    memory = zeroed_memory(shapes, [4] * len(shapes), torch.device("cpu"))
    runner, groups = Runner(checkpoint, "float32", "cpu", 16, memory, mesh), named_by_group(shapes, range(4), 2)
    prompt, at = PROMPTS[0], 0
    for length in (16, 7):
        runner.prefill([PrefillInput(prompt[at : at + length], at, groups=groups)])
        at += length
    [first] = runner.prefill([PrefillInput(prompt[at:], at, sample=SampleParams(), groups=groups)])
    tokens = [sampled_id(first, mesh)]
    for position in range(len(prompt), len(prompt) + TOKENS - 1):
        [token] = runner.decode([DecodeInput(tokens[-1], position, (), SampleParams(), groups)])
        tokens.append(token.token_id)
    return tokens


def rank_main(rank: int, axes: Axes, folder: Path, checkpoints: list[Path], grouped: list[Path], cut: str) -> None:
    torch.set_num_threads(1)
    mesh = RankMesh(axes, rank, str(folder / "meet"), timeout_s=20)
    mesh.connect(60)
    said = [answer(path, mesh, cast(ExpertsCut, cut)) for path in checkpoints]
    torch.save((said, [grouped_answer(path, mesh) for path in grouped]), folder / f"{rank}.pt")
    if axes == Axes(tp=2):
        dies_while_others_wait(rank, mesh, folder)
    mesh.close()


def dies_while_others_wait(rank: int, mesh: RankMesh, folder: Path) -> None:
    """Rank 1 leaves in the middle; rank 0 hears of it instead of waiting."""
    if rank == 1:
        mesh.close()
        return
    with pytest.raises(RanksLost, match="rank 0 lost the other ranks in a step"):
        mesh.tp.all_reduce(torch.ones(4))
    (folder / "heard").touch()


@pytest.mark.parametrize(
    ("axes", "names", "cut"),
    [
        ("tp=2", ["qwen3-gqa4-yarn", "qwen2-gqa7-yarn-parameters", "biased"], "columns"),
        ("tp=2", FAMILIES[::2], "columns"),
        ("tp=2", FAMILIES[1::2], "columns"),
        pytest.param("tp=2", ["mistral", "qwen2", "qwen3", "phi3-long"], "columns", marks=pytest.mark.long),
        ("tp=4", ["llama-gqa4-llama3"], "auto"),
        ("tp=2", ["deepseek_v3", "gpt_oss"], "whole"),
        ("pp=2", ["qwen3-gqa4-yarn", *STAGED], "auto"),
        ("pp=2,tp=2", ["deepseek_v3", "gemma2"], "columns"),
        ("pp=4", ["qwen3_moe", "llama4"], "auto"),
    ],
)
@pytest.mark.slow
def test_ranks_together_answer_as_one_does(
    axes: str, names: list[str], cut: ExpertsCut, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    """Biases at every matrix (added once), KV heads that several ranks share, a vocabulary that does not divide; a tied
    head, which two stages read, a residual between two norms, memory by cache groups, states."""
    made: dict[str, dict[str, Any]] = {
        "biased": {"family": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        "phi3-long": FAMILY_ZOO["phi3"] | {"original_max_position_embeddings": 4},  # shorter than the prompts
    }
    paths = [make_checkpoint(tmp_path / name, **made[name]) if name in made else zoo(name) for name in names]
    mesh, grouped = Axes.parse(axes), []
    if axes == "pp=2":
        grouped = [make_checkpoint(tmp_path / "gemma2", **FAMILY_ZOO["gemma2"] | {"num_hidden_layers": 4})]
        grouped.append(make_qwen3_next(tmp_path / "qwen3_next"))
    run_ranks(rank_main, (mesh, tmp_path, paths, grouped, cut), mesh.world)
    said = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(mesh.world)]
    assert (tmp_path / "heard").exists() == (axes == "tp=2")
    for at, path in enumerate(grouped):
        assert [tokens[at] for _, tokens in said] == [grouped_answer(path, ALONE)] * mesh.world
    for at, path in enumerate(paths):
        alone, every = answer(path, ALONE), [answers[at] for answers, _ in said]
        for own in every:
            assert (own.greedy, own.sampled) == (every[0].greedy, every[0].sampled)
            head, layer = own.layout.first_head, own.layout.first_layer
            expected = alone.pages[:, layer : layer + own.layout.layers, :, head : head + own.layout.kv_heads]
            assert torch.allclose(own.pages, expected, rtol=1e-3, atol=1e-4)
        ranks = [own for own in every if own.last]
        for own in ranks:
            assert own.half == ranks[0].half
            assert own.scores is not None and ranks[0].scores is not None and alone.scores is not None
            for mine, first, right in zip(own.scores, ranks[0].scores, alone.scores, strict=True):
                np.testing.assert_array_equal(mine, first)
                if right.dtype == np.float32:
                    np.testing.assert_allclose(mine, right, atol=1e-4)
        assert ranks[0].sampled == alone.sampled
        assert_as_close_as_reference(path, ranks[0].half)
        for prompt, tokens in zip(PROMPTS, ranks[0].greedy, strict=True):
            assert_matches_reference(path, prompt, tokens)
