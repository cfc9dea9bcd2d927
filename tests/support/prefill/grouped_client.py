"""A scripted decode instance of a model with several cache groups: a real Handoff stream, and a real rank process that
takes what lands in the pages of each group."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvmesh.blockservice.shard_wire import to_wire
from kvmesh.engine.cache_memory import is_state
from kvmesh.kvcache.cache_groups import needed_blocks
from kvmesh.ranks import protocol as m
from kvmesh.rpc import channels, protocol
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.rpc.pb import prefill_pb2_grpc as pb_grpc
from tests.support.grouped_rank import GroupedFront, GroupedRequest
from tests.support.prefill.client import EPOCHS, Decode
from tests.support.rank_driver import BLOCK, Driver


class GroupedDecode(Decode):
    """One stream. `front` has the pages of decode's rank."""

    def __init__(self, call: Any, driver: Driver, path: Path) -> None:
        super().__init__(call, driver, driver.client.ready.fingerprint)
        self.front = GroupedFront(driver, path)

    async def greet(self) -> None:
        """Says hello, with the layouts of every group."""
        ready = self.front.driver.client.ready
        ref = pb_common.InstanceRef(instance_id="decode-x", address="127.0.0.1:1", incarnation=5)
        hello = pb.HandoffHello(
            instance=ref,
            segment_descriptors=[ready.descriptor],
            group_layouts=to_wire(memory.shard for memory in ready.groups),
            protocol_version=protocol.PROTOCOL_VERSION,
        )
        await self.call.write(pb.HandoffRequest(hello=hello))
        reply = (await self.read()).hello
        assert not reply.layouts and len(reply.group_layouts) == len(ready.groups)
        self.writers = tuple(reply.writers)

    async def land_groups(self, handle: int, request: GroupedRequest) -> None:
        """Opens the window and sends the landing, of everything that decode may need."""
        front, ready = self.front, self.front.driver.client.ready
        landing = pb.RankLanding(rank=0, segment=ready.engine_name)
        places, tokens = [], len(request.prompt)
        for number, group in enumerate(front.groups):
            memory, table = front.memory[number], request.tables[number]
            end = -(-tokens // BLOCK)
            if is_state(group):
                first, pages = end - 1, table[:1]
            else:
                first = needed_blocks(group, BLOCK, tokens).start
                pages = [front.free[number].pop() for _ in range(first, end)]
                table[:] = [-1] * first + pages
            size = memory.shard.shard_bytes
            offsets = [memory.page_base_offset + page * size for page in pages]
            places += [(offset, size) for offset in offsets]
            if offsets:
                landing.groups.add(group=number, first_block=first, offset=offsets)
        epoch = next(EPOCHS)
        offsets, sizes = zip(*places, strict=True)
        for writer in self.writers:
            front.driver.client.send(m.OpenWindow(writer, epoch, offsets, sizes))
            await front.driver.take(m.WindowOpened)
        answer = pb.Landing(handle=handle, handoff_epoch=epoch, lease_ms=60_000, ranks=[landing])
        await self.call.write(pb.HandoffRequest(landing=answer))

    async def told(self, prompt: Sequence[int], count: int, **fields: Any) -> tuple[pb.FirstToken, list[int]]:
        """The whole handoff and the greedy answer that the decode rank makes of what landed."""
        request = self.front.request(prompt)
        handle = await self.start(prompt, **fields)
        await self.expect(handle, "begin_fill")
        await self.land_groups(handle, request)
        first = await self.expect(handle, "first_token")
        await self.expect(handle, "fill_done")
        request.made = [first.token_id]
        self.front.join(request, count)
        await self.front.decode(request, count)
        for number, table in enumerate(request.tables):
            self.front.free[number] += [page for page in table if page >= 0]
        return first, request.made


@asynccontextmanager
async def grouped_decode(address: str, driver: Driver, path: Path) -> AsyncIterator[GroupedDecode]:
    """A Handoff stream to `address`."""
    async with channels.connect(address) as channel:
        client = GroupedDecode(pb_grpc.PrefillStub(channel).Handoff(), driver, path)
        try:
            await client.greet()
            yield client
        finally:
            client.call.cancel()
