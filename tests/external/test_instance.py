"""A service of external instances between a real conductor, a real session and an engine that misbehaves by script."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.collect import collect
from kvmesh.errors import DeadlinePassed, InternalError, InvalidRequest, KvmeshError, Overloaded, Unavailable
from kvmesh.external import main
from kvmesh.external.config import ExternalConfig
from kvmesh.external.kv_event_reader import KvEventsAddress
from kvmesh.kvcache.keys import Namespace, chain_tip, pack_tokens
from kvmesh.membership.registrar import ConductorRegistrar
from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import common_pb2, conductor_pb2, conductor_pb2_grpc, decode_pb2
from kvmesh.services.conductor import main as conductor
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.gateway.sessions import Sessions
from kvmesh.services.gateway.text.completion import Alternatives
from kvmesh.sim.fitting import decisions
from tests.support.external.publisher import EventPublisher
from tests.support.external.vllm_blocks import ReportingCache
from tests.support.services import Running, running, until

pytestmark = pytest.mark.timeout(120)

MODEL, BLOCK = "m", 4
PROMPT = list(range(10, 20))


def event(*ids: int, finish: str | None = None) -> bytes:
    choice = {"index": 0, "token_ids": list(ids), "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
WHOLE = [event(1), event(2, 3), event(finish="length"), DONE]


@dataclass
class ScriptedEngine:
    """An HTTP server that answers what it is told to. `pieces` are written one by one; then, unless it `hangs`, the
    connection is closed. `silent`: nothing is answered at all. `broken`: every connection ends without an answer."""

    pieces: Sequence[bytes] = field(default_factory=lambda: WHOLE)
    status: int = 200
    hangs: bool = False
    silent: bool = False
    broken: bool = False
    generates: bool = True
    blocks: int = 64
    running: int = 0  # of others
    caching: bool = True
    asked: list[dict[str, Any]] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            verb, path = head.split()[:2]
            sizes = [
                int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length")
            ]
            body = await reader.readexactly(sizes[0]) if sizes else b""
            if self.silent:
                await reader.read()
            elif self.broken:
                pass
            elif verb == "GET":
                self._answer(writer, 200, self._told(path))
            elif path == "/inference/v1/generate" and not self.generates:
                self._answer(writer, 404, b"{}")
            elif body == b"{}":
                self._answer(writer, 400, b"{}")
            elif self.status != 200:
                self._answer(writer, self.status, b'{"error": {"message": "says no"}}')
            else:
                self.asked.append(json.loads(body) | {"path": path})
                await self._stream(reader, writer)
        writer.close()

    def _told(self, path: str) -> bytes:
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "theirs", "max_model_len": 100}]}).encode()
        return (
            f'vllm:num_requests_running{{model_name="theirs"}} {self.running}\n'
            f'vllm:cache_config_info{{model_name="theirs",block_size="{BLOCK}",num_gpu_blocks="{self.blocks}",'
            f'enable_prefix_caching="{self.caching}"}} 1\n'
        ).encode()

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n")
        for piece in self.pieces:
            writer.write(piece)
            await writer.drain()
        if self.hangs:
            await reader.read()  # until the other side goes
            self.closed.set()


class Sink:
    """Whoever gets an answer (a SessionSink)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: asyncio.Future[decode_pb2.Finished] = asyncio.get_running_loop().create_future()
        self.first = asyncio.Event()

    def on_prefilled(self, cached: int, timings: object, scores: object) -> None: ...

    def on_token(self, token_id: int, token_index: int, logprobs: Alternatives | None) -> None:
        assert token_index == len(self.tokens)
        self.tokens.append(token_id)
        self.first.set()

    def on_finished(self, finished: decode_pb2.Finished) -> None:
        self.end.set_result(finished)

    def on_failed(self, err: KvmeshError, *, at_decode: bool) -> None:
        self.end.set_exception(err)


@dataclass
class World:
    engine: ScriptedEngine
    conductor: str
    service: Running
    sessions: Sessions

    async def told(self) -> Sequence[conductor_pb2.InstanceStatus]:
        async with connect(self.conductor) as channel:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            return (await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=30)).instances

    async def known(self, so: Callable[[conductor_pb2.InstanceStatus], Any]) -> conductor_pb2.InstanceStatus:
        """Returns what the conductor knows of the instance, once it is so."""

        async def look() -> conductor_pb2.InstanceStatus | None:
            return next((one for one in await self.told() if so(one)), None)

        found: conductor_pb2.InstanceStatus = await until(look)
        return found

    async def ready(self) -> conductor_pb2.InstanceStatus:
        return await self.known(lambda one: one.ready)

    async def ask(
        self,
        sink: Sink,
        prompt: Sequence[int] = PROMPT,
        *,
        deadline_ms: int = 30_000,
        credit: int = 64,
        **sampling: Any,
    ) -> Any:
        one = await self.ready()
        namespace = Namespace(fingerprint=one.card.fingerprint, kv_dtype="")
        keys, digest = chain_tip(namespace, pack_tokens(prompt), one.card.block_tokens)
        session = await self.sessions.get(one.instance)
        start = decode_pb2.StartRequest(
            request_id=f"r{len(self.engine.asked)}",
            model_fingerprint=one.card.fingerprint,
            token_ids=pack_tokens(prompt),
            block_keys=keys,
            chain_digest=digest,
            sampling=common_pb2.SamplingParams(**{"max_tokens": 3, "top_p": 1.0, **sampling}),
            deadline_ms=deadline_ms,
            credit_tokens=credit,
        )
        return session.start(sink, start)

    async def scheduled(self, request_id: str) -> conductor_pb2.Placement:
        """Has the conductor decide about the prompt."""
        one = await self.ready()
        namespace = Namespace(fingerprint=one.card.fingerprint, kv_dtype="")
        keys, _ = chain_tip(namespace, pack_tokens(PROMPT), one.card.block_tokens)
        request = conductor_pb2.ScheduleRequest(
            request_id=request_id, model=MODEL, prompt_tokens=len(PROMPT), max_tokens=3, block_keys=keys
        )
        async with connect(self.conductor) as channel:
            answer = await conductor_pb2_grpc.ConductorStub(channel).Schedule(request, timeout=30)
        return answer.placement

    async def fails(self, **asked: Any) -> KvmeshError:
        sink = Sink()
        await self.ask(sink, **asked)
        with pytest.raises(KvmeshError) as told:
            await asyncio.wait_for(sink.end, 30)
        return told.value


@contextlib.asynccontextmanager
async def started(
    folder: Path,
    kv_events: KvEventsAddress | None = None,
    times: dict[str, Any] | None = None,
    caching: bool = True,
    **told: Any,
) -> AsyncIterator[World]:
    """A world of patience: a busy machine stands still for seconds. Who waits for its end gives shorter `times`."""
    (folder / "config.json").write_text('{"vocab_size": 100, "eos_token_id": 2, "max_position_embeddings": 512}')
    engine = ScriptedEngine(caching=caching)
    async with contextlib.AsyncExitStack() as stack:
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        stack.callback(server.close)
        engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        endpoint: dict[str, Any] = {"url": engine.url}
        if kv_events is not None:
            endpoint["kv_events"] = f"tcp://{kv_events.host}:{kv_events.port}"
            endpoint["kv_replay"] = f"tcp://{kv_events.replay_host}:{kv_events.replay_port}"
        (folder / "endpoints.json").write_text(json.dumps({"endpoints": [endpoint]}))
        # Nobody is the store master here: external instances need none.
        there = await stack.enter_async_context(running(conductor.run, ConductorConfig(store="127.0.0.1:9", **told)))
        config = ExternalConfig(
            endpoints_file=str(folder / "endpoints.json"),
            model=str(folder),
            served_name=MODEL,
            conductor=there.address,
            stop_grace_ms=100,
            **{"poll_ms": 50, "engine_timeout_ms": 20_000, "engine_silence_ms": 30_000, **(times or {})},
        )
        service = await stack.enter_async_context(running(main.run, config))
        sessions = Sessions("g", 1, 10.0)
        stack.push_async_callback(sessions.close)
        yield World(engine, there.address, service, sessions)


@pytest.fixture
async def world(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with started(tmp_path, times=getattr(request, "param", None)) as found:
        yield found


async def test_answers_loads_and_blocks(world: World) -> None:
    sink = Sink()
    await world.ask(sink, max_tokens=3)
    end = await asyncio.wait_for(sink.end, 30)
    assert (sink.tokens, end.completion_tokens, end.prompt_tokens) == ([1, 2, 3], 3, 10)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    [asked] = world.engine.asked
    assert (asked["path"], asked["model"], asked["token_ids"]) == ("/inference/v1/generate", "theirs", PROMPT)
    # 13 tokens are three blocks, one of which the answer has filled.
    told = await world.known(lambda one: one.indexed_blocks == 3)
    assert (told.card.max_context_tokens, told.card.vocab_size, told.card.block_tokens) == (100, 100, BLOCK)
    assert (told.capacity_blocks, told.knowledge) == (64, conductor_pb2.BLOCK_KNOWLEDGE_FALLBACK)
    again = Sink()
    await world.ask(again)
    assert (await asyncio.wait_for(again.end, 30)).cached_tokens == 8
    world.engine.generates, world.engine.broken = False, True
    await world.known(lambda one: not one.ready)
    world.engine.broken = False
    await world.known(lambda one: one.ready and one.instance.incarnation != told.instance.incarnation)
    last = Sink()
    await world.ask(last)
    assert (await asyncio.wait_for(last.end, 30)).cached_tokens == 0  # another engine holds nothing
    assert world.engine.asked[-1]["path"] == "/v1/completions" and world.engine.asked[-1]["prompt"] == PROMPT


async def test_the_last_token_of_an_answer_is_not_computed(world: World) -> None:
    world.engine.pieces = [event(1), event(2, finish="length"), DONE]  # 12 tokens, the last of three blocks among them
    sink = Sink()
    await world.ask(sink, max_tokens=2)
    await asyncio.wait_for(sink.end, 30)
    for known in (8, 12):  # the next turn computes it
        turn = Sink()
        await world.ask(turn, [*PROMPT, 1, 2, 3], max_tokens=2)
        assert (await asyncio.wait_for(turn.end, 30)).cached_tokens == known


async def test_an_engine_that_keeps_no_prefixes_is_known_to_hold_none(tmp_path: Path) -> None:
    async with started(tmp_path, caching=False) as world:
        for _ in range(2):
            sink = Sink()
            await world.ask(sink)
            assert (await asyncio.wait_for(sink.end, 30)).cached_tokens == 0
        told = await world.known(lambda one: one.ready)
        assert (told.indexed_blocks, told.knowledge) == (0, conductor_pb2.BLOCK_KNOWLEDGE_EXACT)


@pytest.mark.parametrize(
    ("pieces", "kind", "why"),
    [
        ([event(1), event(2)], Unavailable, "ended the stream after 2 tokens"),
        ([event(1), DONE], Unavailable, "ended the answer after 1 tokens"),
        ([event(1), b"data: {\n\n"], InternalError, "not JSON"),
        ([event(1, 2, 3, 4)], InternalError, "more than max_tokens=3"),
        ([event(1, finish="abort"), DONE], Unavailable, "finish_reason='abort'"),
        ([b'data: {"error": {"message": "out of luck"}}\n\n'], Unavailable, "out of luck"),
        ([b"data: " + b"x" * 500_000] * 10, KvmeshError, "more than 4194304 bytes"),
    ],
    ids=range(7),
)
async def test_what_no_answer_is_has_a_name(
    world: World, pieces: Sequence[bytes], kind: type[KvmeshError], why: str
) -> None:
    world.engine.pieces = pieces
    error = await world.fails()
    assert isinstance(error, kind) and why in error.message
    assert not error.message.count("\n")


async def test_the_status_asks_it_for_no_store(world: World) -> None:
    """An engine of others has its blocks for itself."""
    await world.known(lambda one: one.ready)
    found = await collect(world.conductor, "", "")
    (instance,) = found["conductor"]["instances"]
    assert "error" not in instance["pools"]
    assert found["node_stores"] == {}


@pytest.mark.parametrize("world", [{"token_silence_ms": 2_000}], indirect=True)
async def test_statuses_silence_and_refusals_have_names(world: World) -> None:
    for status, kind in ((400, InvalidRequest), (429, Overloaded), (500, Unavailable)):
        world.engine.status = status
        assert isinstance(error := await world.fails(), kind) and f"answers {status}: says no" in error.message
    world.engine.status, world.engine.hangs, world.engine.pieces = 200, True, [event(1)]
    assert "token_silence_ms=2000" in (await world.fails()).message
    world.engine.pieces = []
    assert isinstance(await world.fails(deadline_ms=300), DeadlinePassed)
    for asked in ({"grammar": "{}"}, {"max_tokens": 0}):
        assert isinstance(await world.fails(**asked), InvalidRequest)


@pytest.mark.parametrize("world", [{"poll_ms": 500}], indirect=True)
async def test_the_end_of_what_went_past_it_is_told_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.ready()
    world.engine.running = 2
    await world.known(lambda one: one.load.running_requests == 2)
    urged = asyncio.Event()
    real = ConductorRegistrar.urge

    def heard(registrar: ConductorRegistrar) -> None:
        urged.set()
        real(registrar)

    monkeypatch.setattr(ConductorRegistrar, "urge", heard)
    world.engine.running = 1
    await asyncio.wait_for(urged.wait(), 60)
    await world.known(lambda one: one.load.running_requests == 1)


async def test_a_cancelled_request_closes_the_engines_stream(world: World) -> None:
    world.engine.hangs, world.engine.pieces = True, [event(1)]
    sink = Sink()
    lane = await world.ask(sink)
    await asyncio.wait_for(sink.first.wait(), 30)
    lane.cancel("the client left")
    await asyncio.wait_for(world.engine.closed.wait(), 30)
    await world.known(lambda one: one.ready and not one.load.running_requests)


async def test_no_more_tokens_come_than_a_gateway_takes(world: World) -> None:
    sink = Sink()
    lane = await world.ask(sink, credit=1)
    await asyncio.wait_for(sink.first.wait(), 30)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(sink.end), 0.2)
    assert sink.tokens == [1]
    lane.grant(2)
    await asyncio.wait_for(sink.end, 30)
    assert sink.tokens == [1, 2, 3]


@pytest.mark.parametrize("world", [{"engine_timeout_ms": 3_000, "engine_silence_ms": 4_000}], indirect=True)
async def test_an_engine_that_does_not_answer_loses_its_work_in_time(world: World) -> None:
    world.engine.hangs, world.engine.pieces = True, [event(1)]
    sink = Sink()
    await world.ask(sink)
    await asyncio.wait_for(sink.first.wait(), 30)
    world.engine.silent = True
    with pytest.raises(Unavailable, match="did not answer /metrics within"):
        await asyncio.wait_for(sink.end, 30)
    told = await world.known(lambda one: not one.ready)
    assert "did not answer /metrics" in told.not_ready_reason
    world.engine.silent = False
    await world.ready()


async def test_an_engine_that_reports_its_blocks_is_known_exactly(tmp_path: Path) -> None:
    publisher = EventPublisher(ReportingCache(8))
    address = await publisher.start()
    log = tmp_path / "decisions.jsonl"
    exact, fallback = conductor_pb2.BLOCK_KNOWLEDGE_EXACT, conductor_pb2.BLOCK_KNOWLEDGE_FALLBACK
    try:
        async with started(tmp_path, address, decision_log=str(log)) as world:
            told = await world.known(lambda one: one.ready and one.knowledge == exact)
            assert not told.indexed_blocks
            publisher.engine = ReportingCache(8, Namespace(fingerprint=told.card.fingerprint, kv_dtype=""))
            publisher.engine.serve(PROMPT[:8])
            publisher.publish()
            await world.known(lambda one: one.indexed_blocks == 2)
            assert (await world.scheduled("held")).predicted_cached_tokens == 8
            sink = Sink()
            await world.ask(sink)  # of which the engine keeps nothing, as it does not say so
            assert (await asyncio.wait_for(sink.end, 30)).cached_tokens == 8
            publisher.engine.serve([9] * 32)
            publisher.publish()
            await world.known(lambda one: one.indexed_blocks == 8)
            assert not (await world.scheduled("gone")).predicted_cached_tokens
            sink = Sink()
            await world.ask(sink)
            assert (await asyncio.wait_for(sink.end, 30)).cached_tokens == 0
            publisher.close()
            await world.known(lambda one: one.knowledge == fallback and one.indexed_blocks == 8)
            again = await world.ready()
            assert again.instance.incarnation == told.instance.incarnation
            await world.scheduled("believed")
    finally:
        publisher.close()
    with log.open("rb") as lines:
        replayed = decisions.replay(lines)
    assert (replayed.decisions, replayed.placed, replayed.differences) == (3, 3, [])
