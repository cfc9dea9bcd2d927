"""Asks a mesh in another network namespace over gRPC. `python -m tests.support.mesh.inside CONDUCTOR` runs there and
answers questions, a line of JSON each; `Inside` starts it and asks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import grpc

from kvmesh.rpc import security
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from tests.support.mesh.client import leaks, pools
from tests.support.mesh.namespaces import Machine
from tests.support.paths import ROOT


class Inside:
    """Asks from within a machine, with the certificates at KVMESH_TLS_CERT, _KEY and _CA of `env`."""

    def __init__(self, machine: Machine, conductor: str, env: dict[str, str]) -> None:
        argv = machine.inside(sys.executable, "-m", "tests.support.mesh.inside", conductor)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)

    def ready(self) -> set[str]:
        """The instances that the conductor would give work, cordoned or not; none before it answers."""
        return set(self._ask(ready=True))

    def cordon(self, *names: str, keep: bool = True) -> None:
        """Keeps new work away from these instances, or lets them have some again."""
        self._ask(cordon=names, keep=keep)

    def leaks(self, address: str, role: str) -> list[str]:
        """What an instance still holds although nothing should be running."""
        found: list[str] = self._ask(address=address, role=role)
        return found

    def _ask(self, **question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


async def _answer(conductor: str, question: dict[str, Any]) -> Any:
    if "role" in question:
        return leaks(await pools(question["address"], question["role"]))
    async with connect(conductor) as channel:
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        state = conductor_pb2.CORDON_STATE_CORDONED if question.get("keep") else conductor_pb2.CORDON_STATE_UNSPECIFIED
        for name in question.get("cordon", ()):
            await stub.Cordon(conductor_pb2.CordonRequest(instance_id=name, state=state), timeout=30)
        try:
            told = (await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)).instances
        except grpc.RpcError:  # it is not up yet
            return []
        return [one.instance.instance_id for one in told if one.ready or one.not_ready_reason.startswith("cordoned")]


async def _main(conductor: str) -> None:
    security.use(security.Security.load(security.TlsFiles.from_env(os.environ)))
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await _answer(conductor, json.loads(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
