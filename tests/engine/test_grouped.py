"""A model over one tensor of pages a cache group answers what it answers over one tensor, to the last bit, while pages
that no token sees any more are given away and full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvmesh.engine.attention.backend import AttentionBackend, TokenSpan
from kvmesh.engine.attention.grouped import GroupedAttention, GroupedSpan
from kvmesh.engine.attention.native_backend import NativeAttention
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.axes import Axes
from kvmesh.engine.batch import DecodeBatch, DecodeInput, SampleParams
from kvmesh.engine.cache_memory import (
    ALIGNED,
    StateMemory,
    StateStep,
    check_memory,
    group_memory,
    group_offsets,
    group_shapes,
    table_of,
    zeroed_memory,
)
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.cpu import native
from kvmesh.engine.pieces import PieceGraphs
from kvmesh.engine.runner import Runner, shard_layout
from kvmesh.errors import InternalError
from kvmesh.kvcache.cache_groups import CacheGroup, CacheKind, CacheLayout, GroupPages
from tests.support.checkpoints import prompts
from tests.support.engine.attention_oracle import BACKENDS
from tests.support.engine.grouped_stepper import Twins
from tests.support.engine.recorded import RecordedCapture

Zoo = Callable[[str], Path]
MODELS = ("gemma2", "gemma3", "mistral", "mistral-some")
needs_native = pytest.mark.skipif(
    not native.loaded(), reason="the CPU operators are not built: python -m kvmesh.engine.cpu.build"
)


def serve(twins: Twins, longest: int = 150) -> None:
    """Prompts in chunks, one after another's prefix, rows that come and go, steps of rows and chunks together."""
    long, other, short = (
        prompts(1, twins.config.vocab_size, seed=seed, low=size, high=size + 1)[0]
        for seed, size in ((1, longest), (2, longest // 2), (3, 5))
    )
    first = twins.request(long)
    twins.step(chunks=[(first, 37)])
    at = first.done // twins.block
    second = twins.request([*long[:37], *other], first, at)  # before the first one gives anything back
    twins.step(chunks=[(first, 50), (second, 3)])
    twins.step(chunks=[(second, 40)])
    twins.step(chunks=[(first, len(long) - first.done)])
    twins.step([first], [(second, len(second.token_ids) - second.done)])
    third = twins.request(short)
    twins.step([second, first], [(third, 5)])
    for _ in range(20):
        twins.step([first, third, second])
    twins.step([third])
    for _ in range(3):
        twins.step([second, first])
    assert len(first.told) == 26 and len(third.told) == 22
    assert twins.holes > 100


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
@needs_native
def test_native_answers_equal_those_over_one_tensor(zoo: Zoo, model: str, dtype: str, block: int) -> None:
    twins = Twins(zoo(model), dtype, block, 1 + 600 // block)
    assert isinstance(twins.grouped.attention, GroupedAttention)
    assert isinstance(twins.grouped.attention.backends[0], NativeAttention)
    serve(twins)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_torch_answers_equal_those_over_one_tensor(
    zoo: Zoo, model: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "loaded", lambda: False)
    twins = Twins(zoo(model), dtype, 8, 80)
    assert isinstance(twins.grouped.attention, GroupedAttention)
    assert isinstance(twins.grouped.attention.backends[0], TorchAttention)
    serve(twins)


def test_pages_that_come_back_are_somebody_elses_at_once(zoo: Zoo) -> None:
    """With hardly more pages than one request alone would keep of all its tokens."""
    twins = Twins(zoo("gemma3"), "float32", 4, 50)
    long, other = (prompts(1, twins.config.vocab_size, seed=s, low=70, high=71)[0] for s in (4, 5))
    first, second = twins.request(long), twins.request(other)
    for _ in range(7):
        twins.step(chunks=[(first, 10), (second, 10)])
    for _ in range(12):
        twins.step([first, second])
    used = [len({page for page in table if page >= 0}) for table in first.groups]
    assert used[0] > 3 * used[1], "of the window few are left"


def test_steps_by_pieces_over_groups(zoo: Zoo) -> None:
    twins = Twins(zoo("gemma3"), "float32", 16, 40)
    with torch.inference_mode():
        for runner in (twins.whole, twins.grouped):
            runner.pieces = PieceGraphs(runner.model, runner.attention, (4, 8, 24), RecordedCapture())
    assert twins.grouped.pieces is not None and twins.grouped.pieces.sizes == (4, 8, 24)
    request = twins.request(prompts(1, twins.config.vocab_size, seed=6, low=51, high=52)[0])
    for _ in range(3):
        twins.step(chunks=[(request, 17)])
    other = twins.request(request.token_ids[:21])
    twins.step([request], [(other, 21)])
    assert len(request.told) == 2 and len(other.told) == 1


def test_launched_steps_over_groups(zoo: Zoo) -> None:
    twins = Twins(zoo("mistral"), "float32", 4, 40)
    request = twins.request(prompts(1, twins.config.vocab_size, seed=7, low=60, high=61)[0])
    twins.step(chunks=[(request, 30)])
    twins.step(chunks=[(request, 30)])
    twins.ready(request, 2)
    told = []
    for runner, grouped in ((twins.whole, False), (twins.grouped, True)):
        first, second = (
            DecodeBatch.of(
                [
                    DecodeInput(
                        request.token_ids[-1],
                        request.done + step,
                        () if grouped else tuple(request.pages),
                        SampleParams(token_index=1 + step),
                        [tuple(table) for table in request.groups] if grouped else (),
                    )
                ]
            )
            for step in range(2)
        )
        before = runner.launch(first)
        after = runner.launch(second, before, np.array([0]))
        told.append((before.result().token_ids.tolist(), after.result().token_ids.tolist()))
    assert told[0] == told[1]
    assert -1 in request.groups[0]


@pytest.mark.parametrize("name", [pytest.param("native", marks=needs_native), "torch"])
def test_a_hole_that_is_seen_is_refused(name: str) -> None:
    specs = [AttentionSpec(0.25, window=7), AttentionSpec(0.25, window=5)]
    backend = BACKENDS[name](torch.zeros(8, 2, 2, 1, 4, 16), 1, specs)
    assert [backend.oldest_seen(at) for at in (0, 6, 7, 20)] == [0, 0, 1, 14]
    assert backend.page_array((-1, -1, -1, 5, 6), 20, 14).tolist() == [5, 5, 5, 5, 6]
    backend.plan_decode([(-1, -1, -1, 5, 6, 2)], [20])
    backend.plan_prefill([TokenSpan(18, 4, (-1, -1, -1, 5, 6, 2))])
    for pages, start in (((-1, -1, -1, -1, 6, 2), 20), ((-1, -1, -1, 5, -1, 2), 20), ((0, -1, -1, 5, 6, 2), 17)):
        with pytest.raises(InternalError, match="page ids -1"):
            backend.plan_decode([pages], [start])
        with pytest.raises(InternalError, match="page ids -1"):
            backend.plan_prefill([TokenSpan(start, 1, pages)])
    mixed = BACKENDS[name](torch.zeros(8, 2, 2, 1, 4, 16), 1, [*specs[:1], AttentionSpec(0.25)])
    with pytest.raises(InternalError, match="page ids -1"):
        mixed.plan_decode([(-1, 5)], [7])


def test_a_plan_of_rows_that_a_newer_one_replaced_says_so() -> None:
    backend = TorchAttention(torch.zeros(8, 1, 2, 1, 4, 16), 1, [AttentionSpec(0.25)])
    older = backend.plan_decode([(0,), (1,)], [0, 0])
    backend.plan_decode([(2,)], [0])
    with pytest.raises(InternalError, match="2 rows for a plan of 1"):
        older.attend(0, torch.zeros(2, 3, 16))


# ── memory ────────────────────────────────────────────────────────────────────────────────────────

LAYOUT = CacheLayout(2, 2, 8)
STATES = (
    CacheGroup("all", (0, 3), LAYOUT),
    CacheGroup("rule", (1, 2), CacheLayout(1, 2, 6, "float32"), CacheKind.STATE, 4),
    CacheGroup("inputs", (1, 2), CacheLayout(3, 2, 4), CacheKind.STATE, 4),
)


def test_memory_of_groups_lies_in_one_buffer(zoo: Zoo) -> None:
    config = open_checkpoint(zoo("gemma2")).config
    shapes = group_shapes(config, torch.bfloat16, 16, rank=1, world=2)
    assert [shape.group.name for shape in shapes] == ["all", "window16"]
    assert [shape.layout.layers for shape in shapes] == [1, 2]
    assert all(shape.layout.kv_heads == config.kv_heads // 2 for shape in shapes)
    assert all(shape.layout.first_head == config.kv_heads // 2 for shape in shapes)
    assert sum(shape.page_bytes for shape in shapes) == shard_layout(config, "bfloat16", 16, Axes(tp=2), 1).shard_bytes
    counts = [3, 5]
    offsets = group_offsets(shapes, counts)
    assert offsets[1] % ALIGNED == 0 and offsets[1] >= 3 * shapes[0].page_bytes
    buffer = bytearray(offsets[-1])
    memory = group_memory(shapes, counts, buffer)
    memory[1][4] = 1.0
    page = buffer[offsets[1] + 4 * shapes[1].page_bytes :][: shapes[1].page_bytes]
    assert torch.frombuffer(page, dtype=torch.bfloat16).eq(1).all()
    assert not any(buffer[: offsets[1] + 4 * shapes[1].page_bytes])
    with pytest.raises(InternalError, match="the buffer has"):
        group_memory(shapes, [3, 50], buffer)
    with pytest.raises(InternalError, match="1 tensors of pages for 2 cache groups"):
        check_memory(shapes, memory[:1], torch.device("cpu"))
    with pytest.raises(InternalError, match="cache group window16: pages are"):
        check_memory(shapes, [memory[0], memory[0]], torch.device("cpu"))
    assert table_of(GroupPages(1, 2, (7, 9))) == (-1, -1, 7, 9)


def test_a_model_of_one_group_has_the_one_tensor(zoo: Zoo) -> None:
    path = zoo("llama2")
    checkpoint = open_checkpoint(path)
    memory = zeroed_memory(group_shapes(checkpoint.config, torch.float32, 16), [4], torch.device("cpu"))
    runner = Runner(checkpoint, "float32", "cpu", 16, memory)
    assert isinstance(runner.attention, AttentionBackend) and runner.attention.pages is memory[0]
    with pytest.raises(InternalError, match="one tensor for all cache groups"):
        runner.zero_slots(0, [1])


class Sums:
    """Keeps of each sequence the sum of its inputs in the first group of states and the last input in the second."""

    def __init__(self, memory: StateMemory) -> None:
        self.memory = memory
        self.step: StateStep

    def plan(self, step: StateStep) -> Sums:
        self.step = step
        return self

    def attend_state(self, layer: int, inputs: torch.Tensor) -> torch.Tensor:
        sums, last = (
            tensor[:, group.layers.index(layer)]
            for tensor, group in zip(self.memory.tensors, self.memory.groups, strict=True)
        )
        answers, at = [], 0
        for length, *slots in zip(self.step.lengths, *self.step.slots, strict=True):
            for x in inputs[at : at + length]:
                sums[slots[0]] += x
                last[slots[1]] = x
                answers.append(sums[slots[0], 0, 0, 0, 0].clone())
            at += length
        return torch.stack(answers)


def test_a_step_names_the_slots_of_states() -> None:
    def memory(slots: int) -> list[torch.Tensor]:
        return [torch.zeros(8, 2, 2, 2, 4, 8), torch.zeros(slots, 2, 1, 2, 1, 6), torch.zeros(slots + 2, 2, 3, 2, 1, 4)]

    own = memory(4)
    backend = GroupedAttention(
        STATES, own, lambda pages, layers: TorchAttention(pages, 2, [AttentionSpec(0.25)] * len(layers)), Sums
    )
    assert not backend.capturable
    rows = [[(3,), (4,)], [(2,), (0,)], [(5,), (1,)]]  # two rows in each group
    span = GroupedSpan(4, 3, [(6, 7), (3,), (2,)])
    plan = backend.plan_mixed(rows, [1, 2], [span])
    sums = plan.states
    assert isinstance(sums, Sums)
    assert sums.step == StateStep(2, (1, 2, 4), (1, 1, 3), ((2, 0, 3), (5, 1, 2)))
    assert plan.positions.tolist() == [1, 2, 4, 5, 6]
    assert plan.attend_state(2, torch.arange(1.0, 6.0)).tolist() == [1, 2, 3, 7, 12]
    assert own[1][:, 1, 0, 0, 0, 0].tolist() == [2, 0, 1, 12] and not own[1][:, 0].any()
    assert own[2][:, 1, 0, 0, 0, 0].tolist() == [0, 2, 5, 0, 0, 1]
    # A snapshot goes to two rows; it stays what it was while they go on.
    backend.states.copy(1, [3, 3], [0, 2])
    backend.states.zero(2, [5])
    plan = backend.plan_mixed([[(3,)], [(0,)], [(5,)]], [2], [])
    plan.attend_state(2, torch.tensor([1.0]))
    assert own[1][:, 1, 0, 0, 0, 0].tolist() == [13, 0, 12, 12]
    for slots in ([(1,), (1,)], [(1,), (4,)], [(-1,), (1,)]):
        with pytest.raises(InternalError, match="state slots"):
            backend.plan_mixed([rows[0], slots, rows[2]], [1, 2], [])
    with pytest.raises(InternalError, match="state slots"):
        backend.states.copy(1, [3], [3])
    for tables in (rows[:2], [rows[0][:1], *rows[1:]]):
        with pytest.raises(InternalError, match="2 rows have one table each"):
            backend.plan_mixed(tables, [1, 2], [])
    with pytest.raises(InternalError, match="a chunk has one table for each of 3"):
        backend.plan_mixed([], [], [GroupedSpan(0, 3, [(6, 7)])])
