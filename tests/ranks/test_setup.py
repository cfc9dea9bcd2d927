"""What a rank chooses for its device, with a real model and real ranks; a GPU's memory is numbers here."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kvmesh.engine.attention.grouped import GroupedAttention
from kvmesh.engine.cache_memory import group_shapes
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.config_latent import PARTIAL_BYTES, PIECE_TOKENS, WORKSPACE_BYTES
from kvmesh.engine.pieces import PieceGraphs
from kvmesh.engine.runner import DecodeInput, Runner, SampleParams, shard_layout
from kvmesh.errors import ConfigError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.sizing import CUDA_SHARE, GIB, GRAPH_BYTES, MIB, STEP_KEYS, ChosenPages
from kvmesh.ranks.worker import setup as module
from kvmesh.ranks.worker.setup import DeviceUse, RankSetup, largest_step
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.recorded import RecordedCapture
from tests.support.rank_driver import rank

BLOCK = 16
BY_DEVICE = dict.fromkeys(STEP_KEYS, 0)


def told(path: Path, **settings: object) -> m.Configure:
    known: dict[str, object] = {"dtype": "auto", "device": "cpu", "num_pages": 0, "num_extents": 0, "memory_bytes": 0}
    known |= {"instance_id": "a", "incarnation": 1, "rank": 0, "world_size": 1, "model_path": str(path)}
    known |= {"block_tokens": BLOCK, "threads": 1, "max_context_tokens": 0, "transports": ("shm",), "steps": BY_DEVICE}
    return m.Configure(**known | settings)  # type: ignore[arg-type]


async def test_a_rank_that_is_told_nothing_chooses_and_says_why(checkpoint: Path) -> None:
    """As many pages as all rows fill: of a tiny model that is far less than what is free."""
    settings = {"dtype": "auto", "num_pages": 0, "num_extents": 0, "room_bytes": 2 * GIB, "steps": BY_DEVICE}
    async with rank("a", checkpoint, **settings) as a:
        ready = a.client.ready
    assert ready.dtype == "float32" and "the checkpoint has float32" in ready.settings
    assert ready.steps == dict(zip(STEP_KEYS, (512, 512, 256, 64), strict=True))
    assert "prefill_chunk_tokens 512" in ready.settings and "(all by device)" in ready.settings
    assert ready.num_pages == ready.num_extents == 64 * (2048 // BLOCK) + 1
    assert ready.max_context_tokens == 2048
    assert f"{ready.num_pages:,} pages of 16 tokens" in ready.settings
    assert "all that the rows can fill of 2,048 MiB (room_mb" in ready.settings


async def test_a_rank_without_room_says_what_it_needs_before_it_loads(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_mb=0: room_mb.* gives this rank 300 MiB; weights 0, .*MiB more"):
        async with rank("a", checkpoint, num_pages=0, num_extents=0, room_bytes=300 * MIB, steps=BY_DEVICE):
            pass


def test_what_is_named_wins(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    named = dict(zip(STEP_KEYS, (100, 200, 30, 5), strict=True))
    setup = RankSetup(told(checkpoint, dtype="float16", num_pages=9, memory_bytes=1 << 40, steps=named), opened)
    assert (setup.configure.dtype, setup.configure.steps) == ("float16", named)
    layout = shard_layout(opened.config, "float16", BLOCK)
    assert setup.choose_pages(layout, opened).count == 9
    few = RankSetup(told(checkpoint, dtype="float16", memory_bytes=10 * layout.shard_bytes + 1), opened)
    assert few.choose_pages(layout, opened) == ChosenPages(10, "as told")


@pytest.mark.parametrize("operators", [True, False])
def test_on_a_cpu_bfloat16_is_computed_where_it_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operators: bool
) -> None:
    path = make_checkpoint(tmp_path / "half", dtype=torch.bfloat16, tokenizer=False)
    monkeypatch.setattr(module.native, "loaded", lambda: operators)
    assert RankSetup(told(path), open_checkpoint(path)).configure.dtype == ("bfloat16" if operators else "float32")


def gpu(path: Path, monkeypatch: pytest.MonkeyPatch, total: int, free: int, **settings: object) -> RankSetup:
    """Of a GPU that is not here: its memory is these numbers, and it computes on the CPU."""
    monkeypatch.setattr(module, "cuda_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(module, "_device_memory", lambda device: (total, free))
    return RankSetup(told(path, device="cuda", **settings), open_checkpoint(path))


def test_pages_of_a_gpu_are_what_the_largest_step_leaves(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total, part = 4 * GIB, int(4 * GIB * CUDA_SHARE)
    steps = {"prefill_chunk_tokens": 3000, "max_batch_tokens": 0, "max_running": 70}
    setup = gpu(checkpoint, monkeypatch, total, total - MIB, steps=steps, cuda_graphs=False)
    assert setup.profiles and (setup.tokens, setup.rows) == (3000, 70)
    opened = open_checkpoint(checkpoint)
    layout = shard_layout(opened.config, "float32", BLOCK)
    trial = setup.trial_pages(layout)
    assert len(trial) * BLOCK >= 3000
    runner = Runner(opened, "float32", "cpu", BLOCK, trial)
    before = runner.decode([DecodeInput(5, 0, (0,), SampleParams())])
    # 40 MiB are left; of the 500 that went meanwhile 200 are torch's, the others the libraries'.
    use = DeviceUse(total, total - MIB, part - 340 * MIB + trial.nbytes, 200 * MIB, total - MIB - 500 * MIB)
    pages = setup.profiled(runner, layout, lambda: use)
    assert runner.attention.num_pages == 1, "the trial pages have gone"
    assert pages.count == 40 * MIB // layout.shard_bytes
    assert "libraries 300" in pages.why
    runner.use_pages(torch.zeros((8, *layout.shape)), cuda_graphs=False)
    assert runner.decode([DecodeInput(5, 0, (7,), SampleParams())]) == before
    settings = setup.settings(pages, layout, runner)
    assert "max_batch_tokens 3,000" in settings and "no CUDA graphs (as told)" in settings
    assert "a step is launched before the last one's tokens are read (the GPU runs behind the host)" in settings


def test_the_workspace_of_latents_has_its_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used with long contexts alone, so no trial shows it."""
    path = make_checkpoint(tmp_path / "latents", tokenizer=False, **FAMILY_ZOO["deepseek_v3"])
    total, opened = 4 * GIB, open_checkpoint(path)
    steps = {"prefill_chunk_tokens": 64, "max_batch_tokens": 0, "max_running": 3}
    setup = gpu(path, monkeypatch, total, total, steps=steps, cuda_graphs=False, max_context_tokens=512)
    layout = shard_layout(opened.config, "float32", BLOCK)
    latent = opened.config.latent
    assert latent is not None
    most = WORKSPACE_BYTES + PARTIAL_BYTES + PIECE_TOKENS * (latent.latent + latent.rope) * 4
    assert f"attention over latents {most // MIB}" in setup.choose_pages(layout, opened).why
    trial = setup.trial_pages(layout)
    room = int(total * CUDA_SHARE)
    use = DeviceUse(total, total, room - most - 2 * MIB + trial.nbytes, 0, total)
    pages = setup.profiled(Runner(opened, "float32", "cpu", BLOCK, trial), layout, lambda: use)
    assert 0 < pages.count <= 2 * MIB // layout.shard_bytes
    decode = gpu(path, monkeypatch, total, total, steps={"max_running": 3}, cuda_graphs=False)
    assert f"attention over latents {PARTIAL_BYTES // MIB} MiB" in decode.choose_pages(layout, opened).why


def test_what_was_captured_is_told_and_has_its_room(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6,<3.7' (Linux only)")
    total, steps = 8 * GIB, {"prefill_chunk_tokens": 3000, "max_batch_tokens": 0}
    opened = open_checkpoint(checkpoint)
    layout = shard_layout(opened.config, "float32", BLOCK)
    setup = gpu(checkpoint, monkeypatch, total, total, steps=steps)
    assert setup.most_tokens == 3000
    graphs = int(setup.choose_pages(layout, opened).why.split("CUDA graphs ")[1].split()[0].replace(",", ""))
    assert 32 * GRAPH_BYTES // MIB < graphs < 1.1 * 32 * GRAPH_BYTES // MIB, "32 sizes up to 2,048 tokens"
    told = gpu(checkpoint, monkeypatch, total, total, steps=steps, cuda_graphs=False)
    assert "CUDA graphs" not in told.choose_pages(layout, opened).why
    runner = Runner(opened, "float32", "cpu", BLOCK, setup.trial_pages(layout))
    pages = ChosenPages(1, "as told")
    assert "no CUDA graphs (no Triton)" in setup.settings(pages, layout, runner)
    pieces = runner.config.layers + 1
    with torch.inference_mode():
        capture = RecordedCapture(lambda number: number > pieces)
        runner.pieces = PieceGraphs(runner.model, runner.attention, (4, 8), capture)
    settings = setup.settings(pages, layout, runner)
    assert f"; {pieces} pieces of steps that compute prompts, 8 to 8 tokens; a step of 4 tokens in pieces" in settings


def test_ranks_that_share_a_gpu_do_not_count_each_other(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that measures while the other loads sees its memory go."""
    total = 40 * GIB
    setup = gpu(checkpoint, monkeypatch, total, total, steps={}, device_instances=2)
    layout = shard_layout(open_checkpoint(checkpoint).config, "float32", BLOCK)
    runner = Runner(open_checkpoint(checkpoint), "float32", "cpu", BLOCK, setup.trial_pages(layout))
    pages = setup.profiled(runner, layout, lambda: DeviceUse(total, total, GIB, GIB, 10 * GIB))
    assert "libraries 1,024" in pages.why and "one of 2 ranks" in pages.why


def test_a_model_that_no_gpu_holds_is_refused_before_it_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = gpu(checkpoint, monkeypatch, 64 * MIB, 60 * MIB, steps={}, cuda_graphs=False)
    opened = open_checkpoint(checkpoint)
    wide = dataclasses.replace(shard_layout(opened.config, "float32", BLOCK), layers=4000)
    with pytest.raises(ConfigError, match=r"memory_mb=0: 90% of the GPU's 64 MiB gives this rank 57 MiB; weights 0"):
        setup.choose_pages(wide, opened)


def test_the_largest_step_goes_beyond_the_longest_prompt(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "short", max_position_embeddings=40, tokenizer=False)
    layout = shard_layout(open_checkpoint(path).config, "float32", BLOCK)
    for tokens in (1, 16, 41, 100):
        trial = torch.zeros((-(-tokens // BLOCK), *layout.shape))
        largest_step(Runner(open_checkpoint(path), "float32", "cpu", BLOCK, trial), tokens, 3)
    largest_step(Runner(open_checkpoint(path), "float32", "cpu", BLOCK, trial), 0, 3)


def test_the_largest_step_over_a_tensor_for_each_cache_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(tmp_path / "gemma", tokenizer=False, **FAMILY_ZOO["gemma2"])
    total, opened = 4 * GIB, open_checkpoint(path)
    steps = {"prefill_chunk_tokens": 100, "max_batch_tokens": 0, "max_running": 3}
    setup = gpu(path, monkeypatch, total, total, steps=steps, cuda_graphs=False)
    layout = shard_layout(opened.config, "float32", BLOCK)
    trial = setup.trial_memory(group_shapes(opened.config, torch.float32, BLOCK))
    assert [len(pages) for pages in trial] == [-(-100 // BLOCK)] * 2
    runner = Runner(opened, "float32", "cpu", BLOCK, trial)
    nbytes = sum(pages.nbytes for pages in trial)
    pages = setup.profiled(runner, layout, lambda: DeviceUse(total, total, GIB + nbytes, GIB, total - 2 * GIB))
    assert "weights and the largest step 1,024" in pages.why
    assert isinstance(runner.attention, GroupedAttention)
    assert [len(pages) for pages in runner.memory] == [1, 1], "the trial pages have gone"


@pytest.mark.parametrize("named", [{}, {"memory_bytes": 4 * MIB}, {"num_pages": 60}])
def test_pages_of_each_cache_group(tmp_path: Path, named: dict[str, int]) -> None:
    path = make_checkpoint(tmp_path / "gemma", tokenizer=False, **FAMILY_ZOO["gemma2"])
    opened = open_checkpoint(path)
    steps = {"prefill_chunk_tokens": 64, "max_batch_tokens": 0, "max_running": 3}
    setup = RankSetup(told(path, steps=steps, room_bytes=2 * GIB, cache_groups=True, **named), opened)
    assert setup.grouped
    shapes = group_shapes(opened.config, torch.float32, BLOCK)
    pages = setup.choose_group_pages(shapes, opened)
    window = -(-(16 + 64 - 2) // BLOCK) + 1
    assert pages.groups[1] == 3 * window, "of the window of 16 tokens, while a chunk of 64 is computed"
    assert pages.count == pages.groups[0] > 3 * window
    if named.get("memory_bytes"):
        nbytes = sum(count * shape.page_bytes for count, shape in zip(pages.groups, shapes, strict=True))
        assert 4 * MIB - shapes[0].page_bytes < nbytes <= 4 * MIB
    if not named:
        assert pages.count == 3 * (opened.config.max_context_tokens // BLOCK) + 1
    assert setup.extent_counts(shapes, pages.groups) == pages.groups
    settings = setup.group_settings(pages, shapes, Runner(opened, "float32", "cpu", BLOCK, setup.trial_memory(shapes)))
    assert f"{pages.groups[1]} pages of window16" in settings


def test_memory_that_holds_no_windows_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "gemma", tokenizer=False, **FAMILY_ZOO["gemma2"])
    opened = open_checkpoint(path)
    setup = RankSetup(told(path, memory_bytes=1000, cache_groups=True), opened)
    with pytest.raises(ConfigError, match=r"memory_mb=0\.0: one request needs"):
        setup.choose_group_pages(group_shapes(opened.config, torch.float32, BLOCK), opened)
