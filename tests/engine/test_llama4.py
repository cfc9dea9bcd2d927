"""What greedy tokens of Llama 4 and gpt-oss would hide: log-probabilities of every position, in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvmesh.engine.config_positions import NopeConfig
from kvmesh.engine.models.llama4 import QueryGrowth
from tests.support.checkpoints import prompts
from tests.support.engine.stepper import Stepper
from tests.support.reference import reference_logits


@pytest.mark.parametrize("name", ["llama4", "llama4-plain", "gpt_oss"])
def test_log_probabilities_of_every_position_are_transformers(name: str, zoo: Callable[[str], Path]) -> None:
    """Positions on both sides of each chunk's and each step's end, all but the first few decoded."""
    [tokens] = prompts(1, 300, seed=31, low=96, high=97)
    _, start, told = Stepper(zoo(name)).forced(tokens, 5)
    expected = reference_logits(zoo(name), tokens)[start - 1 :].log_softmax(-1)
    found = torch.tensor([[of[token] for token in range(expected.shape[1])] for of in told])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_queries_grow_at_the_last_token_of_a_step() -> None:
    cos, sin = QueryGrowth(NopeConfig((0,), step=8, growth=0.5), 4, torch.float32)(torch.tensor([0, 6, 7, 14, 15]))
    wanted = [1.0, 1.0, *[1 + 0.5 * math.log(2)] * 2, 1 + 0.5 * math.log(3)]
    torch.testing.assert_close(cos, torch.tensor(wanted)[:, None, None].expand(5, 1, 4))
    assert not sin.any()
