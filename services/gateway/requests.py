"""One request's life: prepare, place, start at decode, tokens, end; or a new placement, or one clear error.

A Request owns everything it started: leaving its context cancels at decode what is still running there.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from types import TracebackType

from opentelemetry.context import Context

from kvmesh.rpc.errors import DeadlinePassed, InternalError, KvmeshError, Unavailable
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2
from kvmesh.telemetry import names, spans
from services.gateway.accounts import Account
from services.gateway.api_keys import ANYBODY, Tenant
from services.gateway.choice import Answer, Delta
from services.gateway.choices import Choice
from services.gateway.core import Core
from services.gateway.generation import Generation, brief
from services.gateway.models import Facts, Model
from services.gateway.prepare import Prepared
from services.gateway.stops import StopMatcher, StopStrings

log = logging.getLogger(__name__)

_RETRY_BACKOFF_S = 0.05
_LAST_WORDS_S = 1.0


class Request:
    """`async with Request(...) as request: async for step in request: ...`

    A step is a list of (choice index, Delta): something to send for each of them. With `stream` False there are
    no steps until all is done and `choices` hold the whole answers; then a failed attempt can be made again
    whatever has arrived. `token_ids`: the client sees token ids, not only text."""

    def __init__(
        self,
        core: Core,
        generation: Generation,
        *,
        request_id: str,
        route: str,
        stream: bool,
        parent: Context,
        received_ns: int,
        token_ids: bool = False,
        tenant: Tenant = ANYBODY,
    ) -> None:
        self.core = core
        self.tenant = tenant
        self.generation = generation
        self.request_id = request_id
        self.choices: list[Choice] = []
        self.account = Account(
            generation,
            request_id=request_id,
            route=route,
            stream=stream,
            parent=parent,
            received_ns=received_ns,
            tenant=tenant.name,
        )
        self._stream = stream
        self._token_ids = token_ids
        self._loop = asyncio.get_running_loop()
        self._timeout_s = min(core.config.timeout_s, generation.timeout_s or core.config.timeout_s)
        self._deadline = self._loop.time() + self._timeout_s - (time.monotonic_ns() - received_ns) / 1e9
        self._event = asyncio.Event()
        self._dirty: list[Choice] = []
        self._failure: KvmeshError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._model: Model | None = None
        self._facts: Facts | None = None
        self._stops: StopStrings | None = None
        self._left = 0

    # ── as a context ──────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Request:
        self.core.enter(self)
        self._timer = self._loop.call_at(self._deadline, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        named = isinstance(err, KvmeshError)
        for choice in self.choices:
            choice.cancel(brief(str(err), 200) if named else "the client went away")
        for task in self._tasks:
            task.cancel()
        self.core.leave(self)
        self.account.close(self.choices, err)
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> Request:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        if not self.choices:
            await self._begin()
        while self._left:
            await self._event.wait()
            self._event.clear()
            if self._failure is not None:
                raise self._failure
            step = self._step()
            if step:
                return step
        raise StopAsyncIteration

    async def _begin(self) -> None:
        """Template, tokens, keys, off they go. Raises what a client did wrong, or Unavailable while the model is
        unknown."""
        core, wanted = self.core, self.generation
        model = self._model = core.models.find(wanted.model, self.tenant)
        facts = self._facts = model.require()
        try:
            async with asyncio.timeout_at(self._deadline):
                prepared = await core.prepare(wanted, model, facts, self.tenant)
        except TimeoutError:
            raise self._late() from None
        self.account.tokenized(sum(prompt.tokens for prompt in prepared), facts.block_tokens)
        if wanted.stops:
            self._stops = StopStrings(wanted.stops)
        seed = random.getrandbits(63) if wanted.seed is None else wanted.seed
        for index in range(wanted.choices):
            prompt = prepared[index // wanted.n]
            self.choices.append(Choice(self, index, prompt, (seed + index) & (2**64 - 1)))
        self._left = len(self.choices)
        for choice in self.choices:
            self._spawn(choice, 0.0)

    def _step(self) -> list[tuple[int, Delta]]:
        dirty, self._dirty = self._dirty, []
        now, step = self._loop.time(), []
        for choice in dirty:
            if choice.done:
                continue
            try:
                delta = choice.take(now)
            except KvmeshError as err:
                self._again(choice, err)
                continue
            if delta.token_ids:
                self.account.token()
            self._left -= choice.done
            if not self._stream:
                choice.texts.append(delta.text)
                choice.entries += delta.logprobs
            elif delta.text or delta.logprobs or delta.finish or (self._token_ids and delta.token_ids):
                choice.delivered = True
                step.append((choice.index, delta))
        return step

    def guard(self) -> asyncio.Timeout:
        """Around all that is written to the client: one that takes nothing cannot hold the request beyond its deadline
        and a moment for the last words. TimeoutError then; nobody is left to be told."""
        return asyncio.timeout_at(self._deadline + _LAST_WORDS_S)

    def piece(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of one of the model's tokens."""
        assert self._model is not None, "prepared"
        return self._model.preparer.tokenizer.piece(token_id)

    # ── what choices need ─────────────────────────────────────────────────────────────────────────

    @property
    def credit_tokens(self) -> int:
        """See choices.Owner."""
        return self.core.config.session_credit_tokens

    @property
    def wants_logprobs(self) -> bool:
        """See choices.Owner."""
        return self.generation.logprobs >= 0

    def touch(self, choice: Choice) -> None:
        """See choices.Owner."""
        self._dirty.append(choice)
        self._event.set()

    def new_answer(self, prompt: Prepared) -> Answer:
        """See choices.Owner."""
        assert self._facts is not None and self._model is not None, "prepared"
        detokenizer = self._model.preparer.tokenizer.detokenizer(prompt.context, opens=prompt.blank)
        matcher = StopMatcher(self._stops) if self._stops else None
        return Answer(detokenizer, matcher, () if self.generation.ignore_eos else self._facts.eos_ids)

    # ── attempts ──────────────────────────────────────────────────────────────────────────────────

    def _again(self, choice: Choice, err: KvmeshError) -> None:
        """Place `choice` anew, or raise what went wrong."""
        core = self.core
        if isinstance(err, Unavailable):
            core.catalog.poke()
        if not err.retryable or choice.delivered or choice.attempt >= core.config.max_retries or core.stopping:
            raise err
        backoff_s = _RETRY_BACKOFF_S * 4**choice.attempt * random.uniform(0.5, 1.5)
        if self._loop.time() + backoff_s >= self._deadline:
            raise err
        log.warning("request %s: attempt %d failed, placing it anew: %s", self.request_id, choice.attempt, err)
        names.GATEWAY_RETRIES.labels(reason=choice.retry()).inc()
        self._spawn(choice, backoff_s)

    def _spawn(self, choice: Choice, delay_s: float) -> None:
        task = self._loop.create_task(self._launch(choice, delay_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _launch(self, choice: Choice, delay_s: float) -> None:
        try:
            if delay_s:
                await asyncio.sleep(delay_s)
            placement = choice.placement = await self._place(choice)
        except KvmeshError as err:
            if isinstance(err, Unavailable):
                self.core.catalog.poke()
            self._fail(err)  # the conductor's word is final
            return
        except Exception as err:
            log.exception("request %s cannot be placed", self.request_id)
            self._fail(InternalError(f"placing failed: {type(err).__name__}: {err}"))
            return
        try:
            session = await self.core.sessions.get(placement.decode)
            choice.lane = session.start(choice, self._start_request(choice, placement))
        except KvmeshError as err:
            choice.on_failed(err, at_decode=True)
        except Exception as err:
            log.exception("request %s cannot be started", self.request_id)
            self._fail(InternalError(f"starting failed: {type(err).__name__}: {err}"))

    async def _place(self, choice: Choice) -> conductor_pb2.Placement:
        config, wanted, start_ns = self.core.config, self.generation, time.monotonic_ns()
        attributes: dict[str, spans.Value] = {names.ATTEMPT: choice.attempt}
        span = spans.begin(names.SPAN_SCHEDULE, self.account.context, attributes, start_ns=start_ns)
        request = conductor_pb2.ScheduleRequest(
            request_id=self._engine_id(choice),
            attempt=choice.attempt,
            model=wanted.model,
            prompt_tokens=choice.prompt.tokens,
            max_tokens=self._max_tokens(choice),
            block_keys=choice.prompt.keys,
            ttft_slo_ms=wanted.ttft_slo_ms or config.ttft_slo_ms,
            tbt_slo_ms=wanted.tbt_slo_ms or config.tbt_slo_ms,
            priority=wanted.urgency,
            avoid_instance_ids=choice.avoid,
            lane=conductor_pb2.LANE_BATCH if wanted.is_batch else conductor_pb2.LANE_INTERACTIVE,
            session=self._own_name(wanted.session),
            origin=self._own_name(wanted.origin),
            tenant=self.tenant.name,
            endpoint=self.account.route,
            expected_output_tokens=wanted.expected_tokens or 0,
        )
        failure = "cancelled"
        try:
            placement = await self.core.conductor.schedule(request, self._deadline, spans.context_of(span))
            failure = ""
            span.set_attribute(names.PREFILL_INSTANCE, placement.prefill.instance_id)
            span.set_attribute(names.DECODE_INSTANCE, placement.decode.instance_id)
        except KvmeshError as err:
            failure = str(err)
            raise
        finally:
            now_ns = self.account.scheduled_ns = time.monotonic_ns()
            names.GATEWAY_SCHEDULE.observe((now_ns - start_ns) / 1e9)
            spans.finish(span, end_ns=now_ns, error=failure)
        return placement

    def _start_request(self, choice: Choice, placement: conductor_pb2.Placement) -> decode_pb2.StartRequest:
        assert self._facts is not None, "prepared"
        wanted = self.generation
        sampling = common_pb2.SamplingParams(
            max_tokens=self._max_tokens(choice),
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            seed=choice.seed,
            ignore_eos=wanted.ignore_eos,
            logprobs=wanted.logprobs >= 0,
            top_logprobs=max(0, wanted.logprobs),
            min_p=wanted.min_p,
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            repetition_penalty=wanted.repetition_penalty,
            logit_bias=[common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in wanted.logit_bias],
        )
        return decode_pb2.StartRequest(
            request_id=self._engine_id(choice),
            attempt=choice.attempt,
            model_fingerprint=self._facts.fingerprint,
            token_ids=choice.prompt.token_ids,
            block_keys=choice.prompt.keys,
            sampling=sampling,
            placement=placement,
            deadline_ms=max(1, int(1000 * (self._deadline - self._loop.time()))),
            priority=wanted.urgency,
            traceparent=spans.traceparent(self.account.span),
            credit_tokens=self.credit_tokens,
            chain_digest=choice.prompt.chain_digest,
        )

    def _own_name(self, name: str | None) -> str:
        """Tenants do not share sessions and origins, whatever they call them."""
        return f"{self.tenant.name}/{name}" if name else ""

    def _engine_id(self, choice: Choice) -> str:
        return self.request_id if len(self.choices) == 1 else f"{self.request_id}-{choice.index}"

    def _max_tokens(self, choice: Choice) -> int:
        assert self._facts is not None, "prepared"
        room = self._facts.max_context_tokens - choice.prompt.tokens
        return min(self.generation.max_tokens or room, room)

    # ── failures of the whole ─────────────────────────────────────────────────────────────────────

    def _fail(self, err: KvmeshError) -> None:
        self._failure = self._failure or err
        self._event.set()

    def _late(self) -> DeadlinePassed:
        return DeadlinePassed(f"the request was not done within its {self._timeout_s:g} s")

    def _expire(self) -> None:
        self._fail(self._late())
