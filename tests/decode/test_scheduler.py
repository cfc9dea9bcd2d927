"""Who gets memory and seats: everything that fits ends in tokens, in order, and nobody starves."""

from __future__ import annotations

import random

import pytest

from kvmesh.errors import Unavailable
from kvmesh.services.decode import events as e
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.events import Phase
from tests.support.decode.world import World


def run_dry(world: World, turns: int = 5_000) -> None:
    """Honest writers and a rank that steps, until nobody waits."""
    begun: set[int] = set()
    for _ in range(turns):
        for handle in world.asked:
            if handle not in begun:
                begun.add(handle)
                world.honest_prefill(handle)
        world.settle()
        world.honest_fills()
        world.rank.step()
        world.settle()
        if not world.state.requests:
            return
    raise AssertionError([(h.phase.name, h.context, h.pages, h.extents) for h in world.state.requests.values()])


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_fits_the_pool_finishes_under_any_load(seed: int, direct: bool) -> None:
    rng = random.Random(seed)
    pages = rng.randint(2, 9)
    world = World(pages=pages, extents=60, swap=90, running=rng.randint(1, 6), waiting=100, direct=direct)
    wanted = {}
    for _ in range(30):
        prompt = rng.randint(1, pages * 4 - 1)
        most = rng.randint(1, pages * 4 - prompt)
        wanted[world.start(prompt, most, priority=rng.randint(-1, 1))] = most
    run_dry(world)
    assert not world.errors
    assert {slot: len(world.tokens[world.session, slot]) for slot in wanted} == wanted
    world.wind_down()


def test_without_extents_to_go_to_the_last_in_order_is_refused_and_the_first_finishes() -> None:
    world = World(pages=4, extents=1, running=4)
    first = world.start(4, 12)
    world.start(4, 12)
    world.start(4, 12)
    run_dry(world)
    assert (world.session, first) in world.finished
    assert set(world.errors) == {"overloaded"}
    world.wind_down()


def test_preemption_keeps_the_token_index() -> None:
    world = World(pages=5, extents=8, running=4)
    slots = [world.start(6, 10) for _ in range(3)]
    run_dry(world)
    for slot in slots:
        assert world.tokens[world.session, slot] == list(range(10))
    assert not world.errors


def test_smaller_priority_numbers_go_first_then_arrival() -> None:
    world = World(pages=2, extents=2, running=1, direct=False)
    late = [world.start(5, 3, priority=1) for _ in range(2)]
    first = world.start(5, 3, priority=0)
    begun = [world.asked.copy()]
    for handle in begun[0]:
        world.honest_prefill(handle)
    world.settle()
    order = []
    for _ in range(60):
        world.honest_fills()
        world.rank.step()
        world.settle()
        order += [slot for _, slot in sorted(world.finished) if slot not in order]
    # The first BeginFill got the only landing before the others had come; from then on by priority.
    assert order == [late[0], first, late[1]]


@pytest.mark.parametrize(
    ("prompt", "most", "code"),
    [(24, 1, "context_length_exceeded"), (23, 1, ""), (9, 400, ""), (24 * 100, 1, "context_length_exceeded")],
)
def test_a_prompt_that_can_never_fit_is_refused_at_once(prompt: int, most: int, code: str) -> None:
    world = World(pages=6, extents=6)
    world.start(prompt, most)
    assert world.errors == ([code] if code else [])


def test_a_landing_larger_than_the_extents_waits_for_pages_or_is_refused() -> None:
    assert World(pages=6, extents=1, direct=False).start(9, 1)
    refused = World(pages=6, extents=1, direct=False)
    refused.start(9, 1)
    assert refused.errors == ["context_length_exceeded"]
    taken = World(pages=6, extents=1, direct=True)
    taken.start(9, 2)
    run_dry(taken)
    assert not taken.errors


def test_the_waiting_room_is_bounded_and_says_when_to_come_again() -> None:
    world = World(running=1, waiting=2)
    for _ in range(3):
        world.start(4, 2)
    assert not world.errors
    another = e.Spec(request_id="x", prompt_tokens=4, max_tokens=2, deadline_ns=10**18)
    refusal = world.state.scheduler.refusal(another, world.now)
    assert refusal is not None
    assert refusal.code == "overloaded"
    assert refusal.retry_after_ms >= 100
    world.start(4, 2)
    assert world.errors == ["overloaded"]
    run_dry(world)
    assert world.state.scheduler.refusal(another, world.now) is None


def test_after_the_door_is_closed_new_requests_are_refused_and_running_ones_go_on() -> None:
    world = World()
    slot = world.start(4, 3)
    world.feed(i.CloseDoor(Unavailable("shutting down")))
    world.start(4, 3)
    assert world.errors == ["unavailable"]
    run_dry(world)
    assert (world.session, slot) in world.finished


def test_when_it_stops_every_client_hears_its_end_at_once() -> None:
    world = World()
    for _ in range(3):
        world.start(4, 9)
    world.honest_prefill(1)
    world.settle()
    world.honest_fills()
    world.feed(i.CloseDoor(Unavailable("shutting down")))
    world.feed(i.EndAll(Unavailable("shutting down")))
    assert world.errors == ["unavailable"] * 3
    assert all(h.ended for h in world.state.requests.values())


def test_phases_are_in_the_order_of_life() -> None:
    assert sorted(Phase) == list(Phase)
