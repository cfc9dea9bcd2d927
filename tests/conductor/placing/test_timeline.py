"""A life laid out on arrival: when the pull begins, what is expected when, and that it goes over the wire."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.conductor import mapping
from kvmesh.services.conductor.domain import Load, Role
from kvmesh.services.conductor.loads.outgoing import Outgoing
from kvmesh.services.conductor.loads.outgoing import OutgoingLoad as Sending
from kvmesh.services.conductor.placing.placement import PlacementChoice
from kvmesh.services.conductor.placing.timeline import (
    FETCH_SHARE,
    MARGIN_S,
    MAX_DELAY_S,
    MIN_DELAY_S,
    life,
    pull_after_s,
)
from tests.support.conductor.brain import BLOCK, Brain, chain, reset


def choice(**terms: float) -> PlacementChoice:
    """As much of one as is looked at."""
    get = lambda name: terms.get(name, 0.0)  # noqa: E731
    names = ("queue_s", "fetch_s", "prefill_s", "tail_s")
    prefill = SimpleNamespace(segments=("leg",) if "fetch_s" in terms else (), **{name: get(name) for name in names})
    decode = SimpleNamespace(**{name: get(name) for name in ("landing_wait_s", "slot_wait_s", "tbt_s")})
    return cast(PlacementChoice, SimpleNamespace(prefill=prefill, decode=decode))


@pytest.mark.parametrize(
    ("queue_s", "fetch_s", "after_s"),
    [
        (0.0, 0.1, 0.0),
        (0.6, 0.1, 0.0),  # 0.15 s to spare: not worth a timer
        (0.75, 0.1, 0.3),
        (10.0, 1.0, 10 - 2 - MARGIN_S),
        (1.0, 5.0, 0.0),
        (1000.0, 1.0, MAX_DELAY_S),
    ],
)
def test_with_a_long_queue_it_begins_later(queue_s: float, fetch_s: float, after_s: float) -> None:
    assert pull_after_s(choice(queue_s=queue_s, fetch_s=fetch_s)) == pytest.approx(after_s)


def test_nothing_to_fetch_is_not_put_off() -> None:
    assert pull_after_s(choice(queue_s=9.0)) == 0.0
    assert life(choice(queue_s=9.0), 1, 0.0).fetched_s == 0.0


@given(*(st.floats(0, 100) for _ in range(6)), st.integers(0, 1000))
def test_it_is_in_order_and_costs_nothing_by_the_prediction(
    queue_s: float, fetch_s: float, prefill_s: float, tail_s: float, landing_s: float, tbt_s: float, tokens: int
) -> None:
    made = choice(
        queue_s=queue_s, fetch_s=fetch_s, prefill_s=prefill_s, tail_s=tail_s, landing_wait_s=landing_s, tbt_s=tbt_s
    )
    delay_s = pull_after_s(made)
    told = life(made, tokens, delay_s)
    assert delay_s == 0 or (delay_s >= MIN_DELAY_S and delay_s + FETCH_SHARE * fetch_s <= queue_s)
    at_once = max(queue_s, fetch_s) + prefill_s + tail_s + landing_s
    assert told.first_token_s == pytest.approx(at_once), "as if it began at once"
    assert told.pull_start_s <= told.fetched_s <= told.prefill_start_s <= told.prefill_end_s <= told.first_token_s
    assert told.end_s >= told.first_token_s and told.output_tokens == tokens


def busy_mesh(queued_tokens: int) -> Brain:
    """p1 holds nothing and has a queue, p0 holds the prompt and has a longer one."""
    brain = Brain(lease_s=1e9)
    for name, role in (("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE)):
        brain.add(name, role)
    brain.step(reset(1, "p0", "p1", "d0"))
    brain.seal("p0", chain("k", 100))
    for name, tokens in (("p0", 900_000), ("p1", queued_tokens)):
        brain.beat(name, Load(queued_requests=9, queued_tokens=tokens, free_pages=1000, free_extents=1000))
    return brain


def ask(brain: Brain, **more: Any) -> Any:
    return brain.placed(100 * BLOCK + 1, keys=chain("k", 100), ttft_slo_s=1e6, max_tokens=50, **more)


def test_a_placement_says_when_and_the_wire_carries_it() -> None:
    short, long = ask(busy_mesh(0)), ask(busy_mesh(60_000))
    assert short.pulls and long.pulls and short.prefill.instance_id == long.prefill.instance_id == "p1"
    assert short.pull_after_s == 0.0 and long.pull_after_s > 0.5
    assert long.life.fetched_s < long.life.prefill_start_s == pytest.approx(long.terms["queue_ms"] / 1000)
    assert long.life.first_token_s == pytest.approx(long.ttft_s)
    out = mapping.placement_out(long)
    assert abs(out.pull_after_ms - long.pull_after_s * 1000) <= 1
    assert out.life.pull_start_ms == out.pull_after_ms and out.life.output_tokens == long.life.output_tokens > 0


def test_what_begins_later_is_not_ahead_of_what_begins_now() -> None:
    outgoing = Outgoing()
    holder = ("p0", 1)
    outgoing.add("later", [], 20.0, [Sending(holder, 700)], begins=10.0)
    outgoing.add("now", [Sending(holder, 30)], until=5.0)
    assert outgoing.ahead(holder) == 30 and len(outgoing) == 2
    outgoing.expire(5.0)
    assert outgoing.ahead(holder) == 0
    outgoing.expire(10.0)
    assert outgoing.ahead(holder) == 700
    outgoing.end("later")
    outgoing.end("later")
    assert outgoing.ahead(holder) == 0 and len(outgoing) == 0
    outgoing.add("gone", [], 40.0, [Sending(holder, 5)], begins=30.0)
    outgoing.end("gone")
    outgoing.expire(30.0)
    assert outgoing.ahead(holder) == 0, "it ended before it began"
    outgoing.add("again", [], 60.0, [Sending(holder, 5)], begins=50.0)
    outgoing.add("again", [Sending(holder, 6)], until=60.0)
    outgoing.expire(50.0)
    assert outgoing.ahead(holder) == 6, "another attempt took its place"
    outgoing.add("both", [Sending(holder, 10)], 80.0, [Sending(holder, 20)], begins=70.0)
    assert outgoing.ahead(holder) == 16
    outgoing.expire(70.0)
    assert outgoing.ahead(holder) == 30, "and the other one is over"
    outgoing.end("both")
    assert outgoing.ahead(holder) == 0


def test_the_brain_counts_it_from_its_beginning() -> None:
    """What decode fetches itself counts at once."""
    brain, holder = busy_mesh(60_000), ("p0", 1)
    first = ask(brain)
    outgoing, of_decode = brain.state.scheduling._ledger.outgoing, sum(r.blocks for r in first.decode_pulls)
    assert outgoing.ahead(holder) == of_decode * BLOCK * 1024
    outgoing.expire(brain.now + first.pull_after_s)
    assert outgoing.ahead(holder) == (of_decode + 100) * BLOCK * 1024
