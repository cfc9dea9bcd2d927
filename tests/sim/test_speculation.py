"""Drafts in the simulator: what they cost against arithmetic by hand, what they bring, and who decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError
from kvmesh.sim.config import MeshMode
from kvmesh.sim.hardware.axes_times import AxesRoofline
from kvmesh.sim.hardware.collectives import RankSpan
from kvmesh.sim.hardware.hardware import hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.speculation import Speculation, SpeculationModel, head_shape
from kvmesh.sim.hardware.times import NodeSpec
from tests.support.sim.fleets import Linear, coupled, mesh, node, request, served

KIMI = shape_of("kimi-k2")


def of(text: str, model: str = "kimi-k2", gpu: str = "h200", **told: Any) -> AxesRoofline:
    return AxesRoofline(hardware(gpu), Axes.parse(text), shape_of(model), **{"weight_dtype": "int4"} | told)


# ── costs by hand ─────────────────────────────────────────────────────────────────────────────────


def test_tokens_a_step_by_hand() -> None:
    model = SpeculationModel("mtp", (0.8, 0.5, 0.5))
    assert [model.tokens_a_step(length) for length in range(4)] == pytest.approx([1, 1.8, 2.2, 2.4])


def test_a_step_with_drafts_by_hand() -> None:
    """A dense model on one GPU: weights and KV are read once whatever is drafted, until products are bound by FLOP/s;
    attention of eight KV heads is bound by memory up to here."""
    times, shape = of("tp=1", "llama3-8b", weight_dtype="bf16"), shape_of("llama3-8b")
    gpu, read_s = hardware("h200"), 1 / (4800e9 * 0.75)
    weights, head = shape.layer_params * 2, shape.head_params * 2
    kv = 10_000 * 2 * 32 * 8 * 128 * 2
    expected = 0.003 + (weights + head + kv) * read_s
    for queries in (1.0, 2.0, 4.0):
        assert times.drafted_s((), 1, 10_000, queries) == pytest.approx(expected)
    flop_s = 1 / (989e12 * 0.60)
    many = 2000 * 2 * (shape.layer_params + shape.head_params) * flop_s
    assert times.drafted_s((), 500, 10_000, 4.0) == pytest.approx(0.003 + many + kv * read_s)
    assert gpu.efficiency.step_s == 0.003


def test_rows_of_a_latent_cost_arithmetic_for_each_query() -> None:
    """Kimi K2 on H20: 64 heads × (2 × 512 + 64) × 2 FLOP a pair against 1,152 bytes a token: bound by arithmetic from
    the first query on, so two queries cost twice as much."""
    times = of("tp=8,dcp=8", gpu="h20")
    pair_s = 2 * 64 * (2 * 512 + 64) / 8 / (148e12 * 0.50)
    assert pair_s > 1152 / 8 / (4000e9 * 0.75)
    long, short = 2_000_000, 1_000_000
    for queries in (1.0, 2.0):
        found = times.drafted_s((), 8, long, queries) - times.drafted_s((), 8, short, queries)
        assert found == pytest.approx((long - short) * 61 * pair_s * queries)


def test_collectives_carry_every_query() -> None:
    """TP's all-reduces of a dense model: two a layer, of as many tokens as there are queries."""
    times = of("tp=8", "llama3-70b", weight_dtype="bf16")
    one, two = (times._talk_s(8 * q, 0, 8 * q, 8 * q, [[]]) for q in (1, 2))
    reduce = times.fabric.reduce_s_of(8 * 8192 * 2, RankSpan(8)) - times.fabric.reduce_s_of(0, RankSpan(8))
    assert two - one == pytest.approx(2 * 80 * reduce)


def test_an_mtp_head_by_hand() -> None:
    """Of one token at one GPU: the projection, the attention's matrices, the shared expert and the router in bf16,
    eight experts in INT4 with their scales, the output matrix, and its own small constant."""
    head = head_shape(KIMI)
    hidden = 7168
    assert head.attention_params == KIMI.attention_params // 61 + 2 * hidden * hidden
    assert head.dense_params == 3 * hidden * 2048 + hidden * 384
    assert (head.layers, head.kv_layers, head.expert_layers) == (1, 1, 1)
    large = replace(hardware("h200"), memory_bytes=1e13)
    times = AxesRoofline(large, Axes(), KIMI, weight_dtype="int4", mtp=True)
    nbytes = (head.attention_params + head.dense_params + head.head_params) * 2 + 8 * 3 * hidden * 2048 * 0.5625
    assert times.head_s(1, 0) == pytest.approx(0.00025 + nbytes / (4800e9 * 0.75))
    without = AxesRoofline(large, Axes(), KIMI, weight_dtype="int4")
    layer = (head.attention_params + head.dense_params) * 2 + 384 * 3 * hidden * 2048 * 0.5625
    assert times.weight_bytes - without.weight_bytes == pytest.approx(layer)
    assert times.slot_tokens < without.slot_tokens
    with pytest.raises(ConfigError, match="without its MTP head"):
        without.head_s(1, 0)


def test_one_query_a_row_is_a_step_as_it_was() -> None:
    for axes in ("tp=8,dcp=8", "dp=8,ep=dp", "pp=2,tp=4"):
        times = of(axes)
        assert times.drafted_s((), 16, 160_000, 1.0) == times.decode_s(16, 160_000)
        assert times.drafted_s([(512, 0)], 16, 160_000, 1.0) == times.mixed_s([(512, 0)], 16, 160_000)
        assert times.drafted_s((), 16, 160_000, 2.0) > times.decode_s(16, 160_000)


def test_what_conductors_take_a_token_for_is_the_best_length() -> None:
    """Steps of 0.006 + 0.001 · D: no draft 6 ms a token, one 7 / 1.5, two 8 / 1.55."""
    speculation = Speculation(SpeculationModel("ngram", (0.5, 0.1)), Drafting())
    assert speculation.decode_s(1, 0) == pytest.approx(0.007 / 1.5)


@pytest.mark.parametrize(
    ("told", "field"),
    [({"drafter": "oracle"}, "speculate"), ({"accept": ()}, "accept"), ({"accept": (0.5, 1.5)}, "accept"),
     ({"accept": (0.5,) * 8}, "accept")],
)  # fmt: skip
def test_what_cannot_be_is_refused(told: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculationModel(**{"drafter": "mtp", "accept": (0.5,)} | told)
    assert caught.value.field == field


# ── in a simulation ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Drafting(Linear):
    """`Linear`, a token of a draft costing as much as a row, and a head that costs a millisecond a token."""

    token_s: float = 0.001

    def drafted_s(self, pieces: Sequence[tuple[int, int]], batch: int, context_tokens: float, queries: float) -> float:
        own_s = self.decode_s(batch, context_tokens) + self.token_s * batch * (queries - 1)
        return own_s + (self.prefill_s(pieces) if pieces else 0.0)

    def head_s(self, batch: int, answer_tokens: float, queries: float = 1.0) -> float:
        return 0.001


def drafting(
    *accept: float, drafter: str = "ngram", adapts: bool = False, token_s: float = 0.001, **told: Any
) -> NodeSpec:
    times = Drafting(token_s)
    model = SpeculationModel(drafter, accept, adapts=adapts, **told)
    return node(times=times, speculation=Speculation(model, times))


def alone(spec: NodeSpec, output: int = 41) -> float:
    """Mean seconds a token of one request's answer. Contexts are short, so a step takes 6 ms and a bit."""
    [record] = served(mesh(decode=(spec,)), [request(0, 0.0, 32, output)])
    assert record.outcome == "done" and record.output_tokens == output
    return record.mean_tbt_s


def test_right_drafts_divide_the_time_of_a_token() -> None:
    """40 tokens behind the first: ten steps of four, where every draft is right; forty where none is."""
    plain, right = alone(node()), alone(drafting(1.0, 1.0, 1.0))
    assert plain == pytest.approx(0.006, rel=0.05)
    assert right == pytest.approx((0.006 + 0.003) / 4, rel=0.05)
    assert alone(drafting(0.0, 1.0)) == pytest.approx(0.006 + 0.002, rel=0.05)


def test_a_head_is_paid_for_each_token_of_the_longest_draft() -> None:
    mtp, copied = alone(drafting(1.0, 1.0, 1.0, drafter="mtp")), alone(drafting(1.0, 1.0, 1.0))
    assert mtp - copied == pytest.approx(3 * 0.001 / 4, rel=0.1)


def test_the_live_policy_stops_drafting_what_is_not_kept() -> None:
    """With dear tokens of which none is right, drafts that are forced cost more than a third, and the policy's are
    looked at now and then, which costs a copying drafter nothing."""
    forced = alone(drafting(0.0, 0.0, token_s=0.003), output=401)
    chosen = alone(drafting(0.0, 0.0, token_s=0.003, adapts=True), output=401)
    plain = alone(node(), output=401)
    assert forced > 1.3 * plain
    assert chosen < 1.03 * plain


def test_the_live_policy_drafts_what_is_kept() -> None:
    plain, chosen = alone(node(), output=401), alone(drafting(0.9, 0.9, 0.9, adapts=True, token_s=1e-4), output=401)
    assert chosen < 0.45 * plain


@pytest.mark.parametrize("mode", [MeshMode.COUPLED_CHUNKED, MeshMode.COUPLED_PREFILL_FIRST, MeshMode.DISAGGREGATED])
@pytest.mark.parametrize("slots", [1, 2])
def test_everything_comes_back_with_drafts(mode: MeshMode, slots: int) -> None:
    """Many rows in few pages, so that some are preempted: every answer has its tokens, and every page comes back
    (`check_empty`, at the end of a run)."""
    spec = replace(drafting(0.8, 0.6, 0.5, drafter="mtp", adapts=True), kv_tokens=1536, slots=slots)
    asked = [request(n, 0.02 * n, 40 + 16 * (n % 5), 30 + 20 * (n % 4)) for n in range(24)]
    config = mesh(decode=(spec,)) if mode is MeshMode.DISAGGREGATED else coupled(mode, spec=spec)
    records = served(config, asked)
    assert [one.outcome for one in records] == ["done"] * 24
    assert [one.output_tokens for one in records] == [one.output_tokens for one in asked]
    again = served(config, asked)
    assert [one.finish_s for one in records] == [one.finish_s for one in again]


def test_rows_beside_a_chunk_have_drafts_only_where_that_is_asked_for() -> None:
    """A long prompt comes when a row has begun to answer: meanwhile that makes one token a step, or four."""
    found = {}
    for beside in (False, True):
        spec = drafting(1.0, 1.0, 1.0, beside_chunks=beside)
        config = coupled(MeshMode.COUPLED_CHUNKED, spec=spec, chunk_tokens=64, batch_tokens=64)
        records = served(config, [request(0, 0.0, 32, 50), request(1, 0.01, 3600, 2)])
        found[beside] = records[0].mean_tbt_s
    assert found[True] < 0.6 * found[False]


def test_each_copy_of_dp_computes_a_prompt_of_its_own() -> None:
    """Two prompts of four chunks each that come together: four steps of both, and one copy needs eight."""
    ends = []
    for slots in (1, 2):
        config = coupled(MeshMode.COUPLED_CHUNKED, spec=node(slots=slots), chunk_tokens=64, batch_tokens=64)
        records = served(config, [request(0, 0.0, 256, 1), request(1, 0.0, 256, 1)])
        ends.append([one.finish_s for one in records])
    assert ends[1][0] == ends[1][1] < ends[0][1]
    assert ends[0][0] < ends[0][1]
