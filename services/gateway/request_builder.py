"""What the gateway asks of conductor and decode for one attempt of an answer. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.errors import KvmeshError, Overloaded
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2
from services.gateway.attempts import AnswerAttempts
from services.gateway.generation import Generation
from services.gateway.models import Facts

RETRY_AFTER_MS = 1_000


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Of one request. `ttft_slo_ms`, `tbt_slo_ms`: the gateway's own, for who asks for none; `alone`: of one answer.

    Tenants do not share sessions and origins, whatever they call them."""

    request_id: str
    wanted: Generation
    facts: Facts
    tenant: str
    route: str
    ttft_slo_ms: int
    tbt_slo_ms: int
    alone: bool

    def schedule(self, choice: AnswerAttempts) -> conductor_pb2.ScheduleRequest:
        """For a placement of its next attempt."""
        wanted, carried = self.wanted, choice.carried
        return conductor_pb2.ScheduleRequest(
            request_id=self._engine_id(choice),
            attempt=choice.attempt,
            model=wanted.model,
            prompt_tokens=carried.tokens,
            max_tokens=choice.max_tokens - carried.answered,
            block_keys=carried.keys,
            ttft_slo_ms=wanted.ttft_slo_ms or self.ttft_slo_ms,
            tbt_slo_ms=wanted.tbt_slo_ms or self.tbt_slo_ms,
            priority=wanted.urgency,
            avoid_instance_ids=choice.avoid,
            lane=conductor_pb2.LANE_BATCH if wanted.is_batch else conductor_pb2.LANE_INTERACTIVE,
            session=self._own_name(wanted.session),
            origin=self._own_name(wanted.origin),
            tenant=self.tenant,
            endpoint=self.route,
            expected_output_tokens=wanted.expected_tokens or 0,
            answered_tokens=carried.answered,
        )

    def told(self, err: KvmeshError) -> KvmeshError:
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
        """For its decode instance. `left_s`: of the request's time; `credit_tokens`: that may be on the way."""
        carried = choice.carried
        return decode_pb2.StartRequest(
            request_id=self._engine_id(choice),
            attempt=choice.attempt,
            model_fingerprint=self.facts.fingerprint,
            weights_epoch=self.facts.weights_epoch,
            token_ids=carried.token_ids,
            block_keys=carried.keys,
            sampling=self._sampling(choice),
            placement=placement,
            deadline_ms=max(1, int(1000 * left_s)),
            priority=self.wanted.urgency,
            traceparent=traceparent,
            credit_tokens=credit_tokens,
            chain_digest=carried.chain_digest,
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
            logprobs=wanted.logprobs >= 0,
            top_logprobs=max(0, wanted.logprobs),
            min_p=wanted.min_p,
            presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty,
            repetition_penalty=wanted.repetition_penalty,
            logit_bias=[common_pb2.LogitBias(token_id=token, bias=bias) for token, bias in wanted.logit_bias],
            answered_tokens=choice.carried.answered,
        )

    def _own_name(self, name: str | None) -> str:
        return f"{self.tenant}/{name}" if name else ""

    def _engine_id(self, choice: AnswerAttempts) -> str:
        return self.request_id if self.alone else f"{self.request_id}-{choice.index}"
