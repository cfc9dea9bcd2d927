"""Requests that a pause holds back: one of them looks, and who is placed lets others go; and what a pause costs an
answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvmesh.errors import Paused, PermissionDenied, WeightsChanged
from kvmesh.services.gateway.api_keys import ANYBODY, KeyRing
from kvmesh.services.gateway.pauses import SILENT_S, PauseGate
from kvmesh.services.gateway.recovery import AttemptRecovery, Failure, RecoveryPatience
from kvmesh.services.gateway.rest.rollout import check_trainer


async def test_one_looks_and_the_others_wait_for_it() -> None:
    gate, looks, waited = PauseGate(), list[int](), list[int]()

    async def waits(number: int) -> None:
        await gate.wait("m", number)
        waited.append(number)

    others = []
    for number in range(3):
        others.append(asyncio.create_task(waits(number)))
        await asyncio.sleep(0)
    await others[0]
    looks = list(waited)
    gate.passed("m")
    async with asyncio.timeout(SILENT_S / 2):
        await asyncio.gather(*others)
    assert looks == [0] and sorted(waited) == [0, 1, 2]
    gate.passed("m")  # nobody waits


async def test_each_that_is_placed_lets_two_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few meet the next pause, however many wait."""
    monkeypatch.setattr("kvmesh.services.gateway.pauses.SILENT_S", 60.0)
    gate, gone = PauseGate(), list[int]()

    async def waits(number: int) -> None:
        await gate.wait("m", number)
        gone.append(number)

    tasks = []
    for number in range(8):
        tasks.append(asyncio.create_task(waits(number)))
        await asyncio.sleep(0)
    await tasks[0]
    tasks[3].cancel()
    for expected in ([0, 1, 2], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5, 6, 7]):
        gate.passed("m")
        await asyncio.gather(*(tasks[number] for number in expected))
        assert gone == expected
    assert not gate._models


@pytest.mark.parametrize("error", [Paused("paused: x"), WeightsChanged("weights_epoch=1: other")])
def test_a_pause_is_no_failure_however_often(error: Any) -> None:
    patience = RecoveryPatience(max_retries=1, reach_s=0.1, max_migrations=1, migration_timeout_s=0.1)
    recovery = AttemptRecovery(patience)
    for at in range(50):
        plan = recovery.failed(Failure(error, "d", answered=at, fresh=1, delivered=True, taken=True), 10.0 * at, 1.0)
        assert plan.anew is (at == 0)
    assert recovery.migrations == 0
    never = AttemptRecovery(RecoveryPatience(1, 0.1, 0, 0.1))
    with pytest.raises(type(error)):  # it cannot go on elsewhere, and its client has seen some of it
        never.failed(Failure(error, "d", answered=1, fresh=1, delivered=True, taken=True), 0.0, 1.0)


def test_who_may_order() -> None:
    text = "".join(
        f'[[key]]\nname = "{name}"\nsha256 = "{name[0] * 64}"\ntrainer = {told}\n'
        for name, told in (("alice", "false"), ("coach", "true"))
    )
    alice, coach = (entry.tenant for entry in KeyRing.parse(text).entries)
    closed: Any = SimpleNamespace(keys=SimpleNamespace(required=True))
    check_trainer(cast(Any, closed), coach)
    with pytest.raises(PermissionDenied, match="'alice' is not a trainer's"):
        check_trainer(closed, alice)
    check_trainer(cast(Any, SimpleNamespace(keys=SimpleNamespace(required=False))), ANYBODY)
