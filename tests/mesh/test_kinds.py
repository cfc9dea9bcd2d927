"""A mesh with a pair, a coupled instance and a decode instance that computes short prompts: where requests go, over the
wire, and that they are answered alike."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.cli import collect
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, instance_pb2, instance_pb2_grpc
from tests.support.mesh.client import until
from tests.support.mesh.harness import Running

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]
LIMIT = 48


def prompt(tokens: int, first: int) -> list[int]:
    return [20 + (first + 7 * i) % 200 for i in range(tokens)]


async def became(running: Running, request_id: str) -> tuple[str, str]:
    """Kind and decode instance, as explained."""
    told = await collect.explained(running.mesh.addresses["conductor"], request_id)
    assert told is not None
    (chosen,) = [kind for kind in told["kinds"] if kind["chosen"]]
    placement = told["placement"]
    assert chosen["prefill"]["instance_id"] == placement["prefill"]["instance_id"]
    assert chosen["decode"]["instance_id"] == placement["decode"]["instance_id"]
    return chosen["kind"], chosen["decode"]["instance_id"]


async def set_role(running: Running, name: str, role: common_pb2.Role.ValueType) -> None:
    async with connect(running.mesh.addresses[name]) as channel:
        stub: Any = instance_pb2_grpc.InstanceStub(channel)
        await stub.SetRole(instance_pb2.SetRoleRequest(role=role), timeout=10)

    async def heard() -> bool:
        async with connect(running.mesh.addresses["conductor"]) as channel:
            stub: Any = conductor_pb2_grpc.ConductorStub(channel)
            status = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)
        return any(i.instance.instance_id == name and i.role == role and i.ready for i in status.instances)

    await until(heard, f"the role of {name}")


async def test_every_kind_answers_alike(
    mesh: Callable[..., AbstractAsyncContextManager[Running]], demo_path: Path
) -> None:
    flags = {"decode": {"local_prefill_tokens": LIMIT}}
    async with mesh(demo_path, prefill=1, decode=1, coupled=1, flags=flags) as running:
        for name in running.instances():
            await running.ready(name)
        seen, answers = set(), {}
        short, long = prompt(LIMIT - 8, 1), prompt(300, 3)
        for role, sent in (
            (common_pb2.ROLE_BOTH, (short, long)),
            (common_pb2.ROLE_PREFILL, (short, long)),  # nobody is coupled now
        ):
            await set_role(running, "coupled-0", role)
            for tokens in sent:
                answer = await running.client.generate(tokens, 12)
                assert answer.error is None, answer.error
                assert answers.setdefault(len(tokens), answer.tokens) == answer.tokens
                seen.add(await became(running, answer.request_id))
        assert {kind for kind, _ in seen} >= {"pair"}
        assert any(kind in ("coupled", "decode") for kind, _ in seen)
        assert ("coupled", "decode-0") not in seen
        with pytest.raises(grpc.aio.AioRpcError):
            await set_role(running, "prefill-0", common_pb2.ROLE_BOTH)
        await running.settled()
