"""The solver and the formulas of benchmarks/sizing.py, and how it reads counters and plans a second gateway."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sizing_costs import CALLED, FLEET, GATEWAY, LIVE, SATURATED, WIRE, Costs, costs_of
from benchmarks.sizing_mesh import Clocks, another, total
from benchmarks.sizing_paper import (
    MOST_INSTANCES,
    Setup,
    Workload,
    announcements,
    at,
    engines,
    gateway_s,
    most_instances,
    saturates,
    spread_over,
)
from benchmarks.sizing_solve import Cost, Fit, Window, fit, nonnegative
from kvmesh.cli.up import plan
from kvmesh.cli.up.settings import MeshSettings

# ── the solver ────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(0, 6))
def test_the_solution_is_optimal(seed: int, columns: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    table = rng.random((columns + more, columns)) * 10.0 ** rng.integers(-3, 4, columns)
    # Unknowns of both signs: some come in early and have to leave again.
    values = table @ (rng.normal(size=columns) / np.linalg.norm(table, axis=0)) + 0.1 * rng.normal(size=columns + more)
    x = nonnegative(table, values)
    slope = (table / np.linalg.norm(table, axis=0)).T @ (values - table @ x)
    assert (x >= 0).all()
    assert slope.max() <= 1e-7, "no unknown would do better if it grew"
    assert np.abs(slope[x > 0]).max(initial=0.0) <= 1e-7, "nor the others if they changed"


def test_what_would_be_negative_is_nothing_and_the_rest_is_solved_anew() -> None:
    table = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative(table, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert nonnegative(table, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])


def windows(costs: dict[str, float], service: str, repeat: int, times: float = 1.0) -> list[Window]:
    """As many as events and two more, without noise."""
    rng = np.random.default_rng(3)
    found = []
    for i in range(len(costs) + 2):
        counts = {event: float(rng.integers(1, 100)) for event in costs}
        cpu = times * sum(cost * counts[event] for event, cost in costs.items())
        found.append(Window(f"window {i}", repeat, counts, {service: cpu}))
    return found


def test_costs_are_the_median_of_the_repeats_and_their_range() -> None:
    true = {"seconds": 0.01, "requests": 0.002}
    some = [w for repeat, times in enumerate((1.0, 4.0, 2.0)) for w in windows(true, "x", repeat, times)]
    found = fit(some, "x", list(true))
    cost = found.costs["requests"]
    assert (cost.median, cost.least, cost.most) == pytest.approx((0.004, 0.002, 0.008))
    assert cost.spread == pytest.approx(1.5)
    assert found["requests"] == cost.median and found["tokens"] == 0.0
    assert found.error == pytest.approx(0.5), "off by a half at 4, by one at 1, by nothing at 2"


def test_a_fit_without_windows_or_of_what_never_happened_is_refused() -> None:
    with pytest.raises(ValueError, match="no window"):
        fit([], "x", ["seconds"])
    with pytest.raises(ValueError, match="'tokens'"):
        fit([Window("a", 0, {"seconds": 1.0}, {"x": 1.0})], "x", ["seconds", "tokens"])


def test_a_large_window_weighs_no_more_than_a_small_one() -> None:
    large = Window("large", 0, {"requests": 1000.0}, {"x": 20.0})
    small = [Window(f"small {i}", 0, {"requests": 10.0}, {"x": 0.1}) for i in range(8)]
    assert fit([large, *small], "x", ["requests"])["requests"] < 0.012


def test_costs_of_all_services_and_of_calls_in_flight() -> None:
    doors = [f"{event}_{door}" for door in ("rest", "grpc") for event in GATEWAY]
    events = sorted({event for some in LIVE.values() for event in some} | set(doors))
    unit = [
        Window(w.group + f" {door}", 0, w.counts, dict.fromkeys((*LIVE, "gateway"), w.cpu_s["x"]))
        for door in ("rest", "grpc")
        for w in windows(dict.fromkeys(events, 1e-3), "x", 0)
    ]
    odd = Window(f"1P+1D, {CALLED[1]}: idle", 0, unit[0].counts, dict.fromkeys((*LIVE, "gateway"), 1e6))
    quiet = [
        Window(w.group, 0, w.counts, dict.fromkeys(FLEET, w.cpu_s["x"]))
        for w in windows(dict.fromkeys(sorted({e for some in FLEET.values() for e in some}), 1e-3), "x", 0)
    ]
    full = [Window(f"{w.group}, {SATURATED}", 0, w.counts, {k: v / 2 for k, v in w.cpu_s.items()}) for w in quiet]
    with_odd, without = costs_of([*unit, odd], [*quiet, *full]), costs_of(unit, [*quiet, *full])
    assert with_odd.live["store"] == without.live["store"], "its own rounds are as many as its beats there"
    assert with_odd.live["decode"] != without.live["decode"]
    for service in without.full:
        for event in FLEET[service]:
            assert without.full[service][event] == pytest.approx(without.fleet[service][event] / 2)
    with pytest.raises(ValueError, match="no window"):
        costs_of(unit, quiet)


# ── the formulas ──────────────────────────────────────────────────────────────────────────────────


def fitted(**costs: float) -> Fit:
    return Fit({event: Cost(cost, cost, cost) for event, cost in costs.items()}, 0.0)


COSTS = Costs(
    live={
        "gateway, rest": fitted(seconds=0.01, requests_rest=0.01, tokens_rest=1e-4, steps_rest=1e-4),
        "prefill": fitted(seconds=0.01, own_conductor_beats=1e-3, requests=1e-3),
        "decode": fitted(seconds=0.01, own_conductor_beats=1e-3, requests=1e-3, tokens=1e-4, steps=1e-4),
    },
    fleet={WIRE: fitted(conductor_beats=500.0, store_beats=400.0, announcements=300.0)},
    full={
        "conductor": fitted(seconds=0.1, conductor_beats=1e-3, requests=2e-3, blocks=1e-5),
        "store": fitted(seconds=0.1, store_beats=1e-3, announcements=1e-3),
    },
)
CALM = Setup("calm", beat_s=5.0, store_beat_s=10.0, announce_s=5.0)
WORK = Workload(prompt_tokens=6400, answer_tokens=100)


def test_a_conductor_is_full_where_its_terms_make_one() -> None:
    # 0.1 + 100 instances / 5 s * 1 ms + rate * (2 ms + 100 blocks * 10 us) = 1
    assert saturates(COSTS, 100, CALM, WORK, "conductor") == pytest.approx((1 - 0.1 - 0.02) / 3e-3)
    several = Setup("calm", beat_s=5.0, store_beat_s=10.0, announce_s=5.0, conductors=3)
    assert saturates(COSTS, 100, several, WORK, "conductor") == pytest.approx(3 * (1 - 0.1 - 0.02) / 3e-3)


def test_heartbeats_alone_may_fill_it() -> None:
    setup = Setup("often", beat_s=0.2, beats=0)
    assert most_instances(COSTS, setup, "conductor") == pytest.approx(180, abs=1)  # 0.9 / (5 * 1 ms)
    assert saturates(COSTS, 170, setup, WORK, "conductor") > 0
    assert saturates(COSTS, 190, setup, WORK, "conductor") == 0.0


def test_budgets_bound_what_comes_at_rest() -> None:
    setup = Setup("paced", beats=50, store_beats=25, words=400)  # by doors four times as many
    for instances in (100, 1000, 20_000):
        rest = at(COSTS, instances, setup, WORK, 0.0)
        assert rest.conductor <= 0.1 + 0.2 + 1e-9 and rest.store <= 0.1 + 0.1 + 0.1 + 1e-9
    assert most_instances(COSTS, setup, "conductor") == most_instances(COSTS, setup, "store") == MOST_INSTANCES
    few = Setup("few")
    assert few.paced(64) == few and few.idle_s(64) == 1.0
    assert few.paced(1000).paced(1000) == few.paced(1000)
    busy = announcements(2000, setup, WORK, 1e6)
    assert busy.all == busy.relayed <= 400 * (1 + 1e-9)


def test_announcements_come_as_often_as_there_is_something_between_two_bounds() -> None:
    setup = Setup("some", announce_s=0.1)
    rest = announcements(10, setup, WORK, 0.0)
    assert (rest.all, rest.relayed) == (10.0, 0.0), "one a second each, with nothing in it"
    full = announcements(10, setup, WORK, 1e6)
    assert (full.all, full.relayed) == pytest.approx((100.0, 100.0)), "each interval one"
    assert announcements(10, Setup("rare", announce_s=4.0), WORK, 1e6).all == pytest.approx(2.5)
    assert announcements(10, Setup("rare", announce_s=4.0), WORK, 0.0).all == pytest.approx(2.5)
    one = announcements(10, setup, WORK, 0.5)  # a tenth of a request a second and instance
    assert one.relayed < one.all < full.all


def test_tokens_of_a_step_share_a_message_as_far_as_gateways_are_few() -> None:
    assert spread_over(1, 16) == pytest.approx(1 / 16)
    assert spread_over(10**6, 16) == pytest.approx(1.0, abs=1e-4)
    assert spread_over(5, 1) == 1.0 and spread_over(3, 0.2) == 1.0
    shares = [spread_over(gateways, 12) for gateways in range(1, 50)]
    assert shares == sorted(shares)


def test_gateways_are_enough_at_their_share_and_no_more() -> None:
    point = at(COSTS, 100, CALM, WORK, 50.0)
    assert point.gateway / point.gateways <= 0.7 < point.gateway / max(1, point.gateways - 2)
    assert point.gateway == pytest.approx(50.0 * 0.03, rel=0.35), "request 10 ms, 100 tokens of 0.1 to 0.2 ms"
    assert gateway_s(COSTS, WORK, 100, 1.0) == pytest.approx(0.01 + 100 * 2e-4)


def test_everything_takes_more_at_a_higher_rate_and_the_wire_carries_it() -> None:
    points = [at(COSTS, 100, CALM, WORK, rate) for rate in (0.0, 1.0, 10.0, 100.0)]
    for name in ("conductor", "gateway", "prefill", "decode"):
        values = [getattr(point, name) for point in points]
        assert values == sorted(values) and values[0] < values[-1]
    assert points[0].bytes_per_s == pytest.approx(100 / 5 * 500 + 100 / 10 * 400 + 100 / 5 * 300)
    assert points[0].prefill == pytest.approx(0.01 + 1e-3 / 5)


def test_engines_bound_the_rate() -> None:
    assert engines(10, Workload(prompt_tokens=1000, prefill_per_s=2000)) == 10.0


# ── reading and planning ──────────────────────────────────────────────────────────────────────────


def test_a_counter_is_summed_over_the_labels_that_hold_the_text() -> None:
    text = '# HELP a_total x\na_total{verdict="applied",b="1"} 2.0\na_total{verdict="gap"} 3.0\nb_total 7\na_totals 9\n'
    assert total(text, "a_total", "") == 5.0
    assert total(text, "a_total", 'verdict="applied"') == 2.0
    assert total(text, "b_total", "") == 7.0
    assert total(text, "c_total", "") == 0.0


def test_clocks_tell_the_cpu_time_of_a_process_and_refuse_one_that_is_not_there() -> None:
    import os

    clocks = Clocks()
    first = clocks.read(os.getpid())
    sum(i * i for i in range(200_000))
    assert first < clocks.read(os.getpid())
    with pytest.raises(OSError, match="process"):
        clocks.read(2**22 + 1)


def test_a_second_gateway_has_ports_and_files_of_its_own(tmp_path: Path) -> None:
    wanted = MeshSettings(model="m", http_port=0, grpc_port=0, run_dir=str(tmp_path))
    ports = plan.Ports(1)
    first = next(spec for spec in plan.plan(wanted, tmp_path, ports) if spec.service == "gateway")
    second = another(first, "gateway-1", ports)
    own = ("address", "http", "metrics", "ready_file", "log", "name")
    assert all(getattr(first, key) != getattr(second, key) for key in own)
    differ = {a.partition("=")[0] for a, b in zip(first.argv, second.argv, strict=True) if a != b}
    assert differ == {"--port", "--http-port", "--metrics-port", "--ready-file", "--instance-id"}
    assert f"--port={second.address.rpartition(':')[2]}" in second.argv
    assert f"--http-port={second.http.rpartition(':')[2]}" in second.argv
