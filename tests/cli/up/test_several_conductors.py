"""Several conductors as the command line sees them: the plan of a mesh, its status, cordons without Redis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli import collect, cordon, status
from kvmesh.cli.up import plan
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.errors import ConfigError, Unavailable, UnknownInstance
from kvmesh.rpc.pb import conductor_pb2 as pb
from tests.cli.test_screens import instance, mesh, printed
from tests.conductor.peers.test_leadership import One, conductor, config
from tests.support.services import until

NOBODY = "127.0.0.1:1"


def specs(tmp_path: Path, **settings: Any) -> dict[str, plan.ProcessSpec]:
    made = MeshSettings(model="/none", run_dir=str(tmp_path), http_port=0, grpc_port=0, **settings)
    return {spec.name: spec for spec in plan.plan(made, tmp_path, plan.Ports())}


def test_a_plan_with_two_conductors(tmp_path: Path) -> None:
    found = specs(tmp_path, conductors=2, redis="redis://10.0.0.9:6379/0", coupled=1)
    conductors = f"{found['conductor-0'].address},{found['conductor-1'].address}"
    for name in ("gateway", "prefill-0", "decode-0", "coupled-0"):
        assert f"--conductor={conductors}" in found[name].argv
    for name in ("conductor-0", "conductor-1", "store"):
        assert found[name].env["KVMESH_REDIS"] == "redis://10.0.0.9:6379/0"
        assert "10.0.0.9" not in " ".join(found[name].argv), "everybody reads arguments, and it may hold a password"
    assert "conductor" in specs(tmp_path)
    with pytest.raises(ConfigError, match=r"conductors=2: .*--redis auto"):
        MeshSettings(model="/none", conductors=2)


def leadership(role: str, leader: str) -> dict[str, Any]:
    return {"role": role, "term": 7, "leader": leader}


def test_every_conductor_has_a_row() -> None:
    found = mesh()
    a, b = "127.0.0.1:11788", "127.0.0.1:2"
    found["conductor"]["leadership"] = leadership("leader", a)
    found["conductor"]["conductors"] = [
        {"address": a, "leadership": leadership("leader", a), "store_master": "connected", "known_instances": 2},
        {"address": b, "leadership": leadership("standby", a), "store_master": "connected", "known_instances": 1},
        {"address": "127.0.0.1:3", "error": "it is gone"},
    ]
    text = printed(status._screen(found, 120), 120)
    assert [" ".join(line.split()) for line in text.splitlines() if line.startswith("conductor ")] == [
        f"conductor {a} ready leads, term 7, 2 instances, store master connected",
        f"conductor {b} ready places, leader: {a}, 1 instance, store master connected",
        "conductor 127.0.0.1:3 no answer it is gone",
    ]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"cordon": "CORDON_STATE_CORDONED", "not_ready_reason": "cordoned: a fan"}, "cordoned"),
        ({"cordon": "CORDON_STATE_DRAINING", "not_ready_reason": "draining"}, "draining"),
        ({"breaker": "rests for 3.0 s more", "not_ready_reason": "rests for 3.0 s more"}, "resting"),
        ({"breaker": "rests for 3.0 s more", "not_ready_reason": "silent for 2000 ms"}, "not ready"),
    ],
)
def test_why_an_instance_gets_no_work(more: dict[str, str], word: str) -> None:
    found = mesh()
    found["conductor"]["instances"] = [{**instance("prefill-0"), "ready": False, **more}]
    text = printed(status._screen(found, 120), 120)
    assert word in text
    assert more["not_ready_reason"] in text


async def reason(one: One) -> str:
    return (await one.reasons())["p0"]


async def test_without_redis_every_conductor_is_told() -> None:
    request = pb.CordonRequest(instance_id="p0", state=pb.CORDON_STATE_CORDONED, reason="a fan")
    async with conductor(config(None)) as a, conductor(config(None)) as b:
        addresses = (a.service.address, b.service.address)
        with pytest.raises(UnknownInstance, match=r"instance='p0': .*kvmesh status"):
            await cordon.tell(addresses, request)
        await a.serve("p0", "d0")
        with pytest.raises(Unavailable, match=f"1 of 2 conductors .*{b.service.address}: .*instance='p0'"):
            await cordon.tell(addresses, request)
        await b.serve("p0", "d0")
        assert await cordon.tell(addresses, request) == pb.CORDON_STATE_CORDONED, "one had heard of it"
        assert [await reason(one) for one in (a, b)] == ["cordoned: a fan"] * 2
        with pytest.raises(Unavailable, match=f"2 of 3 conductors .*{NOBODY}"):
            await cordon.tell((*addresses, NOBODY), pb.CordonRequest(instance_id="p0"))
        assert [await reason(one) for one in (a, b)] == [""] * 2

        async def answered() -> dict[str, Any]:
            told = await collect.ask_conductors(f"{NOBODY},{a.service.address}")
            assert "error" not in told, "it has answered late"
            return told

        found = await until(answered)
        assert [i["instance"]["instance_id"] for i in found["instances"]] == ["p0", "d0"]
        assert [("error" in one) for one in found["conductors"]] == [True, False]
