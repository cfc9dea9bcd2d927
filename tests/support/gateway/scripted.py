"""A conductor and decode instances that follow a script: real gRPC servers around a gateway under test."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmesh.errors import KvmeshError
from kvmesh.kvcache.keys import unpack_tokens
from kvmesh.rpc import status
from kvmesh.rpc.fastpath.control import ControlFastPath
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc, decode_pb2, decode_pb2_grpc
from kvmesh.rpc.protocol import PROTOCOL_VERSION
from kvmesh.rpc.server import Server

BLOCK_TOKENS = 16
MAX_CONTEXT = 512
MODEL = "tiny"
FINGERPRINT, WEIGHTS_EPOCH = "feed", 6
CACHED = 7


def fingerprint_of(model: str) -> str:
    """Of the models in `Conductor.also`."""
    return model.encode().hex()


class Conductor(conductor_pb2_grpc.ConductorServicer):
    """Places on `decodes` in turn, unless told to fail."""

    def __init__(self) -> None:
        self.decodes: list[Decode] = []
        self.more = conductor_pb2.Placement()
        """Added to every placement."""
        self.failures: deque[KvmeshError] = deque()
        self.asked: list[conductor_pb2.ScheduleRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.card = pb.ModelCard(
            name=MODEL,
            fingerprint=FINGERPRINT,
            block_tokens=BLOCK_TOKENS,
            kv_dtype="float32",
            max_context_tokens=MAX_CONTEXT,
            vocab_size=401,
            weights_epoch=WEIGHTS_EPOCH,
        )
        self.also: dict[str, bool] = {}
        """Further models on the same instances → ready."""
        self.held: dict[str, int] = {}
        """As the last caller of ListModels told."""
        self.stopped = False
        self.registered = True
        self.ready = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.server = Server("127.0.0.1", 0)
        conductor_pb2_grpc.add_ConductorServicer_to_server(self, self.server.grpc)
        service = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"]
        self.door = ControlFastPath(service, self, ("Schedule",), 0)
        self.door.add_to(self.server)

    async def stop(self) -> None:
        """Again: nothing."""
        if not self.stopped:
            self.stopped = True
            await self.door.close()
            await self.server.stop(0)

    async def Schedule(  # noqa: N802
        self, request: conductor_pb2.ScheduleRequest, context: Any
    ) -> conductor_pb2.ScheduleResponse:
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        await self.gate.wait()
        if self.failures:
            raise self.failures.popleft()
        usable = [d for d in self.decodes if d.ref.instance_id not in request.avoid_instance_ids] or self.decodes
        chosen = usable[(len(self.asked) - 1) % len(usable)]
        placement = conductor_pb2.Placement(prefill=pb.InstanceRef(instance_id="prefill-0"), decode=chosen.ref)
        placement.MergeFrom(self.more)
        return conductor_pb2.ScheduleResponse(placement=placement)

    async def ListModels(  # noqa: N802
        self, request: conductor_pb2.ListModelsRequest, context: Any
    ) -> conductor_pb2.ListModelsResponse:
        self.held = {one.model: one.requests for one in request.held}
        cards = [self.card] if self.registered else []
        for name in self.also:
            cards.append(pb.ModelCard())
            cards[-1].MergeFrom(self.card)
            cards[-1].name, cards[-1].fingerprint = name, fingerprint_of(name)
        return conductor_pb2.ListModelsResponse(models=cards)

    async def GetStatus(  # noqa: N802
        self, request: conductor_pb2.GetConductorStatusRequest, context: Any
    ) -> conductor_pb2.GetConductorStatusResponse:
        known = [(pb.InstanceRef(instance_id="prefill-0"), pb.ROLE_PREFILL, True)]
        known += [(decode.ref, pb.ROLE_DECODE, self.ready) for decode in self.decodes]
        return conductor_pb2.GetConductorStatusResponse(
            instances=[
                conductor_pb2.InstanceStatus(
                    instance=ref,
                    role=role,
                    model=model,
                    ready=ready and fine,
                    not_ready_reason="" if ready and fine else "loading",
                )
                for ref, role, ready in known
                for model, fine in ({MODEL: True} | self.also).items()
            ]
        )


@dataclass
class Run:
    """One StartRequest as decode sees it."""

    start: decode_pb2.StartRequest
    send: Callable[[decode_pb2.SessionResponse], Awaitable[None]]
    credit: int = 0
    more_credit: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    cancel_reason: str = ""

    @property
    def prompt(self) -> list[int]:
        return unpack_tokens(self.start.token_ids)

    async def prefilled(self, cached_tokens: int = CACHED) -> None:
        timings = pb.StageTimings(queue_us=11, prefill_us=22)
        one = decode_pb2.Prefilled(slot=self.start.slot, cached_tokens=cached_tokens, timings=timings)
        if self.start.sampling.HasField("prompt_logprobs"):
            one.prompt_logprobs.CopyFrom(scores(len(self.prompt), self.start.sampling.prompt_logprobs))
        await self.send(decode_pb2.SessionResponse(prefilled=[one]))

    async def token(self, token_id: int, index: int, finish: decode_pb2.Finished | None = None) -> None:
        """One token as one message, once there is credit."""
        while self.credit <= 0:
            self.more_credit.clear()
            await self.more_credit.wait()
        self.credit -= 1
        tokens = decode_pb2.StepTokens(slot=[self.start.slot], token_id=[token_id], token_index=[index])
        if self.start.sampling.logprobs:
            top = [
                pb.TopLogprob(token_id=token_id + n, logprob=-0.5 - n) for n in range(self.start.sampling.top_logprobs)
            ]
            tokens.logprobs.append(pb.TokenLogprobs(logprob=-0.5, top=top))
        await self.send(decode_pb2.SessionResponse(tokens=tokens, finished=[finish] if finish else []))

    def finished(self, count: int, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_LENGTH) -> decode_pb2.Finished:
        return decode_pb2.Finished(
            slot=self.start.slot,
            reason=reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=count,
            cached_tokens=CACHED,
            timings=pb.StageTimings(queue_us=11, prefill_us=22, transfer_us=33),
        )

    async def answer(self, tokens: Sequence[int], reason: pb.FinishReason.ValueType | None = None) -> None:
        """A whole answer, cut at max_tokens, one token a message."""
        limit = self.start.sampling.max_tokens
        shown = list(tokens)[:limit]
        if reason is None:
            reason = pb.FINISH_REASON_LENGTH if len(tokens) >= limit else pb.FINISH_REASON_STOP
        await self.prefilled()
        for index, token in enumerate(shown):
            last = index == len(shown) - 1
            await self.token(token, index, self.finished(len(shown), reason) if last else None)

    async def fail(self, err: KvmeshError) -> None:
        failed = decode_pb2.Failed(slot=self.start.slot, error=status.to_detail(err))
        await self.send(decode_pb2.SessionResponse(failed=[failed]))


def scores(tokens: int, top: int) -> pb.PromptLogprobs:
    """Log-probabilities of a prompt of so many tokens: of token i, and of the n-th alternative, whose id is 40 + n, to
    it, they are -i - n / 4 - 1/4. Its rank is i."""
    lines = [[-i - n / 4 for n in range(1, 2 + top)] for i in range(1, tokens)]
    return pb.PromptLogprobs(
        logprobs=array("f", [number for line in lines for number in line]).tobytes(),
        ranks=array("I", range(1, tokens)).tobytes(),
        top_ids=array("I", [*range(41, 41 + top)] * (tokens - 1)).tobytes(),
    )


Script = Callable[[Run], Awaitable[None]]


class BreakStream(Exception):
    """Raised by a script: the whole Session stream ends with an error."""


class Decode(decode_pb2_grpc.DecodeServicer):
    """`script` is run for each StartRequest."""

    def __init__(self, instance_id: str, script: Script) -> None:
        self.script = script
        self.runs: list[Run] = []
        self.hellos: list[decode_pb2.SessionHello] = []
        self.sessions = 0
        self.ended = asyncio.Event()
        self.reply_version = int(PROTOCOL_VERSION)
        self.ref = pb.InstanceRef(instance_id=instance_id, incarnation=1)
        self.server = Server("127.0.0.1", 0)
        decode_pb2_grpc.add_DecodeServicer_to_server(self, self.server.grpc)

    async def start(self) -> None:
        await self.server.start()
        self.ref.address = self.server.address

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[decode_pb2.SessionRequest], context: Any
    ) -> None:
        """Written against the low-level stream: scripts send whenever they like."""
        lock = asyncio.Lock()

        async def send(message: decode_pb2.SessionResponse) -> None:
            async with lock:
                await context.write(message)

        self.sessions += 1
        self.ended.clear()
        runs: dict[int, Run] = {}
        tasks: set[asyncio.Task[None]] = set()
        broken = asyncio.get_running_loop().create_future()

        async def play(run: Run) -> None:
            try:
                await self.script(run)
            except BreakStream as err:
                if not broken.done():
                    broken.set_result(str(err))

        async def take() -> None:
            async for message in requests:
                kind = message.WhichOneof("kind")
                if kind == "hello":
                    self.hellos.append(message.hello)
                    version: Any = self.reply_version
                    hello = decode_pb2.SessionHelloReply(protocol_version=version, instance=self.ref)
                    await send(decode_pb2.SessionResponse(hello=hello))
                elif kind == "start":
                    run = Run(message.start, send, message.start.credit_tokens)
                    assert message.start.slot not in runs, "slots are never used twice"
                    runs[message.start.slot] = run
                    self.runs.append(run)
                    task = asyncio.create_task(play(run))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                elif kind == "cancel":
                    runs[message.cancel.slot].cancel_reason = message.cancel.reason
                    runs[message.cancel.slot].cancelled.set()
                elif kind == "credit":
                    runs[message.credit.slot].credit += message.credit.tokens
                    runs[message.credit.slot].more_credit.set()

        taking = asyncio.create_task(take())
        try:
            await asyncio.wait({taking, broken}, return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                import grpc

                await context.abort(grpc.StatusCode.UNAVAILABLE, broken.result())
        finally:
            for task in (taking, *tasks):
                task.cancel()
            await asyncio.gather(taking, *tasks, return_exceptions=True)
            self.sessions -= 1
            if not self.sessions:
                self.ended.set()
