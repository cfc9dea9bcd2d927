"""What Hugging Face transformers answers in float32: the oracle of every greedy comparison."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

MARGIN = 1e-4  # a step may differ where the reference's own best two logits are closer than this


@functools.lru_cache(maxsize=16)
def _load(path: str, dtype: torch.dtype = torch.float32) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def reference_logits(path: str | Path, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """float32 `[len(token_ids), vocab]`: the logits after each token, of a model that computes in `dtype`."""
    logits: torch.Tensor = _load(str(path), dtype)(torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return logits


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
