"""A row with a draft is computed as if its tokens came one by one, for each kind of cache group: plain, latent, windows
and sinks, states. The drafts are right, wrong from some token on, or wrong at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kvmesh.engine.batch import DecodeBatch, DecodeInput, PrefillInput, SampleParams
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.cpu import native
from kvmesh.engine.runner import Runner, shard_layout
from kvmesh.ranks.worker.verification import RowVariants, accepted, expand, sampled_at, until_stop

BLOCK, LONG = 4, 24
Zoo = Callable[[str], Path]


class One:
    """One model over its pages, one request at a time."""

    def __init__(self, path: Path, block_tokens: int = BLOCK) -> None:
        checkpoint = open_checkpoint(path)
        layout = shard_layout(checkpoint.config, "float32", block_tokens)
        self.pages = torch.full((24, *layout.shape), torch.nan)
        self.runner = Runner(checkpoint, "float32", "cpu", block_tokens, self.pages)

    def begin(self, prompt: list[int], pages: tuple[int, ...], sample: SampleParams) -> int:
        [first] = self.runner.prefill([PrefillInput(prompt, 0, pages, sample)])
        assert first is not None
        return first.token_id


def alone(one: One, prompt: list[int], sample: dict[str, float]) -> list[int]:
    pages = tuple(range(12))
    params = SampleParams(**sample)  # type: ignore[arg-type]
    answer = [one.begin(prompt, pages, params)]
    while len(answer) < LONG:
        params.token_index = len(answer)
        row = DecodeInput(answer[-1], len(prompt) + len(answer) - 1, pages, params)
        answer.append(one.runner.decode([row])[0].token_id)
    return answer


def drafted(one: One, prompt: list[int], sample: dict[str, float], truth: list[int], right: Sequence[int]) -> list[int]:
    """Answers with drafts of five tokens, of which the first `right[step]` are those that come."""
    pages, beside = tuple(range(12)), tuple(range(12, 20))
    params, other = SampleParams(**sample), SampleParams()  # type: ignore[arg-type]
    answer, step = [one.begin(prompt, pages, params)], 0
    one.begin([3, 1, 2], beside, other)
    variants, steps = RowVariants(5), 0
    while len(answer) < LONG:
        at = len(prompt) + len(answer) - 1
        good = right[step % len(right)]
        draft = (truth + [7] * 6)[len(answer) : len(answer) + 5]
        draft[good:] = [(token + 1) % 200 for token in draft[good:]]
        # Beside it is a row without a draft, before and behind it.
        rows = [
            DecodeInput(5, 3, beside, other),
            DecodeInput(answer[-1], at, pages, params),
            DecodeInput(6, 4, tuple(range(20, 24)), SampleParams()),
        ]
        batch = DecodeBatch.of(rows)
        batch.indices[1] = len(answer)
        wide = expand(batch, [[], draft, []], [[], variants.of(1, params, draft), []])
        _, chosen = one.runner.step((), wide.batch)
        made = sampled_at(chosen, wide.firsts, [[], draft, []])
        assert len(made[0]) == len(made[2]) == 1 and len(made[1]) >= 1 + (good if len(answer) + good < LONG else 0)
        answer += made[1]
        step, steps = step + 1, steps + 1
    assert steps < LONG - 4
    return answer[:LONG]


KINDS = ["qwen3", "deepseek_v3", "gpt_oss", "gemma3"]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sample", [{}, {"temperature": 0.9, "top_k": 20, "seed": 5}], ids=["greedy", "sampled"])
def test_a_draft_is_computed_as_its_tokens_one_by_one(
    zoo: Zoo, kind: str, backend: str, sample: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "torch":
        monkeypatch.setattr(native, "loaded", lambda: False)
    elif not native.loaded():
        pytest.skip("the operators are not built")
    one, prompt = One(zoo(kind)), [9, 8, 7, 9, 8, 11]
    truth = alone(one, prompt, sample)
    one.pages.fill_(torch.nan)
    one.pages[20:] = 0  # of the row that nobody began
    assert drafted(one, prompt, sample, truth, (5, 0, 2, 4, 1)) == truth


def test_what_is_kept_of_drafts_has_the_distribution_of_the_model(zoo: Zoo) -> None:
    """Pearson's chi-square of the first token, and of the second where a draft foresaw the first, over 4,000 seeds:
    what is kept is kept because of its noise, and the next token must not follow from that."""
    one, pages, prompt, kinds = One(zoo("qwen3")), tuple(range(8)), [9, 8, 7, 9, 8, 11], 5
    sample = {"temperature": 1.7, "top_k": kinds}
    [best] = one.runner.prefill([PrefillInput(prompt, 0, pages, SampleParams(logprobs=8))])
    assert best is not None
    draft, at, rows = [best.top[0][0]], len(prompt) - 1, 200
    [behind] = one.runner.prefill([PrefillInput(draft, at + 1, pages, SampleParams(logprobs=8))])
    assert behind is not None
    first, second, variants = [0] * kinds, [0] * kinds, RowVariants(1)
    for start in range(0, 4_000, rows):
        params = [SampleParams(**sample, seed=start + row) for row in range(rows)]  # type: ignore[arg-type]
        batch = DecodeBatch.of([DecodeInput(prompt[-1], at, pages, one) for one in params])
        wide = expand(batch, [draft] * rows, [variants.of(start + row, p, draft) for row, p in enumerate(params)])
        _, chosen = one.runner.step((), wide.batch)
        for made in sampled_at(chosen, wide.firsts, [draft] * rows):
            first[[token for token, _ in best.top[:kinds]].index(made[0])] += 1
            if len(made) > 1:
                second[[token for token, _ in behind.top[:kinds]].index(made[1])] += 1
    assert sum(second) > 400
    for counts, top in ((first, best.top), (second, behind.top)):
        weights = [math.exp(logprob / sample["temperature"]) for _, logprob in top[:kinds]]
        expected = [sum(counts) * weight / sum(weights) for weight in weights]
        square = sum((a - b) ** 2 / b for a, b in zip(counts, expected, strict=True))
        assert square < 18.47, f"{counts} for {expected}"  # 4 degrees of freedom: one in a thousand


def test_what_is_accepted() -> None:
    assert accepted([4, 5, 6], [4, 5]) == 2
    assert accepted([4, 5, 6], [4, 9]) == 1
    assert accepted([4], []) == 0
    assert until_stop([1, 2, 3], {2}) == [1]
    assert until_stop([1, 2, 3], ()) == [1, 2, 3]
