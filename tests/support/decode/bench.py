"""A decode instance of this process over real gRPC, a scripted prefill instance in front of a real writer rank, and
a gateway that is nothing but a Session."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from kvmesh.kvcache import keys as block_keys
from kvmesh.ranks import protocol as m
from kvmesh.rpc import channels, protocol
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvmesh.rpc.server import Server
from kvmesh.services.decode import main
from kvmesh.services.decode.config import DecodeConfig
from tests.support.rank_driver import BLOCK, GREEDY, Driver, rank
from tests.support.reference import reference_model
from tests.support.services import Running, running, until

SETTINGS: dict[str, Any] = {
    "num_pages": 24,
    "num_extents": 24,
    "block_tokens": BLOCK,
    "instance_id": "decode-0",
    "lease_ms": 30_000,  # a busy machine may let a scripted writer wait longer than the default
}
SCORES = pb.PromptLogprobs(logprobs=b"logprobs", ranks=b"ranks", top_ids=b"ids")  # nobody looks into them
Event = prefill_pb2.HandoffEvent
Say = Callable[[Event], Awaitable[None]]


class Gate:
    """A place in the script where requests wait until the test lets them go."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.waiting = 0

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def pass_(self) -> None:
        self.waiting += 1
        try:
            await self._open.wait()
        finally:
            self.waiting -= 1


@dataclasses.dataclass
class Landed:
    """One request at the scripted prefill."""

    start: prefill_pb2.StartPrefill
    landing: asyncio.Future[prefill_pb2.Landing]
    task: asyncio.Task[None] | None = None
    renewals: int = 0
    first_block: int = -1  # that decode wanted to be sent
    pushed_bytes: int = 0


class ScriptedPrefill(prefill_pb2_grpc.PrefillServicer):
    """Does what a prefill instance does, one request at a time, with gates in between and a real rank that writes."""

    def __init__(self, writer: Driver) -> None:
        self.writer = writer
        self.before_begin, self.before_push, self.before_end = Gate(), Gate(), Gate()
        self.refuse_with: pb.ErrorDetail | None = None
        self.version = protocol.PROTOCOL_VERSION
        self.first_token: int | None = None
        self.requests: list[Landed] = []  # in order of their Start
        self.cancelled: list[str] = []
        self._rank = asyncio.Lock()  # Driver's inbox tells no handles apart
        self.server = Server("127.0.0.1", 0)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, self.server.grpc)

    @property
    def ref(self) -> pb.InstanceRef:
        return pb.InstanceRef(instance_id="prefill-0", address=self.server.address, incarnation=7)

    async def Handoff(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        mine: dict[int, Landed] = {}
        out: asyncio.Queue[Event] = asyncio.Queue()

        async def say(event: Event) -> None:
            out.put_nowait(event)

        async def write() -> None:
            while True:
                await context.write(await out.get())  # one at a time; a script that is cancelled cuts no write short

        writer = asyncio.create_task(write())
        try:
            async for request in request_iterator:
                match request.WhichOneof("kind"):
                    case "hello":
                        for descriptor in request.hello.segment_descriptors:
                            self.writer.client.send(m.OpenSegment(descriptor))
                        reply = prefill_pb2.HandoffHelloReply(protocol_version=self.version, writers=[self.writer.name])
                        await say(Event(hello=reply))
                    case "start":
                        landed = Landed(request.start, asyncio.get_running_loop().create_future())
                        landed.task = asyncio.create_task(self._serve(landed, say))
                        mine[request.start.handle] = landed
                        self.requests.append(landed)
                    case "landing":
                        mine[request.landing.handle].landing.set_result(request.landing)
                    case "renewed":
                        mine[request.renewed.handle].renewals += 1
                    case "cancel":
                        self.cancelled.append(request.cancel.reason)
                        await self._cancel(mine[request.cancel.handle], say)
        finally:
            for landed in mine.values():
                if landed.task is not None:
                    landed.task.cancel()
            writer.cancel()
            await asyncio.gather(writer, *(x.task for x in mine.values() if x.task is not None), return_exceptions=True)

    async def GetPools(self, request: pb.GetPoolsRequest, context: Any) -> pb.GetPoolsResponse:  # noqa: N802
        return pb.GetPoolsResponse()

    async def _serve(self, landed: Landed, say: Say) -> None:
        start, client = landed.start, self.writer.client
        handle = start.handle
        if self.refuse_with is not None:
            await say(Event(failed=prefill_pb2.HandoffFailed(handle=handle, error=self.refuse_with, drained=True)))
            return
        await self.before_begin.pass_()
        ids = array("I")
        ids.frombytes(start.token_ids)
        blocks = -(-len(ids) // BLOCK)
        pages = tuple(range(blocks))
        await say(Event(begin_fill=prefill_pb2.BeginFill(handle=handle, num_blocks=blocks)))
        async with self._rank:
            item = m.PrefillItem(handle, tuple(ids), 0, pages, GREEDY)
            client.send(m.PrefillStep(handle, (item,)))
            done = await self.writer.take(m.PrefillStepDone)
            token = self.first_token if self.first_token is not None else done.sampled[0].token_id
            first = prefill_pb2.FirstToken(
                handle=handle, token_id=token, cached_tokens=3, timings=pb.StageTimings(queue_us=7, prefill_us=8)
            )
            if landed.start.sampling.HasField("prompt_logprobs"):
                first.prompt_logprobs.CopyFrom(SCORES)
            await say(Event(first_token=first))
            landing = await asyncio.shield(landed.landing)
            await self.before_push.pass_()
            epoch, rank_landing = landing.handoff_epoch, landing.ranks[0]
            lease = time.monotonic_ns() + landing.lease_ms * 1_000_000
            landed.first_block = rank_landing.first_block
            client.send(
                m.PushOpen(
                    handle=handle,
                    handoff_epoch=epoch,
                    segment=rank_landing.segment,
                    pages=pages,
                    offsets=tuple(rank_landing.offset),
                    first_block=rank_landing.first_block,
                    ready_tokens=len(ids),
                    prompt_tokens=len(ids),
                    lease_until_ns=lease,
                )
            )
            pushed = await self.writer.take(m.PushDone)
            landed.pushed_bytes = pushed.bytes_done
        await self.before_end.pass_()
        figures = pb.StageTimings(transfer_us=9, transfer_bytes=pushed.bytes_done)
        await say(Event(fill_done=prefill_pb2.FillDone(handle=handle, handoff_epoch=epoch, timings=figures)))

    async def _cancel(self, landed: Landed, say: Say) -> None:
        if landed.task is not None and not landed.task.done():
            landed.task.cancel()
            await asyncio.gather(landed.task, return_exceptions=True)
            epoch = landed.landing.result().handoff_epoch if landed.landing.done() else 0
            await say(Event(drained=prefill_pb2.Drained(handle=landed.start.handle, handoff_epoch=epoch)))


@dataclasses.dataclass
class Answer:
    """What the gateway has of one request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = dataclasses.field(default_factory=list)
    prefilled: decode_pb2.Prefilled | None = None
    finished: decode_pb2.Finished | None = None
    failed: pb.ErrorDetail | None = None

    @property
    def over(self) -> bool:
        return self.finished is not None or self.failed is not None

    @property
    def code(self) -> str:
        return self.failed.code if self.failed is not None else ""


class Gateway:
    """One Session. Everything that decode says goes into `answers`."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._channel = channels.connect(bench.service.address)
        self.call: Any = decode_pb2_grpc.DecodeStub(self._channel).Session()
        self.answers: dict[int, Answer] = {}
        self.messages = 0
        self.reply: decode_pb2.SessionHelloReply | None = None
        self._next = 0
        self.namespace = block_keys.Namespace(fingerprint=bench.fingerprint, kv_dtype="float32")
        self._reader: asyncio.Task[None] | None = None

    async def hello(self, version: int = protocol.PROTOCOL_VERSION) -> None:
        hello = decode_pb2.SessionHello(protocol_version=version, gateway_id="test", incarnation=1)  # type: ignore[arg-type]
        await self.call.write(decode_pb2.SessionRequest(hello=hello))
        first = await self.call.read()
        if first is grpc.aio.EOF:
            await self.call.read()
        self.reply = first.hello
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self._take(message)

    def _take(self, message: decode_pb2.SessionResponse) -> None:
        self.messages += 1
        for prefilled in message.prefilled:
            self.answers[prefilled.slot].prefilled = prefilled
        tokens = message.tokens
        assert len(tokens.slot) == len(tokens.token_id) == len(tokens.token_index)
        assert len(tokens.logprobs) in (0, len(tokens.slot))
        for at, (slot, token, index) in enumerate(zip(tokens.slot, tokens.token_id, tokens.token_index, strict=True)):
            answer = self.answers[slot]
            assert not answer.over
            assert index == len(answer.tokens)
            answer.tokens.append(token)
            if tokens.logprobs:
                answer.logprobs.append(tokens.logprobs[at])
        for finished in message.finished:
            assert not self.answers[finished.slot].over
            self.answers[finished.slot].finished = finished
        for failed in message.failed:
            assert not self.answers[failed.slot].over
            self.answers[failed.slot].failed = failed.error

    async def start(self, prompt: Sequence[int], max_tokens: int = 8, **changes: Any) -> int:
        """Start a request; `changes` replace fields of StartRequest or, if it has none such, of its sampling."""
        self._next += 1
        tokens = block_keys.pack_tokens(prompt)
        keys, digest = block_keys.chain_tip(self.namespace, tokens, BLOCK)
        sampling: dict[str, Any] = {"max_tokens": max_tokens, "top_p": 1.0, "ignore_eos": True, "seed": 1}
        fields: dict[str, Any] = {
            "slot": self._next,
            "request_id": f"r{self._next}",
            "attempt": 1,
            "model_fingerprint": self._bench.fingerprint,
            "token_ids": tokens,
            "block_keys": keys,
            "chain_digest": digest,
            "placement": {"prefill": self._bench.prefill.ref},
            "deadline_ms": 60_000,
            "credit_tokens": 1_000,
        }
        for name, value in changes.items():
            (fields if name in decode_pb2.StartRequest.DESCRIPTOR.fields_by_name else sampling)[name] = value
        self.answers[fields["slot"]] = Answer()
        start = decode_pb2.StartRequest(sampling=pb.SamplingParams(**sampling), **fields)
        await self.call.write(decode_pb2.SessionRequest(start=start))
        return int(fields["slot"])

    async def cancel(self, slot: int) -> None:
        await self.call.write(decode_pb2.SessionRequest(cancel=decode_pb2.CancelRequest(slot=slot, reason="test")))

    async def credit(self, slot: int, tokens: int) -> None:
        await self.call.write(decode_pb2.SessionRequest(credit=decode_pb2.Credit(slot=slot, tokens=tokens)))

    async def over(self, slot: int) -> Answer:
        """The answer once it has its end."""

        async def ended() -> bool:
            return self.answers[slot].over

        await until(ended, 60)
        return self.answers[slot]

    async def has(self, slot: int, tokens: int) -> None:
        async def made() -> bool:
            answer = self.answers[slot]
            return len(answer.tokens) >= tokens or answer.over

        await until(made, 60)
        assert len(self.answers[slot].tokens) >= tokens, self.answers[slot]

    async def close(self) -> None:
        self.call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close(grace=None)


class Bench:
    """All of it."""

    def __init__(self, service: Running, prefill: ScriptedPrefill, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.service = service
        self.prefill = prefill
        self.fingerprint = prefill.writer.client.ready.fingerprint
        self._channel = channels.connect(service.address)

    @contextlib.asynccontextmanager
    async def gateway(self) -> AsyncIterator[Gateway]:
        gateway = Gateway(self)
        try:
            await gateway.hello()
            yield gateway
        finally:
            await gateway.close()

    @contextlib.asynccontextmanager
    async def another(self, **config: Any) -> AsyncIterator[Bench]:
        """A second decode instance before the same prefill instance."""
        settings = SETTINGS | {"instance_id": "decode-1", "transports": "shm"} | config
        async with running(main.run, DecodeConfig(model=str(self.checkpoint), **settings)) as service:
            made = Bench(service, self.prefill, self.checkpoint)
            try:
                yield made
            finally:
                await made.close()

    async def pools(self) -> pb.PoolCounters:
        stub = decode_pb2_grpc.DecodeStub(self._channel)
        return (await stub.GetPools(pb.GetPoolsRequest(), timeout=10)).pools

    async def full(self) -> None:
        """Wait until nothing is held any more."""

        async def clean() -> bool:
            pools = await self.pools()
            held = (pools.handoffs, pools.requests, pools.windows, pools.quarantined)
            return (
                held == (0, 0, 0, 0)
                and pools.pages_free == pools.pages_total
                and pools.extents_free == pools.extents_total
                and pools.store_writing == pools.pulls == pools.store_leases == 0
            )

        await until(clean)

    async def close(self) -> None:
        await self._channel.close(grace=None)


@contextlib.asynccontextmanager
async def bench(
    checkpoint: Path, transports: str = "shm", writer_pages: int = 24, **config: Any
) -> AsyncIterator[Bench]:
    """Two rank processes; on leaving, nothing runs any more."""
    reference_model(str(checkpoint))  # it takes seconds on this thread, on which the service will wait
    decode = DecodeConfig(model=str(checkpoint), transports=transports, **SETTINGS | config)
    async with rank("prefill-0", checkpoint, (transports,), writer_pages) as writer:
        prefill = ScriptedPrefill(writer)
        await prefill.server.start()
        try:
            async with running(main.run, decode) as service:
                made = Bench(service, prefill, checkpoint)
                try:
                    yield made
                finally:
                    await made.close()
        finally:
            await prefill.server.stop(0)
