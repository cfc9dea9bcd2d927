"""Picks the endpoints of one request: reads its body, asks the conductor, and puts the answer into an order."""

from __future__ import annotations

import asyncio
import datetime
import functools
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from opentelemetry.context import Context

from kvmesh.errors import (
    ContextTooLong,
    DeadlinePassed,
    InvalidRequest,
    KvmeshError,
    Overloaded,
    Paused,
    Unavailable,
)
from kvmesh.rpc.pb import conductor_pb2
from kvmesh.services.gateway.api_keys import ANYBODY
from kvmesh.services.gateway.conductor import Conductor
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.generation import Generation, Prompt, brief
from kvmesh.services.gateway.models import ServedModelFacts
from kvmesh.services.gateway.request_memory import WORK_TIMEOUT_S, RequestMemory, parse_cost, tokenize_cost
from kvmesh.services.gateway.rest.interfaces import INTERFACES
from kvmesh.services.gateway.text.chat import Chat
from kvmesh.services.gateway.text.prepare import ModelBounds
from kvmesh.services.picker import decide
from kvmesh.services.picker.catalog import EndpointCatalog, endpoints_ready
from kvmesh.services.picker.config import PickerConfig
from kvmesh.services.picker.decide import PickableEngine
from kvmesh.services.picker.prompts import KeyedPrompt, PromptReader, read_generation
from kvmesh.services.picker.releases import RequestReleases
from kvmesh.services.picker.wire import RequestHead
from kvmesh.telemetry import names, spans

log = logging.getLogger(__name__)

_MAX_ID_CHARS = 100
_SMALL_WORK_BYTES = 16 << 20
_SHORT_BODY = 64 << 10  # parsed at once
_HERE_CHARS = 4096  # so many are tokenized at once, in a millisecond where their words are known
_LIMITS = GatewayLimits(max_messages=65_536)
_SESSION = b"x-kvmesh-session"
_BY_LOAD = (
    ContextTooLong,
    DeadlinePassed,
    InvalidRequest,
    Unavailable,
)  # of the conductor: nothing is known to be wrong
_KNOWN, _NEW = (names.PICKER_CHARS.labels(found=found) for found in ("known", "new"))
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class PickedEndpoints:
    """Where a request shall go. `by`: placement, load or gateway. `reserved` says that the conductor keeps a
    reservation for it, and `stay_s` how long it expects it to be there."""

    addresses: tuple[str, ...]
    by: str
    request_id: str
    reserved: bool = False
    stay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PickRequest:
    """One request to pick endpoints for. `body` is None when it is not known."""

    head: RequestHead
    body: bytes | None
    subset: Collection[str] | None


class EndpointPicker:
    """Owns its threads; its owner must `close` it."""

    def __init__(
        self,
        config: PickerConfig,
        readers: Mapping[str, PromptReader],
        conductor: Conductor,
        catalog: EndpointCatalog,
        memory: RequestMemory,
        releases: RequestReleases,
    ) -> None:
        self._config = config
        self._readers = readers
        self._conductor = conductor
        self._catalog = catalog
        self._memory = memory
        self._releases = releases
        self._turn = 0
        self._pool = ThreadPoolExecutor(config.threads, thread_name_prefix="tokenize")

    async def pick(self, asked: PickRequest, attributes: dict[str, spans.Value], parent: Context) -> PickedEndpoints:
        """Returns the endpoints. `attributes` gets those of the request's span; `parent` is what the conductor's is
        below. Raises InvalidRequest for a body that is not JSON, ModelNotFound, Overloaded when the conductor refuses,
        Unavailable when there is no endpoint."""
        catalog, subset = self._catalog, asked.subset
        body = await self._parsed(asked)
        model = body.get("model") if body is not None else None
        model = model if isinstance(model, str) else ""
        attributes[names.REQUEST_MODEL] = brief(model, 200)
        request_id = _new_id(asked.head.text(b"x-request-id"))
        attributes[names.REQUEST_ID] = request_id
        engines = catalog.engines(model)
        if not engines and catalog.gateways:
            return self._gateway(asked, body, request_id, model)
        able = decide.engines_by_load(engines, subset, catalog.sent, self._next_turn())
        if not able:
            raise self._nothing(model, engines, subset)
        generation = read_generation(asked.head.path, body, asked.head.headers, _LIMITS) if body is not None else None
        if generation is not None and (prompt := await self._prompt(generation)) is not None:
            attributes[names.PROMPT_TOKENS] = prompt.tokens
            placed = await self._placed(generation, prompt, request_id, asked, able, parent)
            if placed is not None:
                return placed
        addresses = [one.address for one in able]
        return PickedEndpoints(
            decide.with_fallbacks(addresses[0], addresses, self._config.fallbacks), "load", request_id
        )

    def _next_turn(self) -> int:
        self._turn += 1
        return self._turn

    def _nothing(self, model: str, engines: Collection[PickableEngine], subset: Collection[str] | None) -> KvmeshError:
        catalog = self._catalog
        count, ready = endpoints_ready(engines, catalog.gateways)
        if catalog.why_not and not count:
            return Unavailable(catalog.why_not, retry_after_ms=1000)
        return decide.none_left(model, catalog.engine_models, count, ready, subset)

    def _gateway(self, asked: PickRequest, body: dict[str, Any] | None, request_id: str, model: str) -> PickedEndpoints:
        session = asked.head.text(_SESSION)
        for field in ("session", "prompt_cache_key"):
            told = body.get(field) if body is not None else None
            session = session or (told if isinstance(told, str) else "")
        found = decide.gateways_in_order(self._catalog.gateways, asked.subset, session, self._next_turn())
        if not found:
            raise self._nothing("", (), asked.subset)
        return PickedEndpoints(decide.with_fallbacks(found[0], found, self._config.fallbacks), "gateway", request_id)

    # ── bodies ────────────────────────────────────────────────────────────────────────────────────

    async def _parsed(self, asked: PickRequest) -> dict[str, Any] | None:
        """Returns the JSON object of a request's body; None for a request without one, and for a compressed one, which
        is the endpoint's to read. Raises InvalidRequest."""
        if not asked.body or (asked.head.path not in INTERFACES and not _is_json(asked.head)):
            return None
        if asked.head.text(b"content-encoding").strip().lower() not in ("", "identity"):
            return None
        body = asked.body
        parse = functools.partial(_parse, body)
        found = parse() if len(body) <= _SHORT_BODY else await self._work(parse_cost(body), parse)
        if not isinstance(found, dict):
            if asked.head.path in INTERFACES:
                raise InvalidRequest("body: must be a JSON object", field="body")
            return None
        return found

    async def _prompt(self, generation: Generation) -> KeyedPrompt | None:
        """Returns what a placement goes by; None where the tokenizer or the model is not known here."""
        reader, facts = self._readers.get(generation.model), self._catalog.facts.get(generation.model)
        if reader is None or facts is None:
            return None
        start = time.perf_counter()
        bounds = ModelBounds(facts.block_tokens, facts.max_context_tokens, facts.vocab_size)
        namespace = facts.namespace(ANYBODY, generation.cache_salt)
        cost = tokenize_cost(generation.prompts)
        begin = functools.partial(reader.begin, generation, namespace, bounds, datetime.datetime.now)
        # What is known needs no thread: a wake-up costs as much as looking it up.
        begun = begin() if cost <= _SMALL_WORK_BYTES else await self._work(cost, begin)
        if begun is None:
            return None
        finish = functools.partial(reader.finish, begun, namespace, bounds)
        new_chars = sum(one.new_chars for one in begun)
        found = finish() if new_chars <= _HERE_CHARS else await self._work(cost, finish)
        _KNOWN.inc(max(0, sum(map(_size, generation.prompts)) - new_chars))
        _NEW.inc(new_chars)
        names.PICKER_TOKENIZE.observe(time.perf_counter() - start)
        return found

    async def _work(self, cost: int, work: Callable[[], Made]) -> Made:
        """Does `work`, which takes about `cost` bytes, off the event loop. Raises Overloaded when there is no room for
        it in time."""
        loop = asyncio.get_running_loop()
        if cost <= _SMALL_WORK_BYTES:  # as many as there are threads
            return await loop.run_in_executor(self._pool, work)
        async with self._memory.work(min(cost, self._memory.work_limit), WORK_TIMEOUT_S):
            return await loop.run_in_executor(self._pool, work)

    # ── placements ────────────────────────────────────────────────────────────────────────────────

    async def _placed(
        self,
        generation: Generation,
        prompt: KeyedPrompt,
        request_id: str,
        asked: PickRequest,
        able: list[PickableEngine],
        parent: Context,
    ) -> PickedEndpoints | None:
        """Returns the conductor's choice, with other engines behind it; None when it has none that may be picked."""
        facts = self._catalog.facts[generation.model]
        allowed = {one.instance_id for one in able}
        request = self._schedule(generation, prompt, request_id, facts)
        if asked.subset is not None:
            others = (one.instance_id for one in self._catalog.engines(generation.model))
            request.avoid_instance_ids.extend(one for one in others if one not in allowed)
        start = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self._config.schedule_timeout_ms / 1000
        try:
            placement = await self._conductor.schedule(request, deadline, parent)
        except (Overloaded, Paused):
            raise
        except _BY_LOAD as err:
            log.info("request %s goes by load: %s", request_id, err.message)
            self._forget(request_id)  # its answer may have been lost, and not its placement
            return None
        except asyncio.CancelledError:
            self._forget(request_id)
            raise
        finally:
            names.PICKER_SCHEDULE.observe(time.perf_counter() - start)
        chosen = self._catalog.engine(placement.decode.instance_id) or self._catalog.engine(
            placement.prefill.instance_id
        )
        if chosen is None or chosen.instance_id not in allowed:
            self._forget(request_id)
            return None
        addresses = decide.with_fallbacks(chosen.address, (one.address for one in able), self._config.fallbacks)
        stay_s = placement.life.end_ms / 1000
        return PickedEndpoints(addresses, "placement", request_id, True, stay_s)

    def _forget(self, request_id: str) -> None:
        self._releases.add(request_id, "", conductor_pb2.OUTCOME_CANCELLED)

    def _schedule(
        self, wanted: Generation, prompt: KeyedPrompt, request_id: str, facts: ServedModelFacts
    ) -> conductor_pb2.ScheduleRequest:
        room = max(1, facts.max_context_tokens - prompt.tokens)
        return conductor_pb2.ScheduleRequest(
            request_id=request_id,
            model=wanted.model,
            prompt_tokens=prompt.tokens,
            max_tokens=max(1, min(wanted.max_tokens or room, room)),
            block_keys=prompt.keys,
            ttft_slo_ms=wanted.ttft_slo_ms or self._config.ttft_slo_ms,
            tbt_slo_ms=wanted.tbt_slo_ms or self._config.tbt_slo_ms,
            priority=max(0, wanted.urgency),  # a stranger is not more urgent than others
            lane=conductor_pb2.LANE_BATCH if wanted.is_batch else conductor_pb2.LANE_INTERACTIVE,
            session=wanted.session or "",
            origin=wanted.origin or "",
            endpoint="picker",
            expected_output_tokens=wanted.expected_tokens or 0,
        )

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _is_json(head: RequestHead) -> bool:
    return head.text(b"content-type").partition(";")[0].strip().lower() == "application/json"


def _parse(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as err:
        raise InvalidRequest(f"body: not valid JSON: {brief(str(err), 200)}", field="body") from None


def _new_id(given: str) -> str:
    """Returns a name of the request of its own, which begins with what its client, or the proxy, called it."""
    kept = "".join(letter for letter in given[:_MAX_ID_CHARS] if letter.isascii() and letter.isprintable())
    return f"{kept}-{random.getrandbits(32):08x}" if kept else f"{random.getrandbits(128):032x}"


def _size(prompt: Prompt) -> int:
    """Returns the characters of a text; a chat's are those of its messages, without the template's."""
    if isinstance(prompt, Chat):
        return sum(len(one.content) for one in prompt.messages)
    return len(prompt) if isinstance(prompt, str) else 0
