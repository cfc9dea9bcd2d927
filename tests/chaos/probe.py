"""Nodes asked one by one, past master and client: what each holds, its bytes, its pools, and whether it works."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Sequence

import grpc.aio

from kvmesh.kvcache.keys import KEY_BYTES, split
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import blocks_pb2_grpc
from kvmesh.storeclient.naming import content_key
from kvmesh.transfer import EngineConfig, Opcode, TransferEngine, TransferRequest, TransferState
from tests.chaos.history import digest_of

LAYOUT = "bytes"
REGION = 8 << 20
CALL_S = 10.0
LEASE_MS = 3000
PORTION = 8  # of the largest blocks fit the region
USABLE_S = 20.0
READ_S = 5.0
EXISTS = 4096


class Probe:
    """Its own engine. Methods raise what goes wrong."""

    def __init__(self, host: str) -> None:
        config = EngineConfig(transports=("tcp",), host=host)
        self.engine = TransferEngine(f"probe@{time.monotonic_ns():x}", config)
        self._region = self.engine.allocate(REGION, "cpu:0")

    def close(self) -> None:
        self.engine.close()

    async def holds(self, channel: grpc.aio.Channel, known: Iterable[bytes]) -> list[bytes]:
        """Every key that the node lists, and those of `known` that it has in any tier."""
        stub = blocks_pb2_grpc.NodeStoreStub(channel)
        held: set[bytes] = set()
        async for part in stub.ListBlocks(pb.ListBlocksRequest(), timeout=CALL_S):
            held.update(split(part.keys))
        asked = sorted(set(known) - held)
        for at in range(0, len(asked), EXISTS):
            some = asked[at : at + EXISTS]
            answer = await stub.Exists(pb.ExistsRequest(keys=b"".join(some)), timeout=CALL_S)
            held.update(key for key, tier in zip(some, answer.tiers, strict=True) if tier)
        return sorted(held)

    async def in_memory(self, channel: grpc.aio.Channel, tag: bytes) -> int:
        """Blocks with this tag, those on an SSD only not counted."""
        stub = blocks_pb2_grpc.NodeStoreStub(channel)
        held = [key for key in await self.holds(channel, ()) if key.startswith(tag)]
        tiers = b""
        for at in range(0, len(held), EXISTS):
            request = pb.ExistsRequest(keys=b"".join(held[at : at + EXISTS]))
            tiers += (await stub.Exists(request, timeout=CALL_S)).tiers
        return tiers.count(Tier.DRAM)

    async def pools(self, channel: grpc.aio.Channel) -> pb.GetNodeStoreResponse:
        stub = blocks_pb2_grpc.NodeStoreStub(channel)
        return await stub.GetStore(pb.GetNodeStoreRequest(), timeout=CALL_S)  # type: ignore[no-any-return]

    async def read(self, channel: grpc.aio.Channel, keys: Sequence[bytes]) -> dict[bytes, str]:
        """Digests of what the node hands out. What it does not lease any more and has in no tier is left out: it may go
        at any time. What it has and does not lease, within READ_S, stands there with that for its digest."""
        found: dict[bytes, str] = {}
        missing, deadline = list(keys), time.monotonic() + READ_S
        portion = PORTION
        while missing:
            for at in range(0, len(missing), portion):
                read = await self._read(channel, missing[at : at + portion])
                found |= {key: digest_of(data) for key, data in read.items()}
            held = set(await self.holds(channel, missing))
            missing = [key for key in missing if key not in found and key in held]
            if missing and time.monotonic() > deadline:
                return found | {key: await self._why(channel, key) for key in missing}
            portion = 1  # there may be little room to stage
        return found

    async def _why(self, channel: grpc.aio.Channel, key: bytes) -> str:
        stub = blocks_pb2_grpc.NodeStoreStub(channel)
        told = await stub.Exists(pb.ExistsRequest(keys=key), timeout=CALL_S)
        layouts = [told.layouts[i] for i in told.layout]
        return f"is there and cannot be read: tier {told.tiers[0]}, {list(told.nbytes)} bytes, layout {layouts}"

    async def _read(self, channel: grpc.aio.Channel, keys: list[bytes]) -> dict[bytes, bytes]:
        stub = blocks_pb2_grpc.NodeStoreStub(channel)
        node = await stub.GetStore(pb.GetNodeStoreRequest(), timeout=CALL_S)
        request = pb.LeaseRequest(
            reader="probe",
            holder_incarnation=node.instance.incarnation,
            keys=b"".join(keys),
            lease_ms=LEASE_MS,
            layout=LAYOUT,
            want_descriptors=True,
        )
        lease = await stub.Lease(request, timeout=CALL_S)
        if not lease.lease_id:
            return {}
        try:
            held = [key for key, here in zip(keys, lease.held, strict=True) if here]
            (rank,) = lease.ranks
            return dict(zip(held, await self._fetch(rank, list(lease.nbytes)), strict=True))
        finally:
            await stub.ReleaseLease(pb.ReleaseBlocksRequest(lease_id=lease.lease_id), timeout=CALL_S)

    async def _fetch(self, rank: pb.LeasedRank, sizes: list[int]) -> list[bytes]:
        from kvmesh.transfer import SegmentDescriptor

        name = self.engine.open_segment(SegmentDescriptor.decode(rank.segment_descriptor))
        memory = self._region.memory
        assert memory is not None
        assert sum(sizes) <= REGION, f"{sum(sizes)} bytes to read at once"
        requests, at = [], 0
        for offset, nbytes in zip(rank.offset, sizes, strict=True):
            requests.append(TransferRequest(Opcode.READ, self._region.address + at, name, offset, nbytes))
            at += nbytes
        batch = self.engine.allocate_batch(len(requests))
        try:
            self.engine.submit(batch, requests, CALL_S)
            await self.engine.wait(batch)
            states = {s.state for s in self.engine.statuses(batch)}
            assert states == {TransferState.COMPLETED}, [s.cause for s in self.engine.statuses(batch)]
        finally:
            self.engine.free_batch(batch)
            self.engine.close_segment(name)
        out, at = [], 0
        for nbytes in sizes:
            out.append(bytes(memory[at : at + nbytes]))
            at += nbytes
        return out

    async def put(self, channel: grpc.aio.Channel, data: bytes) -> bytes:
        """Its key. AssertionError: the node did not take it."""
        memory, key = self._region.memory, content_key(data, "probe")
        assert memory is not None
        memory[: len(data)] = data
        descriptor = self.engine.local_descriptor()
        request = pb.PutBlocksRequest(
            keys=key,
            layout=LAYOUT,
            segment=descriptor.name,
            segment_descriptor=descriptor.encode(),
            offset=[self._region.base_offset],
            nbytes=[len(data)],
            read_within_ms=5000,
        )
        answer = await blocks_pb2_grpc.NodeStoreStub(channel).Put(request, timeout=CALL_S)
        assert answer.held == b"\1", answer.why_not
        return key

    async def works(self, channel: grpc.aio.Channel) -> str:
        """ "" when the node takes a block, hands it out, and forgets it, in bounded time; else why not."""
        data = os.urandom(50_000)
        try:
            async with asyncio.timeout(USABLE_S):
                key = await self.put(channel, data)
                found = await self.read(channel, [key])
                stub = blocks_pb2_grpc.NodeStoreStub(channel)
                await stub.Remove(pb.RemoveBlocksRequest(keys=key), timeout=CALL_S)
                left = await stub.Exists(pb.ExistsRequest(keys=key), timeout=CALL_S)
        except (AssertionError, TimeoutError, grpc.aio.AioRpcError) as error:
            told = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            return f"{type(error).__name__}: {told}"
        if found != {key: digest_of(data)}:
            return f"put {digest_of(data)}, got {found}"
        return f"removed and still in tier {Tier(left.tiers[0]).name}" if left.tiers[0] else ""


def leaks_of(told: pb.GetNodeStoreResponse) -> tuple[str, ...]:
    """What is not so in a node that nobody uses: no lease, nothing written, and what is not pinned is free to take."""
    pools = told.pools
    found = [
        f"{name} {value}"
        for name, value in (
            ("leases", pools.store_leases),
            ("writing", pools.store_writing),
            ("pulls", pools.pulls),
            ("quarantined", pools.quarantined),
            ("windows", pools.windows),
        )
        if value
    ]
    if pools.extents_free + told.hard_pinned != pools.extents_total:
        free, total = pools.extents_free, pools.extents_total
        found.append(f"of {total} extents {free} are free and {told.hard_pinned} are pinned")
    return tuple(found)


def by_hex(found: dict[bytes, str]) -> dict[str, str]:
    assert all(len(key) == KEY_BYTES for key in found)
    return {key.hex(): digest for key, digest in found.items()}
