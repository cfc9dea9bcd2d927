"""The fronts of an instance's data-parallel places: what each has, and what holds for all. No rank is started."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvmesh.errors import FailedWeights, InvalidRequest, Overloaded
from kvmesh.instance.config import InstanceConfig
from kvmesh.instance.front import Front, fronts_of
from kvmesh.instance.pausing import PauseMode
from kvmesh.instance.served_weights import NewWeights
from kvmesh.rpc.pb import common_pb2 as pb


def places(folder: Path, mesh: str, lost: list[str]) -> list[Front]:
    config = InstanceConfig(
        instance_id="d0", model=str(folder), mesh=mesh, port=7020, ssd_path="/ssd", warm_segment="/dev/shm/w"
    )
    return fronts_of(config, pb.ROLE_DECODE, lambda place: lambda rank, message: None, lost.append)


async def test_each_place_has_its_own_name_port_and_folders(tmp_path: Path) -> None:
    one, other = places(tmp_path, "dp=2,ep=dp", [])
    assert [front.instance_id for front in (one, other)] == ["d0", "d0.dp1"]
    assert [front.config.port for front in (one, other)] == [7020, 7021]
    assert (one.config.ssd_path, other.config.ssd_path) == ("/ssd", "/ssd/dp1")
    assert (one.config.warm_segment, other.config.warm_segment) == ("/dev/shm/w", "/dev/shm/w/dp1")


async def test_a_rank_that_is_lost_is_lost_to_all_places_and_told_once(tmp_path: Path) -> None:
    lost: list[str] = []
    fronts = places(tmp_path, "dp=2", lost)
    for front in reversed(fronts):
        front._rank_lost(0, f"a rank of {front.instance_id} has ended")
    assert lost == ["a rank of d0.dp1 has ended"]
    assert {front.not_ready_reason for front in fronts} == set(lost)


async def test_a_rank_that_was_killed_is_the_cause_whoever_is_heard_first(tmp_path: Path) -> None:
    lost: list[str] = []
    (front,) = places(tmp_path, "tp=2", lost)
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: ASYNC220  it stands for a rank
        front.ranks[1]._process = process
        assert not front.ranks[1].killed()
        process.kill()
        process.wait()
    front._rank_lost(0, "rank 0 gave up: rank 0 lost the other ranks in a step")
    assert lost == [f"rank 1 (pid {process.pid}) was killed by SIGKILL"]


async def test_weights_of_shared_experts_change_while_all_places_are_paused(tmp_path: Path) -> None:
    fronts = places(tmp_path, "dp=2,ep=dp", [])
    new: Any = None
    for front in fronts:
        front.can_pause(on_weights=lambda: None)
    await fronts[0].pause(PauseMode.FINISH, "", 1)
    with pytest.raises(InvalidRequest, match="pause all places of the instance first"):
        await fronts[0].update_weights(new, 1)
    fronts[0]._live = SimpleNamespace(changing=False, torn="", epoch=2)  # type: ignore[assignment]
    fronts[1]._live = SimpleNamespace(changing=False, torn="", epoch=1)  # type: ignore[assignment]
    with pytest.raises(FailedWeights, match=r"d0: d0\.dp1, whose experts it shares, has other weights"):
        fronts[0].resume()
    fronts[1]._live.epoch = 2  # type: ignore[misc]
    assert fronts[0].resume() == 2


@pytest.mark.parametrize(("mesh", "asks"), [("dp=2", 0), ("dp=2,ep=dp", 1)])
async def test_nothing_goes_on_while_the_weights_it_is_computed_with_change(
    tmp_path: Path, mesh: str, asks: int
) -> None:
    fronts = places(tmp_path, mesh, [])
    for front in fronts:
        front.can_pause(on_weights=lambda: None)
        await front.pause(PauseMode.FINISH, "", 1)
    update = asyncio.create_task(fronts[0].update_weights(NewWeights(1, "/weights"), 10))
    await asyncio.sleep(0)  # its ranks, which are none yet, are asked
    with pytest.raises(Overloaded, match="its weights are being changed"):
        fronts[asks].resume()
    assert fronts[asks].not_ready_reason.startswith("paused")
    update.cancel()
    await asyncio.gather(update, return_exceptions=True)
    assert fronts[asks].resume() == 0
