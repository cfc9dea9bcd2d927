"""One Lease of one key of a pool node: over gRPC, through its Unix door and through its TCP door, in turns.

python -m benchmarks.doors [--rounds 7] [--calls 200] [--loop uvloop] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.progress import tell
from benchmarks.store_contest import service
from kvmesh.blockservice.peers import FIND_S, ways
from kvmesh.blockservice.peers import SERVICE as NODE_STORE
from kvmesh.kvcache.size_classes import BYTES
from kvmesh.rpc import channels
from kvmesh.rpc.fastpath.caller import DIAL_S, FastCaller, FoundPaths
from kvmesh.rpc.fastpath.client import Way
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.storeclient import ClientConfig, StoreClient

CALL_S = 10.0


async def measure(master: str, rounds: int, calls: int) -> dict[str, float]:
    """Microseconds of a call, the median of all turns of each way."""
    async with StoreClient(ClientConfig(store=master)) as client:
        key = await client.put(bytes(range(256)))
        async with asyncio.timeout(CALL_S):
            while not (places := (await client.locate_many([key]))[0]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # until it is announced
        holder = places[0].holder
        async with channels.connect(holder.address) as channel:
            request = pb.LeaseRequest(
                reader="benchmark", holder_incarnation=holder.incarnation, keys=key, lease_ms=1_000, layout=BYTES
            )
            callers = {"gRPC": FastCaller(channel, NODE_STORE, _nowhere)}
            told = await callers["gRPC"].over_grpc("Doors", pb.DoorsRequest(), FIND_S)
            for way in ways(told, holder.address, unix=True):
                name = "Unix door" if isinstance(way, str) else "TCP door"
                callers[name] = await _through(channel, told.incarnation, way)
            found: dict[str, list[float]] = {name: [] for name in callers}
            for turn in range(rounds):
                tell(f"{turn + 1} of {rounds}")
                for name, caller in callers.items():
                    found[name] += await _timed(caller, request, calls)
            tell("")
            for caller in callers.values():
                await caller.close()
    return {name: round(statistics.median(times) * 1e6, 1) for name, times in found.items()}


async def _nowhere(caller: FastCaller) -> FoundPaths:
    return FoundPaths(0, ())


async def _through(channel: Any, life: int, way: Way) -> FastCaller:
    async def find(caller: FastCaller) -> FoundPaths:
        return FoundPaths(life, (way,))

    made = FastCaller(channel, NODE_STORE, find)
    deadline = time.monotonic() + DIAL_S
    while not made.by_door:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the door at {way} does not open")
        await made.call("Doors", pb.DoorsRequest(), FIND_S)
    return made


async def _timed(caller: FastCaller, request: pb.LeaseRequest, calls: int) -> list[float]:
    """Seconds of each call; what it leased is given back outside of them."""
    times, leases = [], []
    for _ in range(calls):
        began = time.perf_counter()
        answer = await caller.call("Lease", request, CALL_S)
        times.append(time.perf_counter() - began)
        leases.append(answer.lease_id)
    for at in range(0, calls, 1000):
        some = leases[at : at + 1000]
        await caller.call("ReleaseLease", pb.ReleaseBlocksRequest(lease_id=some[0], also=some[1:]), CALL_S)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    factory = uvloop.new_event_loop if options.loop == "uvloop" else asyncio.new_event_loop
    with (
        service("store") as master,
        service("pool", "--store", master, "--memory-mb", "64"),
        asyncio.Runner(loop_factory=factory) as runner,
    ):
        found = runner.run(measure(master, options.rounds, options.calls))
    for name, micros in found.items():
        print(f"{name:12}{micros:8.1f} us   {found['gRPC'] / micros:5.1f} ×")
    if options.json:
        options.json.write_text(json.dumps({"loop": options.loop, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
