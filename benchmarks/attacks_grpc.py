"""Attacks on the gateway's gRPC port of a real mesh, and what they cost it.

    python -m benchmarks.attacks_grpc

Each function attacks a running gateway and returns what was measured; `benchmarks.attacks` combines them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.cli.models import resolve
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.rpc.pb import gateway_pb2, gateway_pb2_grpc

KEY = "sk-kvmesh-" + "a" * 43
GENERATE = "/kvmesh.v1.Gateway/Generate"
_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1))


@dataclass
class Measured:
    """What one attack did: MiB of the gateway's memory before, at its peak and after, and how the calls ended."""

    attack: str
    before_mib: int
    peak_mib: int
    after_mib: int
    seconds: float
    codes: dict[str, int]


@contextlib.contextmanager
def mesh(*, keys: bool) -> Iterator[Mesh]:
    """The smallest real mesh: a master, a conductor, one prefill, one decode, a gateway; with one API key or none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.toml"
        digest = hashlib.sha256(KEY.encode()).hexdigest()
        path.write_text(f'[[key]]\nname = "attacker"\nsha256 = {json.dumps(digest)}\n')
        settings = MeshSettings(
            model=str(resolve("")),
            http_port=0,
            grpc_port=0,
            conductor_port=0,
            store_port=0,
            memory_mb=64,
            api_keys=str(path) if keys else "",
            run_dir=str(Path(folder) / "run"),
        )
        with Mesh(settings) as made:
            made.wait_ready()
            yield made


def memory_mib(pid: int, field: str = "VmRSS") -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) >> 10
    raise KeyError(field)


class _Watch:
    """The gateway's memory around an attack; the kernel keeps the peak."""

    def __init__(self, made: Mesh, attack: str) -> None:
        self._pid, self._attack = made.processes["gateway"].pid, attack
        Path(f"/proc/{self._pid}/clear_refs").write_text("5")
        self._before, self._start = memory_mib(self._pid), time.monotonic()

    def measured(self, codes: Sequence[str]) -> Measured:
        peak, after = memory_mib(self._pid, "VmHWM"), memory_mib(self._pid)
        took = time.monotonic() - self._start
        return Measured(self._attack, self._before, peak, after, round(took, 1), dict(Counter(codes)))


def _channels(made: Mesh, count: int) -> list[grpc.aio.Channel]:
    return [grpc.aio.insecure_channel(made.addresses["gateway"], options=_OPTIONS) for _ in range(count)]


async def _end_of(call: Any) -> str:
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as err:
        code: grpc.StatusCode = err.code()
        return code.name
    return "OK"


async def large_calls(made: Mesh, *, key: str = "", calls: int = 16, size: int = 60_000_000) -> Measured:
    """`calls` at once, each with a message of `size` bytes."""
    message = gateway_pb2.GenerateRequest(text="a" * size).SerializeToString()
    metadata = [("authorization", f"Bearer {key}")] if key else []
    channels = _channels(made, calls)
    watch = _Watch(made, f"{calls} calls of {size // 10**6} MB, {'with a key' if key else 'no key'}")
    codes = await asyncio.gather(
        *(_end_of(one.unary_stream(GENERATE)(message, metadata=metadata, timeout=120)) for one in channels)
    )
    found = watch.measured(codes)
    await asyncio.gather(*(one.close() for one in channels))
    return found


async def watchers(made: Mesh, *, streams: int = 2_000, name: int = 60_000) -> Measured:
    """`streams` of Health.Watch at once, each of a service with a long name of its own."""
    channels = _channels(made, 20)
    stubs: list[Any] = [health_pb2_grpc.HealthStub(one) for one in channels]
    watch = _Watch(made, f"{streams} Health.Watch with names of {name // 1000} kB")

    async def one(index: int) -> str:
        request = health_pb2.HealthCheckRequest(service=f"{index:06d}" + "n" * name)
        return await _end_of(stubs[index % len(stubs)].Watch(request, timeout=15))

    codes = await asyncio.gather(*(one(index) for index in range(streams)))
    found = watch.measured(codes)
    await asyncio.gather(*(one.close() for one in channels))
    return found


async def many_calls(made: Mesh, *, key: str = "", calls: int = 5_000, channels: int = 50) -> Measured:
    """`calls` ordinary requests at once over `channels` connections."""
    opened = _channels(made, channels)
    stubs = [gateway_pb2_grpc.GatewayStub(one) for one in opened]
    metadata = [("authorization", f"Bearer {key}")] if key else []
    request = gateway_pb2.GenerateRequest(text="Hello", max_tokens=1)
    watch = _Watch(made, f"{calls} calls over {channels} channels")
    codes = await asyncio.gather(
        *(_end_of(stubs[index % channels].Generate(request, metadata=metadata, timeout=300)) for index in range(calls))
    )
    found = watch.measured(codes)
    await asyncio.gather(*(one.close() for one in opened))
    return found


async def silent_calls(made: Mesh, *, key: str = "", calls: int = 500) -> Measured:
    """`calls` that are opened and never send their message, while one ordinary caller asks; its end comes last."""
    opened = _channels(made, 10)
    metadata = [("authorization", f"Bearer {key}")] if key else []
    watch = _Watch(made, f"{calls} calls without a message, and one ordinary one")
    silent = [opened[index % 10].stream_stream(GENERATE)(metadata=metadata, timeout=60) for index in range(calls)]
    await asyncio.gather(*(one.wait_for_connection() for one in silent), return_exceptions=True)
    request = gateway_pb2.GenerateRequest(text="Hello", max_tokens=1)
    stub = gateway_pb2_grpc.GatewayStub(opened[0])
    code = await _end_of(stub.Generate(request, metadata=metadata, timeout=60))
    for one in silent:
        one.cancel()
    found = watch.measured([f"ordinary {code}"])
    await asyncio.gather(*(one.close() for one in opened))
    return found


def measure() -> list[Measured]:
    """Every attack, on a mesh with a key and without."""
    found = []
    with mesh(keys=True) as made:
        found += [asyncio.run(large_calls(made)), asyncio.run(large_calls(made, key=KEY)), asyncio.run(watchers(made))]
        found.append(asyncio.run(large_calls(made, key=KEY, size=8_000_000)))
        found.append(asyncio.run(silent_calls(made, key=KEY)))
        found.append(asyncio.run(many_calls(made, key=KEY)))
        made.wait_ready(30)
    return found


if __name__ == "__main__":
    for measured in measure():
        print(json.dumps(asdict(measured)), flush=True)
