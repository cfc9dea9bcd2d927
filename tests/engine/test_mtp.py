"""MTP heads of DeepSeek-V3, GLM-4.5 and Qwen3-Next against plain torch: logits, and drafts in uneven pieces."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.cache_memory import group_shapes, zeroed_memory
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.mtp import MtpDrafter
from kvmesh.engine.parallel import SOLO, Group
from kvmesh.engine.runner import Runner
from kvmesh.errors import CheckpointError, ConfigError
from tests.support.checkpoints import prompts
from tests.support.engine.given_mesh import GivenMesh, Together
from tests.support.engine.mtp import FAMILIES, MtpReference, make_mtp
from tests.support.engine.stepper import Stepper
from tests.support.reference import assert_matches_reference

BLOCK, PAGES, TOKENS, DRAFTS = 16, 12, 70, 3


class Made(NamedTuple):
    path: Path
    reference: MtpReference


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(*make_mtp(request.param, tmp_path_factory.mktemp(request.param)))


def runner_of(path: Path, *, mtp: bool = True, group: Group = SOLO) -> Runner:
    checkpoint, cpu = open_checkpoint(path), torch.device("cpu")
    shapes = group_shapes(checkpoint.config, torch.float32, BLOCK, group.rank, group.size)
    memory = zeroed_memory(shapes, [4] * len(shapes), cpu)
    return Runner(checkpoint, "float32", "cpu", BLOCK, memory, GivenMesh(group), mtp=mtp)


def drafter_of(path: Path, pages: int = PAGES, least: float = 0.0) -> MtpDrafter:
    return MtpDrafter(runner_of(path), pages, least)


def text(seed: int, count: int = TOKENS) -> list[int]:
    return prompts(1, 300, seed=seed, low=count, high=count + 1)[0][:count]


def test_logits_of_every_token(made: Made) -> None:
    drafter, tokens = drafter_of(made.path), text(1)
    hidden = made.reference.hidden(tokens[:-1])
    normed = made.reference.model.norm(hidden)
    expected = made.reference.ahead(normed, tokens[1:])
    plan = drafter.backend.plan_prefill([TokenSpan(0, len(hidden), (3, 1, 7, 0, 4))])
    with torch.inference_mode():
        assert torch.allclose(drafter.model.norm(hidden), normed, atol=1e-4, rtol=1e-4)
        answers = drafter._step(torch.tensor(tokens[1:]), normed, plan)
        logits = drafter.head.logits(answers)
        assert torch.allclose(answers, expected, atol=2e-4, rtol=2e-4)
        assert torch.allclose(logits, expected @ made.reference.output.T, atol=2e-3, rtol=1e-3)
    assert len(set(logits.argmax(-1).tolist())) > 20  # the head says something


def test_two_rows_in_uneven_pieces(made: Made) -> None:
    """One from its first token on, one from its 20th: after each piece the drafts are those of the reference, which has
    the same tokens in its sight; drafts that were not accepted leave nothing behind."""
    drafter = drafter_of(made.path)
    texts, bases = [text(2), text(3)], [0, 20]
    states, ends = [made.reference.hidden(tokens) for tokens in texts], list(bases)
    for row in range(2):
        drafter.begin(row, texts[row][: bases[row]], texts[row][bases[row] : bases[row] + 1])
    for sizes in ((9, 1), (1, 4), (4, 2), (30, 3), (1, 1)):
        for row, size in enumerate(sizes):
            start, ends[row] = ends[row], ends[row] + size
            drafter.extend(row, texts[row][start + 1 : ends[row] + 1], states[row][start : ends[row]])
        drafts = drafter.propose((0, 1), (DRAFTS, DRAFTS - 1))
        for row, draft in enumerate(drafts):
            seen, told = states[row][bases[row] : ends[row]], texts[row][bases[row] + 1 : ends[row] + 1]
            assert draft.tokens == made.reference.drafts(seen, told, DRAFTS - row), (row, sizes)
    assert [draft.tokens for draft in drafter.propose((0, 1), (1, 1))] == [(), ()]  # nothing new is known of them


def test_pages_that_run_out(made: Made) -> None:
    """Whoever finds none begins anew where it is, or is given no draft; what a row leaves serves others."""
    drafter, tokens = drafter_of(made.path, pages=3), text(4)
    states = made.reference.hidden(tokens)

    def drafted(row: int, start: int, count: int) -> list[int]:
        drafter.extend(row, tokens[start + 1 : start + count + 1], states[start : start + count])
        return list(drafter.propose((row,), (DRAFTS,))[0].tokens)

    def expected(start: int, count: int) -> list[int]:
        return made.reference.drafts(states[start : start + count], tokens[start + 1 : start + count + 1], DRAFTS)

    for row in range(3):
        drafter.begin(row, tokens[:1], ())
    drafted(0, 0, 40)
    assert drafter.free_pages == 0
    assert drafted(1, 0, 5) == []
    assert drafted(0, 40, 8) == expected(40, 8)  # a fourth page would be needed
    assert drafter.free_pages == 2
    drafter.end(0)
    drafter.end(0)
    assert drafter.free_pages == 3
    assert drafted(1, 5, 3) == expected(0, 8)  # what waited is taken up
    drafter.extend(1, tokens[9:11])  # as of a step that was launched ahead
    assert drafter.propose((1,), (DRAFTS,))[0].tokens == ()
    seen, told = torch.cat((states[:8], states[10:12])), [*tokens[1:9], *tokens[11:13]]
    assert drafted(1, 10, 2) == made.reference.drafts(seen, told, DRAFTS)
    drafter.begin(1, tokens[:1], ())  # it has been here before
    assert drafted(1, 3, 4) == expected(3, 4)


def test_two_ranks_draft_as_one_does(made: Made) -> None:
    parts: list[torch.Tensor | None] = [None, None]
    barrier, tokens = threading.Barrier(2), text(6)
    states = made.reference.hidden(tokens)

    def rank(number: int) -> tuple[Sequence[int], Sequence[int]]:
        torch.set_num_threads(1)
        drafter = MtpDrafter(runner_of(made.path, group=Together(number, parts, barrier)), PAGES, 0.0)
        drafter.begin(0, tokens[:1], ())
        drafter.extend(0, tokens[1:41], states[:40])
        [first] = drafter.propose((0,), (DRAFTS,))
        drafter.extend(0, tokens[41:44], states[40:43])
        [then] = drafter.propose((0,), (DRAFTS,))
        return first.tokens, then.tokens

    expected = tuple(made.reference.drafts(states[:end], tokens[1 : end + 1], DRAFTS) for end in (40, 43))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [expected, expected]


def test_a_draft_ends_before_what_is_not_likely(made: Made) -> None:
    drafter, tokens = drafter_of(made.path, least=2.0), text(5)
    states = made.reference.hidden(tokens)
    drafter.begin(0, tokens[:1], ())
    drafter.extend(0, tokens[1:31], states[:30])
    [draft] = drafter.propose((0,), (DRAFTS,))
    assert draft.tokens == made.reference.drafts(states[:30], tokens[1:31], 1) and 0 <= draft.strength <= 7


def test_a_head_that_is_not_whole_is_named(made: Made, tmp_path: Path) -> None:
    tensors = load_file(made.path / "model.safetensors")
    [missing] = [name for name in tensors if "hnorm" in name or "pre_fc_norm_hidden" in name]
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    save_file({name: value for name, value in tensors.items() if name != missing}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"hnorm\.weight is missing"):
        runner_of(tmp_path)
    with pytest.raises(ConfigError, match="loaded without its MTP head"):
        MtpDrafter(runner_of(tmp_path, mtp=False), PAGES)
    assert open_checkpoint(tmp_path).fingerprint == open_checkpoint(made.path).fingerprint


def test_matrices_of_the_heads_own(made: Made, tmp_path: Path) -> None:
    """The files may repeat embedding and output matrix, or bring others."""
    tensors = load_file(made.path / "model.safetensors")
    config = open_checkpoint(made.path).config
    prefix = f"model.layers.{config.layers}."
    (tmp_path / "config.json").write_text((made.path / "config.json").read_text())
    tensors[prefix + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[prefix + "shared_head.head.weight"] = -tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    head, plain = runner_of(tmp_path).mtp, runner_of(made.path).mtp
    assert head is not None and plain is not None
    assert head.embed is head.model.embed and head.head is not head.model.head
    x = torch.randn(3, config.hidden_size)
    assert torch.equal(head.logits(x), -plain.logits(x))


def test_the_measured_models_tokens_equal_transformers() -> None:
    """All of its layers are dense, which GLM-4.5 says by `first_k_dense_replace` alone."""
    path = Path(__file__).parents[2] / "examples/measured-model"
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.experts is None and checkpoint.has_mtp
    prompt = text(7, 40)
    assert_matches_reference(path, prompt, Stepper(path).answer(prompt, 12))
