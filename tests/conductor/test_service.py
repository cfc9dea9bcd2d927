"""The conductor over real gRPC, with a real store master beside it."""

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.errors import (
    ConfigError,
    InvalidRequest,
    KvmeshError,
    ModelNotFound,
    Overloaded,
    ProtocolMismatch,
    Unavailable,
    UnknownInstance,
)
from kvmesh.rpc import channels, protocol, status
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, store_pb2, store_pb2_grpc
from kvmesh.services.conductor import main
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.store import main as store_main
from kvmesh.services.store.config import StoreConfig
from tests.support.services import Running, running, until

TIMEOUT = 10.0
CARD = common_pb2.ModelCard(
    name="demo", fingerprint="f", block_tokens=16, kv_dtype="float32", max_context_tokens=1000, eos_token_ids=[7]
)
ROLES = {"p": common_pb2.ROLE_PREFILL, "d": common_pb2.ROLE_DECODE, "m": common_pb2.ROLE_POOL}


def config(store: str, **more: Any) -> ConductorConfig:
    return ConductorConfig(store=store, **({"heartbeat_interval_ms": 50, "lease_ms": 60_000} | more))


def ref(name: str, incarnation: int = 1) -> common_pb2.InstanceRef:
    return common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=incarnation)


def registering(name: str, incarnation: int = 1, version: int = protocol.PROTOCOL_VERSION) -> Any:
    return conductor_pb2.RegisterInstanceRequest(
        protocol_version=version,
        instance=ref(name, incarnation),
        role=ROLES.get(name[:1], 0),
        node_id="n",
        model=CARD,
        capacity_blocks=100,
        max_running_requests=8,
    )


def beat(name: str, incarnation: int = 1, seq: int = 1, **load: int) -> Any:
    told = conductor_pb2.Load(**({"free_pages": 100, "free_extents": 100} | load))
    return conductor_pb2.HeartbeatRequest(instance=ref(name, incarnation), seq=seq, ready=True, load=told)


def scheduling(prompt: int = 40, **more: Any) -> Any:
    values = {"request_id": "r", "model": "demo", "prompt_tokens": prompt, "max_tokens": 8}
    return conductor_pb2.ScheduleRequest(**(values | more))


async def failing(call: Any) -> KvmeshError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return status.from_rpc_error(caught.value)


class Mesh:
    def __init__(self, store: Running, conductor: Running) -> None:
        self.store_service, self.conductor_service = store, conductor
        self._channels = [channels.connect(store.address), channels.connect(conductor.address)]
        self.store: Any = store_pb2_grpc.StoreMasterStub(self._channels[0])
        self.conductor: Any = conductor_pb2_grpc.ConductorStub(self._channels[1])

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def add(self, name: str, incarnation: int = 1) -> None:
        await self.conductor.Register(registering(name, incarnation), timeout=TIMEOUT)
        await self.conductor.Heartbeat(beat(name, incarnation), timeout=TIMEOUT)

    async def join(self, name: str, incarnation: int = 1) -> None:
        member = store_pb2.Member(instance=ref(name, incarnation), role=ROLES[name[0]], node_id="n", store_id=name)
        request = store_pb2.JoinRequest(protocol_version=protocol.PROTOCOL_VERSION, member=member)
        await self.store.Join(request, timeout=TIMEOUT)

    async def schedule(self, *args: Any, **more: Any) -> Any:
        return (await self.conductor.Schedule(scheduling(*args, **more), timeout=TIMEOUT)).placement

    async def refused(self, *args: Any, **more: Any) -> KvmeshError:
        return await failing(self.conductor.Schedule(scheduling(*args, **more), timeout=TIMEOUT))

    async def status(self) -> Any:
        return await self.conductor.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=TIMEOUT)

    async def says_of(self, name: str, text: str) -> None:
        async def so() -> bool:
            return any(
                i.instance.instance_id == name and text in i.not_ready_reason for i in (await self.status()).instances
            )

        await until(so)


@contextlib.asynccontextmanager
async def meshed(**more: Any) -> AsyncIterator[Mesh]:
    store_config = StoreConfig(heartbeat_interval_ms=50, lease_ms=60_000)
    async with (
        running(store_main.run, store_config) as store,
        running(main.run, config(store.address, **more)) as conductor,
    ):
        mesh = Mesh(store, conductor)
        try:
            yield mesh
        finally:
            await mesh.close()


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with meshed() as found:
        yield found


async def test_a_request_is_placed_on_the_registered_pair(mesh: Mesh) -> None:
    answer = await mesh.conductor.Register(registering("p0"), timeout=TIMEOUT)
    assert (answer.heartbeat_interval_ms, answer.lease_ms) == (50, 60_000)
    await mesh.add("p0")
    await mesh.add("d0", 5)
    placement = await mesh.schedule(block_keys=bytes(range(32)))
    assert placement.prefill == ref("p0")
    assert placement.decode == ref("d0", 5)
    assert placement.predicted_ttft_ms >= 1
    assert placement.predicted_tbt_ms >= 1
    assert placement.predicted_cached_tokens == 0
    again = await mesh.schedule(request_id="r2", block_keys=bytes(range(32)))
    assert again.predicted_cached_tokens == 32
    models = await mesh.conductor.ListModels(conductor_pb2.ListModelsRequest(), timeout=TIMEOUT)
    assert list(models.models) == [CARD]


async def test_what_a_gateway_holds_is_wanted() -> None:
    """Of a model that no instance has ever registered, by the conductor that leads: here it is alone."""
    held = conductor_pb2.ListModelsRequest(held=[conductor_pb2.HeldRequests(model="demo", requests=3)])
    async with meshed(balance_window_ms=100) as mesh:

        async def wanted() -> bool:
            assert not (await mesh.conductor.ListModels(held, timeout=TIMEOUT)).models
            told = await mesh.conductor.GetScaleHints(conductor_pb2.GetScaleHintsRequest(), timeout=TIMEOUT)
            hints = {common_pb2.Role.Name(one.role): (one.instances, one.change) for one in told.hints}
            return hints == dict.fromkeys(("ROLE_PREFILL", "ROLE_DECODE", "ROLE_BOTH"), (0, 1))

        await until(wanted)


async def test_every_refusal_has_its_name(mesh: Mesh) -> None:
    assert isinstance(await mesh.refused(), Unavailable)
    await mesh.add("p0")
    error = await mesh.refused()
    assert isinstance(error, Unavailable)
    assert "no ready decode instance" in error.message
    await mesh.add("d0")
    overloaded = await mesh.refused(ttft_slo_ms=1)
    assert isinstance(overloaded, Overloaded)
    assert overloaded.retry_after_ms >= 100
    too_long = await mesh.refused(5000)
    assert too_long.code == "context_length_exceeded"
    assert too_long.field == "prompt_tokens"
    for wrong in ({"block_keys": b"short"}, {"request_id": ""}, {"prompt_tokens": 0}):
        assert isinstance(await mesh.refused(**wrong), InvalidRequest), wrong


async def test_a_model_nobody_serves_is_404() -> None:
    async with meshed(heartbeat_interval_ms=50, lease_ms=100) as mesh:

        async def not_found() -> bool:
            await mesh.add("p0")
            return isinstance(await mesh.refused(model="nothing"), ModelNotFound)

        await until(not_found)


@pytest.mark.parametrize("version", [0, 2])
async def test_another_protocol_version_is_refused(mesh: Mesh, version: int) -> None:
    error = await failing(mesh.conductor.Register(registering("p0", version=version), timeout=TIMEOUT))
    assert isinstance(error, ProtocolMismatch)
    assert "p0" in error.message
    error = await failing(mesh.conductor.Heartbeat(beat("p0"), timeout=TIMEOUT))
    assert isinstance(error, UnknownInstance)


async def test_a_role_is_needed(mesh: Mesh) -> None:
    error = await failing(mesh.conductor.Register(registering("x0"), timeout=TIMEOUT))
    assert isinstance(error, InvalidRequest)
    assert "role" in error.message


async def test_what_the_master_says_stops_and_starts_work(mesh: Mesh) -> None:
    for name in ("p0", "d0"):
        await mesh.join(name)
        await mesh.add(name)
    await mesh.schedule()
    await mesh.store.Leave(store_pb2.LeaveRequest(instance=ref("p0")), timeout=TIMEOUT)
    await mesh.says_of("p0", "the store master says it left")
    await mesh.conductor.Heartbeat(beat("p0", seq=2), timeout=TIMEOUT)
    assert isinstance(await mesh.refused(), Unavailable)
    await mesh.join("p0", 2)
    assert isinstance(await mesh.refused(), Unavailable)  # the master alone knows the new one
    await mesh.add("p0", 2)
    assert (await mesh.schedule()).prefill == ref("p0", 2)
    assert (await mesh.status()).store_master == "connected"


async def test_a_lease_that_runs_out_ends_the_work() -> None:
    async with meshed(lease_ms=300) as mesh:
        await mesh.add("p0")
        await mesh.says_of("p0", "silent for")
        await mesh.add("d0")
        assert "p0: silent for" in (await mesh.refused()).message


async def test_the_span_is_a_child_of_the_callers(tmp_path: Path) -> None:
    trace_id, span_id = "ab" * 16, "cd" * 8
    metadata = (("traceparent", f"00-{trace_id}-{span_id}-01"),)
    # Alone: a process has one telemetry, and the store master of `meshed` would have started it.
    conducting = running(main.run, config("127.0.0.1:1", trace_dir=str(tmp_path)))
    async with conducting as conductor, channels.connect(conductor.address) as channel:
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        for name in ("p0", "d0"):
            await stub.Register(registering(name), timeout=TIMEOUT)
            await stub.Heartbeat(beat(name), timeout=TIMEOUT)
        await stub.Schedule(scheduling(), timeout=TIMEOUT, metadata=metadata)
        await failing(stub.Schedule(scheduling(ttft_slo_ms=1), timeout=TIMEOUT, metadata=metadata))
    placed, refused = _spans(tmp_path)
    for span in (placed, refused):
        assert (span["name"], span["trace_id"], span["parent"]) == ("kvmesh.place", trace_id, span_id)
        assert span["start_ns"] <= span["end_ns"]
        assert span["attributes"]["kvmesh.request_id"] == "r"
    assert placed["attributes"]["kvmesh.prefill.instance_id"] == "p0"
    assert placed["attributes"]["kvmesh.decode.instance_id"] == "d0"
    assert placed["attributes"]["kvmesh.predicted.queue_ms"] == 0
    assert placed["status"] == ""
    assert refused["attributes"]["kvmesh.outcome"] == "overloaded"
    assert "TTFT" in refused["status"]


def _spans(folder: Path) -> list[Any]:
    (path,) = folder.glob("conductor-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_metrics_and_health(mesh: Mesh) -> None:
    await mesh.add("p0")
    await mesh.refused()
    url = f"http://{mesh.conductor_service.metrics}/metrics"

    def fetch() -> str:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            return str(answer.read().decode())

    async def told() -> bool:
        text = await asyncio.to_thread(fetch)
        assert 'kvmesh_conductor_decisions_total{outcome="unavailable"}' in text
        assert 'kvmesh_conductor_instances_count{role="prefill",state="ready"} 1.0' in text
        return True

    await until(told)
    async with channels.connect(mesh.conductor_service.address) as channel:
        request = health_pb2.HealthCheckRequest(service="kvmesh.v1.Conductor")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_without_a_master_the_status_says_why_and_work_goes_on() -> None:
    async with running(main.run, config("127.0.0.1:1")) as conductor, channels.connect(conductor.address) as channel:
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        for name in ("p0", "d0"):
            await stub.Register(registering(name), timeout=TIMEOUT)
            await stub.Heartbeat(beat(name), timeout=TIMEOUT)

        async def told() -> bool:
            answer = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=TIMEOUT)
            return "no connection to 127.0.0.1:1" in answer.store_master

        await until(told)
        await stub.Schedule(scheduling(), timeout=TIMEOUT)


@pytest.mark.parametrize(
    "wrong", [{"slo_ttft_ms": 0}, {"slo_tbt_ms": -1}, {"lease_ms": 399}], ids=lambda w: next(iter(w))
)
def test_config_names_the_field(wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        ConductorConfig(**wrong)


async def test_a_port_in_use_is_one_clear_line(mesh: Mesh) -> None:
    port = mesh.conductor_service.port
    with pytest.raises(ConfigError, match=str(port)):
        async with running(main.run, config("127.0.0.1:1", port=port)):
            pass
