"""MTP heads of DeepSeek-V3, GLM-4.5 and Qwen3-Next against plain torch: logits, and drafts in uneven pieces."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.cache_memory import group_shapes, zeroed_memory
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.mtp import MtpDrafter, MtpRow
from kvmesh.engine.runner import Runner
from kvmesh.errors import CheckpointError, ConfigError, InternalError
from tests.support.checkpoints import prompts
from tests.support.engine.mtp import FAMILIES, MtpReference, make_mtp

BLOCK, PAGES, TOKENS, DRAFTS = 16, 12, 70, 3


class Made(NamedTuple):
    path: Path
    reference: MtpReference


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(*make_mtp(request.param, tmp_path_factory.mktemp(request.param)))


def runner_of(path: Path, *, mtp: bool = True) -> Runner:
    checkpoint, cpu = open_checkpoint(path), torch.device("cpu")
    memory = zeroed_memory(shapes := group_shapes(checkpoint.config, torch.float32, BLOCK), [4] * len(shapes), cpu)
    return Runner(checkpoint, "float32", "cpu", BLOCK, memory, mtp=mtp)


def drafter_of(path: Path, pages: int = PAGES) -> MtpDrafter:
    return MtpDrafter(runner_of(path), pages)


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
    assert logits.argmax(-1).unique().numel() > 20  # the head says something


def test_two_requests_in_uneven_pieces(made: Made) -> None:
    """One from its first token on, one from its 20th: after each piece the drafts are those of the reference, which has
    the same tokens in its sight; drafts that were not accepted leave nothing behind."""
    drafter = drafter_of(made.path)
    rows = {"a": (text(2), 0), "b": (text(3), 20)}
    states = {key: made.reference.hidden(tokens) for key, (tokens, _) in rows.items()}
    ends = {key: base for key, (_, base) in rows.items()}
    for sizes in ((9, 1), (1, 4), (4, 2), (30, 3), (1, 1)):
        told = []
        for key, size in zip(rows, sizes, strict=True):
            tokens, start = rows[key][0], ends[key]
            told.append(MtpRow(key, start, states[key][start : start + size], tokens[start + 1 : start + size + 1]))
            ends[key] += size
        drafts = drafter.draft(told, DRAFTS)
        for row, (key, (tokens, base)) in enumerate(rows.items()):
            seen = states[key][base : ends[key]]
            expected = made.reference.drafts(seen, tokens[base + 1 : ends[key] + 1], DRAFTS)
            assert drafts[row].tolist() == expected, (key, sizes)


def test_pages_that_run_out(made: Made) -> None:
    """Whoever finds none begins anew where it is, or is given no drafts; what is forgotten serves others."""
    drafter, tokens = drafter_of(made.path, pages=3), text(4)
    states = made.reference.hidden(tokens)

    def told(key: str, start: int, count: int) -> MtpRow:
        return MtpRow(key, start, states[start : start + count], tokens[start + 1 : start + count + 1])

    drafter.draft([told("a", 0, 40)], DRAFTS)
    assert drafter.free_pages == 0
    assert drafter.draft([told("b", 0, 5)], DRAFTS).tolist() == [[-1] * DRAFTS]
    again = drafter.draft([told("a", 40, 8)], DRAFTS)  # would need a fourth page
    assert again[0].tolist() == made.reference.drafts(states[40:48], tokens[41:49], DRAFTS)
    assert drafter.free_pages == 2
    drafter.forget("a")
    drafter.forget("a")
    assert drafter.free_pages == 3
    # A request that went on without the drafter begins anew, too.
    drafter.draft([told("c", 0, 5)], DRAFTS)
    late = drafter.draft([told("c", 9, 2)], DRAFTS)
    assert late[0].tolist() == made.reference.drafts(states[9:11], tokens[10:12], DRAFTS)
    with pytest.raises(InternalError, match="1 tokens are told of 2 answers"):
        drafter.draft([MtpRow("d", 0, states[:2], tokens[1:2])], DRAFTS)


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
