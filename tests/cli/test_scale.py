"""`kvmesh scale`: what is wanted, as a table and as JSON, by whichever conductor leads."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from typer.testing import CliRunner

from kvmesh.cli import runs, scale
from kvmesh.cli.app import app
from kvmesh.errors import Unavailable
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from kvmesh.services.conductor.main import ConductorService
from kvmesh.services.conductor.servicer import ConductorServicer
from tests.conductor.peers.test_leadership import conductor, config
from tests.support.redis_server import needs_redis, redis_server
from tests.support.services import until

HINTS = [
    conductor_pb2.ScaleHint(
        model="demo", role=common_pb2.ROLE_PREFILL, instances=2, change=3, load=1.25, reason="work for 3.10 of them"
    ),
    conductor_pb2.ScaleHint(model="demo", role=common_pb2.ROLE_DECODE, instances=0, change=1, load=float("inf")),
]


def call(*args: str) -> str:
    done = CliRunner().invoke(app, ["scale", "--conductor", "127.0.0.1:7001", *args])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def hints(monkeypatch: pytest.MonkeyPatch) -> list[conductor_pb2.ScaleHint]:
    found = list(HINTS)

    async def answer(conductor: str) -> list[conductor_pb2.ScaleHint]:
        assert conductor == "127.0.0.1:7001"
        return found

    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(scale, "scale_hints", answer)
    return found


def test_a_table(hints: list[conductor_pb2.ScaleHint]) -> None:
    lines = [line.split() for line in call().splitlines()]
    assert lines[0] == ["model", "role", "instances", "load", "change"]
    assert lines[1][:5] == ["demo", "prefill", "2", "1.25", "+3"]
    assert lines[1][5:] == ["work", "for", "3.10", "of", "them"]
    assert lines[2] == ["demo", "decode", "0", "-", "+1"]
    hints.clear()
    assert call() == "No instance gets work now.\n"


def test_json(hints: list[conductor_pb2.ScaleHint]) -> None:
    told = json.loads(call("--json"))
    assert told[0] == {
        "model": "demo", "role": "prefill", "instances": 2, "change": 3, "load": 1.25,
        "reason": "work for 3.10 of them",
    }  # fmt: skip
    assert told[1]["load"] is None


def test_nobody_answers() -> None:
    done = CliRunner().invoke(app, ["scale", "--conductor", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "127.0.0.1:1" in done.output
    assert len(done.output.strip().splitlines()) == 1


# ── which conductor says so ───────────────────────────────────────────────────────────────────────

NOBODY = "127.0.0.1:1"


class Scripted(conductor_pb2_grpc.ConductorServicer):
    """A conductor that says of itself what it is told to. `leader` may name it by "self"."""

    def __init__(self, role: str, leader: str, term: int, change: int | None) -> None:
        self.role, self.leader, self.term, self.change = role, leader, term, change

    async def GetScaleHints(self, request: Any, context: Any) -> Any:  # noqa: N802
        hints = [] if self.change is None else [conductor_pb2.ScaleHint(model="demo", change=self.change)]
        told = conductor_pb2.Leadership(role=self.role, term=self.term, leader=self.leader)
        return conductor_pb2.GetScaleHintsResponse(hints=hints, leadership=told)


@asynccontextmanager
async def scripted(*conductors: Scripted) -> AsyncIterator[list[str]]:
    """Their addresses."""
    async with AsyncExitStack() as stack:
        addresses = []
        for one in conductors:
            server = grpc.aio.server()
            conductor_pb2_grpc.add_ConductorServicer_to_server(one, server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        yield addresses


async def change(*addresses: str) -> list[int]:
    return [hint.change for hint in await scale.scale_hints(",".join(addresses))]


async def test_the_one_that_leads_is_found_whoever_is_asked() -> None:
    leader, follower = Scripted("leader", "", 7, 3), Scripted("standby", "", 7, None)
    async with scripted(leader, follower) as (a, b):
        leader.leader = follower.leader = a
        assert await change(a, b) == await change(b, a) == await change(b) == await change(a) == [3]
        assert await change(NOBODY, b) == [3], "one that is gone hinders nobody"


async def test_a_leader_of_yesterday_counts_less_than_the_one_of_today() -> None:
    async with scripted(Scripted("leader", "", 7, 3), Scripted("leader", "", 8, -1)) as (a, b):
        assert await change(a, b) == await change(b, a) == [-1]


async def test_what_a_follower_thinks_is_never_shown_as_what_is_wanted() -> None:
    follower = Scripted("standby", NOBODY, 7, 0)
    async with scripted(follower) as (a,):
        with pytest.raises(Unavailable, match=f"no conductor leads that answers .*{NOBODY}"):
            await change(a)
        follower.leader = ""
        with pytest.raises(Unavailable, match="no conductor leads: is their Redis there"):
            await change(a)
        follower.leader = a  # nonsense ends, too
        with pytest.raises(Unavailable, match="no conductor leads"):
            await change(a)


async def test_a_conductor_of_before_tells_of_itself() -> None:
    async with scripted(Scripted("", "", 0, 2)) as (a,):
        assert await change(a) == [2]


def test_a_mesh_with_two_conductors_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    services = {
        "conductor-0": {"service": "conductor", "address": "127.0.0.1:7001"},
        "conductor-1": {"service": "conductor", "address": "127.0.0.1:7003"},
    }

    async def answer(conductors: str) -> list[conductor_pb2.ScaleHint]:
        asked.append(conductors)
        return []

    monkeypatch.setattr(runs, "find_running", lambda run_dir: runs.Run(Path("/nowhere"), {"services": services}))
    monkeypatch.setattr(scale, "scale_hints", answer)
    done = CliRunner().invoke(app, ["scale"])
    assert done.exit_code == 0, done.output
    assert asked == ["127.0.0.1:7001,127.0.0.1:7003"]


@needs_redis
async def test_of_two_real_conductors_only_the_leader_tells_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicers: list[ConductorServicer] = []
    monkeypatch.setattr(ConductorService, "add_to", _remembering(ConductorService.add_to, servicers))
    with redis_server(tmp_path) as redis:
        async with conductor(config(redis, "scale")) as a:
            await until(a.leads)
            async with conductor(config(redis, "scale")) as b:
                for one in (a, b):
                    await one.serve("p0", "d0")

                async def told() -> bool:
                    return len(await change(b.service.address)) == 2

                await until(told)
                request = conductor_pb2.GetScaleHintsRequest()
                own = await b.stub.GetScaleHints(request, timeout=10)
                assert (list(own.hints), own.leadership.role) == ([], "standby")
                assert own.leadership.leader == a.service.address
                shown: dict[str, list[Any]] = {}
                for one, servicer in zip("ab", servicers, strict=True):
                    seen = shown[one] = []
                    monkeypatch.setattr(servicer._gauges, "show", seen.append)
                    servicer._show_hints()
                assert shown["b"] == [()]
                assert len(shown["a"][0]) == 2


def _remembering(add_to: Any, servicers: list[ConductorServicer]) -> Any:
    def remember(self: ConductorService, server: Any) -> None:
        servicers.append(self._servicer)
        add_to(self, server)

    return remember
