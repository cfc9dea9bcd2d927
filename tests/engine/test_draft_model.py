"""A draft model against the model alone: its drafts, whatever was accepted before, what it reads at once, its pages."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from kvmesh.drafts.drafter import NO_DRAFT, Drafter
from kvmesh.engine import draft_model
from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.draft_model import FEW, FirstRanksDrafter, ModelDrafter, check_draft_model
from kvmesh.engine.parallel import Group
from kvmesh.engine.runner import Runner, shard_layout
from kvmesh.errors import ConfigError
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.qwen3_next import make_qwen3_next

BLOCK, MOST = 4, 5


def drafter_of(path: Path, pages: int = 64, vocab: int = 1 << 20) -> ModelDrafter:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(path)
    layout = shard_layout(checkpoint.config, "float32", BLOCK)
    runner = Runner(checkpoint, "float32", "cpu", BLOCK, torch.full((pages, *layout.shape), torch.nan))
    return ModelDrafter(runner, vocab, least=0.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("draft") / "m", vocab_size=300, hidden_size=32, intermediate_size=32)


def answer(engine: LocalEngine, text: list[int]) -> list[int]:
    [made] = engine.generate([text], GenerateParams(max_tokens=MOST))
    return [token.sampled.token_id for token in made.tokens]


@pytest.mark.parametrize("family", ["qwen3", "kimi_k2", "gemma3"])
def test_drafts_are_what_the_model_says_whatever_was_accepted(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", **FAMILY_ZOO[family])
    drafter, alone = drafter_of(path), LocalEngine(path, block_tokens=BLOCK, num_pages=64)
    noise = random.Random(5)
    texts = {1: [5, 9, 3, 7], 2: [8, 1], 3: [2] * 11}
    for handle, text in texts.items():
        drafter.begin(handle, text[:-1], text[-1:])
    for _ in range(7):
        asked = noise.sample(sorted(texts), noise.randint(1, 3))
        for handle, draft in zip(asked, drafter.propose(asked, [MOST] * len(asked)), strict=True):
            wanted = answer(alone, texts[handle])
            assert list(draft.tokens)[: len(wanted)] == wanted, "an end of the text does not end a draft"
            kept = noise.randint(0, MOST)
            made = [*draft.tokens[:kept], noise.randrange(200)]  # what the target has sampled in its place
            drafter.extend(handle, made)
            texts[handle] += made
    for handle in texts:
        drafter.end(handle)
    assert drafter.free_pages == 64


def test_what_was_accepted_is_not_computed_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = drafter_of(tiny)
    read = spans_read(drafter, monkeypatch)
    drafter.begin(1, [1, 2, 3], [4])
    [draft] = drafter.propose([1], [4])
    drafter.extend(1, [*draft.tokens, 7])
    drafter.propose([1], [4])
    drafter.extend(1, [draft.tokens[0] + 1])
    drafter.propose([1], [4])
    drafter.propose([1], [4])
    assert [(span.start, span.length) for spans in read for span in spans] == [(0, 4), (7, 2), (9, 1), (9, 1)]


def spans_read(drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch) -> list[list[TokenSpan]]:
    """Returns what is read each time, as it happens."""
    read: list[list[TokenSpan]] = []
    plan = drafter.backend.plan_prefill

    def planned(spans: Any) -> Any:
        read.append(list(spans))
        return plan(spans)

    monkeypatch.setattr(drafter.backend, "plan_prefill", planned)
    return read


def test_long_prompts_are_read_in_parts_beside_rows_that_draft(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MOST_CATCH_UP", 10)
    drafter = drafter_of(tiny)
    read = spans_read(drafter, monkeypatch)
    long = [random.Random(1).randrange(250) for _ in range(25)]
    drafter.begin(1, long, [1])
    drafter.begin(2, long, [2])
    drafter.begin(3, [3, 4], [5])
    found = []
    for _ in range(6):
        found.append([len(draft.tokens) for draft in drafter.propose([1, 2, 3], [2, 2, 2])])
        drafter.extend(3, [9])
    assert found == [[0, 0, 2], [0, 0, 2], [2, 0, 2], [2, 0, 2], [2, 2, 2], [2, 2, 2]]
    assert max(sum(span.length for span in spans if span.length > FEW) for spans in read) <= 10
    whole = drafter_of(tiny)
    whole.begin(1, long, [1])
    monkeypatch.setattr(draft_model, "MOST_CATCH_UP", 1000)
    assert whole.propose([1], [4]) == drafter.propose([1], [4])


def test_rows_without_pages_draft_nothing(tiny: Path) -> None:
    drafter = drafter_of(tiny, pages=6)
    drafter.begin(1, [1] * 11, [2])  # 3 pages, and one for drafts
    drafter.begin(2, [1] * 11, [3])
    assert [len(draft.tokens) for draft in drafter.propose([1, 2], [3, 3])] == [3, 0]
    assert drafter.free_pages == 2
    drafter.extend(1, [5] * 10)
    drafter.propose([1], [3])
    assert drafter.free_pages == 0
    drafter.extend(1, [5] * 4)
    assert drafter.propose([1], [3]) == [NO_DRAFT], "it finds no page more"
    assert drafter.free_pages == 6, "and keeps none for nothing"
    assert [len(draft.tokens) for draft in drafter.propose([2, 1], [3, 3])] == [3, 0]
    drafter.end(2)
    drafter.end(1)
    drafter.end(1)
    assert drafter.free_pages == 6
    drafter.begin(3, [1] * 5000, [2])
    assert drafter.propose([3], [3]) == [NO_DRAFT]


def test_no_token_is_drafted_that_the_target_does_not_know(tiny: Path) -> None:
    drafter = drafter_of(tiny, vocab=7)
    drafter.begin(1, [1, 2], [3])
    assert max(drafter.propose([1], [7])[0].tokens) < 7


# ── what may draft for what ──────────────────────────────────────────────────────────────────────


def test_a_model_that_cannot_draft_is_refused(tiny: Path, tmp_path: Path) -> None:
    target = open_checkpoint(tiny)
    other = make_checkpoint(tmp_path / "other", vocab_size=320)
    file = other / "tokenizer.json"
    told = json.loads((tiny / "tokenizer.json").read_text())
    file.write_text(json.dumps(told))
    check_draft_model(open_checkpoint(other), target)  # filled up to another size, the tokens are the same
    vocab = told["model"]["vocab"]
    first, second = list(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"draft_model='.*': its token \d+ is .*: both must have the same tokenizer"):
        check_draft_model(open_checkpoint(other), target)
    file.unlink()
    with pytest.raises(ConfigError, match=r"has 320 tokens and .* 300, and not both have a tokenizer\.json"):
        check_draft_model(open_checkpoint(other), target)
    states = make_qwen3_next(tmp_path / "states")
    with pytest.raises(ConfigError, match="Qwen3NextForCausalLM keeps recurrent states"):
        check_draft_model(open_checkpoint(states), target)


# ── several ranks ────────────────────────────────────────────────────────────────────────────────


class Summed(Group):
    """Two ranks in one process: the first writes down what it gives, the second gets it."""

    size = 2

    def __init__(self, told: list[torch.Tensor], rank: int) -> None:
        self.told, self.rank = told, rank

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank == 0:
            self.told.append(x.clone())
            return x
        return x + self.told.pop(0)


def test_the_first_rank_drafts_for_all(tiny: Path) -> None:
    told: list[torch.Tensor] = []
    own = drafter_of(tiny)
    both = [
        FirstRanksDrafter("draft", drafter, Summed(told, rank), torch.device("cpu"))
        for rank, drafter in enumerate((own, None))
    ]
    everyone: list[Drafter] = [*both, drafter_of(tiny)]
    for drafter in everyone:
        drafter.begin(1, [1, 2], [3])
        drafter.begin(2, [1] * 5000, [3])
        drafter.extend(1, [4])
    drafts = [drafter.propose([1, 2], [4, 2]) for drafter in everyone]
    assert drafts[0] == drafts[1] == drafts[2] and len(drafts[0][0].tokens) == 4 and drafts[0][1] == NO_DRAFT
    for one in both:
        one.end(1)
        one.end(2)
    assert own.free_pages == 64
