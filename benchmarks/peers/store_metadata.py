"""A node and a reader of our store master, without a byte of data: announcements and look-ups, one call at a time."""

from __future__ import annotations

import random
import struct
import time
from typing import Any

import uvloop

from benchmarks.peers.link import End, serve
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.rpc.channels import connect
from kvmesh.rpc.leader_client import LeaderClient, LeaderTracker
from kvmesh.rpc.pb import common_pb2, store_pb2, store_pb2_grpc
from kvmesh.rpc.protocol import PROTOCOL_VERSION

SERVICE = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]
PART = 8192  # keys in one announcement, when the map is filled
TIMEOUT_S = 60.0


class Talker(End):
    def __init__(self, master: str, name: str) -> None:
        self.loop = uvloop.new_event_loop()
        self.name = name
        self.seq = 0
        self.keys: list[bytes] = []
        self.rng = random.Random(name)
        self.loop.run_until_complete(self._join(master))

    async def _join(self, master: str) -> None:
        self.channel = connect(master)
        self.rpc: Any = store_pb2_grpc.StoreMasterStub(self.channel)
        self.client = LeaderClient(SERVICE, LeaderTracker(master), ("Find",))
        instance = common_pb2.InstanceRef(instance_id=self.name, address="127.0.0.1:9", incarnation=1)
        member = store_pb2.Member(instance=instance, role=common_pb2.ROLE_PREFILL, node_id="bench", store_id=self.name)
        request = store_pb2.JoinRequest(protocol_version=PROTOCOL_VERSION, member=member)
        await self.rpc.Join(request, timeout=TIMEOUT_S)
        await self._announce([], snapshot=True)

    async def _announce(self, keys: list[bytes], snapshot: bool = False) -> None:
        self.seq += 1
        said = store_pb2.Announcement(
            store_id=self.name, incarnation=1, seq=self.seq, sealed=b"".join(keys), snapshot=snapshot
        )
        answer = await self.rpc.Announce(store_pb2.AnnounceRequest(announcement=said), timeout=TIMEOUT_S)
        if answer.want_snapshot:
            raise RuntimeError("the master wants a snapshot")

    def _new(self, n: int) -> list[bytes]:
        packed = self.rng.randbytes(n * KEY_BYTES)
        made = [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]
        self.keys += made
        return made

    def know(self, blocks: int) -> None:
        """So many blocks in all."""

        async def all_of_them() -> None:
            while len(self.keys) < blocks:
                await self._announce(self._new(min(PART, blocks - len(self.keys))))

        self.loop.run_until_complete(all_of_them())

    def announce(self, count: int, batch: int) -> float:
        """Seconds to make so many new keys known."""
        parts = [self._new(min(batch, count - at)) for at in range(0, count, batch)]

        async def all_of_them() -> float:
            start = time.perf_counter()
            for part in parts:
                await self._announce(part)
            return time.perf_counter() - start

        return self.loop.run_until_complete(all_of_them())

    def bind(self, prefix: str, count: int, batch: int) -> float:
        """Seconds to bind so many new names, `batch` of them in a call."""
        key = self.rng.randbytes(KEY_BYTES)
        requests = []
        for at in range(0, count, batch):
            some = [f"{prefix}-{i}" for i in range(at, min(at + batch, count))]
            requests.append(store_pb2.BindRequest(names=[store_pb2.NamedKey(name=one, key=key) for one in some]))

        async def all_of_them() -> float:
            start = time.perf_counter()
            for request in requests:
                await self.rpc.Bind(request, timeout=TIMEOUT_S)
            return time.perf_counter() - start

        return self.loop.run_until_complete(all_of_them())

    def look(self, batch: int, times: int, grpc: bool = False) -> float:
        """Seconds for so many look-ups of `batch` keys each, as a client of the Store asks; or over gRPC."""
        requests = []
        for _ in range(times):
            first = self.rng.randrange(max(1, len(self.keys) - batch))
            requests.append(store_pb2.FindRequest(keys=b"".join(self.keys[first : first + batch]), grouped=True))

        async def over_grpc(request: store_pb2.FindRequest) -> Any:
            return await self.rpc.Find(request, timeout=TIMEOUT_S)

        async def by_client(request: store_pb2.FindRequest) -> Any:
            return await self.client.call("Find", request, TIMEOUT_S)

        async def all_of_them() -> float:
            ask = over_grpc if grpc else by_client
            while not grpc and not self.client.via_fastpath:
                await ask(requests[0])
            start = time.perf_counter()
            for request in requests:
                answer = await ask(request)
                holders = [list(one.holder) for one in answer.groups]
                found = [holders[at] for at in struct.unpack(f"<{batch}H", answer.group)]
                if not all(found):
                    raise RuntimeError("Find: a key is missing")
            return time.perf_counter() - start

        return self.loop.run_until_complete(all_of_them())

    def map_bytes(self) -> tuple[int, int]:
        """(blocks, what the master says its map takes)."""

        async def ask() -> tuple[int, int]:
            told = await self.rpc.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=TIMEOUT_S)
            return told.blocks, told.map_bytes

        return self.loop.run_until_complete(ask())

    def close(self) -> None:
        self.loop.run_until_complete(self.client.close())
        self.loop.run_until_complete(self.channel.close())


if __name__ == "__main__":
    serve({"talker": Talker})
