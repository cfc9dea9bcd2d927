"""One life of one external instance: it is registered at the conductors, takes requests of gateways, asks its engine
over HTTP and streams token ids back. It ends when its engine turns out to be another one than was registered.

What the engine does is watched in two ways: every answer has its deadlines, and /metrics are read all the time. Where
these are not answered for `engine_silence_ms`, the engine is lost, frozen or cut off: all its answers fail here with a
retryable error, and gateways go on with them elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from opentelemetry.trace import Span

from kvmesh.errors import (
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    KvmeshError,
    Overloaded,
    RequestCancelled,
    Unavailable,
)
from kvmesh.external.config import ExternalConfig
from kvmesh.external.endpoints import EngineEndpoint
from kvmesh.external.engine_blocks import EngineBlocks
from kvmesh.external.engine_book import EngineBook, EngineRequest
from kvmesh.external.engine_client import EngineClient, EngineLost
from kvmesh.external.engine_protocol import EngineChunk, EngineInterface, body_of, chunk_of
from kvmesh.external.facts import EngineFacts, ModelFolder, card_of
from kvmesh.external.kv_event_reader import KvEventReader
from kvmesh.external.reported_blocks import ReportedBlocks
from kvmesh.external.sessions import SERVICE, AnswerSlot, EngineServicer
from kvmesh.kvcache.announce import Announcer
from kvmesh.kvcache.keys import DIGEST_BYTES, TOKEN_BYTES, Namespace, extend, pack_tokens, split
from kvmesh.membership.registrar import ConductorRegistrar
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.pb import conductor_pb2, decode_pb2, decode_pb2_grpc
from kvmesh.rpc.server import Server, join
from kvmesh.telemetry import names, spans

log = logging.getLogger(__name__)

ANNOUNCED_KEYS = 2_048  # in one heartbeat
GOODBYE_S = 1.5
TELL_S = 1.0  # the longest wait until gateways have been told the ends of their requests
END_S = 5.0  # from an answer's last token to the end of its stream

_KNOWLEDGE = {
    False: conductor_pb2.BLOCK_KNOWLEDGE_FALLBACK,
    True: conductor_pb2.BLOCK_KNOWLEDGE_EXACT,
}
_FINISHES = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


@dataclass(slots=True)
class _Running:
    """An answer under way. `failure` is why its task was cancelled, where the gateway did not cancel it."""

    task: asyncio.Task[None]
    failure: KvmeshError | None = None


class ExternalInstance:
    """`facts` are what the engine was found to be; None: it could not be asked, for the reason `unknown`."""

    def __init__(
        self,
        config: ExternalConfig,
        endpoint: EngineEndpoint,
        folder: ModelFolder,
        client: EngineClient,
        facts: EngineFacts | None,
        unknown: str = "",
    ) -> None:
        self._config = config
        self.endpoint = endpoint
        self._folder = folder
        self._client = client
        self.facts = facts
        self._said = facts or _unknown_engine(config, folder)
        self._most = endpoint.max_running or config.max_running
        self.incarnation = time.time_ns() & ~0xFFFF | secrets.randbits(16)
        self.address = ""
        self.book = EngineBook(endpoint.name)
        self.blocks = EngineBlocks(self._said.blocks)
        self._card = card_of(folder, self._said)
        self._answers: dict[asyncio.Task[None], _Running] = {}
        self._servicer = EngineServicer(self)
        self._lost = unknown  # why the engine gets no work; "": it does
        self._leaving = ""
        self._registrar: ConductorRegistrar | None = None
        root = Namespace(fingerprint=self._card.fingerprint, kv_dtype="").root(self._said.block_tokens)
        self._reported = ReportedBlocks(self.blocks, root, self._said.block_tokens, self._said.blocks)
        self._knowledge = False, ""  # what was said last: whether it is exact, and why not
        self._reader: KvEventReader | None = None
        if not self._said.keeps_prefixes:
            log.warning("external instance %s: its engine keeps no prefixes", endpoint.name)
            names.EXTERNAL_EXACT.labels(instance_id=endpoint.name).set(True)
            self.blocks.report(())  # as if it reported that it holds none
        elif endpoint.kv_events is not None and facts is not None:
            self._reader = KvEventReader(
                endpoint.kv_events,
                self._reported,
                self._know,
                who=f"external instance {endpoint.name}",
                timeout_s=config.engine_timeout_ms / 1000,
            )

    # ── what the mesh sees ───────────────────────────────────────────────────────────────────────────────────────

    @property
    def ref(self) -> pb.InstanceRef:
        """See EngineAnswers."""
        return pb.InstanceRef(instance_id=self.endpoint.name, address=self.address, incarnation=self.incarnation)

    @property
    def not_ready_reason(self) -> str:
        """Why it takes no requests; "" when it does."""
        return self._leaving or self._lost

    def registration(self) -> conductor_pb2.RegisterInstanceRequest:
        """Returns what conductors are told of it."""
        return conductor_pb2.RegisterInstanceRequest(
            instance=self.ref,
            role=pb.ROLE_BOTH,
            node_id=self._config.node_id,
            model=self._card,
            capacity_blocks=self._said.blocks,
            max_running_requests=self._most,
            http_url=self.endpoint.url,
            knowledge=_KNOWLEDGE[self._reported.exact or not self._said.keeps_prefixes],
        )

    def report(self) -> conductor_pb2.HeartbeatRequest:
        """Returns the next heartbeat."""
        beat = self.book.report(self._said.blocks, len(self.blocks))
        beat.not_ready_reason = self.not_ready_reason
        return beat

    def pools(self) -> pb.PoolCounters:
        """See EngineAnswers."""
        return pb.PoolCounters(
            pages_total=self._said.blocks,
            pages_free=self.book.free_blocks(self._said.blocks),
            requests=self.book.live,
            streams=self._servicer.sessions,
            store_blocks=len(self.blocks),
        )

    def _announcer(self) -> Announcer:
        source = self.blocks.changes()
        return Announcer(self.endpoint.name, self.incarnation, source, max_keys=ANNOUNCED_KEYS)

    # ── its life ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self, stop: asyncio.Event, port: int) -> None:
        """Serves until `stop` is set, or the engine is found to be another one. Raises ConfigError where it cannot
        listen."""
        server = Server(self._config.host, port)
        decode_pb2_grpc.add_DecodeServicer_to_server(self._servicer, server.grpc)
        server.serves(SERVICE)
        bound = await server.start()
        self.address = join(self._config.advertise_host or self._config.host, bound)
        self._registrar = ConductorRegistrar(
            self._config.conductor, self.registration(), self.report, lambda: not self.not_ready_reason, self._announcer
        )
        gone = asyncio.Event()
        registering = asyncio.create_task(self._registrar.run(gone), name=f"register {self.endpoint.name}")
        reading = []
        if self._reader is not None:
            reading = [asyncio.create_task(self._reader.run(), name=f"blocks of {self.endpoint.name}")]
        try:
            self._show(server)
            log.info("external instance %s asks %s", self.endpoint.name, self.endpoint.url)
            await self._watch(stop, server)
            self._leave("leaving: it is stopped" if stop.is_set() else "the engine has changed")
            await self._drained(self._config.stop_grace_ms / 1000 if stop.is_set() else 0.0)
            gone.set()
            await asyncio.wait([registering], timeout=GOODBYE_S)
        finally:
            for task in (registering, *reading):
                task.cancel()
            await asyncio.gather(registering, *reading, return_exceptions=True)
            await self._end_all(Unavailable(f"external instance {self.endpoint.name} has left"))
            self._servicer.close()
            await server.stop(TELL_S)

    async def _watch(self, stop: asyncio.Event, server: Server) -> None:
        """Reads the engine's load until `stop`, or until it is another engine."""
        silent_s, heard = self._config.engine_silence_ms / 1000, time.monotonic()
        while not stop.is_set():
            try:
                if self._lost:
                    found = await find(self._client, self.endpoint, self._config, self._folder)
                    if found != self.facts:
                        return
                    if not self._reported.exact:
                        self.blocks.clear()  # it may have been started anew
                load = await self._client.load(self._said.model)
            except KvmeshError as err:
                gone_s = time.monotonic() - heard
                if isinstance(err, EngineLost) or gone_s >= silent_s:
                    self._lose(err.message)
            else:
                heard, before = time.monotonic(), self.book.others
                self.book.polled(load)
                if self.book.others < before:
                    self._urge()  # the next turn of a conversation may follow at once
                self._found_again()
            self._show(server)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.book.poll_again_s(self._config.poll_ms / 1000)):
                    await stop.wait()

    def _show(self, server: Server) -> None:
        server.set_ready(not self.not_ready_reason, self.not_ready_reason)
        names.EXTERNAL_READY.labels(instance_id=self.endpoint.name).set(not self.not_ready_reason)

    def _found_again(self) -> None:
        if self._lost:
            log.info("the engine of %s at %s answers again", self.endpoint.name, self.endpoint.url)
            self._lost = ""
            self._urge()

    def _lose(self, why: str) -> None:
        """The engine does not answer: no new work, and what runs goes on elsewhere."""
        if not self._lost:
            log.warning("external instance %s gets no work: %s", self.endpoint.name, why)
            if self._reader is not None:
                self._reader.reconnect(why)  # another engine may answer there next, and its batches have their numbers
        self._lost = why
        self._urge()
        self._fail_all(Unavailable(why))

    def _leave(self, why: str) -> None:
        self._leaving = why
        self._urge()

    def _know(self) -> None:
        """Says openly how well it is known which blocks the engine holds."""
        told = self._reported.exact, self._reported.why
        if told == self._knowledge:
            return
        self._knowledge = told
        exact, why = told
        if exact:
            log.info("external instance %s: its engine reports which blocks it holds", self.endpoint.name)
        else:
            log.warning("external instance %s: which blocks its engine holds is believed: %s", self.endpoint.name, why)
        names.EXTERNAL_EXACT.labels(instance_id=self.endpoint.name).set(exact)
        if self._registrar is not None:
            self._registrar.know(_KNOWLEDGE[exact])

    def _urge(self) -> None:
        if self._registrar is not None:
            self._registrar.urge()

    async def _drained(self, within_s: float) -> None:
        """Waits until no answer runs, `within_s` at most."""
        if self._answers and within_s:
            await asyncio.wait(list(self._answers), timeout=within_s)

    async def _end_all(self, error: KvmeshError) -> None:
        self._fail_all(error)
        tasks = list(self._answers)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail_all(self, error: KvmeshError) -> None:
        for one in list(self._answers.values()):
            one.failure = one.failure or error
            one.task.cancel()

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def start(self, slot: AnswerSlot, request: decode_pb2.StartRequest) -> asyncio.Task[None]:
        """See EngineAnswers."""
        task = asyncio.create_task(self._answer(slot, request), name=f"ask {self.endpoint.name}")
        self._answers[task] = _Running(task)
        task.add_done_callback(lambda done: self._answers.pop(done, None))
        return task

    async def _answer(self, slot: AnswerSlot, start: decode_pb2.StartRequest) -> None:
        """Runs one answer from its request to its end, and tells how it went."""
        received = time.monotonic_ns()
        span = _begin_span(start, received, self.endpoint.name)
        request: EngineRequest | None = None
        error: KvmeshError | None = None
        try:
            self._check(start)
            answer = _Answer(self, slot, start, received)
            request = answer.request
            self.book.begin(request)
            self._urge_if_first()
            try:
                async with asyncio.timeout(start.deadline_ms / 1000):
                    finished = await answer.run()
            except TimeoutError:
                raise DeadlinePassed(f"the request was not done within its {start.deadline_ms} ms") from None
            slot.finished(finished)
        except asyncio.CancelledError:
            running = self._answers.get(_this_task())
            failure = running.failure if running is not None else None
            error = failure or RequestCancelled("cancelled by the gateway")
            if failure is None:
                raise
            slot.failed(failure)
        except KvmeshError as err:
            error = err
            slot.failed(err)
        except Exception as err:
            log.exception("external instance %s: request %s failed", self.endpoint.name, start.request_id)
            error = InternalError(f"asking the engine failed: {type(err).__name__}: {err}")
            slot.failed(error)
        finally:
            now = time.monotonic_ns()
            if request is not None:
                self.book.end(request, error, now)
            elif error is not None:
                self.book.refused(start.request_id, start.attempt, error)
            outcome = error.code if error is not None else "done"
            names.EXTERNAL_REQUESTS.labels(outcome=outcome).inc()
            _end_span(span, request, outcome, error.message if error is not None else "", now)
            self._urge_if_first()

    def _urge_if_first(self) -> None:
        """A beat soon after an idle engine gets work, or a busy one loses some: conductors count on that."""
        if self.book.live <= 1:
            self._urge()

    def _check(self, start: decode_pb2.StartRequest) -> None:
        """Raises the named error of a request that cannot be taken."""
        if self.not_ready_reason:
            raise Unavailable(f"external instance {self.endpoint.name}: {self.not_ready_reason}")
        if start.model_fingerprint != self._card.fingerprint:
            why = f"this instance serves {self._card.fingerprint!r}"
            raise InvalidRequest.of("model_fingerprint", start.model_fingerprint, why)
        tokens, rest = divmod(len(start.token_ids), TOKEN_BYTES)
        if rest or not tokens:
            raise InvalidRequest.of("token_ids", len(start.token_ids), "bytes: must be whole token ids, at least one")
        longest = self._said.max_context_tokens
        if longest and tokens >= longest:
            raise InvalidRequest.of("token_ids", tokens, f"tokens: the engine's context is {longest}")
        if start.sampling.max_tokens < 1 or start.deadline_ms < 1:
            raise InvalidRequest.of("max_tokens", start.sampling.max_tokens, "max_tokens and deadline_ms: at least 1")
        if self.book.live >= self._most:
            why = f"external instance {self.endpoint.name} has max_running={self._most} requests"
            raise Overloaded(why, retry_after_ms=100)


class _Answer:
    """One answer of the engine, as it comes."""

    def __init__(self, instance: ExternalInstance, slot: AnswerSlot, start: decode_pb2.StartRequest, now: int) -> None:
        self._instance = instance
        self._slot = slot
        self._start = start
        self._keys = split(start.block_keys)
        tokens, size = len(start.token_ids) // TOKEN_BYTES, instance._said.block_tokens
        cached = min(instance.blocks.cached(self._keys), (tokens - 1) // size) * size
        self.request = EngineRequest(start.request_id, start.attempt, tokens, cached, now)
        # The keys of the answer's blocks follow from the prompt's last full block.
        self._digest = start.chain_digest if len(start.chain_digest) == DIGEST_BYTES else b""
        self._tail = bytearray(start.token_ids[len(self._keys) * size * TOKEN_BYTES :])
        self._newest: list[int] = []  # the last token: its KV is computed with the next one, if there is one
        self._block_bytes = size * TOKEN_BYTES

    async def run(self) -> decode_pb2.Finished:
        """Asks the engine and passes on its tokens. Returns the end of the answer; raises the named error of one that
        has none."""
        instance, start = self._instance, self._start
        body = body_of(start, instance._said.interface, instance._said.model)
        async with instance._client.stream(instance._said.interface, body) as events:
            finish = await self._read(events)
        instance.blocks.used(self._keys)  # an engine evicts in the order in which requests end
        request = self.request
        return decode_pb2.Finished(
            reason=_FINISHES[finish],
            prompt_tokens=request.prompt_tokens,
            completion_tokens=request.made,
            cached_tokens=request.cached_tokens,
            timings=self._timings(),
        )

    async def _read(self, events: AsyncIterator[bytes]) -> str:
        """Reads events up to the end of the stream; returns the finish reason."""
        top = self._start.sampling.top_logprobs if self._start.sampling.logprobs else -1
        silent_s, finish = self._instance._config.token_silence_ms / 1000, ""
        while True:
            try:
                # The first token may wait in the engine's queue as long as the request may take.
                async with asyncio.timeout(END_S if finish else silent_s if self.request.made else None):
                    data = await anext(events, None)
            except TimeoutError:
                if finish:
                    return finish
                raise Unavailable(f"the engine has sent no token for token_silence_ms={silent_s * 1000:g}") from None
            if data is None:
                if finish:
                    return finish
                raise Unavailable(
                    f"the engine ended the stream after {self.request.made} tokens without a finish_reason"
                )
            chunk = chunk_of(data, top)
            if chunk.done:
                if finish:
                    return finish
                raise Unavailable(
                    f"the engine ended the answer after {self.request.made} tokens without a finish_reason"
                )
            if chunk.token_ids and not self._slot.may_send:
                await self._slot.allowed()
            self._take(chunk)
            finish = finish or chunk.finish
            if finish and finish not in _FINISHES:
                raise Unavailable(f"the engine ended the answer with finish_reason={finish[:40]!r}")

    def _take(self, chunk: EngineChunk) -> None:
        request, ids = self.request, chunk.token_ids
        if request.made + len(ids) > self._start.sampling.max_tokens:
            raise InternalError(f"the engine sent more than max_tokens={self._start.sampling.max_tokens} tokens")
        if chunk.cached_tokens >= 0:
            request.cached_tokens = min(chunk.cached_tokens, request.prompt_tokens - 1)
        if not ids:
            return
        opens, first = not request.made, request.made
        self._instance.book.tokens(request, len(ids), time.monotonic_ns())
        names.EXTERNAL_OUTPUT_TOKENS.inc(len(ids))
        if opens:
            names.EXTERNAL_TTFT.observe((request.first_ns - request.received_ns) / 1e9)
            self._instance.blocks.used(self._keys)
            self._slot.prefilled(request.cached_tokens, self._timings())
        self._slot.tokens(first, ids, chunk.scores)
        self._extend(ids)

    def _extend(self, ids: list[int]) -> None:
        """The engine keeps the answer's blocks, too."""
        if not self._digest:
            return
        computed = [*self._newest, *ids]
        self._newest = [computed.pop()]
        self._tail += pack_tokens(computed)
        grown = False
        while len(self._tail) >= self._block_bytes:
            key, self._digest = extend(self._digest, bytes(self._tail[: self._block_bytes]))
            del self._tail[: self._block_bytes]
            self._keys.append(key)
            grown = True
        if grown:
            self._instance.blocks.used(self._keys)

    def _timings(self) -> pb.StageTimings:
        request = self.request
        if not request.first_ns:
            return pb.StageTimings()
        return pb.StageTimings(prefill_us=(request.first_ns - request.received_ns) // 1000)


async def find(
    client: EngineClient, endpoint: EngineEndpoint, config: ExternalConfig, folder: ModelFolder
) -> EngineFacts:
    """Asks the engine what it is. Raises named errors."""
    model = await client.model(endpoint.engine_model or config.engine_model)
    interface = await client.interface()
    load = await client.load(model.name)
    longest = model.max_context_tokens or config.max_context_tokens or folder.max_context_tokens
    if not longest:
        why = "neither /v1/models (max_model_len) nor config.json (max_position_embeddings) tells"
        raise InternalError(f"max_context_tokens=0: {why}: give --max-context-tokens")
    block_tokens, blocks = load.block_tokens or config.block_tokens, load.blocks or config.blocks
    return EngineFacts(model.name, interface, longest, block_tokens, blocks, load.keeps_prefixes)


def _unknown_engine(config: ExternalConfig, folder: ModelFolder) -> EngineFacts:
    """Returns what an engine is registered as that cannot be asked: it gets no work before it can."""
    longest = config.max_context_tokens or folder.max_context_tokens or 1
    return EngineFacts("", EngineInterface.GENERATE, longest, config.block_tokens, config.blocks)


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    return task


def _begin_span(start: decode_pb2.StartRequest, received_ns: int, name: str) -> Span:
    attributes: dict[str, spans.Value] = {
        names.REQUEST_ID: start.request_id,
        names.ATTEMPT: start.attempt,
        names.INSTANCE: name,
        names.PREFILL_INSTANCE: name,
        names.PROMPT_TOKENS: len(start.token_ids) // TOKEN_BYTES,
    }
    return spans.begin(names.SPAN_REQUEST, spans.context_from(start.traceparent), attributes, start_ns=received_ns)


def _end_span(span: Span, request: EngineRequest | None, outcome: str, error: str, now: int) -> None:
    if request is not None:
        parent = spans.context_of(span)
        if request.first_ns:
            of = {names.REQUEST_ID: request.request_id}
            spans.record(names.SPAN_PREFILL, parent, request.received_ns, request.first_ns, of)
            spans.record(names.SPAN_GENERATE, parent, request.first_ns, request.last_ns, of)
        span.set_attributes({names.OUTPUT_TOKENS: request.made, names.CACHED_TOKENS: request.cached_tokens})
    span.set_attribute(names.OUTCOME, outcome)
    spans.finish(span, end_ns=now, error=error)
