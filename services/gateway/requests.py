"""One request's life: prepare, place, start at decode, tokens, end; or another placement, or one clear error.

A Request owns everything it started: leaving its context cancels at decode what is still running there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from opentelemetry.context import Context

from kvmesh.errors import (
    DeadlinePassed,
    InternalError,
    KvmeshError,
    Overloaded,
    Paused,
    RequestCancelled,
    Unavailable,
    WeightsChanged,
)
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2
from kvmesh.services.gateway.accounting import Account
from kvmesh.services.gateway.api_keys import ANYBODY, Tenant
from kvmesh.services.gateway.attempts import AnswerAttempts
from kvmesh.services.gateway.conductor import ConductorSilent
from kvmesh.services.gateway.core import GatewayCore
from kvmesh.services.gateway.generation import Generation, brief, refused
from kvmesh.services.gateway.hold_gate import HeldTurn
from kvmesh.services.gateway.migration import Migration
from kvmesh.services.gateway.models import Model, ServedModelFacts
from kvmesh.services.gateway.quota_book import QuotaGrant
from kvmesh.services.gateway.quotas import QuotaStanding
from kvmesh.services.gateway.recovery import Failure, RecoveryPatience
from kvmesh.services.gateway.request_memory import REQUEST_BYTES, prompts_bytes
from kvmesh.services.gateway.text.completion import Completion, Delta
from kvmesh.services.gateway.text.prepare import Prepared
from kvmesh.services.gateway.text.stops import StopMatcher, StopStrings
from kvmesh.telemetry import names, spans

# What the gateway asks of conductor and decode for one attempt of an answer. Pure.

RETRY_AFTER_MS = 1_000


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Builds the messages of one request. `ttft_slo_ms`, `tbt_slo_ms`: the gateway's own, for who asks for none;
    `alone`: the request has one answer.

    Tenants do not share sessions and origins, whatever they call them."""

    request_id: str
    wanted: Generation
    facts: ServedModelFacts
    tenant: str
    tenant_weight: float
    route: str
    ttft_slo_ms: int
    tbt_slo_ms: int
    alone: bool
    cache_salt: str = ""  # for engines that are not kvmesh's own, whose caches do not go by block keys

    def schedule(self, choice: AnswerAttempts, sibling_prefill: str) -> conductor_pb2.ScheduleRequest:
        """Asks the conductor for a placement of an answer's next attempt. `sibling_prefill` is the prefill instance of
        the first answer to the same prompt; "": there is none."""
        wanted, carried = self.wanted, choice.carried
        return conductor_pb2.ScheduleRequest(
            request_id=self._engine_id(choice),
            attempt=choice.attempt,
            model=wanted.model,
            prompt_tokens=carried.tokens,
            max_tokens=choice.max_tokens - carried.answered,
            block_keys=b"" if choice.asks_for_scores else carried.keys,  # no hit saves such a prompt anything
            ttft_slo_ms=wanted.ttft_slo_ms or self.ttft_slo_ms,
            tbt_slo_ms=wanted.tbt_slo_ms or self.tbt_slo_ms,
            priority=wanted.urgency,
            avoid_instance_ids=choice.avoid,
            lane=conductor_pb2.LANE_BATCH if wanted.is_batch else conductor_pb2.LANE_INTERACTIVE,
            session=self._own_name(wanted.session),
            origin=self._own_name(wanted.origin),
            tenant=self.tenant,
            tenant_weight=self.tenant_weight,
            endpoint=self.route,
            expected_output_tokens=wanted.expected_tokens or 0,
            answered_tokens=carried.answered,
            sibling_prefill_id=sibling_prefill,
        )

    def final_error(self, err: KvmeshError) -> KvmeshError:
        """What the client hears of the conductor's error: one that blames an SLO for which the client did not ask is no
        fault of its request."""
        if err.field not in ("ttft_slo_ms", "tbt_slo_ms") or getattr(self.wanted, err.field) is not None:
            return err
        return Overloaded(f"the gateway's own {err.message}", retry_after_ms=RETRY_AFTER_MS)

    def start(
        self,
        choice: AnswerAttempts,
        placement: conductor_pb2.Placement,
        *,
        left_s: float,
        traceparent: str,
        credit_tokens: int,
    ) -> decode_pb2.StartRequest:
        """Starts the attempt at its decode instance. `left_s`: what is left of the request's time; `credit_tokens`: so
        many tokens may be on the way."""
        carried = choice.carried
        return decode_pb2.StartRequest(
            request_id=self._engine_id(choice),
            attempt=choice.attempt,
            model_fingerprint=self.facts.fingerprint,
            weights_epoch=carried.weights_epoch,
            token_ids=carried.token_ids,
            block_keys=carried.keys,
            sampling=self._sampling(choice),
            placement=placement,
            deadline_ms=max(1, int(1000 * left_s)),
            priority=self.wanted.urgency,
            traceparent=traceparent,
            credit_tokens=credit_tokens,
            chain_digest=carried.chain_digest,
            tenant=self.tenant,
            tenant_weight=self.tenant_weight,
            cache_salt=self.cache_salt,
        )

    def _sampling(self, choice: AnswerAttempts) -> common_pb2.SamplingParams:
        wanted = self.wanted
        return common_pb2.SamplingParams(
            max_tokens=choice.max_tokens - choice.carried.answered,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            seed=choice.seed,
            ignore_eos=wanted.ignore_eos,
            logprobs=wanted.scored,
            top_logprobs=max(0, wanted.logprobs),
            min_p=wanted.min_p,
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            repetition_penalty=wanted.repetition_penalty,
            logit_bias=[common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in wanted.logit_bias],
            answered_tokens=choice.carried.answered,
            grammar=choice.prompt.grammar,
            prompt_logprobs=wanted.prompt_logprobs if choice.asks_for_scores else None,
        )

    def _own_name(self, name: str | None) -> str:
        return f"{self.tenant}/{name}" if name else ""

    def _engine_id(self, choice: AnswerAttempts) -> str:
        return self.request_id if self.alone else f"{self.request_id}-{choice.index}"


log = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
PLACED_AGAIN = 4  # where the weights were others than the request's blocks were named after
_LOOKS = 4  # within token_timeout_s


class Request:
    """`async with Request(...) as request: async for step in request: ...`

    A step is a list of (choice index, Delta): something to send for each of them. With `stream` False there are
    no steps until all is done and `choices` hold the whole answers. `token_ids`: the client sees token ids, not only
    text."""

    def __init__(
        self,
        core: GatewayCore,
        generation: Generation,
        *,
        request_id: str,
        route: str,
        stream: bool,
        parent: Context,
        received_ns: int,
        token_ids: bool = False,
        tenant: Tenant = ANYBODY,
        given_id: str = "",
    ) -> None:
        self.core = core
        self.tenant = tenant
        self.generation = generation
        self.request_id = request_id
        self._given_id = given_id
        self._call_ids = request_id  # what ids of tool calls begin with
        self.choices: list[AnswerAttempts] = []
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
        self._news: asyncio.Future[None] | None = None  # while a step waits for some
        self._dirty: list[AnswerAttempts] = []
        self._failure: KvmeshError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._model: Model | None = None
        self._facts: ServedModelFacts | None = None
        self._stops: StopStrings | None = None
        self._asks: RequestBuilder | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._guarding: asyncio.Timeout | None = None
        self._left = 0
        self._turns: dict[int, HeldTurn] = {}  # of answers that wait, or have waited, for an instance to be there
        self._led: set[int] = set()  # answers that were placed once, and have begun their siblings
        self.scores = 0  # log-probabilities of prompts that the client is told
        self._served_by: set[str] = set()  # addresses: who has spans of this request
        config = core.config
        self._slos = generation.ttft_slo_ms or config.ttft_slo_ms, generation.tbt_slo_ms or config.tbt_slo_ms
        self._grant: QuotaGrant | None = None
        self.quota: QuotaStanding | None = None  # of its key, once that is known; None: the key has no quota

    # ── as a context ──────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Request:
        self.core.enter(self)
        self._timer = self._loop.call_at(self._deadline, self._expire)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watching is not None:
            self._watching.cancel()
        named = isinstance(err, KvmeshError)
        for choice in self.choices:
            choice.cancel(brief(str(err), 200) if named else "the client went away")
            if choice.migration is not None:
                choice.migration.failed(str(err) if named else "")
        for task in self._tasks:
            task.cancel()
        for turn in self._turns.values():
            turn.leave()
        self.core.leave(self)
        if self._grant is not None:
            told = self.account.first_token_ns > 0
            refund = named and not told and not isinstance(err, RequestCancelled)
            answer_tokens = self.account.usage(self.choices).completion_tokens
            self.core.quotas.leave(self._grant, answer_tokens, refund=refund)
        trace_id = spans.trace_to_keep(self.account.span)
        self.account.close(self.choices, err)
        if trace_id and self.account.failed_or_late(self.choices, err, self._slos):
            self.core.traces.keep(trace_id, self._served_by)
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # ── steps ─────────────────────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> Request:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        if not self.choices:
            await self._begin()
        while self._left:
            if not self._dirty and self._failure is None:
                self._news = self._loop.create_future()
                await self._news
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
        self._check_priority()
        model = self._model = core.models.find(wanted.model, self.tenant)
        self.account.served_model = model.name
        core.quotas.check_early(self.tenant, wanted.choices)
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._hold(model)
                facts = self._facts = model.require()
                prepared = await core.prepare(wanted, model, facts, self.tenant)
                await self._enter_quotas(sum(prompt.tokens for prompt in prepared))
        except TimeoutError:
            raise self._late() from None
        self._check_scores(prepared)
        self.account.tokenized(sum(prompt.tokens for prompt in prepared), facts.block_tokens)
        if wanted.stops:
            self._stops = StopStrings(wanted.stops)
        seed = self._seed(prepared)
        for index in range(wanted.choices):
            prompt = prepared[index // wanted.n]
            room = facts.max_context_tokens - prompt.tokens
            limit = 1 if wanted.prompt_only else min(wanted.max_tokens or room, room)
            self.choices.append(AnswerAttempts(self, index, prompt, (seed + index) & (2**64 - 1), limit))
        self._asks = self._made_asks(facts)
        self._left = len(self.choices)
        for choice in self.choices[:: wanted.n]:
            self._spawn(choice, 0.0)  # its siblings follow once it is placed
        if core.config.token_timeout_s and self.patience.max_migrations:
            self._watch()

    async def _hold(self, model: Model) -> None:
        """Waits while no instance of the model is there, where the gateway holds requests, and for its turn then.
        Raises Unavailable when there is no room to wait, or none has come in time."""
        turn = self.core.holds.join(model.name, self.account.received_ns, self._held_bytes)
        if turn is not None:
            self._turns[0] = turn
            await turn.wait()
            self.account.held()

    @property
    def _held_bytes(self) -> int:
        return REQUEST_BYTES + prompts_bytes(self.generation.prompts)

    def _check_scores(self, prepared: list[Prepared]) -> None:
        """Raises InvalidRequest for more log-probabilities of prompts than one request may ask for."""
        n, top, most = self.generation.n, self.generation.prompt_logprobs, self.core.config.max_prompt_logprobs
        tokens = sum(prompt.tokens for prompt in prepared) * n
        self.scores = tokens * (1 + top)
        if self.scores > most:
            why = f"{tokens} prompt tokens x {1 + top} are {self.scores}; a request may ask for {most}"
            raise refused("prompt_logprobs", top, why)

    async def _enter_quotas(self, prompt_tokens: int) -> None:
        """Raises QuotaExceeded when the key's quotas do not allow the request."""
        quotas = self.core.quotas
        found = await quotas.enter(self.tenant, prompt_tokens, self.generation.choices)
        if isinstance(found, QuotaGrant):
            self._grant, self.quota = found, found.standing
        elif found is not None:
            self.quota = found
            quotas.refuse(self.tenant, found)

    def _check_priority(self) -> None:
        """Raises InvalidRequest for a priority more urgent than this client may ask for. It is not made smaller
        silently: a client that counts on it should know."""
        asked, most = self.generation.priority, self.tenant.max_priority
        if most is None:
            most = self.core.config.max_priority
        if asked is not None and asked < most:
            raise refused("priority", asked, f"the most urgent that you may ask for is {most} (smaller goes first)")

    def _made_asks(self, facts: ServedModelFacts) -> RequestBuilder:
        config = self.core.config
        return RequestBuilder(
            self.request_id,
            self.generation,
            facts,
            self.tenant.name,
            self.tenant.weight,
            self.account.route,
            config.ttft_slo_ms,
            config.tbt_slo_ms,
            alone=len(self.choices) == 1,
            cache_salt=facts.engine_salt(self.tenant, self.generation.cache_salt),
        )

    def _step(self) -> list[tuple[int, Delta]]:
        dirty, self._dirty = self._dirty, []
        now, step = self._loop.time(), []
        for choice in dirty:
            if choice.done:
                continue
            delta = choice.take(now)
            if delta.token_ids:
                self.account.token()
            if delta.token_ids or choice.done:
                self._went_on(choice)
            self._left -= choice.done
            if not self._stream:
                choice.whole.add(delta)
            elif delta.shows or (self._token_ids and delta.token_ids):
                choice.delivered = True
                step.append((choice.index, delta))
            failure = choice.failure()
            if failure is not None:
                self._lost(choice, failure)
        return step

    def guard(self) -> asyncio.Timeout:
        """Around all that is written to the client: one that takes nothing cannot hold the request beyond its deadline
        and a moment for the last words. TimeoutError then; nobody is left to be told. The moment begins when the
        deadline is noticed, which is late where the event loop stood still."""
        self._guarding = asyncio.timeout_at(max(self._deadline, self._loop.time()) + _LAST_WORDS_S)
        return self._guarding

    @property
    def returned(self) -> list[AnswerAttempts]:
        """The answers that the client gets, in order: all, or of each prompt those with the highest log-probability a
        token, the best first."""
        n, most = self.generation.n, self.generation.returned
        if most is None:
            return self.choices
        groups = (self.choices[at : at + n] for at in range(0, len(self.choices), n))
        ranked = (sorted(group, key=lambda choice: -choice.answer.mean_logprob) for group in groups)
        return [choice for group in ranked for choice in group[:most]]

    def cancel(self, why: str) -> None:
        """Ends the request: who waits for its answers gets RequestCancelled."""
        self._fail(RequestCancelled(why))

    def piece(self, token_id: int) -> tuple[str, list[int]]:
        """Text and bytes of one of the model's tokens."""
        assert self._model is not None, "prepared"
        return self._model.preparer.tokenizer.piece(token_id)

    def text_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Returns where the text of each token of a prompt begins in the prompt's."""
        assert self._model is not None, "prepared"
        detokenizer, offsets, read = self._model.preparer.tokenizer.detokenizer((), opens=True), list[int](), 0
        for token in token_ids:
            offsets.append(read)
            read += len(detokenizer.push((token,)))
        return offsets

    # ── what attempts need (AttemptOwner) ─────────────────────────────────────────────────────────

    @property
    def credit_tokens(self) -> int:
        """See AttemptOwner."""
        return self.core.config.session_credit_tokens

    @property
    def served_model(self) -> str:
        """See AttemptOwner."""
        return self.account.served_model

    @property
    def wants_logprobs(self) -> bool:
        """See AttemptOwner."""
        return self.generation.scored

    @property
    def prompt_logprobs(self) -> int:
        """See AttemptOwner."""
        return self.generation.prompt_logprobs

    @property
    def prompt_only(self) -> bool:
        """See AttemptOwner."""
        return self.generation.prompt_only

    @property
    def patience(self) -> RecoveryPatience:
        """See AttemptOwner."""
        return self.core.config.patience

    @property
    def goes_on_exactly(self) -> bool:
        """See AttemptOwner. kvmesh's own instances go on with the same noise; engines of others have their own, and
        cannot tell the prompt from what was answered."""
        assert self._facts is not None, "prepared"
        wanted = self.generation
        greedy = wanted.temperature == 0 and not wanted.presence_penalty and not wanted.frequency_penalty
        return greedy or not self._facts.external

    def _seed(self, prepared: Sequence[Prepared]) -> int:
        """Returns the seed of the first choice. Of a request that its client has named, what is not told follows from
        the name and the prompt, at every gateway: whoever asks again because a gateway died gets the same answer."""
        seed = random.getrandbits(63)
        if self._given_id:
            named = hashlib.blake2b(f"{self.tenant.name}/{self._given_id}".encode(), digest_size=16)
            for prompt in prepared:
                named.update(prompt.token_ids)
            seed = int.from_bytes(named.digest()[:8], "little") >> 1
            self._call_ids = f"{self._given_id}-{named.hexdigest()[16:24]}"
        return seed if self.generation.seed is None else self.generation.seed

    @property
    def block_tokens(self) -> int:
        """See AttemptOwner."""
        assert self._facts is not None, "prepared"
        return self._facts.block_tokens

    def touch(self, choice: AnswerAttempts) -> None:
        """See AttemptOwner."""
        self._dirty.append(choice)
        self._wake()

    def new_answer(self, prompt: Prepared) -> Completion:
        """See AttemptOwner."""
        assert self._facts is not None and self._model is not None, "prepared"
        parser = self._model.preparer.parser(prompt, self._call_ids) if self.generation.parsed else None
        tokenizer = self._model.preparer.tokenizer
        markers = parser.markers if parser is not None else frozenset()
        detokenizer = tokenizer.detokenizer(prompt.context, opens=prompt.blank, markers=markers)
        matcher = StopMatcher(self._stops) if self._stops else None
        unending = self.generation.ignore_eos and not prompt.grammar  # an end token ends a grammar's answer
        silent = () if unending else self._facts.eos_ids
        # Clients that score a prompt by an echo (lm-evaluation-harness) count on an entry for each token of the answer.
        scores_end = self.generation.echo and self.generation.logprobs >= 0
        return Completion(detokenizer, matcher, silent, parser, scores_end=scores_end)

    # ── attempts ──────────────────────────────────────────────────────────────────────────────────

    def _lost(self, choice: AnswerAttempts, failure: Failure) -> None:
        """Have `choice` made again or gone on with elsewhere; or the request ends, once what has come is delivered."""
        core, err = self.core, failure.error
        if isinstance(err, Unavailable):
            core.catalog.poke()
        held = isinstance(err, Paused | WeightsChanged)
        if failure.fresh and err.retryable and self.patience.max_migrations and not held:
            choice.migration = Migration(self.account.context, choice.index, failure)
        try:
            if core.stopping:
                raise err
            now = self._loop.time()
            plan = choice.recovery.failed(failure, now, random.uniform(0.5, 1.5))
            if now + plan.delay_s >= self._deadline:
                raise err
        except KvmeshError as final:
            self._fail(final)
            return
        if held:
            if choice.migration is not None and choice.migration.timer is not None:
                choice.migration.timer.cancel()
        elif failure.fresh and not plan.anew:
            assert choice.migration is not None, "begun above"
            choice.migration.timer = self._loop.call_at(choice.recovery.ends_at, self._too_long, choice)
        else:
            names.GATEWAY_RETRIES.labels(reason=err.code).inc()
        what = "placing it anew" if plan.anew else f"going on after {failure.answered} tokens"
        level = logging.DEBUG if held else logging.WARNING
        log.log(level, "request %s: attempt %d failed, %s: %s", self.request_id, choice.attempt, what, err)
        choice.again(anew=plan.anew)
        self._spawn(choice, plan.delay_s, paused=isinstance(err, Paused))

    def _too_long(self, choice: AnswerAttempts) -> None:
        if not choice.has_news:  # else it is the client that takes nothing
            self._fail(choice.recovery.late())

    def _went_on(self, choice: AnswerAttempts) -> None:
        """Ends the recovery of an answer that has new tokens, or is whole."""
        choice.recovery.went_on()
        if choice.migration is not None:
            choice.migration.moved(choice.decode_instance)
            choice.migration = None

    def _watch(self) -> None:
        now, timeout_s = self._loop.time(), self.core.config.token_timeout_s
        for choice in self.choices:
            if not choice.done:
                choice.watch(now, timeout_s)
        self._watching = self._loop.call_later(timeout_s / _LOOKS, self._watch)

    def _spawn(self, choice: AnswerAttempts, delay_s: float, *, paused: bool = False) -> None:
        task = self._loop.create_task(self._launch(choice, delay_s, paused=paused))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _launch(self, choice: AnswerAttempts, delay_s: float, *, paused: bool) -> None:
        model = self.generation.model
        try:
            if paused:
                await self.core.pauses.wait(model, choice)
            elif delay_s:
                await asyncio.sleep(delay_s)
            placement = choice.placement = await self._placed_in_turn(choice)
            self.core.pauses.passed(model)
        except KvmeshError as err:
            if choice.carried.answered or isinstance(err, Paused | WeightsChanged):
                choice.refused(err)
                return
            if isinstance(err, Unavailable):
                self.core.catalog.poke()
            self._fail(self._asks.final_error(err) if self._asks else err)  # of what has not begun that word is final
            return
        except Exception as err:
            log.exception("request %s cannot be placed", self.request_id)
            self._fail(InternalError(f"placing failed: {type(err).__name__}: {err}"))
            return
        if choice.index not in self._led:
            self._led.add(choice.index)
            self._spawn_siblings(choice)
        try:
            session = await self.core.sessions.get(placement.decode)
            choice.started(session.start(choice, self._start_request(choice, placement)))
        except KvmeshError as err:
            choice.on_failed(err, at_decode=True)
        except Exception as err:
            log.exception("request %s cannot be started", self.request_id)
            self._fail(InternalError(f"starting failed: {type(err).__name__}: {err}"))

    def _spawn_siblings(self, choice: AnswerAttempts) -> None:
        """Begins the other answers to the prompt of `choice`, if that is the first: they are placed where its prefill
        is, which then computes the prompt once and gives its pages to all of them."""
        n = self.generation.n
        for other in self.choices[choice.index + 1 : choice.index + n] if choice.index % n == 0 else ():
            self._spawn(other, 0.0)

    def _sibling_prefill(self, choice: AnswerAttempts) -> str:
        """Returns where the prompt of `choice` is computed for the first answer to it; "": nowhere, or not any more."""
        first = self.choices[choice.index - choice.index % self.generation.n]
        if first is choice or first.placement is None or choice.carried.answered:
            return ""
        name = first.placement.prefill.instance_id
        return name if name not in choice.avoid else ""

    async def _placed_in_turn(self, choice: AnswerAttempts) -> conductor_pb2.Placement:
        """Returns what `_placed` does. Where requests are held, an answer for which there is no instance any more, or
        whose turn ended with a refusal, waits for the next turn. Raises the refusal, or Unavailable when none came in
        time, or there is no room to wait."""
        index = choice.index
        if self.generation.is_batch and index in self._turns:
            self._turns.pop(index).placed()  # its lane has a wait of its own, which would keep all others waiting
        while True:
            try:
                placement = await self._placed(choice)
                if index in self._turns:
                    self._turns.pop(index).placed()
                return placement
            except BaseException as err:
                if not self._waits_again(choice, err):
                    if index in self._turns:
                        self._turns.pop(index).leave()  # a pause, say, must not keep the others waiting
                    raise
            await self._turns[index].wait()

    def _waits_again(self, choice: AnswerAttempts, err: BaseException) -> bool:
        """Says whether an answer that was placed nowhere waits in the line of its model now."""
        if not isinstance(err, Unavailable | Overloaded) or isinstance(err, Paused | WeightsChanged):
            return False
        if choice.carried.answered or self.core.stopping:
            return False
        turn = self._turns.get(choice.index)
        if isinstance(err, Overloaded):  # as any other request that nobody held is refused
            if turn is not None:
                turn.refuse(err)
            return turn is not None
        if isinstance(err, ConductorSilent) and turn is None:
            return False
        self.core.catalog.poke()
        if turn is not None:
            turn.refuse(err)
            return True
        model, received_ns = self.account.served_model, self.account.received_ns
        turn = self.core.holds.join(model, received_ns, self._held_bytes, refused=err)
        if turn is not None:
            self._turns[choice.index] = turn
        return turn is not None

    async def _placed(self, choice: AnswerAttempts) -> conductor_pb2.Placement:
        """Returns where the answer's next attempt goes, its blocks named after the weights that are there. Raises
        WeightsChanged when these change faster than it can be placed."""
        assert self._facts is not None, "prepared"
        for _ in range(PLACED_AGAIN):
            placement = await self._place(choice)
            told = placement.HasField("weights_epoch")
            if not told or placement.weights_epoch == choice.carried.weights_epoch:
                return placement
            facts = self._facts = replace(self._facts, weights_epoch=placement.weights_epoch)
            namespace = facts.namespace(self.tenant, self.generation.cache_salt)
            carried = choice.carried
            cost = 2 * len(carried.token_ids)
            await self.core.in_thread(cost, lambda: carried.follow(namespace, facts.block_tokens))  # noqa: B023
        raise WeightsChanged(f"weights_epoch={choice.carried.weights_epoch}: other weights each time it was placed")

    async def _place(self, choice: AnswerAttempts) -> conductor_pb2.Placement:
        assert self._asks is not None, "prepared"
        start_ns = time.monotonic_ns()
        attributes: dict[str, spans.Value] = {names.ATTEMPT: choice.attempt}
        span = spans.begin(names.SPAN_SCHEDULE, self.account.context, attributes, start_ns=start_ns)
        request = self._asks.schedule(choice, self._sibling_prefill(choice))
        failure = "cancelled"
        try:
            placement = await self.core.conductor.schedule(request, self._deadline, spans.context_of(span))
            failure = ""
            self._served_by |= {placement.prefill.address, placement.decode.address}
            span.set_attribute(names.PREFILL_INSTANCE, placement.prefill.instance_id)
            span.set_attribute(names.DECODE_INSTANCE, placement.decode.instance_id)
        except KvmeshError as err:
            failure = str(err)
            raise
        finally:
            self._served_by.add(self.core.conductor.address)
            now_ns = time.monotonic_ns()
            if not choice.carried.answered:
                self.account.scheduled_ns = now_ns
            names.GATEWAY_SCHEDULE.observe((now_ns - start_ns) / 1e9)
            spans.finish(span, end_ns=now_ns, error=failure)
        return placement

    def _start_request(self, choice: AnswerAttempts, placement: conductor_pb2.Placement) -> decode_pb2.StartRequest:
        assert self._asks is not None, "prepared"
        return self._asks.start(
            choice,
            placement,
            left_s=self._deadline - self._loop.time(),
            traceparent=spans.traceparent(self.account.span),
            credit_tokens=self.credit_tokens,
        )

    # ── failures of the whole ─────────────────────────────────────────────────────────────────────

    def _fail(self, err: KvmeshError) -> None:
        self._failure = self._failure or err
        for turn in list(self._turns.values()):
            turn.fail(err)
        self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():  # done: the step was cancelled
            news.set_result(None)

    def _late(self) -> DeadlinePassed:
        return DeadlinePassed(f"the request was not done within its {self._timeout_s:g} s")

    def _expire(self) -> None:
        if self._guarding is not None and not self._guarding.expired():
            self._guarding.reschedule(self._loop.time() + _LAST_WORDS_S)
        self._fail(self._late())
