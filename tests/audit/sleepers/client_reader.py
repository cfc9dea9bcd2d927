"""A public client that gets one block, into memory of its own or as bytes."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from kvmesh.errors import KvmeshError
from kvmesh.storeclient import ClientConfig, StoreClient


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


async def main() -> None:
    told = json.loads(sys.stdin.readline())
    config = ClientConfig(
        store=told["store"],
        staging_mb=8,
        near=False,
        node_id="far",
        host="127.0.0.1",
        transports=told["transport"],
        fault=told["fault"],
        lease_ms=told["lease_ms"],
        timeout_ms=20_000,
    )
    async with StoreClient(config) as client:
        target = client.allocate(told["nbytes"]).span()
        say(ready=True)
        key, found, cause = bytes.fromhex(told["key"]), None, ""
        try:
            if told["into"]:
                got = await client.get_into(key, target)
                found, cause = bytes(target.memory) if got.here else None, got.cause
            else:
                found = await client.get(key)
        except KvmeshError as error:
            cause = error.message
        say(first=found[:16].hex() if found is not None else None, cause=cause)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
