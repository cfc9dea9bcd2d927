"""Log-probabilities of a prompt's own tokens are transformers', in one piece, in chunks and in slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.batch import PrefillInput, SampledToken, SampleParams
from kvmesh.engine.runner import NOBODY
from kvmesh.engine.sampling import prompt_scores
from kvmesh.engine.sampling.prompt_scores import TokenScores
from kvmesh.errors import InvalidRequest, NonFiniteLogits
from tests.support.checkpoints import prompts
from tests.support.engine.stepper import Stepper
from tests.support.paths import ROOT
from tests.support.reference import reference_logits

TOP = 3


def scored(stepper: Stepper, prompt: Sequence[int], chunks: Sequence[int] = ()) -> TokenScores:
    """All tokens of a prompt but the first, computed in `chunks` and the rest, beside a prompt that asks for none."""
    pages, found, start = stepper.take(len(prompt)), list[TokenScores](), 0
    for length in (*chunks, len(prompt)):
        piece = prompt[start : start + length]
        end = start + len(piece)
        mine = PrefillInput(piece, start, pages, SampleParams() if end == len(prompt) else None)
        mine.targets, mine.top = prompt[start + 1 : end + 1], TOP
        other = PrefillInput(prompt[:5], 0, stepper.take(5))
        told: dict[int, TokenScores] = {}
        first, _ = stepper.runner.step([other, mine], NOBODY, on_scores=told.__setitem__)
        assert list(told) == [1] and (first[1] is not None) == (end == len(prompt))
        found.append(told[1])
        start = end
    return TokenScores(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


@pytest.mark.parametrize("name", ["demo-model", "llama-gqa4-llama3", "gemma2"])
def test_as_transformers_has_them(zoo: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / "examples" / name if name == "demo-model" else zoo(name)
    stepper = Stepper(path)
    [prompt] = prompts(1, stepper.checkpoint.config.vocab_size, seed=5, low=61, high=62)
    whole = scored(stepper, prompt)
    # Slices of three tokens, which end inside chunks.
    monkeypatch.setattr(prompt_scores, "SLICE_BYTES", 4 * 3 * stepper.checkpoint.config.vocab_size)
    cut = scored(stepper, prompt, (1, 16, 7))

    raw = reference_logits(path, prompt)[:-1].log_softmax(-1)
    own = raw.gather(1, torch.tensor(prompt[1:])[:, None])
    best = raw.topk(TOP)
    expected = torch.cat((own, best.values), 1).numpy()
    for found in (whole, cut):
        assert found.logprobs.shape == (len(prompt) - 1, 1 + TOP)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)
        clear = (best.values[:, :-1] - best.values[:, 1:]).min(1).values.numpy() > 1e-3
        np.testing.assert_array_equal(found.top_ids[clear], best.indices.numpy()[clear])
        exact, above = found.ranks, (raw > own + 1e-4).sum(1).numpy()
        assert ((exact > above) & (exact <= (raw > own - 1e-4).sum(1).numpy() + 1)).all()


def test_what_cannot_be_scored(zoo: Callable[[str], Path]) -> None:
    """Targets outside the vocabulary, and a prompt in whose logits something is not a number: of two, it alone."""
    stepper = Stepper(zoo("llama-gqa4-llama3"))
    pages = stepper.take(16)
    with pytest.raises(InvalidRequest, match="token ids of this model"):
        stepper.runner.prefill([PrefillInput([1, 2], 0, pages, targets=[2, 1 << 20])])
    head = stepper.runner.model.logits
    calls = iter((1.0, float("nan"), 1.0, float("nan")))
    stepper.runner.model.logits = lambda hidden: head(hidden) * next(calls)  # type: ignore[method-assign]
    items = [PrefillInput([1, 2], 0, stepper.take(2), targets=[2], top=1) for _ in range(2)]
    told: list[int] = []
    with pytest.raises(NonFiniteLogits) as error:
        stepper.runner.step(items, NOBODY, on_scores=lambda at, _: told.append(at))
    assert (error.value.rows, told) == ((1,), [0])
    stepper.runner.tolerant = True  # a step over states is not computed again
    first, _ = stepper.runner.step(items, NOBODY, on_scores=lambda at, _: told.append(at))
    assert (first, told) == ([None, SampledToken(-1)], [0, 0])
