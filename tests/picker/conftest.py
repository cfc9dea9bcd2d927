"""A picker in this process, before a real conductor at which engines are registered through its RPCs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from kvmesh.rpc import channels, protocol
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc
from kvmesh.services.conductor import main as conductor_main
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.picker import main as picker_main
from kvmesh.services.picker.config import PickerConfig
from tests.support.ext_proc import ProxyClient
from tests.support.paths import ROOT
from tests.support.services import Running, running, until

TIMEOUT_S = 30.0
DEMO = ROOT / "examples" / "demo-model"
MODEL = "demo-model"
BLOCK_TOKENS = 16


class PickerMesh:
    """A conductor, a picker and a proxy."""

    def __init__(self, conductor: Running, picker: Running, proxy: ProxyClient, stub: Any) -> None:
        self.conductor, self.picker, self.proxy, self.stub = conductor, picker, proxy, stub
        self._beats = 0
        self._engines: dict[str, bool] = {}  # whether it is ready

    async def add(self, name: str, address: str, *, ready: bool = True, seen: bool = True) -> None:
        """Registers an engine of that `ip:port`; waits until the picker has seen it."""
        ref = common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=1)
        card = common_pb2.ModelCard(
            name=MODEL, fingerprint="external-demo", block_tokens=BLOCK_TOKENS, kv_dtype="float32",
            max_context_tokens=4096, vocab_size=512, eos_token_ids=[0], kv_bytes_per_token=64,
        )  # fmt: skip
        request = conductor_pb2.RegisterInstanceRequest(
            protocol_version=protocol.PROTOCOL_VERSION, instance=ref, role=common_pb2.ROLE_BOTH, node_id=name,
            model=card, capacity_blocks=4096, max_running_requests=8, http_url=f"http://{address}",
            knowledge=conductor_pb2.BLOCK_KNOWLEDGE_FALLBACK,
        )  # fmt: skip
        await self.stub.Register(request, timeout=TIMEOUT_S)
        self._engines[name] = ready
        await self.beat()
        if ready and seen:
            await self.sees(address)

    async def beat(self) -> None:
        """Says of all engines that they are there and idle: the conductor forgets who is silent for long."""
        load = conductor_pb2.Load(free_pages=4096, free_extents=4096)
        for name, ready in self._engines.items():
            self._beats += 1
            ref = common_pb2.InstanceRef(instance_id=name, address="127.0.0.1:9", incarnation=1)
            beat = conductor_pb2.HeartbeatRequest(instance=ref, seq=self._beats, ready=ready, load=load)
            await self.stub.Heartbeat(beat, timeout=TIMEOUT_S)

    async def sees(self, address: str) -> None:
        async def it_does() -> bool:
            return address in (await self.proxy.ask(headers={":method": "GET", ":path": "/v1/models"})).endpoints

        await until(it_does)

    async def pending(self, name: str) -> int:
        """Placements at an instance that are not over."""
        await self.beat()
        told = await self.stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=TIMEOUT_S)
        return next(one.pending_requests for one in told.instances if one.instance.instance_id == name)


@contextlib.asynccontextmanager
async def picker_mesh(conductor: dict[str, Any], **more: Any) -> AsyncIterator[PickerMesh]:
    told = {"lease_ms": 600_000, "store": "127.0.0.1:1"} | conductor
    async with (
        running(conductor_main.run, ConductorConfig(**told)) as conducting,
        running(
            picker_main.run,
            PickerConfig(port=0, conductor=conducting.address, **({"model": str(DEMO), "served_name": MODEL} | more)),
        ) as picking,
        ProxyClient(picking.address) as proxy,
        channels.connect(conducting.address) as channel,
    ):
        yield PickerMesh(conducting, picking, proxy, conductor_pb2_grpc.ConductorStub(channel))  # type: ignore[no-untyped-call]
