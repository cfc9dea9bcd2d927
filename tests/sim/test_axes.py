"""Instances with named axes: collectives and steps against arithmetic by hand, and in a simulation as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.chunk_pipeline import ChunkCost, pipeline_ends
from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError
from kvmesh.sim.changes import KillEvent
from kvmesh.sim.hardware.axes_times import AxesRoofline, axes_node_spec
from kvmesh.sim.hardware.collectives import Fabric, RankSpan, reached, span, stages_apart
from kvmesh.sim.hardware.hardware import hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.times import Roofline
from kvmesh.sim.report.records import DONE, FAILED, REFUSED
from tests.support.sim.fleets import Linear, mesh, node, request, served

FABRIC = Fabric(
    link=100.0,
    nic=10.0,
    tokens_nic=5.0,
    reduce_s=1.0,
    network_reduce_s=2.0,
    all_to_all_latency_s=3.0,
    network_all_to_all_s=4.0,
    send_latency_s=0.5,
)
LLAMA, DEEPSEEK = shape_of("llama3-70b"), shape_of("deepseek-v3")


def of(text: str, model: str = "llama3-70b", gpu: str = "h200", **told: Any) -> AxesRoofline:
    return AxesRoofline(hardware(gpu), Axes.parse(text), shape_of(model), **told)


# ── collectives ───────────────────────────────────────────────────────────────────────────────────


def test_collectives_by_hand() -> None:
    """800 bytes at 8 ranks of one node, and at 16 of two: each of 8 ranks takes an eighth over its own NIC."""
    assert FABRIC.gather_s(800, RankSpan(8)) == pytest.approx(800 * 7 / 8 / 100 + 1)
    assert FABRIC.reduce_s_of(800, RankSpan(8)) == pytest.approx(2 * 800 * 7 / 8 / 100 + 1)
    assert FABRIC.gather_s(800, RankSpan(16, 2)) == pytest.approx(800 * 7 / 8 / 100 + 800 / 2 / 8 / 10 + 3)
    assert FABRIC.gather_s(800, RankSpan(2, 2)) == pytest.approx(800 / 2 / 10 + 3)
    assert FABRIC.gather_s(800, RankSpan(1)) == FABRIC.reduce_s_of(800, RankSpan(1)) == 0.0
    assert FABRIC.send_s(50, apart=False) == 1.0 and FABRIC.send_s(50, apart=True) == 5.5


def test_a_token_crosses_to_another_node_once() -> None:
    """Two choices among 4 ranks on 2 nodes reach 4 · (1 - (3/4)²) = 1.75 ranks and 1.5 nodes: 3/4 and 1/2 of others."""
    assert reached(4, 2) == pytest.approx(1.75) and reached(8, 1) == pytest.approx(1.0)
    over_nics = 10 * 2 * 1.5 / 2 / 5.0
    assert FABRIC.all_to_all_s(10, 2.0, 2, RankSpan(4, 2)) == pytest.approx(over_nics + 7)
    assert FABRIC.all_to_all_s(10, 2.0, 2, RankSpan(4)) == pytest.approx(10 * 2 * 1.75 * 3 / 4 / 100 + 3)


SIZES = st.integers(1, 4)


@settings(max_examples=40, deadline=None)
@given(dp=SIZES, pp=SIZES, cp=SIZES, tp=SIZES, over=st.sets(st.sampled_from(("dp", "pp", "cp", "tp"))))
def test_spans_are_those_of_the_engines_groups(dp: int, pp: int, cp: int, tp: int, over: set[str]) -> None:
    axes = Axes(dp, pp, cp, tp)
    groups = axes.groups(over)
    nodes = max(len({rank // 8 for rank in group}) for group in groups)
    assert span(axes, over) == RankSpan(len(groups[0]), nodes)
    pairs = [(a, b) for group in axes.groups(["pp"]) for a, b in pairwise(group)]
    assert stages_apart(axes) == any(a // 8 != b // 8 for a, b in pairs)


def test_dcp_is_a_part_of_tp() -> None:
    assert span(Axes(tp=16, dcp=4), ("dcp",)) == RankSpan(4, 1)


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("model", "gpu", "tp"),
    [
        ("llama3-70b", "a800", 8),
        ("deepseek-v3", "h200", 8),
        ("qwen3-next-80b-a3b", "h800", 2),
        ("gpt-oss-20b", "h20", 8),
    ],
)
def test_tp_alone_is_the_roofline_that_was(model: str, gpu: str, tp: int) -> None:
    """But for the head, which is a kind of kernel of its own here."""
    shape, dtypes = shape_of(model), {"weight_dtype": "fp8"}
    was, now = Roofline(hardware(gpu), tp, shape, **dtypes), of(f"tp={tp}", model, gpu, **dtypes)
    for pieces in ([(4096, 0)], [(100, 5), (7, 3000)]):
        assert now.prefill_s(pieces) == pytest.approx(was.prefill_s(pieces), rel=1e-2)
    for rows in ((1, 1000), (64, 640_000)):
        assert now.decode_s(*rows) == pytest.approx(was.decode_s(*rows), rel=0.02)
    assert now.mixed_s([(512, 512)], 8, 9000) == pytest.approx(was.mixed_s([(512, 512)], 8, 9000), rel=5e-3)
    assert now.weight_bytes == pytest.approx(was.weight_bytes / tp)


def test_cp_divides_a_prompt_and_gathers_its_keys() -> None:
    """Against tp: the same arithmetic on 16 GPUs of two nodes, other bytes."""
    times, tokens = of("cp=2,tp=8"), 16_384
    both = of("tp=8").prefill_s([(tokens, 0)])
    fabric, step = times.fabric, 0.003
    hidden = tokens * 8192 * 2
    talk = 80 * (
        fabric.reduce_s_of(hidden / 2, RankSpan(8))
        + fabric.reduce_s_of(hidden, RankSpan(16, 2))
        + fabric.gather_s(tokens * 327_680 / 8 / 80, RankSpan(2, 2))
    )
    head = 2 * 128_256 * 8192 / 8
    computing = both - step - 80 * 2 * fabric.reduce_s_of(hidden, RankSpan(8))
    assert times.prefill_s([(tokens, 0)]) == pytest.approx(step + computing / 2 + talk, rel=2e-3), head
    # Behind a prefix Q is gathered too, and what each rank found is joined.
    more = times.prefill_s([(512, 8192)]) - of("cp=2,tp=8").prefill_s([(512, 0)])
    assert more > 80 * 2 * fabric.gather_s(512 * 64 / 8 * 128 * 2, RankSpan(2, 2))


def test_dcp_multiplies_the_tokens_that_fit_and_divides_what_is_read() -> None:
    told = {"model": "deepseek-v3", "weight_dtype": "fp8"}
    whole, parts = of("tp=8", **told), of("tp=8,dcp=8", **told)
    assert parts.kv_tokens == pytest.approx(8 * whole.kv_tokens, rel=1e-4)
    rows, context = 1, 1_000_000
    base = whole.decode_s(rows, 0), parts.decode_s(rows, 0)
    assert parts.decode_s(rows, context) - base[1] < whole.decode_s(rows, context) - base[0]
    assert base[1] - base[0] == pytest.approx(61 * 2 * 15e-6, rel=0.05)  # two collectives a layer, of few bytes
    with pytest.raises(ConfigError, match="dcp=2: must divide the 1 ranks of tp=8 that have the same KV heads"):
        of("tp=8,dcp=2")
    assert of("tp=16,dcp=2").kv_tokens > 2 * of("tp=16").kv_tokens * 0.999


def test_experts_lie_apart_and_are_read_until_each_has_many_tokens() -> None:
    told = {"model": "deepseek-v3", "weight_dtype": "fp8", "gpu": "h800"}
    few, many = of("dp=8,ep=dp", **told), of("dp=64,ep=dp", **told)
    experts = DEEPSEEK.expert_layers * DEEPSEEK.experts * DEEPSEEK.expert_params
    assert few.weight_bytes - many.weight_bytes == pytest.approx(experts / 8 - experts / 64)
    assert few.kv_tokens <= 0 < many.kv_tokens
    # The same rows a GPU: of eight times the GPUs each reads an eighth of the experts, whose products are as long.
    assert many.decode_s(64 * 32, 0) < few.decode_s(8 * 32, 0)
    assert few.decode_s(8 * 64, 0) < 1.2 * few.decode_s(8 * 8, 0)  # bound by memory


def test_skew_holds_up_those_who_wait_for_the_fullest() -> None:
    told = {"model": "deepseek-v3", "weight_dtype": "fp8"}
    assert of("dp=8,ep=dp", **told, skew=2.0).prefill_s([(8192, 0)] * 8) > of("dp=8,ep=dp", **told).prefill_s(
        [(8192, 0)] * 8
    )
    cut = of("dp=8,ep=dp", **told, tensor_experts=True)
    assert cut.weight_bytes == of("dp=8,ep=dp", **told).weight_bytes
    skewed = of("dp=8,ep=dp", **told, tensor_experts=True, skew=2.0)
    assert cut.prefill_s([(8192, 0)] * 8) == skewed.prefill_s([(8192, 0)] * 8)


def test_one_prompt_keeps_one_copy_of_dp_busy() -> None:
    times = of("dp=8")
    assert times.prefill_s([(4096, 0)]) == pytest.approx(of("dp=1").prefill_s([(4096, 0)]))
    assert times.prefill_s([(4096, 0)] * 8) == pytest.approx(times.prefill_s([(4096, 0)]))
    assert times.decode_s(80, 8000) == pytest.approx(of("dp=1").decode_s(10, 1000))


def test_two_micro_batches_hide_all_to_all_of_many_rows_alone() -> None:
    told: dict[str, Any] = {"model": "deepseek-v3", "weight_dtype": "fp8", "gpu": "h800", "fp8_products": True}
    plain, halves = of("dp=64,ep=dp", **told), of("dp=64,ep=dp", **told, micro_batches=2)
    assert halves.decode_s(64 * 256, 64 * 256 * 1000) < plain.decode_s(64 * 256, 64 * 256 * 1000)
    assert halves.decode_s(64 * 2, 64 * 2 * 1000) > plain.decode_s(64 * 2, 64 * 2 * 1000)


def test_rows_go_round_a_pipeline_in_micro_batches() -> None:
    one, four = of("tp=8"), of("pp=4,tp=8")
    rounds = 4 * max(four._stages_s([[]], 16, 64_000.0))  # the last stage has the head
    assert four.decode_s(64, 256_000) == pytest.approx(rounds, rel=0.02)
    assert four.decode_s(64, 256_000) > one.decode_s(64, 256_000)  # four times the weights are not read faster
    assert four.kv_tokens > 4 * one.kv_tokens


def test_a_prompt_goes_through_stages_in_chunks_of_equal_compute() -> None:
    times = of("pp=4,tp=8", gpu="a800", block_tokens=256)
    ends = times.borders(131_072, 0)
    stages = [times.stages_s([(end - start, start)]) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert all(len(one) == 4 for one in stages)
    middle = [one[0] for one in stages[5:-1]]
    assert max(middle) < 1.15 * min(middle)  # but for the rounding to blocks
    sends = [times.send_s(end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert times.prefill_s([(131_072, 0)]) == pytest.approx(pipeline_ends(stages, sends)[-1][-1])
    alone = of("tp=8", gpu="a800").prefill_s([(131_072, 0)])
    assert 0.24 * alone < times.prefill_s([(131_072, 0)]) < 0.33 * alone


def test_mistakes_name_their_field() -> None:
    for call, field in (
        (lambda: of("tp=3"), "tp"),
        (lambda: of("pp=81"), "pp"),
        (lambda: of("tp=8", weight_dtype="int3"), "weight_dtype"),
        (lambda: of("tp=8", gpu="a800", fp8_products=True), "fp8_products"),
        (lambda: of("tp=8", micro_batches=3), "micro_batches"),
        (lambda: axes_node_spec(of("tp=1", gpu="a800")), "model"),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert error.value.field == field


# ── in a simulation ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Stages(Linear):
    """Four stages, each of which takes a fourth of `Linear`'s tokens and pairs and its constant."""

    def stages_s(self, pieces: Sequence[tuple[int, int]]) -> list[float]:
        return [0.002 + (self.prefill_s(pieces) - 0.002) / 4] * 4

    def send_s(self, tokens: int) -> float:
        return 0.001

    def chunk_cost(self) -> ChunkCost:
        return ChunkCost(1e-4 / 4, 0.0, 0.002)


PIPED = node(times=Stages(), pipeline=Stages())


def test_chunks_of_a_prompt_follow_one_another_through_the_stages() -> None:
    (one,) = served(mesh(spec=PIPED), [request(0, 1.0, 2048, 2)])
    ends = [(512 * n, 512 * (n + 1)) for n in range(4)]
    stages = [Stages().stages_s([(512, start)]) for start, _ in ends]
    assert one.first_token_s - 1.0 == pytest.approx(pipeline_ends(stages, 0.001)[-1][-1])
    assert one.first_token_s - 1.0 < 0.6 * sum(Linear().prefill_s([(512, start)]) for start, _ in ends)
    assert one.prefill_gpu_s == pytest.approx(sum(one[0] for one in stages))


def test_a_prompt_enters_when_the_first_stage_is_free() -> None:
    one, two = served(mesh(spec=PIPED), [request(0, 1.0, 512, 1), request(1, 1.0, 512, 1)])
    (each,) = {*Stages().stages_s([(512, 0)])}
    assert one.first_token_s == pytest.approx(1.0 + 4 * each + 3 * 0.001)
    assert two.prefill_start_s == pytest.approx(1.0 + each)
    assert two.first_token_s == pytest.approx(one.first_token_s + each)


def test_many_prompts_through_a_pipeline_all_end_and_all_bytes_arrive() -> None:
    shared = [request(n, 0.01 * n, 48 + 97 * n % 1500, 3, family=n % 3) for n in range(40)]
    assert {one.outcome for one in served(mesh(spec=PIPED), shared)} == {DONE}
    asked = [request(n, 0.01 * n, 400 + 97 * n % 1000, 3) for n in range(40)]
    piped, plain = served(mesh(spec=PIPED), asked), served(mesh(), asked)
    assert {one.outcome for one in piped} == {DONE}
    assert max(one.finish_s for one in piped) < max(one.finish_s for one in plain)


def test_an_instance_with_a_pipeline_dies_with_steps_in_its_stages() -> None:
    asked = [request(n, 0.02 * n, 700, 3) for n in range(30)]
    ended = served(mesh(2, spec=PIPED, kill=(KillEvent("p0", 0.2, 1.0),)), asked)
    assert len(ended) == 30 and {one.outcome for one in ended} <= {DONE, FAILED}
    assert sum(one.outcome == DONE for one in ended) > 25


def test_copies_of_dp_have_rows_and_pages_of_their_own() -> None:
    """One slot of four holds 64 tokens: nobody with more fits, whatever the others have free."""
    spec = node(kv_tokens=256, slots=4)
    config = mesh(spec=replace(node(), kv_tokens=4096))
    config = replace(config, decode=(spec,))
    small, large = served(config, [request(0, 0.0, 48, 10), request(1, 0.0, 60, 20)])
    assert small.outcome == DONE and large.outcome == REFUSED
    ended = served(config, [request(n, 0.0, 30, 30) for n in range(12)])
    assert {one.outcome for one in ended} == {DONE}


def test_the_fullest_copy_sets_the_pace() -> None:
    """Of two slots each has a row: contexts of 400 and 40 take as long as two of 400."""
    config = replace(mesh(), decode=(node(slots=2),))
    long, _ = served(config, [request(0, 0.0, 400, 3), request(1, 0.0, 40, 60)])
    alone, _ = served(config, [request(0, 0.0, 400, 3), request(1, 0.0, 400, 60)])
    assert long.mean_tbt_s > 0.0
    assert alone.finish_s - alone.kv_end_s == pytest.approx(long.finish_s - long.kv_end_s, rel=0.3)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=25),
    slots=st.integers(1, 5),
    share=st.floats(0.0, 0.05),
)
def test_whatever_comes_slots_give_everything_back(sizes: list[tuple[int, int]], slots: int, share: float) -> None:
    """`run` checks that pages and extents came back."""
    spec = node(kv_tokens=112 * slots, slots=slots)
    asked = [request(n, share * n, tokens, output) for n, (tokens, output) in enumerate(sizes)]
    ended = served(replace(mesh(), decode=(spec,)), asked)
    assert len(ended) == len(sizes) and {one.outcome for one in ended} == {DONE}
