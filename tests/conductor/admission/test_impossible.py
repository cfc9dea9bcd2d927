"""SLOs that nobody could meet, idle or not: refused as such, with the least that can be met, and no hint to scale."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded
from kvmesh.services.conductor.domain import (
    Cordon,
    CordonState,
    DecodeSample,
    Lane,
    Load,
    Placed,
    PrefillSample,
    Refuse,
    Role,
)
from kvmesh.services.conductor.settings import AdmissionSettings, BalanceSettings, Settings
from tests.support.conductor.brain import Brain, card, chain

LONG: dict[str, Any] = {"model": card(max_context_tokens=1 << 20), "capacity": 1 << 20}
PROMPT = 1000
ROOMY = Load(free_pages=1 << 19, free_extents=1 << 19)


def told(brain: Brain, name: str, *, pace: float = 1.0) -> None:
    """It has measured prompts and steps: 30 ms for 1,000 tokens, 5.1 ms for one row."""
    for n in range(32):
        tokens, rows = 100 * (n % 16 + 1), n % 8 + 1
        prefill = PrefillSample(f"{name}-{brain.seq}", tokens, 0, pace * (0.005 + 25e-6 * tokens), 1024, 1e-6)
        decode = DecodeSample(rows, 100 * rows, pace * (0.005 + 0.0001 * rows))
        more: dict[str, Any] = {"prefill_samples": (prefill,)} if name[0] in "pb" else {}
        more |= {"decode_samples": (decode,)} if name[0] in "db" else {}
        brain.beat(name, ROOMY, **more)


def mesh(names: str = "p0 d0", **more: Any) -> Brain:
    """Measured and idle. What others seem to have placed is long over."""
    brain = Brain(**more)
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    for name in names.split():
        brain.add(name, roles[name[0]], max_running=256, **LONG)
    for name in names.split():
        told(brain, name)
    rest(brain, 60.0)
    return brain


def rest(brain: Brain, seconds: float) -> None:
    """Nothing happens, so that nothing seems to have been placed by others."""
    for _ in range(round(seconds)):
        brain.now += 1.0
        beats(brain)


def beats(brain: Brain) -> None:
    """All are idle, and there."""
    for name in brain.refs:
        brain.beat(name, ROOMY)


def impossible(brain: Brain, prompt: int = PROMPT, **more: Any) -> InvalidRequest:
    """The error of a request that is refused for that."""
    refused = brain.refused(InvalidRequest, prompt, **more)
    assert refused.reason == "impossible"
    error = refused.error
    assert isinstance(error, InvalidRequest) and not error.retryable and error.retry_after_ms == 0
    assert (error.http_status, error.grpc_status) == (400, "INVALID_ARGUMENT")
    return error


def least_ms(error: KvmeshError) -> int:
    """As it tells."""
    return int(error.message.split("about ")[1].split(" ms")[0])


@pytest.mark.parametrize(("field", "least"), [("ttft_slo", 30), ("tbt_slo", 5)])
def test_it_names_the_field_the_value_and_the_least(field: str, least: int) -> None:
    brain = mesh()
    error = impossible(brain, **{f"{field}_s": 0.001})
    assert error.field == f"{field}_ms"
    assert error.message.startswith(f"{field}_ms=1: no instance can")
    assert least_ms(error) == pytest.approx(least, rel=0.15, abs=1)


@pytest.mark.parametrize("field", ["ttft_slo_s", "tbt_slo_s"])
@pytest.mark.parametrize("prompt", [1, 100, 1000, 20_000])
def test_what_it_names_is_met_when_asked_for(field: str, prompt: int) -> None:
    brain = mesh()
    least = least_ms(impossible(brain, prompt, **{field: 0.001}))
    brain.placed(prompt, **{field: least / 1000})
    if least > 4:
        impossible(mesh(), prompt, **{field: least // 1.4 / 1000})


def test_a_busy_mesh_says_so_too() -> None:
    """It is not for load: a queue before it changes nothing."""
    brain = mesh()
    for _ in range(40):
        brain.placed(PROMPT)
    impossible(brain, ttft_slo_s=0.001)
    assert brain.refused(Overloaded, PROMPT, ttft_slo_s=0.1).error.retry_after_ms > 500


def test_what_was_never_measured_is_not_impossible() -> None:
    """A prior may be ten times as slow as what is real."""
    brain = Brain()
    brain.pair()
    for more in ({"ttft_slo_s": 0.001}, {"tbt_slo_s": 0.001}):
        assert brain.refused(Overloaded, PROMPT, **more).error.retry_after_ms > 0
    brain = Brain()
    brain.pair()
    for n in range(3):
        brain.placed(PROMPT, request_id=f"x{n}")
        brain.done("p0", f"x{n}", PROMPT, seconds=0.03)
    brain.refused(Overloaded, PROMPT, ttft_slo_s=0.001)  # few say little


def test_the_operators_slo_is_no_fault_of_the_request() -> None:
    brain = mesh(slo_ttft_s=0.005)
    error = brain.refused(Overloaded, PROMPT).error
    assert "over the SLO of 5 ms" in str(error) and "none can do better than about 3" in str(error)
    brain = mesh(admission=AdmissionSettings(by_model=(("demo", 30.0, 0.002),)))
    assert "none can do better than about 6 ms even when idle" in str(brain.refused(Overloaded, PROMPT).error)


def test_a_prefix_that_somebody_holds_makes_it_possible() -> None:
    brain = mesh("p0 p1 d0")
    keys = chain("x", PROMPT // 16)
    assert least_ms(impossible(brain, keys=keys, ttft_slo_s=0.010)) > 25
    brain.seal("p1", keys)
    placed = brain.placed(keys=keys, prompt=PROMPT, ttft_slo_s=0.010)
    assert placed.prefill.instance_id == "p1"


def test_an_instance_that_is_busy_or_gets_no_work_now_could_do_it() -> None:
    """Half the mesh is four times as slow; the others are away for a while."""
    brain = mesh("p0 p1 d0")
    for n in range(20):
        for name, other, seconds in (("p0", "p1", 0.03), ("p1", "p0", 0.12)):
            assert brain.placed(PROMPT, request_id=f"{name}{n}", avoid={other}).prefill.instance_id == name
            brain.done(name, f"{name}{n}", PROMPT, seconds=seconds)
            brain.beat("d0", ROOMY, finished_request_ids=(f"{name}{n}",))
        brain.now += 0.2
    beats(brain)
    assert brain.placed(PROMPT, ttft_slo_s=0.05).prefill.instance_id == "p0"
    for _ in range(3):
        brain.schedule(PROMPT, ttft_slo_s=0.05)
    assert brain.refused(Overloaded, PROMPT, ttft_slo_s=0.05).error.retry_after_ms > 0
    assert brain.step(Cordon("p0", CordonState.CORDONED)) == []
    brain.refused(Overloaded, PROMPT, ttft_slo_s=0.05)
    impossible(brain, ttft_slo_s=0.001)  # nor could that one


def test_what_is_slow_for_a_while_is_not_impossible() -> None:
    """Instances that share a machine take twice and four times as long while all are busy: who was told to come again
    must not hear then that it was in vain."""
    brain = mesh()
    brain.placed(PROMPT, ttft_slo_s=0.05, request_id="x")
    brain.done("p0", "x", PROMPT, seconds=0.03)
    for n in range(40):
        brain.now += 0.5
        brain.schedule(PROMPT, request_id=f"s{n}", ttft_slo_s=30.0)
        brain.done("p0", f"s{n}", PROMPT, seconds=0.12)
        brain.beat("d0", ROOMY, finished_request_ids=(f"s{n}",))
    assert "predicted TTFT 1" in str(brain.refused(Overloaded, PROMPT, ttft_slo_s=0.05).error)
    assert least_ms(impossible(brain, ttft_slo_s=0.001)) == pytest.approx(30, abs=4)


def test_a_coupled_instance_could_do_it() -> None:
    """A pair refuses by one half, an instance for itself by the other: only who is refused by all is impossible."""
    brain = mesh("p0 d0 b0")
    impossible(brain, ttft_slo_s=0.001)
    impossible(brain, tbt_slo_s=0.001)
    brain = mesh("b0")
    assert least_ms(impossible(brain, ttft_slo_s=0.001)) >= 30


def test_of_many_instances_it_is_known_too() -> None:
    names = " ".join(f"{letter}{n}" for letter in "pd" for n in range(20))
    brain = mesh(names)
    assert least_ms(impossible(brain, ttft_slo_s=0.001)) == pytest.approx(30, abs=5)
    assert least_ms(impossible(brain, tbt_slo_s=0.001)) == pytest.approx(6, abs=1)
    brain.placed(PROMPT, ttft_slo_s=0.05, tbt_slo_s=0.02)


def test_who_is_tried_again_after_a_failure_was_possible_once() -> None:
    brain = mesh()
    assert isinstance(brain.schedule(PROMPT, attempt=1, ttft_slo_s=0.001), Refuse)
    assert isinstance(brain.refused(Overloaded, PROMPT, attempt=1, ttft_slo_s=0.001).error, Overloaded)
    assert isinstance(brain.schedule(PROMPT, answered_tokens=1, ttft_slo_s=0.001), Placed)


def test_the_batch_lane_has_no_slo_and_plain_policies_know_one_instance() -> None:
    assert isinstance(mesh().schedule(PROMPT, lane=Lane.BATCH, ttft_slo_s=0.001), Placed)
    mesh(policy="round_robin").refused(Overloaded, PROMPT, ttft_slo_s=0.001)


def hints(brain: Brain, seconds: float = 10.0) -> dict[Role, tuple[float, int]]:
    """Load and wanted change of each pool, after a while."""
    for _ in range(round(seconds / 0.1)):
        brain.tick(0.1)
        beats(brain)
    return {hint.role: (hint.load, hint.change) for hint in brain.state.hints(brain.now)}


@pytest.mark.parametrize("field", ["ttft_slo_s", "tbt_slo_s"])
def test_they_count_for_no_hint(field: str) -> None:
    """The finding: 238 of them made a load of 0.80 of an idle mesh."""
    settings = {"balance": BalanceSettings(window_s=4.0), "admission": Settings().admission}
    idle = hints(mesh(**settings))
    brain = mesh(**settings)
    for _ in range(238):
        impossible(brain, **{field: 0.001})
        brain.tick(0.02)
        beats(brain)
    found = hints(brain, 5.0)
    assert {role: change for role, (_, change) in found.items()} == {role: change for role, (_, change) in idle.items()}
    assert all(load < 0.001 for load, _ in found.values())


@pytest.mark.slow
def test_those_that_are_refused_for_load_do_count() -> None:
    brain = mesh(balance=BalanceSettings(window_s=4.0))
    for _ in range(20):
        brain.schedule(PROMPT)
    for _ in range(60):
        brain.refused(Overloaded, PROMPT, ttft_slo_s=0.05)
        brain.tick(0.08)
        beats(brain)
        for _ in range(20):
            brain.schedule(PROMPT)
    assert hints(brain, 2.0)[Role.PREFILL][0] > 0.5
