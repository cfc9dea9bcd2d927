"""What stages of a pipeline tell of their chunks: busy and idle times, the bubble, and where later prompts are cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from kvmesh.chunk_pipeline import ChunkCost, stage_ends
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.pipeline_times import MOST_TIMES, PipelineTimes, PromptTimes
from kvmesh.services.prefill.planner import Chunk, PlanConfig
from kvmesh.services.prefill.report import Origin, Reporter
from kvmesh.services.prefill.state import PrefillState
from kvmesh.telemetry import names, spans

MS = 1_000_000
BLOCK, BEGIN = 16, 1_000 * MS
COST = ChunkCost(token=1e-5, pair=1e-7, step=2e-4)  # seconds of a stage
GREEDY = m.Sampling(temperature=0.0, top_p=1.0, top_k=0, seed=0)


@pytest.mark.parametrize(("chunks", "stages"), [(1, 2), (5, 4), (8, 2)])
def test_the_bubble_of_equal_chunks_is_that_of_the_formula(chunks: int, stages: int) -> None:
    """m equal chunks through p stages: (p - 1) / (m + p - 1) of the stages' time; a second prompt right behind fills
    what the first would have left empty."""
    pipeline, prompt = PipelineTimes({rank: rank for rank in range(stages)}), PromptTimes()
    for number in range(chunks):
        busy = {s: (BEGIN + (number + s) * MS, BEGIN + (number + s + 1) * MS) for s in range(stages)}
        prompt.add(Chunk(1, number, number + 1, False), pipeline.step_ended(busy, number + 1 < chunks))
    assert prompt.bubble == pytest.approx((stages - 1) / (chunks + stages - 1))
    assert sum(pipeline.busy_ns) == stages * chunks * MS and sum(pipeline.idle_ns) == stages * (stages - 1) * MS
    later = BEGIN + 1_000 * MS  # nothing was to be done meanwhile: no bubble
    pipeline.step_ended({s: (later + s * MS, later + (s + 1) * MS) for s in range(stages)}, True)
    assert sum(pipeline.idle_ns) == stages * (stages - 1) * MS + sum(range(stages)) * MS


def test_a_step_that_a_stage_did_not_tell_of_counts_nothing() -> None:
    pipeline = PipelineTimes({0: 0, 1: 1})
    assert pipeline.step_ended({0: (BEGIN, BEGIN + MS)}, False) == ()
    assert PipelineTimes({}).step_ended({}, False) == ()


def test_of_a_prompt_with_many_chunks_the_first_are_kept_and_all_summed() -> None:
    pipeline, prompt, count = PipelineTimes({0: 0, 1: 1}), PromptTimes(), MOST_TIMES
    for number in range(count):
        busy = {s: (BEGIN + (number + s) * MS, BEGIN + (number + s + 1) * MS) for s in range(2)}
        prompt.add(Chunk(1, number, number + 1, False), pipeline.step_ended(busy, number + 1 < count))
    assert len(prompt.chunks) == MOST_TIMES // 2 and prompt.left_out == count - MOST_TIMES // 2
    assert prompt.busy_ns == [count * MS, count * MS] and prompt.idle_ns == [MS, MS]


def brain(pp: int, cost: ChunkCost | None) -> PrefillState:
    plan = PlanConfig(
        block_tokens=BLOCK, prefill_chunk_tokens=512, max_batch_tokens=512, chunk_cost=cost, stages=pp, pipeline_depth=5
    )
    stages = {rank: rank for rank in range(pp)} if pp > 1 else {}
    config = BrainConfig(plan=plan, max_context_tokens=1 << 20, vocab_size=256, world=pp, stages=stages)
    return PrefillState(config, PagePool(4096), NodeStore(0, high_percent=100, low_percent=100))


def computed(
    state: PrefillState, handle: int, tokens: int, gap_s: float = 0.0
) -> tuple[list[tuple[int, int]], ev.HandoffEnded]:
    """Has the brain compute a prompt at stages that take what COST says; returns its chunks and how it ended."""
    pp, steps, ends = state.config.world, [], []
    free, now, chunks = [BEGIN / 1e9] * state.config.world, BEGIN, []

    def take(actions: list[ev.Action]) -> None:
        ends.extend(a for a in actions if isinstance(a, ev.HandoffEnded))
        told = [a for a in actions if isinstance(a, m.TellRank) and a.rank == 0]
        steps.extend(a.message for a in told if isinstance(a.message, m.PrefillStep))

    keys = tuple(f"{handle}-{i}".encode() for i in range(tokens // BLOCK))
    take(state.step(ev.Start(handle, 1, f"r{handle}", (1,) * tokens, keys, GREEDY, adopt=True), now))
    while steps:
        step = steps.pop(0)
        [item] = step.items
        chunks.append((item.start, item.start + len(item.token_ids)))
        times = [COST.of(*chunks[-1])] * pp
        free = stage_ends([free[0] + gap_s, *free[1:]], times, 0.0)
        sampled = (m.Sampled(handle, 7),) if item.sample else ()
        for rank in range(pp):
            until = round(free[rank] * 1e9)
            busy = (until - round(times[rank] * 1e9), until) if pp > 1 else (0, 0)
            done = m.PrefillStepDone(step.step_id, now, until, sampled, (), *busy)
            take(state.step(m.FromRank(rank, done), until))
    [end] = ends
    return chunks, end


def test_a_pipeline_cuts_prompts_by_what_it_measured() -> None:
    """By the model's sizes alone pairs seem to cost nothing beside tokens; a few prompts later chunks take equal time,
    within a block, and are as many as suit what a chunk costs beside its tokens."""
    state = brain(4, ChunkCost(token=1e9, pair=2e6))
    computed(state, 1, 8192)
    for handle in range(2, 5):
        chunks, end = computed(state, handle, 8192)
    learnt = state.planner.chunk_cost
    assert learnt is not None
    assert learnt.pair / learnt.token == pytest.approx(COST.pair / COST.token, rel=1e-3)
    lengths = [end - start for start, end in chunks]
    assert lengths[0] > 2 * lengths[-1]
    assert all(later <= earlier + BLOCK for earlier, later in itertools.pairwise(lengths))
    # The first ones have as many tokens as a chunk may have.
    works = [COST.work(*chunk) for chunk, length in zip(chunks, lengths, strict=True) if length < lengths[0]]
    most = max(COST.work(end, end + BLOCK) for _, end in chunks)  # of a block
    assert all(abs(work - works[0]) <= 1.01 * most for work in works)
    assert 0 < end.times.bubble < 3 / (len(chunks) + 3) + 0.02
    assert [times.end for times in end.times.chunks] == [end for _, end in chunks]


def test_what_a_step_costs_before_it_begins_makes_fewer_chunks() -> None:
    """Sending and beginning a step takes the first stage's time, too."""
    counts = []
    for gap_s in (0.0, 0.02):
        state = brain(4, ChunkCost(COST.token, COST.pair))
        for handle in range(1, 5):
            chunks, _ = computed(state, handle, 8192, gap_s)
        counts.append(len(chunks))
    assert counts[1] < 0.5 * counts[0]


def test_one_stage_cuts_prompts_as_before() -> None:
    chunks, end = computed(brain(1, None), 1, 2048)
    assert [end - start for start, end in chunks] == [512] * 4
    assert not end.times.busy_ns and not end.times.chunks


def test_a_trace_has_each_stage_s_busy_and_idle_time_of_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, int, int, int, int, dict[str, Any]]] = []

    def emit(name: str, own: SpanContext, above: SpanContext, start: int, end: int, told: Any, error: str) -> None:
        found.append((name, own.span_id, above.span_id, start, end, dict(told or {})))

    monkeypatch.setattr(spans, "_emit", emit)
    state = brain(2, ChunkCost(token=1.0, pair=1e-3))
    reporter = Reporter(state, "prefill-0")
    chunks, end = computed(state, 1, 2048)
    life = NonRecordingSpan(SpanContext(7, 8, False, TraceFlags(TraceFlags.SAMPLED)))
    before = {state: metric(state) for state in ("busy", "idle")}
    reporter.ended(end, Origin("r1", 0, life), end.last_step_ns)
    reporter.beat()
    [compute] = [one for one in found if one[0] == names.SPAN_COMPUTE]
    assert compute[-1][names.BUBBLE] == round(end.times.bubble, 4) > 0
    stages = [one for one in found if one[0] == names.SPAN_STAGE]
    assert [(one[2], one[-1][names.STAGE], one[-1][names.CHUNKS]) for one in stages] == [
        (compute[1], 0, len(chunks)), (compute[1], 1, len(chunks))
    ]  # fmt: skip
    for stage in stages:
        own = [one for one in found if one[0] == names.SPAN_CHUNK and one[2] == stage[1]]
        assert [(one[-1][names.CHUNK_START], one[-1][names.CHUNK_END]) for one in own] == chunks
        assert stage[3] == own[0][3] and stage[4] == own[-1][4]
        busy_ms = sum(one[4] - one[3] for one in own) / 1e6
        assert stage[-1][names.STAGE_BUSY_MS] == pytest.approx(busy_ms)
        idle_ms = sum(one[-1][names.STAGE_IDLE_MS] for one in own)
        after_ms = end.times.chunks[-1].stages[stage[-1][names.STAGE]].after_ns / 1e6
        assert stage[-1][names.STAGE_IDLE_MS] == pytest.approx(idle_ms + after_ms)
    for which, sums in (("busy", end.times.busy_ns), ("idle", end.times.idle_ns)):
        assert metric(which) - before[which] == pytest.approx(sum(sums) / 1e9)


def metric(state: str) -> float:
    samples = [one for family in names.PREFILL_STAGE_SECONDS.collect() for one in family.samples]
    return sum(one.value for one in samples if one.labels.get("state") == state and one.name.endswith("_total"))
