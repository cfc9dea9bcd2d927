"""A node that pulls blocks: tests.support.nodes.Node in a process of its own. What it has sealed it compares."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from kvmesh.kvcache.sources import PullRange
from tests.support.nodes import bench, content, keys_of, node, until


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


async def main() -> None:
    told = json.loads(sys.stdin.readline())
    keys = keys_of(*told["names"])
    settings = {"lease_ms": told["lease_ms"], "transports": (told["transport"],), "fault": told["fault"]}
    async with bench() as b, node("r", **settings) as reader:
        say(ready=True)
        holder = PullRange(told["holder"], told["address"], told["incarnation"], 0, len(keys))
        job = reader.pull(keys, [holder], timeout_ms=30_000)
        await until(lambda: len(reader.segments) == 1)
        say(reading=True)
        pulled = await reader.ended(job)
        wrong = []
        for i in pulled.arrived:
            (extent,) = reader.store.hold([keys[i]])
            found = await b.read(reader.rank, reader.partition.offset(0, extent), reader.shard)
            reader.store.release([extent])
            wrong += [i] if found != content(keys[i]) else []
        say(arrived=pulled.arrived, wrong=wrong, cause=pulled.cause)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
