"""Scheduling that is right in use, in virtual time: equal instances get equal shares, what changes is found out, and
who is told when to come again is told right. Step times are noisy, and conductors know none of them at first.

`python -m tests.support.sim.scenarios` shows the figures of each."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvmesh.sim.changes import SlowPhase
from kvmesh.sim.report.records import DONE
from tests.support.sim import scenarios
from tests.support.sim.scenarios import BUSY, FAIR, OFTEN, POOLS, SELDOM, Ran, Strike

COMING_BACK_S = 15.0
HALF_BACK = 0.8 / 2  # of an equal share of two


def check_fair(ran: Ran, *, computed: bool = True) -> None:
    """The busiest of each pool has no more than an equal share, and somewhat."""
    for pool, whats in POOLS:
        bound = FAIR[len(getattr(ran.config, pool))]
        for what in whats if computed else whats[:2]:
            busiest = ran.summary.busiest(pool, what)
            assert busiest <= bound, f"{busiest:.0%} of {pool} {what} at one instance, {scenarios.shares(ran)}"
    assert ran.summary.outcomes == {DONE: ran.summary.requests}


# ── C0 ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("size", "in_flight"),
    [(3, 4), (2, 16), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (3, 64)))],
)
def test_equal_instances_share_what_comes(size: int, in_flight: int) -> None:
    check_fair(scenarios.closed(size, size, in_flight))


@pytest.mark.parametrize(("prefills", "decodes", "sessions", "turns"), [(3, 2, 24, 7), (2, 2, 12, 10)])
def test_sessions_are_spread_and_find_what_they_left(prefills: int, decodes: int, sessions: int, turns: int) -> None:
    ran = scenarios.paced_sessions(prefills, decodes, sessions, turns)
    assert ran.summary.requests == sessions * turns
    assert ran.summary.left_cached >= 0.95
    check_fair(ran, computed=False)


@pytest.mark.parametrize(("instances", "system"), [(2, 2000), pytest.param(3, 8000, marks=pytest.mark.slow)])
def test_agents_that_give_no_sign_of_load_are_not_all_at_one_instance(instances: int, system: int) -> None:
    """Their turns are 20 s apart and their prompts begin alike: nobody is ever busy, and at first one instance alone
    has that beginning."""
    ran = scenarios.paced_sessions(instances, instances, system=system, think_s=20.0, start_s=300.0)
    assert ran.summary.left_cached >= 0.95
    for pool, _ in POOLS:
        assert ran.summary.busiest(pool, "requests") <= 0.6, scenarios.shares(ran)


@pytest.mark.slow
def test_one_hot_instance_leaves_sessions_of_others_where_they_are() -> None:
    """One of three becomes ten times slower: its sessions go, the others' stay as they did before."""

    def stay(ran: Ran) -> float:
        """The share of later turns at p1 and p2 whose session's turn before was there, too."""
        before: dict[str, str] = {}
        stayed = []
        for one in sorted(ran.records, key=lambda record: record.at_s):
            was, before[one.session] = before.get(one.session, "p0"), one.prefill
            if was != "p0" and one.at_s > 7.0:
                stayed.append(one.prefill == was)
        return sum(stayed) / len(stayed)

    calm, hot = (
        scenarios.paced_sessions(3, 3, 36, 10, think_s=2.0, slow=slow)
        for slow in ((), (SlowPhase("p0", 5.0, 60.0, 10.0),))
    )
    assert hot.share("p0", 7.0) <= 0.1 < calm.share("p0", 7.0)
    assert hot.summary.left_cached >= 0.95
    assert stay(hot) >= stay(calm) - 0.1


# ── C4 ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("phase", "letter"),
    [
        pytest.param(SELDOM, "d", id="1/s d"),
        pytest.param(OFTEN, "p", id="6/s p", marks=pytest.mark.long),
        pytest.param(BUSY, "d", id="busy d", marks=pytest.mark.slow),
    ],
)
def test_a_slow_instance_is_found_out_and_forgiven(phase: Strike, letter: str) -> None:
    name = phase.victim(letter)
    ran, usual = phase.struck("slow", name), scenarios.undisturbed(phase)
    (found,) = ran.changes
    assert found.noticed_s <= phase.late_s, found
    what = "ttft_s" if letter == "p" else "mean_tbt_s"
    p90_s, usual_s = (one.p90_s(what, phase.from_s, phase.until_s) for one in (ran, usual))
    # In a busy fleet those that were in its queue when it became slow wait three times as long, whoever notices when.
    most = 2.25 if phase is BUSY else 2.0
    assert p90_s <= most * usual_s, f"P90 of {what} {1000 * p90_s:.1f} ms, {1000 * usual_s:.1f} without"
    assert ran.share(name, phase.until_s + COMING_BACK_S) >= HALF_BACK


@pytest.mark.parametrize(
    ("what", "letter"),
    [
        ("frozen", "d"),
        pytest.param("killed", "p", marks=pytest.mark.slow),
        pytest.param("replaced", "d", marks=pytest.mark.slow),
        pytest.param("joined", "p", marks=pytest.mark.slow),
        pytest.param("left", "d", marks=pytest.mark.slow),
    ],
)
def test_who_comes_and_goes_is_missed_soon_and_trusted_soon(what: str, letter: str) -> None:
    name = OFTEN.victim(letter)
    ran, usual = OFTEN.struck(what, name), scenarios.undisturbed(OFTEN)
    (found,) = ran.changes
    assert ran.summary.outcomes == {DONE: ran.summary.requests}
    if what != "joined":
        assert found.noticed_s <= OFTEN.late_s, found
        span = OFTEN.from_s, found.until_s
        assert ran.p90_s("ttft_s", *span) <= 2 * usual.p90_s("ttft_s", *span)
    if what in ("frozen", "replaced", "joined"):
        assert ran.share(name, found.until_s + COMING_BACK_S) >= HALF_BACK


# ── C2 ────────────────────────────────────────────────────────────────────────────────────────────


def check_told_right(ran: Ran, right: float = 0.85, placed: float = 0.7) -> None:
    """`right`: at least so many of those who are told a time are told it within a factor of two; `placed`: and so many
    of those who come then find a place."""
    summary = ran.summary
    assert summary.waits["told"] > 0, "nobody was refused"
    assert summary.right_share >= right, summary.wait_ratio.to_json()
    assert summary.placed_share >= placed, summary.waits


@pytest.mark.parametrize(
    "make",
    [scenarios.burst, scenarios.burst_on_two, lambda: scenarios.crowd(300)],
    ids=["30 at once", "60 on two", "a crowd"],
)
def test_who_comes_when_told_is_served(make: scenarios.Make) -> None:
    ran = make()
    check_told_right(ran)
    assert ran.summary.outcomes == {DONE: ran.summary.requests}


# ── of any fleet ──────────────────────────────────────────────────────────────────────────────────

SIZES = st.integers(2, 4)
SEEDS = st.integers(0, 10_000)
SCALES = st.sampled_from((0.3, 1.0, 4.0, 12.0))  # faster and slower than what conductors take for usual
NOISES = st.sampled_from((0.0, 0.2, 0.4))
# An example is a simulation of a second: smaller ones are not looked for.
FEW = settings(
    max_examples=3,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=False,
)


@FEW
@given(SIZES, SIZES, st.integers(1, 24), SCALES, NOISES, SEEDS)
def test_no_equal_starves(prefills: int, decodes: int, in_flight: int, scale: float, noise: float, seed: int) -> None:
    ran = scenarios.closed(prefills, decodes, in_flight, seed, count=120, scale=scale, noise=noise)
    for pool, count in (("prefill", prefills), ("decode", decodes)):
        for n in range(count):
            share = ran.summary.share(pool, f"{pool[0]}{n}")
            assert share >= 1 / count / 3, f"{pool[0]}{n} has {share:.0%}: {scenarios.shares(ran)}"


@FEW
@given(
    SIZES, SIZES, st.sampled_from("pd"), st.sampled_from((3.0, 5.0, 8.0)), st.sampled_from((2.0, 6.0, 10.0)), SCALES,
    SEEDS,
)  # fmt: skip
@pytest.mark.slow
def test_no_slow_instance_goes_unnoticed(
    prefills: int, decodes: int, letter: str, times: float, rate: float, scale: float, seed: int
) -> None:
    until_s = 26.0 + 60 / rate
    phase = Strike(rate, 26.0, until_s, until_s, 24 / rate, seed, prefills, decodes, min(scale, 4.0))
    (found,) = phase.struck("slow", phase.victim(letter), times).changes
    assert found.noticed_s <= phase.late_s, found


@FEW
@given(st.integers(2, 3), st.integers(2, 4), st.integers(2, 4), NOISES, SEEDS)
@pytest.mark.slow
def test_conductors_that_do_not_know_of_each_other_do_not_herd(
    conductors: int, prefills: int, decodes: int, noise: float, seed: int
) -> None:
    """Bursts between two heartbeats: no instance gets much more than its part of all of them."""
    ran = scenarios.bursts(prefills, decodes, conductors=conductors, noise=noise, seed=seed)
    for pool, count in (("prefill", prefills), ("decode", decodes)):
        busiest = ran.summary.busiest(pool)
        assert busiest <= 1.5 / count, f"{busiest:.0%} of {pool}: {scenarios.shares(ran)}"


@FEW
@given(st.integers(15, 60), st.integers(1, 3), st.sampled_from((300, 600, 1000)), SEEDS)
def test_no_herd_comes_back(count: int, prefills: int, tokens: int, seed: int) -> None:
    each_s = scenarios.Demo().prefill_s([(tokens, 0)])
    slo_ms = 1000 * each_s * max(2.0, count / prefills / 4)  # a quarter of them can be served in time
    ran = scenarios.burst(count, seed, prefills=prefills, decodes=prefills, tokens=tokens, slo_ms=slo_ms)
    if ran.summary.waits["came"] >= 10:
        check_told_right(ran, right=0.55, placed=0.35)
    assert not math.isnan(ran.p90_s())
