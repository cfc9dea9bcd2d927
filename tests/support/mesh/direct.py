"""Requests sent straight to a decode instance with a placement of the test's own choice, and what node stores hold."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc

from kvmesh.errors import KvmeshError
from kvmesh.kvcache.keys import Namespace, chain_tip, split
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import (
    blocks_pb2,
    blocks_pb2_grpc,
    conductor_pb2,
    conductor_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.protocol import PROTOCOL_VERSION
from kvmesh.rpc.status import from_detail, from_rpc_error
from tests.support.mesh.client import Answer, packed
from tests.support.mesh.harness import Running

Pull = tuple[pb.InstanceRef, int, int]  # holder, first block, blocks


class Direct:
    """What the gateway would send, with chosen instances and sources. `salt` keeps tests apart."""

    def __init__(self, running: Running, card: pb.ModelCard, members: dict[str, pb.InstanceRef]) -> None:
        self.running = running
        self.card = card
        self.members = members
        self._serial = 0

    @classmethod
    async def of(cls, running: Running, model: str = "") -> Direct:
        self = cls(running, await model_card(running, model), {})
        await self.refresh()
        return self

    async def refresh(self) -> None:
        """Learn the instances' present incarnations."""
        self.members = await members(running=self.running)

    def keys(self, prompt: Sequence[int], salt: str = "") -> list[bytes]:
        return split(self._chain(prompt, salt)[0])

    def _chain(self, prompt: Sequence[int], salt: str) -> tuple[bytes, bytes]:
        card = self.card
        space = Namespace(
            fingerprint=card.fingerprint, kv_dtype=card.kv_dtype, tenant_salt=salt, weights_epoch=card.weights_epoch
        )
        return chain_tip(space, packed(prompt), card.block_tokens)

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        prefill: str,
        decode: str,
        pulls: Sequence[tuple[str, int, int]] = (),
        decode_pulls: Sequence[tuple[str, int, int]] = (),
        salt: str = "",
        timeout_s: float = 60.0,
        begun: asyncio.Event | None = None,
        held_tbt_ms: int = 0,
        **sampling: Any,
    ) -> Answer:
        """One request, greedy but for `sampling`, at the named instances; a named error is returned, not raised.
        `begun` is set when decode has made tokens of its own. `held_tbt_ms`: the TBT that decode holds for it."""
        self._serial += 1
        keys, digest = self._chain(prompt, salt)
        placement = conductor_pb2.Placement(
            prefill=self.members[prefill], decode=self.members[decode], held_tbt_ms=held_tbt_ms
        )
        for given, ranges in ((pulls, placement.pulls), (decode_pulls, placement.decode_pulls)):
            for holder, first, count in given:
                ranges.add(holder=self.members[holder], first_block=first, blocks=count)
        start = decode_pb2.StartRequest(
            slot=1,
            request_id=f"direct-{self._serial}",
            model_fingerprint=self.card.fingerprint,
            weights_epoch=self.card.weights_epoch,
            token_ids=packed(prompt),
            block_keys=keys,
            chain_digest=digest,
            sampling=pb.SamplingParams(max_tokens=max_tokens, **{"top_p": 1.0, "ignore_eos": True, **sampling}),
            placement=placement,
            deadline_ms=int(timeout_s * 1000),
            credit_tokens=1 << 20,
        )
        answer = Answer(request_id=start.request_id)
        begun = begun or asyncio.Event()
        async with connect(self.members[decode].address) as channel:
            stub: Any = decode_pb2_grpc.DecodeStub(channel)
            call = stub.Session(timeout=timeout_s)
            try:
                hello = decode_pb2.SessionHello(
                    protocol_version=PROTOCOL_VERSION, gateway_id=f"test-{self._serial}", incarnation=self._serial
                )
                await call.write(decode_pb2.SessionRequest(hello=hello))
                await call.write(decode_pb2.SessionRequest(start=start))
                await self._read(call, answer, time.monotonic(), begun)
            except grpc.aio.AioRpcError as error:
                answer.error = from_rpc_error(error)
            finally:
                call.cancel()
        return answer

    async def _read(self, call: Any, answer: Answer, sent: float, begun: asyncio.Event) -> None:
        while not answer.finish and answer.error is None:
            message = await call.read()
            if message is grpc.aio.EOF:
                answer.error = KvmeshError("the session ended without an answer")
                return
            if message.tokens.token_id and not answer.tokens:
                answer.first_s = time.monotonic() - sent
            if message.tokens.token_id:
                answer.last_s = time.monotonic() - sent
            answer.tokens += message.tokens.token_id
            answer.logprobs += [{top.token_id: top.logprob for top in one.top} for one in message.tokens.logprobs]
            if len(answer.tokens) > 1:
                begun.set()
            for failed in message.failed:
                answer.error = from_detail(failed.error)
            for finished in message.finished:
                answer.finish = pb.FinishReason.Name(finished.reason)
                answer.cached_tokens = finished.cached_tokens
                answer.prompt_tokens = finished.prompt_tokens
                answer.timings = finished.timings


async def model_card(running: Running, name: str = "") -> pb.ModelCard:
    async with connect(running.mesh.addresses["conductor"]) as channel:
        stub: Any = conductor_pb2_grpc.ConductorStub(channel)
        cards = (await stub.ListModels(conductor_pb2.ListModelsRequest(), timeout=30)).models
    found: pb.ModelCard = next(card for card in cards if name in ("", card.name))
    return found


async def members(running: Running) -> dict[str, pb.InstanceRef]:
    """instance_id → its present life, as the master knows it."""
    async with connect(running.mesh.addresses["store"]) as channel:
        stub: Any = store_pb2_grpc.StoreMasterStub(channel)
        found = (await stub.ListMembers(store_pb2.ListMembersRequest(), timeout=30)).members
    return {member.instance.instance_id: member.instance for member in found}


async def blocks_at(address: str, tier: Tier | None = None) -> set[bytes]:
    """The truth: every key sealed at that node store, in one tier or (None) in any."""
    keys: set[bytes] = set()
    async with connect(address) as channel:
        stub: Any = blocks_pb2_grpc.NodeStoreStub(channel)
        async for part in stub.ListBlocks(blocks_pb2.ListBlocksRequest(), timeout=10):
            if tier is None or part.tier == tier.value:
                keys.update(split(part.keys))
    return keys


async def masks_at(address: str, tier: Tier) -> dict[bytes, int]:
    """The mask of the groups of each block in one tier of that node store; 1 for a model of one group."""
    masks: dict[bytes, int] = {}
    async with connect(address) as channel:
        stub: Any = blocks_pb2_grpc.NodeStoreStub(channel)
        async for part in stub.ListBlocks(blocks_pb2.ListBlocksRequest(), timeout=10):
            if part.tier == tier.value:
                keys = split(part.keys)
                for key, mask in zip(keys, part.groups or bytes([1]) * len(keys), strict=True):
                    masks[key] = masks.get(key, 0) | mask
    return masks


async def node_store(address: str) -> blocks_pb2.GetNodeStoreResponse:
    async with connect(address) as channel:
        stub: Any = blocks_pb2_grpc.NodeStoreStub(channel)
        found: blocks_pb2.GetNodeStoreResponse = await stub.GetStore(blocks_pb2.GetNodeStoreRequest(), timeout=30)
    return found


async def lookup(running: Running, keys: Sequence[bytes]) -> list[set[str]]:
    """Who holds each key, as the master's map has it."""
    async with connect(running.mesh.addresses["store"]) as channel:
        stub: Any = store_pb2_grpc.StoreMasterStub(channel)
        answer = await stub.Lookup(store_pb2.LookupRequest(keys=b"".join(keys)), timeout=30)
    return [set(holders.store_ids) for holders in answer.holders]


async def replicas(running: Running, keys: Sequence[bytes]) -> list[set[tuple[str, Tier]]]:
    """Who holds each key in which tier, as the master's map has it; at most 4096 keys."""
    async with connect(running.mesh.addresses["store"]) as channel:
        stub: Any = store_pb2_grpc.StoreMasterStub(channel)
        answer = await stub.Find(store_pb2.FindRequest(keys=b"".join(keys)), timeout=30)
    names = [holder.member.instance.instance_id for holder in answer.holders]
    return [{(names[at], Tier(tier)) for at, tier in zip(one.holder, one.tier, strict=True)} for one in answer.replicas]


async def ask_to_pull(
    target: str, keys: Sequence[bytes], holders: Sequence[pb.InstanceRef], layout: str, shard_bytes: int
) -> list[bool]:
    """Have the node store at `target` copy blocks into its own segment; True where they are there now."""
    async with connect(target) as channel:
        stub: Any = blocks_pb2_grpc.NodeStoreStub(channel)
        request = blocks_pb2.PullBlocksRequest(
            keys=b"".join(keys), holders=holders, layout=layout, shard_bytes=shard_bytes, timeout_ms=10_000
        )
        answer = await stub.Pull(request, timeout=15)
    return [bool(held) for held in answer.held]


async def store_status(running: Running) -> store_pb2.GetStoreStatusResponse:
    async with connect(running.mesh.addresses["store"]) as channel:
        stub: Any = store_pb2_grpc.StoreMasterStub(channel)
        found: store_pb2.GetStoreStatusResponse = await stub.GetStatus(store_pb2.GetStoreStatusRequest(), timeout=30)
    return found
