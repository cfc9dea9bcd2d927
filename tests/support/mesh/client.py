"""What mesh tests ask of a running mesh, over its real gRPC and HTTP."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import decode_pb2_grpc, gateway_pb2, gateway_pb2_grpc, prefill_pb2_grpc
from kvmesh.rpc.security import Security
from kvmesh.rpc.status import from_rpc_error

CALL_S = 60.0


@dataclass
class Answer:
    """One request's end: tokens and usage, or the named error."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)  # of each token's alternatives (direct, when asked)
    text: str = ""
    finish: str = ""
    cached_tokens: int = 0
    prompt_tokens: int = 0
    timings: pb.StageTimings | None = None
    request_id: str = ""
    parts: list[tuple[int, int]] = field(default_factory=list)  # of each message: first token's index, tokens
    error: Exception | None = None
    first_s: float = 0.0  # sent → first token here (direct requests only)
    last_s: float = 0.0  # ... → last one


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Token ids of a text that depends on `seed` alone."""
    return [(seed * 7919 + i * i * 31 + i * 17) % (vocab - 10) + 5 for i in range(length)]


def packed(tokens: Iterable[int]) -> bytes:
    ids = list(tokens)
    return struct.pack(f"<{len(ids)}I", *ids)


class MeshClient:
    """Talks to one gateway; owns its channels. `tls`: instead of what this process is configured with."""

    def __init__(self, grpc_address: str, api_key: str = "", tls: Security | None = None) -> None:
        self.channel = connect(grpc_address, tls=tls)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self.stub = gateway_pb2_grpc.GatewayStub(self.channel)

    async def close(self) -> None:
        await self.channel.close(grace=None)

    async def generate(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        on_token: Callable[[int], None] | None = None,
        timeout_s: float = CALL_S,
        **fields: Any,
    ) -> Answer:
        """Runs to its end; a named error is returned, not raised. Cancelling this coroutine cancels the request."""
        fields.setdefault("temperature", 0.0)
        fields.setdefault("ignore_eos", True)
        request = gateway_pb2.GenerateRequest(token_ids=packed(prompt), max_tokens=max_tokens, **fields)
        answer = Answer()
        call = self.stub.Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for part in call:
                answer.request_id = part.request_id
                answer.text += part.text
                answer.tokens += part.token_ids
                if part.token_ids:
                    answer.parts.append((part.first_token_index, len(part.token_ids)))
                for _ in part.token_ids:
                    if on_token is not None:
                        on_token(len(answer.tokens))
                if part.finish_reason:
                    answer.finish = part.finish_reason
                    answer.cached_tokens = part.usage.cached_tokens
                    answer.prompt_tokens = part.usage.prompt_tokens
                    answer.timings = part.timings
        except grpc.aio.AioRpcError as error:
            answer.error = from_rpc_error(error)
        finally:
            call.cancel()
        return answer


async def pools(address: str, role: str) -> pb.PoolCounters:
    """The live counters of one instance."""
    async with connect(address) as channel:
        stub: Any = prefill_pb2_grpc.PrefillStub(channel) if role == "prefill" else decode_pb2_grpc.DecodeStub(channel)
        response = await stub.GetPools(pb.GetPoolsRequest(), timeout=30)
    counters: pb.PoolCounters = response.pools
    return counters


async def gateway_status(address: str) -> gateway_pb2.GetGatewayStatusResponse:
    async with connect(address) as channel:
        request = gateway_pb2.GetGatewayStatusRequest()
        return await gateway_pb2_grpc.GatewayStub(channel).GetGatewayStatus(request, timeout=30)


def leaks(counters: pb.PoolCounters) -> list[str]:
    """What this instance still holds although nothing should be running."""
    found = []
    if counters.pages_free + counters.pages_cached != counters.pages_total:
        found.append(f"pages {counters.pages_free}+{counters.pages_cached} of {counters.pages_total}")
    if counters.extents_free != counters.extents_total:
        found.append(f"extents {counters.extents_free} of {counters.extents_total}")
    for name in ("handoffs", "requests", "windows", "quarantined", "store_writing", "store_leases", "pulls"):
        if getattr(counters, name):
            found.append(f"{name} {getattr(counters, name)}")
    return found


async def until(check: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll an async check until it answers something true; the error names what was waited for."""
    last: Any = None
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                last = await check()
                if last:
                    return last
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{what}: not within {timeout_s} s (last: {last!r})") from None
