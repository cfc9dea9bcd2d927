"""Every RPC of every service of a running mesh, fuzzed: named errors only, no process dies, nothing is held."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import (
    blocks_pb2,
    conductor_pb2,
    conductor_pb2_grpc,
    decode_pb2,
    doors_pb2,
    gateway_pb2,
    instance_pb2,
    instance_pb2_grpc,
    prefill_pb2,
    store_pb2,
)
from tests.fuzz.conftest import Noise
from tests.support import hostile
from tests.support.mesh.client import until
from tests.support.mesh.harness import Running, running_mesh
from tests.support.messages import noisy
from tests.support.paths import ROOT

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [(i * 31 + i * i) % 200 + 20 for i in range(150)]
# A deadline of a millisecond is a wish that is granted; a moved term or role is refused by name.
BORNE = hostile.BORNE | {"DEADLINE_EXCEEDED", "ABORTED", "PERMISSION_DENIED", "UNAUTHENTICATED", "ALREADY_EXISTS"}
AT_ONCE = 4
SILENCE_S = 0.1
RESUME_S = 60.0
PAUSING = (
    "PauseModel",
    "GatherModel",
    "UpdateModelWeights",
    "SleepModel",
    "Pause",
    "Resume",
    "UpdateWeights",
    "HoldOrder",
    "Sleep",
)  # what they are asked for they do
TARGETS = {
    gateway_pb2: ("Gateway", ["gateway"]), conductor_pb2: ("Conductor", ["conductor"]),
    store_pb2: ("StoreMaster", ["store"]), prefill_pb2: ("Prefill", ["prefill-0"]),
    decode_pb2: ("Decode", ["decode-0"]), blocks_pb2: ("NodeStore", ["pool-0", "decode-0"]),
    doors_pb2: ("Doors", ["conductor", "store"]), instance_pb2: ("Instance", ["decode-0"]),
}  # fmt: skip


def _of_this_side(outcome: hostile.Outcome) -> bool:
    """gRPC's own word, here, for a message that was to be sent on a stream which the other side had ended already."""
    return outcome.error is not None and outcome.error.message == "Internal error from Core"


def entries() -> Iterator[Any]:
    for module, (name, processes) in TARGETS.items():
        service = module.DESCRIPTOR.services_by_name[name]  # type: ignore[attr-defined]
        for method in service.methods:
            for process in processes:
                yield pytest.param(service, method, process, id=f"{name}.{method.name}@{process}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    flags = {"*": {"num_pages": 96, "num_extents": 96}}
    async with running_mesh(demo_path, tmp_path_factory.mktemp("fuzz"), pool=1, flags=flags) as running:
        yield running


@pytest.fixture(scope="module")
def demo_path() -> Path:
    return ROOT / "examples" / "demo-model"


@pytest.mark.parametrize(("service", "method", "process"), list(entries()))
async def test_rpc(
    service: ServiceDescriptor, method: MethodDescriptor, process: str, mesh: Running, noise: Noise
) -> None:
    before, pids = await mesh.client.generate(PROMPT, 8), mesh.all_pids()
    assert before.error is None
    seen: Counter[str] = Counter()
    words = ["demo-model", "n", "bytes", b"k" * 16, b"k" * 32, (before.tokens and b"\x20\0\0\0" * 64) or b""]
    waiting = noise.kept()

    async def send(channel: Any) -> None:
        while waiting or noise.goes_on():
            parts = waiting.pop() if waiting else made()
            outcome = await hostile.send(channel, service, method.name, parts, SILENCE_S)
            seen[outcome.code] += 1
            if outcome.code not in BORNE and not _of_this_side(outcome):
                raise AssertionError(f"{outcome}: kept in {noise.keep(parts)}")

    def made() -> list[bytes]:
        times = noise.rng.choice((1, 2, 3)) if method.client_streaming else 1
        return [noisy(noise.rng, method.input_type, words) for _ in range(times)]

    async with connect(mesh.mesh.addresses[process]) as channel, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send(channel))
    if method.name in PAUSING:
        await _resume(mesh)
        async with connect(mesh.mesh.addresses[process]) as channel:
            await until(lambda: _serves(channel, service), "the instance to take requests again", RESUME_S)
    async with connect(mesh.mesh.addresses[process]) as channel:
        await hostile.alive(channel, service)
    assert mesh.all_pids() == pids, "every process lives on"
    print(f"{method.full_name}: {dict(seen)}")


async def _resume(mesh: Running) -> None:
    """Undoes what an operator's noise may have asked for: who sleeps is woken before anything is resumed."""
    async with (
        connect(mesh.mesh.addresses["conductor"]) as channel,
        connect(mesh.mesh.addresses["decode-0"]) as decode,
    ):
        conductor = conductor_pb2_grpc.ConductorStub(channel)  # type: ignore[no-untyped-call]
        instance = instance_pb2_grpc.InstanceStub(decode)  # type: ignore[no-untyped-call]
        wake = conductor_pb2.WakeModelRequest(model="demo-model")
        resume = conductor_pb2.ResumeModelRequest(model="demo-model")
        what = "the leases of orders that nobody carries out to end"
        await until(lambda: _taken(conductor.WakeModel(wake, timeout=RESUME_S)), what, RESUME_S)
        await until(lambda: _taken(instance.Resume(instance_pb2.ResumeRequest(), timeout=RESUME_S)), what, RESUME_S)
        await until(lambda: _taken(conductor.ResumeModel(resume, timeout=RESUME_S)), what, RESUME_S)


async def _taken(call: Any) -> bool:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    return True


async def _serves(channel: Any, service: ServiceDescriptor) -> bool:
    try:
        await hostile.alive(channel, service)
    except AssertionError:
        return False
    return True


async def test_after_all_that_the_mesh_is_whole(mesh: Running) -> None:
    await mesh.settled()
    first = await mesh.client.generate(PROMPT, 8, cache_salt="fresh")
    again = await mesh.client.generate(PROMPT, 8)
    assert (first.error, again.error) == (None, None)
    assert again.tokens == first.tokens, "computed anew and from blocks that were there all the time"
    await mesh.settled()
