"""The order to gather pauses those that are freed, and nobody else, until the model is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest, Paused
from kvmesh.rpc.pb import conductor_pb2
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.model_control import ModelControl
from tests.support.fronts_of_orders import OrderedFront, ordered_fronts


def known(one: OrderedFront, rows: int) -> Instance:
    """What a conductor knows of one whose steps hardly care for rows."""
    found: Any = one.known
    found.ready, found.max_running = one.works, 64
    found.role.prefills = not one.decodes
    found.load, found.model.block_tokens = SimpleNamespace(free_pages=1000), 16
    found.batch = SimpleNamespace(requests=rows, context_tokens=100.0 * rows, residence_s=60.0)
    found.decode = found.prefill = SimpleNamespace(predict=lambda batch, tokens: 0.01 + 1e-4 * batch)
    return found  # type: ignore[no-any-return]


def order(slower_percent: int = 0) -> conductor_pb2.GatherModelRequest:
    return conductor_pb2.GatherModelRequest(model="m", slower_percent=slower_percent, deadline_ms=20_000)


async def test_who_is_freed_is_paused_until_the_model_is_resumed(tmp_path: Path) -> None:
    rows = {"a": 1, "b": 4, "c": 2, "p": 0}

    def instances(fronts: Sequence[OrderedFront]) -> list[Instance]:
        return [known(one, rows[one.front.instance_id]) for one in fronts]

    async with ordered_fronts(tmp_path, *rows) as fronts:
        control = ModelControl(lambda: instances(fronts))
        told = await control.gather(order())
        assert (list(told.kept), list(told.freed), told.moved) == (["b"], ["c", "a"], 3)
        assert {one.front.instance_id: one.works for one in fronts} == {"a": False, "b": True, "c": False, "p": True}
        again = await control.gather(order())
        assert (list(again.kept), list(again.freed), again.moved) == (["b"], [], 0)
        await control.resume(conductor_pb2.ResumeModelRequest(model="m"))
        assert all(one.works for one in fronts)
        await control.pause(conductor_pb2.PauseModelRequest(model="m", deadline_ms=20_000))
        with pytest.raises(Paused, match="none of its instances is at work"):
            await control.gather(order())
        with pytest.raises(InvalidRequest, match="slower_percent"):
            await control.gather(order(5000))
