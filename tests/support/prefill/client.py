"""A scripted decode instance: a real Handoff stream and a real rank process that takes the KV."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvmesh.kvcache import keys
from kvmesh.ranks import protocol as m
from kvmesh.rpc import channels, protocol
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import prefill_pb2 as pb
from kvmesh.rpc.pb import prefill_pb2_grpc as pb_grpc
from tests.support.rank_driver import BLOCK, Driver
from tests.support.services import until

TIMEOUT_S = 60.0
EPOCHS = itertools.count(1)  # never the same twice while a rank lives: streams of one rank share them


class Decode:
    """One stream. `rank` is a decode rank process; pages are given out one after the other."""

    def __init__(self, call: Any, rank: Driver | None, fingerprint: str) -> None:
        self.call = call
        self.rank = rank
        self.fingerprint = fingerprint
        self.writers: tuple[str, ...] = ()
        self.heard: list[pb.HandoffEvent] = []
        self._page = 0
        self._handle = 100

    async def hello(self, version: int = protocol.PROTOCOL_VERSION, descriptors: Sequence[bytes] | None = None) -> None:
        if descriptors is None:
            descriptors = [self.rank.client.ready.descriptor] if self.rank else []
        ref = pb_common.InstanceRef(instance_id="decode-x", address="127.0.0.1:1", incarnation=5)
        hello = pb.HandoffHello(instance=ref, segment_descriptors=descriptors)
        hello.protocol_version = version  # type: ignore[assignment]
        await self.call.write(pb.HandoffRequest(hello=hello))
        self.writers = tuple((await self.read()).hello.writers)

    async def read(self) -> pb.HandoffEvent:
        event = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        if not isinstance(event, pb.HandoffEvent):
            raise EOFError("the stream ended")
        return event

    async def start(self, prompt: Sequence[int], *, handle: int = 0, salt: str = "", **fields: Any) -> int:
        """Ask for a prefill; returns the stream's handle of it."""
        if not handle:
            self._handle += 1
            handle = self._handle
        space = keys.Namespace(fingerprint=self.fingerprint, kv_dtype="float32", tenant_salt=salt)
        known: dict[str, Any] = {
            "handle": handle,
            "request_id": f"request-{handle}",
            "model_fingerprint": self.fingerprint,
            "token_ids": keys.pack_tokens(prompt),
            "block_keys": keys.chain(space, prompt, BLOCK),
            "sampling": pb_common.SamplingParams(max_tokens=8, temperature=0, top_p=1, seed=1),
            "deadline_ms": 60_000,
        }
        await self.call.write(pb.HandoffRequest(start=pb.StartPrefill(**(known | fields))))
        return handle

    async def expect(self, handle: int, kind: str) -> Any:
        """The oldest unread message of that handle and kind; it must not have failed instead."""
        while True:
            for i, event in enumerate(self.heard):
                which = str(event.WhichOneof("kind"))
                message = getattr(event, which)
                if message.handle == handle and which in (kind, "failed"):
                    del self.heard[i]
                    assert which == kind, f"{which} instead of {kind}: {message}"
                    return message
            self.heard.append(await self.read())

    async def land(self, handle: int, num_blocks: int, lease_ms: int = 30_000) -> tuple[int, ...]:
        """Open the window and send the landing; returns decode's pages."""
        assert self.rank is not None
        ready = self.rank.client.ready
        pages = tuple(range(self._page, self._page + num_blocks))
        self._page += num_blocks
        epoch = next(EPOCHS)
        offsets = tuple(ready.page_base_offset + page * ready.shard_bytes for page in pages)
        for writer in self.writers:
            self.rank.client.send(m.OpenWindow(writer, epoch, offsets))
            await self.rank.take(m.WindowOpened)
        target = pb.RankLanding(rank=0, segment=ready.engine_name, offset=offsets)
        landing = pb.Landing(handle=handle, handoff_epoch=epoch, lease_ms=lease_ms, ranks=[target])
        await self.call.write(pb.HandoffRequest(landing=landing))
        return pages

    async def cancel(self, handle: int) -> None:
        await self.call.write(pb.HandoffRequest(cancel=pb.CancelHandoff(handle=handle, reason="not wanted")))

    async def prefill(self, prompt: Sequence[int], **fields: Any) -> tuple[pb.FirstToken, pb.FillDone, tuple[int, ...]]:
        """The whole handoff."""
        handle = await self.start(prompt, **fields)
        begin = await self.expect(handle, "begin_fill")
        assert begin.num_blocks == -(-len(prompt) // BLOCK)
        pages = await self.land(handle, begin.num_blocks)
        first = await self.expect(handle, "first_token")
        return first, await self.expect(handle, "fill_done"), pages

    async def generate(self, prompt: Sequence[int], first: int, pages: tuple[int, ...], count: int) -> list[int]:
        """Greedy tokens that the decode rank makes out of the KV that landed."""
        assert self.rank is not None
        greedy = m.Sampling(0.0, 1.0, 0, 1, -1)
        spare = (self._page, self._page + 1)
        self._page += 2
        self.rank.client.send(m.Join(1, (*pages, *spare), len(prompt), first, 0, count, 0, (), greedy))
        tokens = [first]
        while len(tokens) < count:
            step = await self.rank.take(m.DecodeStepDone)
            tokens += [t.token_id for t in step.tokens]
        return tokens


@asynccontextmanager
async def decode(address: str, rank: Driver | None, fingerprint: str, *, hello: bool = True) -> AsyncIterator[Decode]:
    """A Handoff stream to `address`."""
    async with channels.connect(address) as channel:
        call = pb_grpc.PrefillStub(channel).Handoff()
        client = Decode(call, rank, fingerprint)
        try:
            if hello:
                await client.hello()
            yield client
        finally:
            call.cancel()


async def instance(address: str) -> pb_common.GetPoolsResponse:
    """GetPools: who that is, and what it holds."""
    async with channels.connect(address) as channel:
        answer = await pb_grpc.PrefillStub(channel).GetPools(pb_common.GetPoolsRequest(), timeout=TIMEOUT_S)
        assert isinstance(answer, pb_common.GetPoolsResponse)
        return answer


async def pools(address: str) -> pb_common.PoolCounters:
    """What it holds."""
    return (await instance(address)).pools


async def settled(address: str, streams: int) -> None:
    """Every page and extent is free or idle in a cache, nothing is held or under way."""

    async def full() -> bool:
        now = await pools(address)
        pages = now.pages_free + now.pages_cached == now.pages_total
        extents = now.extents_free == now.extents_total and not (now.store_writing or now.store_leases or now.pulls)
        return pages and extents and now.handoffs == 0 and now.streams == streams

    await until(full)
