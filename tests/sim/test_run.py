"""A simulation as a whole: what a few requests take, by hand; what is true of any; the same again."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvmesh.errors import ConfigError
from kvmesh.services.prefill.rates import Rates
from kvmesh.sim.config import MeshMode, Routing, SimConfig
from kvmesh.sim.life import Life
from kvmesh.sim.prefiller import Prefiller
from kvmesh.sim.report.records import DONE, FAILED, REFUSED, MeshSample, Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest
from tests.support.sim.fleets import BLOCK, KV_BYTES, Linear, coupled, mesh, node, request, served

TIMES = Linear()
EXACT = {"abs": 1e-9, "rel": 1e-12}


def steps(batch: int, context: int, count: int) -> float:
    """So many decode steps in a row."""
    return sum(TIMES.decode_s(batch, context + n * batch) for n in range(count))


def test_two_requests_take_what_the_formulas_say() -> None:
    one, two = served(mesh(), [request(0, 1.0, 100, 3), request(1, 1.0, 60, 4)])
    rate, last_layer = 1e7, 0.25  # bytes/s; share of the KV that leaves when the step ends
    first = 1.0 + TIMES.prefill_s([(100, 0)])
    assert one.prefill_start_s == pytest.approx(1.0, **EXACT)
    assert one.first_token_s == one.prefill_end_s == pytest.approx(first, **EXACT)
    # The other layers left while it was computed. Now the second one's KV wants more than half of the wire, too.
    second = first + TIMES.prefill_s([(60, 0)])
    assert (1 - last_layer) * 60 * KV_BYTES / (second - first) > rate / 2
    landed = first + last_layer * 100 * KV_BYTES / (rate / 2)
    assert one.kv_end_s == pytest.approx(landed, **EXACT)
    assert two.queue_s == pytest.approx(first - 1.0, **EXACT)
    assert two.first_token_s == pytest.approx(second, **EXACT)
    assert two.kv_end_s == pytest.approx(second + last_layer * 60 * KV_BYTES / rate, **EXACT)
    # It joins when the step that the first one is in has ended; the next is the first one's last.
    joined = landed + TIMES.decode_s(1, 100)
    assert landed < two.kv_end_s < joined
    together = TIMES.decode_s(2, 101 + 60)
    assert one.finish_s == pytest.approx(joined + together, **EXACT)
    assert two.finish_s == pytest.approx(joined + together + steps(1, 61, 2), **EXACT)
    gap = joined + together - second
    assert two.tbt_s == pytest.approx(gap, **EXACT)
    assert two.mean_tbt_s == pytest.approx((two.finish_s - second) / 3, **EXACT)


def test_a_slow_wire_is_busy_from_the_first_layer_to_the_last() -> None:
    (one,) = served(mesh(spec=node(nic_bytes_per_s=2e5)), [request(0, 0.0, 160, 2)])
    assert one.kv_end_s == pytest.approx(160 * KV_BYTES / 2e5, **EXACT)


def test_a_known_prefix_is_neither_computed_nor_sent_again() -> None:
    one, two = served(mesh(), [request(0, 0.0, 320, 2, family=1), request(1, 5.0, 330, 2, family=1)])
    assert (one.cached_tokens, two.cached_tokens) == (0, 320)
    assert two.prefill_end_s - 5.0 == pytest.approx(TIMES.prefill_s([(10, 320)]), **EXACT)
    assert two.kv_end_s - two.prefill_end_s == pytest.approx(0.25 * 10 * KV_BYTES / 1e7, **EXACT)
    assert two.pulled_tokens == 0


def test_a_twin_waits_for_the_prefix_that_is_being_computed() -> None:
    """Both would fit one step."""
    asked = [request(0, 0.0, 500, 1), *(request(n, 0.001, 160, 1, family=1) for n in (1, 2))]
    _, one, two = served(mesh(), asked)
    assert one.cached_tokens == 0
    assert two.cached_tokens == 144  # all but the block of its last token
    assert two.prefill_start_s == pytest.approx(one.prefill_end_s)


def test_a_prefix_is_pulled_from_whoever_holds_it_and_waited_for() -> None:
    fast = node(nic_bytes_per_s=1e9)
    known = request(0, 0.0, 1600, 1)
    others = [request(n, 20.0, 2400, 1) for n in range(1, 5)]
    others = [replace(one, keys=(*known.keys, *one.keys[len(known.keys) :])) for one in others]
    records = served(mesh(2, spec=fast), [known, *others])
    assert all(record.cached_tokens == 1600 for record in records[1:])
    away = [record for record in records[1:] if record.prefill != records[0].prefill]
    assert away[0].pulled_tokens == 1600
    assert away[0].prefill_start_s - 20.0 >= 1600 * KV_BYTES / 1e9  # it waited for the bytes


@pytest.mark.parametrize(("pull_ns", "pulled"), [(1.0, 1600), (1e9, 0)])
def test_a_pull_planned_for_later_begins_when_the_turn_comes_first(
    monkeypatch: pytest.MonkeyPatch, pull_ns: float, pulled: int
) -> None:
    """As in the prefill service. Who is alone there waits for it only if blocks come faster than they are computed."""
    expect = Prefiller.expect

    def later(self: Prefiller, life: Life, pull_after_s: float) -> None:
        assert life.placed is not None
        self.rates = Rates(pull_ns, computed_ns=1e6)
        expect(self, life, 100.0 if life.placed.pulls else pull_after_s)

    monkeypatch.setattr(Prefiller, "expect", later)
    known = request(0, 0.0, 1600, 1)
    others = [replace(request(n, 20.0, 2400, 1), keys=known.keys) for n in (1, 2)]
    records = served(mesh(2, spec=node(nic_bytes_per_s=1e9)), [known, *others])
    (away,) = [record for record in records[1:] if record.prefill != records[0].prefill]
    assert away.cached_tokens == away.pulled_tokens == pulled
    assert away.ttft_s < 1.0


def test_what_leaves_memory_is_read_from_the_ssd() -> None:
    disk = node(dram_tokens=640, ssd_tokens=16384, ssd_read_bytes_per_s=1e8)
    fill = [request(n, float(n), 320, 1, family=n) for n in range(1, 4)]
    *_, again = served(mesh(spec=disk), [request(0, 0.0, 320, 1, family=0), *fill, request(4, 20.0, 330, 1, family=0)])
    assert again.cached_tokens == again.pulled_tokens == 320
    read_s = 320 * KV_BYTES / 1e8
    assert again.ttft_s == pytest.approx(read_s + TIMES.prefill_s([(10, 320)]), rel=1e-3)


def test_rows_that_find_no_page_make_room_and_still_end() -> None:
    small = node(kv_tokens=30 * BLOCK)
    asked = [request(n, 0.1 * n, 100, 150) for n in range(6)]
    records = served(mesh(spec=small), asked)
    assert [record.outcome for record in records] == [DONE] * 6
    roomy = max(record.tbt_s for record in served(mesh(), asked))
    assert max(record.tbt_s for record in records) > 5 * roomy  # somebody waited in host memory


def test_a_coupled_instance_stalls_its_rows_or_slows_them() -> None:
    asked = [request(0, 0.0, 100, 50), request(1, 0.2, 1600, 2)]
    long_s = TIMES.prefill_s([(1600, 0)])
    stalled, _ = served(coupled(MeshMode.COUPLED_PREFILL_FIRST), asked)
    assert stalled.tbt_s * math.ceil(0.1 * 49) == pytest.approx(
        long_s + sum(sorted((TIMES.decode_s(1, 100 + n) for n in range(49)), reverse=True)[:5]), rel=0.05
    )
    slowed, _ = served(coupled(MeshMode.COUPLED_CHUNKED, chunk_tokens=101), asked)
    assert slowed.tbt_s == pytest.approx(TIMES.mixed_s([(100, 1500)], 1, 140), rel=0.1)
    assert slowed.tbt_s < stalled.tbt_s
    first = TIMES.prefill_s([(100, 0)])
    assert slowed.first_token_s == stalled.first_token_s == pytest.approx(first, **EXACT)


def test_routing_of_coupled_instances() -> None:
    asked = [request(n, 0.001 * n, 100 if n % 2 else 1600, 20) for n in range(8)]
    turns = served(coupled(MeshMode.COUPLED_PREFILL_FIRST, 2, routing=Routing.ROUND_ROBIN), asked)
    assert [record.prefill for record in turns] == ["c0", "c1"] * 4
    least = served(coupled(MeshMode.COUPLED_PREFILL_FIRST, 2), [*asked, request(8, 0.4, 100, 2)])
    assert {record.prefill for record in least} == {"c0", "c1"}


# ── true of any ───────────────────────────────────────────────────────────────────────────────────

REQUESTS = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 700), st.integers(1, 120), st.one_of(st.none(), st.integers(0, 3))),
    min_size=1,
    max_size=25,
)


def ordered(asked: list[tuple[float, int, int, int | None]]) -> list[SimRequest]:
    return [request(n, *rest) for n, rest in enumerate(sorted(asked, key=lambda one: one[0]))]


def check(records: list[Record], requests: list[SimRequest]) -> None:
    assert [record.index for record in records] == [one.index for one in requests]  # each exactly once
    for record, one in zip(records, requests, strict=True):
        assert record.outcome in (DONE, REFUSED, FAILED)
        if record.outcome != DONE:
            assert record.reason
            continue
        assert (record.input_tokens, record.output_tokens) == (one.input_tokens, one.output_tokens)
        assert 0 <= record.cached_tokens < record.input_tokens
        assert 0 <= record.pulled_tokens <= record.cached_tokens
        assert one.at_s <= record.prefill_start_s < record.prefill_end_s == record.first_token_s <= record.finish_s
        assert record.queue_s >= 0
        assert record.prefill_gpu_s > 0
        spent = record.finish_s - record.first_token_s
        if record.output_tokens == 1:
            assert spent == 0
            assert math.isnan(record.tbt_s)
        else:  # one interval for each token but the first, and together they are the whole time
            assert record.mean_tbt_s * (record.output_tokens - 1) == pytest.approx(spent, rel=1e-6)
            assert record.tbt_s >= record.mean_tbt_s * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(REQUESTS, st.integers(1, 3), st.integers(1, 3), st.sampled_from((48, 64, 256)), st.booleans())
def test_everybody_ends_once_and_everything_comes_back(
    asked: list[tuple[float, int, int, int | None]], prefills: int, decodes: int, pages: int, with_ssd: bool
) -> None:
    """`run` itself asserts that all pages, extents and promises came back."""
    spec = node(
        kv_tokens=pages * BLOCK,
        dram_tokens=90 * BLOCK,
        nic_bytes_per_s=3e6,
        ssd_tokens=1000 * BLOCK if with_ssd else 0,
        ssd_read_bytes_per_s=2e6,
    )
    requests = ordered(asked)
    config = mesh(prefills, decodes, spec, chunk_tokens=128, batch_tokens=128, long_tokens=128, conductors=2)
    check(served(config, requests), requests)


@settings(max_examples=30, deadline=None)
@given(
    REQUESTS,
    st.integers(1, 2),
    st.sampled_from((MeshMode.COUPLED_CHUNKED, MeshMode.COUPLED_PREFILL_FIRST)),
    st.booleans(),
)
@example(  # prompts that begin may not take the pages that rows need for the very next step
    [
        (1.0, 312, 58, None),
        (1.390625, 274, 32, None),
        (0.25, 687, 110, None),
        (1.34375, 237, 37, 0),
        (1.328125, 96, 1, 0),
    ],
    1,
    MeshMode.COUPLED_CHUNKED,
    True,
)
def test_so_it_is_with_coupled_ones(
    asked: list[tuple[float, int, int, int | None]], count: int, mode: MeshMode, caches: bool
) -> None:
    requests = ordered(asked)
    config = coupled(mode, count, node(kv_tokens=64 * BLOCK), chunk_tokens=64, batch_tokens=256, prefix_cache=caches)
    check(served(config, requests), requests)


def busy(count: int = 120) -> list[SimRequest]:
    return [request(n, 0.02 * n, 50 + 37 * n % 600, 1 + 13 * n % 90, n % 7 or None) for n in range(count)]


@pytest.mark.parametrize(
    "config", [mesh(2, 2), mesh(2, 2, conductors=3, seed=4), coupled(MeshMode.COUPLED_CHUNKED, 2)], ids=str.__class__
)
def test_the_same_again(config: SimConfig) -> None:
    first, second = served(config, busy()), served(config, busy())
    assert list(map(repr, first)) == list(map(repr, second))


def test_samples_progress_and_summary_tell_of_the_same_run() -> None:
    samples: list[MeshSample] = []
    told: list[tuple[float, int]] = []
    summary = run(mesh(2, 2), busy(), samples=samples.append, progress=lambda at, done: told.append((at, done)))
    assert summary.requests == 120
    assert told[-1][1] == 120
    assert [sample.at_s for sample in samples[:3]] == [0.0, 1.0, 2.0]
    assert samples[1].pools["prefill"].instances == 2
    assert samples[1].active > 0
    assert samples[-1].wire_bytes > 0


def test_requests_out_of_order_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"request 1: at_s=0\.5: earlier than the one before, 1\.0"):
        run(mesh(), [request(0, 1.0, 10, 1), request(1, 0.5, 10, 1)])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"decode": ()}, r"decode=\(\): must be one instance or more"),
        ({"chunk_tokens": 8}, "chunk_tokens=8: must be at least block_tokens=16"),
        ({"heartbeat_s": 2.0}, "heartbeat_s=2.0: must be below conductor.lease_s=1.5"),
        ({"prefill": (node(nic_bytes_per_s=0.0),)}, r"prefill\[0\].nic_bytes_per_s=0.0: must be above 0"),
    ],
)
def test_what_cannot_be_simulated_is_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        mesh(**changes)
