"""Families beyond those of test_engine.py on a CUDA device, through graphs and pieces, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.gpu import NEEDS_GPU
from tests.gpu.test_engine import MODELS
from tests.support.checkpoints import FAMILY_ZOO, prompts
from tests.support.reference import assert_matches_reference

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("name", [name for name in FAMILY_ZOO if name not in MODELS])
def test_greedy_tokens_equal_the_reference(zoo: Callable[[str], Path], name: str) -> None:
    """Prompts longer than every window; chunks that end within blocks."""
    if name == "minimax_m2" and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("transformers 5.17 rotates other parts of MiniMax M2's heads: needs transformers 5.24")
    path = zoo(name)
    local = LocalEngine(path, device="cuda", block_tokens=16, num_pages=200, prefill_chunk_tokens=53)
    runner = local.runner
    print(name, "capturable" if runner.attention.capturable else "launched")
    for captured in (runner.graphs, runner.pieces):
        assert captured is None or not captured.failed
    asked = prompts(6, 300, seed=13, low=83, high=130)
    for prompt, answer in zip(asked, local.generate(asked, GenerateParams(max_tokens=12)), strict=True):
        assert_matches_reference(path, prompt, answer.token_ids)
