"""What a rank chooses on a real GPU: as many pages as fit beside the largest step, and graphs for all rows."""

from __future__ import annotations

from pathlib import Path

import torch

from kvmesh.ranks.sizing import CUDA_SHARE, STEP_KEYS
from tests.gpu import NEEDS_GPU
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_driver import rank

pytestmark = NEEDS_GPU
BY_DEVICE = dict.fromkeys(STEP_KEYS, 0)


async def test_a_rank_that_is_told_nothing_fills_its_part_of_the_gpu(tmp_path: Path) -> None:
    """KV so wide that all rows could never fill the GPU; the host has few blocks."""
    path = make_checkpoint(
        tmp_path / "wide", num_hidden_layers=4, num_key_value_heads=4, head_dim=256, dtype=torch.bfloat16,
        max_position_embeddings=65_536, tokenizer=False,
    )  # fmt: skip
    _, total = torch.cuda.mem_get_info()
    settings = {"dtype": "auto", "num_pages": 0, "num_extents": 8, "steps": BY_DEVICE, "device_instances": 2}
    async with rank("a", path, device="cuda", **settings) as a:
        ready = a.client.ready
        free, _ = torch.cuda.mem_get_info()
    assert ready.dtype == "bfloat16" and ready.steps["max_running"] == 256
    assert "CUDA graphs of 1, 2, 4," in ready.settings and "256 rows" in ready.settings, ready.settings
    assert "pieces of steps that compute prompts, 32 to 2,048 tokens" in ready.settings, ready.settings
    part = total * CUDA_SHARE / 2
    assert 0.8 * part < ready.num_pages * ready.shard_bytes < part, ready.settings
    assert free > total - part - (2 << 30), ready.settings
