"""An instance that starts anew while its model's weights have changed is ordered to fetch the newest ones."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from kvmesh.errors import CheckpointError, Paused
from kvmesh.instance.pausing import PauseMode
from kvmesh.instance.served_weights import NewWeights, ServedWeights, WeightsTaken
from kvmesh.instance.servicer import Switchable, add_instance
from kvmesh.rpc.pb import common_pb2
from kvmesh.rpc.server import Server
from kvmesh.services.conductor.domain import NewestWeights, Refuse, Role
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.model_control import CATCH_UP, ModelControl
from kvmesh.services.conductor.weights_catch_up import FIRST_S, MOST_S, CatchUpPlan, WeightsCatchUp
from tests.support.conductor.brain import Brain, card

NEWEST = NewestWeights(7, "/steps/7")


def instance(name: str = "a", incarnation: int = 1, epoch: int = 0, address: str = "", why_not: str = "") -> Instance:
    ref = SimpleNamespace(instance_id=name, address=address, incarnation=incarnation, life=(name, incarnation))
    model = SimpleNamespace(name="m", weights_epoch=epoch)
    role = SimpleNamespace(decodes=True)
    return cast(Instance, SimpleNamespace(model=model, ref=ref, role=role, not_ready_reason=why_not))


def test_attempts_at_one_instance_are_further_and_further_apart() -> None:
    plan, now, one = CatchUpPlan(), 0.0, [(instance(), NEWEST)]
    waits = []
    for _ in range(9):
        [order] = plan.due(one, now)
        assert (order.instance_id, order.newest) == ("a", NEWEST)
        assert not plan.due(one, now + 1e6), "it is under way"
        waits.append(plan.ended(order, "no such object", now))
        assert not plan.due(one, now + waits[-1] - 0.1)
        now += waits[-1]
    assert waits[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S] and waits[-1] == MOST_S
    # Another life, and other weights, are not held against what failed before.
    [order] = plan.due([(instance(incarnation=2), NEWEST)], now - 1)
    plan.ended(order, "x", now)
    assert plan.due([(instance(incarnation=2), NewestWeights(8, "/steps/8"))], now)


def test_places_of_one_instance_are_one_order_and_a_trainers_memory_is_none() -> None:
    plan = CatchUpPlan()
    assert not plan.due([(instance(), NewestWeights(7))], 0.0)
    [order] = plan.due([(instance("a"), NEWEST), (instance("a.dp1"), NEWEST)], 0.0)
    assert [one.ref.instance_id for one in order.members] == ["a", "a.dp1"]


def test_conductors_believe_orders_and_what_half_of_the_instances_say() -> None:
    brain = Brain()
    brain.pair()
    brain.add("d2", Role.DECODE, model=card(weights_epoch=9, weights_path="/made-up"))
    brain.beat_all()
    assert not list(brain.state.newest_weights()), "one instance alone takes nobody's work, and names no folder"
    brain.state.weights_ordered("demo", "f1", NEWEST)
    brain.beat_all()
    told = {one.ref.instance_id: newest for one, newest in brain.state.newest_weights()}
    assert set(told.values()) == {NEWEST} and len(told) == 3
    assert "it is to fetch them from /steps/7" in brain.view("d0").not_ready_reason
    brain.add("p2", Role.PREFILL, model=card(weights_epoch=9))
    brain.beat_all()
    assert {newest for _, newest in brain.state.newest_weights()} == {NewestWeights(9)}
    assert brain.view("d0").not_ready_reason.endswith("at epoch 9: update them")


def test_what_is_known_of_a_models_weights_goes_with_its_last_instance() -> None:
    brain = Brain()
    brain.add("a", Role.BOTH)
    brain.state.weights_ordered("demo", "f1", NEWEST)
    brain.beat_all()
    assert "the model is at epoch 7" in brain.view("a").not_ready_reason
    fleet = brain.state._fleet
    for instance in list(fleet):
        fleet.remove(instance)
    assert not fleet._newest and not fleet._ordered and not fleet._weights


class Front:
    """Takes weights out of any folder but one. It has no ranks."""

    role, switch, profiles, not_ready_reason = common_pb2.ROLE_BOTH, None, None, ""

    def __init__(self) -> None:
        self.ref = common_pb2.InstanceRef(instance_id="a", incarnation=1)
        self.weights = ServedWeights("ff", 0)
        self.reason = ""
        self.calls: list[str] = []

    async def pause(self, mode: PauseMode, reason: str, deadline_s: float, *_: Any) -> int:
        self.reason = reason
        self.calls.append("pause")
        return 0

    def resume(self) -> int:
        self.reason = ""
        self.calls.append("resume")
        return self.weights.epoch

    async def update_weights(self, new: NewWeights, deadline_s: float, *_: Any) -> WeightsTaken:
        self.calls.append(f"{new.epoch} {new.path}")
        if new.path == "/gone":
            raise CheckpointError("/gone: not a folder", field="path")
        self.weights = ServedWeights("ff", new.epoch)
        return WeightsTaken(1, 0.0, 0.0)


async def test_what_cannot_be_fetched_stays_paused_and_says_why() -> None:
    front, server = Front(), Server("127.0.0.1", 0)
    add_instance(cast(Switchable, front), server)
    address = f"127.0.0.1:{await server.start()}"
    known: list[tuple[Instance, NewestWeights]] = []
    leads = False
    control = ModelControl(lambda: [one for one, _ in known])
    catch_up = WeightsCatchUp(control, lambda: known, lambda: leads)

    async def tick(now: float, *there: tuple[Instance, NewestWeights]) -> list[str]:
        front.calls.clear()
        known[:] = there
        catch_up.tick(now)
        async with asyncio.timeout(20):
            await asyncio.gather(*catch_up._tasks)
        return list(front.calls)

    try:
        old: Any = instance(address=address)
        assert not await tick(0, (old, NEWEST)), "it does not lead"
        leads = True
        assert not await tick(10, (instance(address=address, epoch=7), NEWEST)), "it has them"
        assert await tick(20, (old, NewestWeights(6, "/gone"))) == ["pause", "6 /gone", "pause"]
        assert front.reason == f"{CATCH_UP} of epoch 6: /gone: not a folder"
        mine = f"{Paused.PREFIX}{front.reason}"
        assert await tick(30, (instance(address=address, why_not=mine), NEWEST)) == ["pause", "7 /steps/7", "resume"]
        # A conductor ended after the weights had come: the next one lets the instance go on.
        assert await tick(40, (instance("a", 2, 7, address, mine), NEWEST)) == ["resume"]
        # The model is paused: the instance has the newest weights then, and stays paused with the others.
        others = instance("b", epoch=7, why_not=f"{Paused.PREFIX}by an operator"), NEWEST
        stopped = instance("a", 3, 0, address, f"{Paused.PREFIX}by an operator"), NEWEST
        assert await tick(50, stopped, others) == ["pause", "7 /steps/7"]
    finally:
        await catch_up.close()
        await server.stop(0)


def test_a_path_that_is_too_long_is_refused_at_registration() -> None:
    [refusal] = Brain().register("p", Role.PREFILL, model=card(weights_epoch=1, weights_path="x" * 5000))
    assert isinstance(refusal, Refuse) and "model.weights_path" in refusal.error.message
