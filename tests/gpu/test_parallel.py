"""Ranks on GPUs of their own: decode steps and pieces are captured with the sums over NCCL in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from kvmesh.engine.axes import Axes
from kvmesh.engine.batch import DecodeBatch, DecodeInput, PrefillInput, SampleParams
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.parallel import RankMesh
from kvmesh.engine.runner import Runner, shard_layout
from tests.gpu import NEEDS_GPU
from tests.support.checkpoints import prompts
from tests.support.reference import assert_matches_reference

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks over NCCL need two NVIDIA GPUs"),
]
BLOCK, ANSWER = 16, 12


def rank_main(rank: int, folder: Path, path: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    checkpoint = open_checkpoint(path)
    mesh = RankMesh(Axes(tp=2), rank, str(folder / "meet"), device, 60)
    layout = shard_layout(checkpoint.config, "float32", BLOCK, mesh.axes, rank)
    pages = torch.zeros((32, *layout.shape), device=device)
    runner = Runner(checkpoint, "float32", device, BLOCK, pages, mesh)
    mesh.connect(60)
    runner.use_pages(pages, cuda_graphs=True, max_rows=8, max_tokens=64)
    assert runner.graphs is not None and runner.pieces is not None
    captured = (runner.graphs.sizes, runner.graphs.failed, runner.pieces.sizes, runner.pieces.failed)
    first, second = prompts(2, 300, seed=5, low=40, high=41)
    own = [tuple(range(8)), tuple(range(8, 16))]
    [token] = runner.prefill([PrefillInput(first, 0, own[0], SampleParams())])
    assert token is not None
    row, answer = DecodeInput(token.token_id, len(first), own[0], SampleParams()), [token.token_id]
    for step in range(ANSWER):
        items = [PrefillInput(second[20 * step : 20 * (step + 1)], 20 * step, own[1])] if step < 2 else []
        _, chosen = runner.step(items, DecodeBatch.of([row]))
        row.token_id, row.position = int(chosen.token_ids[0]), row.position + 1
        answer.append(row.token_id)
    torch.save((captured, answer), folder / f"{rank}.pt")
    runner.drop_graphs()
    mesh.close()


def test_ranks_replay_together(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    path = zoo("llama-gqa4-llama3")
    spawn(rank_main, (tmp_path, path), nprocs=2)  # type: ignore[no-untyped-call]
    told = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    assert told[0] == told[1]
    (captured, answer), _ = told
    assert captured == ((1, 2, 4, 8), "", (32, 64), "")
    assert_matches_reference(path, prompts(2, 300, seed=5, low=40, high=41)[0], answer)
