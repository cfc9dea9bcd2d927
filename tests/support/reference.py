"""What Hugging Face transformers answers in float32: the oracle of every greedy comparison."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MARGIN = 1e-4  # a step may differ where the reference's own best two logits are closer than this
FARTHER = 1.5  # a bfloat16 engine may be so many times as far from float32 as the bfloat16 reference, on average,
FARTHEST = 3.0  # ... and where either is farthest,
APART = 0.25  # ... and so far from the bfloat16 reference on average (log-probability)

Forced = tuple[Sequence[int], int, Sequence[Mapping[int, float]]]
"""Token ids, `start`, and what an engine told with them in its context: the i-th entry has log-probabilities by token
id, of some or all tokens that may follow `token_ids[: start + i]`."""


@functools.lru_cache(maxsize=16)
def reference_model(path: str, dtype: torch.dtype = torch.float32) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()


@functools.lru_cache(maxsize=64)
@torch.inference_mode()
def _logits(path: str, token_ids: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    logits: torch.Tensor = reference_model(path, dtype)(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


def reference_logits(path: str | Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float32 `[len(token_ids), vocab]`: the logits after each token, of a model that computes in `dtype`.
    Nobody may write into them: who asks again gets the same."""
    return _logits(str(path), tuple(token_ids), dtype)


def reference_greedy(path: str | Path, prompt: Sequence[int], count: int) -> list[int]:
    """The reference's own greedy continuation, end-of-sequence ignored."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(path, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def assert_matches_reference(path: str | Path, prompt: Sequence[int], tokens: Sequence[int]) -> None:
    """`tokens` is the greedy continuation of `prompt` by the reference model at `path`.

    One teacher-forced pass: after prompt + tokens[:i] the reference must choose tokens[i], or hold its own best two
    logits within MARGIN and tokens[i] among those that close to the best."""
    assert tokens, "nothing to compare"
    logits = reference_logits(path, [*prompt, *tokens])[len(prompt) - 1 : -1]
    best = logits.topk(2)
    for i, token in enumerate(tokens):
        first, second = best.values[i].tolist()
        given = float(logits[i, token])
        if token != int(best.indices[i, 0]) and not (first - second <= MARGIN and first - given <= MARGIN):
            raise AssertionError(
                f"token {i} of {len(tokens)}: got {token} (reference logit {given:.5f}), reference chooses "
                f"{int(best.indices[i, 0])} ({first:.5f}), next best {second:.5f}; prompt of {len(prompt)} tokens"
            )


def assert_as_close_as_reference(path: str | Path, answers: Iterable[Forced]) -> None:
    """A bfloat16 engine is about as close to the float32 reference at `path` as the bfloat16 reference is.

    Teacher-forced: the references have the same tokens in their context as the engine had. Both bfloat16 engines round
    at every step, so each is compared with float32, by the mean distance of the log-probabilities that were told."""
    ours, theirs, apart = [], [], []
    for token_ids, start, told in answers:
        exact, rounded = (
            reference_logits(path, token_ids, dtype)[start - 1 :].log_softmax(-1)
            for dtype in (torch.float32, torch.bfloat16)
        )
        for i, found in enumerate(told):
            ids, own = list(found), torch.tensor(list(found.values()))
            ours.append(float((own - exact[i, ids]).abs().mean()))
            theirs.append(float((rounded[i, ids] - exact[i, ids]).abs().mean()))
            apart.append(float((own - rounded[i, ids]).abs().mean()))
    count = len(ours)
    assert count, "nothing to compare"
    assert sum(ours) <= FARTHER * sum(theirs), f"on average {sum(ours) / count} from float32, not {sum(theirs) / count}"
    assert sum(apart) <= APART * count, f"on average {sum(apart) / count} from the bfloat16 reference"
    assert max(ours) <= FARTHEST * max(theirs), f"at one token {max(ours)} from float32, not {max(theirs)}"


def assert_scores_match_reference(path: str | Path, prompt: Sequence[int], told: Any) -> None:
    """`told`, a PromptLogprobs of the protos, is what the float32 reference at `path` says of the tokens of `prompt`
    but the first."""
    count = len(prompt) - 1
    logprobs = torch.frombuffer(bytearray(told.logprobs), dtype=torch.float32).reshape(count, -1)
    ranks = torch.frombuffer(bytearray(told.ranks), dtype=torch.int32)
    raw = reference_logits(path, prompt)[:-1].log_softmax(-1)
    own = raw.gather(1, torch.tensor(prompt[1:])[:, None])
    best = raw.topk(logprobs.shape[1] - 1)
    torch.testing.assert_close(logprobs, torch.cat((own, best.values), 1), rtol=0, atol=MARGIN)
    low, high = (raw > own + MARGIN).sum(1) + 1, (raw > own - MARGIN).sum(1)
    assert ((low <= ranks) & (ranks <= high)).all()
    if told.top_ids:
        ids = torch.frombuffer(bytearray(told.top_ids), dtype=torch.int32).reshape(count, -1)
        torch.testing.assert_close(raw.gather(1, ids.long()), best.values, rtol=0, atol=MARGIN)
