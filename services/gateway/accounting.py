"""What a request leaves behind: its root span, metrics, usage, and where its time went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.context import Context

from kvmesh.errors import InternalError, KvmeshError, RequestCancelled
from kvmesh.rpc.pb import common_pb2
from kvmesh.services.gateway.attempts import AnswerAttempts
from kvmesh.services.gateway.config import MAX_NAME_CHARS
from kvmesh.services.gateway.generation import Generation, brief
from kvmesh.services.gateway.rest.frames import CompletionUsage
from kvmesh.telemetry import names, spans

_STAGES = [field.name for field in common_pb2.StageTimings.DESCRIPTOR.fields]


class Account:
    """The account of one request. Times are monotonic nanoseconds; 0: has not happened."""

    def __init__(
        self,
        generation: Generation,
        *,
        request_id: str,
        route: str,
        stream: bool,
        parent: Context,
        received_ns: int,
        tenant: str = "",
    ) -> None:
        self._generation = generation
        self._model = brief(generation.model, MAX_NAME_CHARS)
        self.route = route
        self.served_model = ""  # once it is known to be one that is served
        self.received_ns = received_ns
        self.tokenized_ns = 0
        self.scheduled_ns = 0
        self.first_token_ns = 0
        self.first_write_ns = 0
        operation = names.SPAN_CHAT if route in ("chat", "messages") else names.SPAN_COMPLETION
        attributes: dict[str, spans.Value] = {
            names.OPERATION: operation,
            names.PROVIDER: "kvmesh",
            names.REQUEST_MODEL: self._model,
            names.REQUEST_ID: request_id,
            names.TEMPERATURE: generation.temperature,
            names.TOP_P: generation.top_p,
            names.TOP_K: generation.top_k,
            names.STREAM: stream,
            names.CHOICE_COUNT: generation.choices,
            names.PRIORITY: generation.urgency,
        }
        optional = {names.MAX_TOKENS: generation.max_tokens, names.SEED: generation.seed}
        attributes |= {name: value for name, value in optional.items() if value is not None}
        if tenant:
            attributes[names.TENANT] = tenant
        self.span = spans.begin(f"{operation} {self._model}", parent, attributes, start_ns=received_ns)
        self.context = spans.context_of(self.span)

    def tokenized(self, prompt_tokens: int, block_tokens: int) -> None:
        """Prompts are tokens and keys now."""
        self.tokenized_ns = time.monotonic_ns()
        names.GATEWAY_TOKENIZE.observe((self.tokenized_ns - self.received_ns) / 1e9)
        names.GATEWAY_PROMPT_TOKENS.labels(self.served_model).inc(prompt_tokens)
        attributes: dict[str, spans.Value] = {names.PROMPT_TOKENS: prompt_tokens, names.BLOCK_TOKENS: block_tokens}
        spans.record(names.SPAN_TOKENIZE, self.context, self.received_ns, self.tokenized_ns, attributes)

    def token(self) -> None:
        """A token has arrived."""
        if not self.first_token_ns:
            self.first_token_ns = time.monotonic_ns()
            names.GATEWAY_TTFT.labels(self.served_model).observe((self.first_token_ns - self.received_ns) / 1e9)

    def wrote(self) -> None:
        """Bytes went to the client."""
        self.first_write_ns = self.first_write_ns or time.monotonic_ns()

    def close(self, choices: Sequence[AnswerAttempts], err: BaseException | None) -> None:
        """The request has ended, with `err` unless all went well."""
        if isinstance(err, KvmeshError):
            outcome = err.code
        elif err is not None:
            cancelled = isinstance(err, asyncio.CancelledError | GeneratorExit)
            outcome = RequestCancelled.code if cancelled else InternalError.code
        else:
            outcome = (choices[0].answer.finish if choices else "") or RequestCancelled.code
        now_ns = time.monotonic_ns()
        names.GATEWAY_REQUESTS.labels(route=self.route, outcome=outcome).inc()
        names.GATEWAY_REQUEST_SECONDS.labels(self.served_model).observe((now_ns - self.received_ns) / 1e9)
        usage = self.usage(choices)
        names.GATEWAY_CACHED_TOKENS.labels(self.served_model).inc(usage.cached_tokens)
        if self.span.is_recording():
            self.span.set_attributes(
                {
                    names.INPUT_TOKENS: usage.prompt_tokens,
                    names.OUTPUT_TOKENS: usage.completion_tokens,
                    names.CACHED_INPUT_TOKENS: usage.cached_tokens,
                    names.FINISH_REASONS: [choice.answer.finish for choice in choices],
                    names.RESPONSE_MODEL: self._model,
                    names.OUTCOME: outcome,
                }
            )
            if self.first_token_ns:
                self.span.set_attribute(names.TTFT_MS, (self.first_token_ns - self.received_ns) / 1e6)
            if err is not None:
                self.span.set_attribute(names.ERROR_TYPE, outcome)
        spans.finish(self.span, end_ns=now_ns, error="" if err is None else str(err) or outcome)

    def failed_or_late(
        self, choices: Sequence[AnswerAttempts], err: BaseException | None, slos_ms: tuple[int, int]
    ) -> bool:
        """Says of a request that has ended whether it failed, other than by its client's going away, or came later
        than its SLOs (TTFT and mean time between tokens; 0: none)."""
        if err is not None:
            return not isinstance(err, asyncio.CancelledError | GeneratorExit | RequestCancelled)
        if not self.first_token_ns:
            return False
        ttft_slo_ms, tbt_slo_ms = slos_ms
        tokens = max((choice.answer.count for choice in choices), default=0)
        ttft_ms = (self.first_token_ns - self.received_ns) / 1e6
        tbt_ms = (time.monotonic_ns() - self.first_token_ns) / 1e6 / max(tokens - 1, 1)
        return 0 < ttft_slo_ms < ttft_ms or 0 < tbt_slo_ms < tbt_ms

    def usage(self, choices: Sequence[AnswerAttempts]) -> CompletionUsage:
        """Tokens so far. Each prompt counts once, and as cached what was cached before the first of its answers: the
        others find what that one has computed, and any of them may have been the first."""
        n = self._generation.n
        firsts = choices[::n]
        return CompletionUsage(
            sum(choice.prompt.tokens for choice in firsts),
            sum(choice.answer.count for choice in choices),
            sum(min(choice.cached_tokens for choice in choices[at : at + n]) for at in range(0, len(choices), n)),
            sum(choice.answer.reasoning_tokens for choice in choices),
        )

    def stages(self, choices: Sequence[AnswerAttempts]) -> dict[str, Any]:
        """Where the time went, in µs: the gateway's own stages, and the engine's for each choice."""

        def span_us(start_ns: int, end_ns: int) -> int:
            return max(0, end_ns - start_ns) // 1000 if start_ns and end_ns else 0

        return {
            "gateway": {
                "tokenize_us": span_us(self.received_ns, self.tokenized_ns),
                "schedule_us": span_us(self.tokenized_ns, self.scheduled_ns),
                "first_token_us": span_us(self.scheduled_ns, self.first_token_ns),
                "first_write_us": span_us(self.first_token_ns, self.first_write_ns),
            },
            "choices": [
                {
                    "attempts": choice.attempt + 1,
                    "migrations": choice.recovery.migrations,
                    "exact": choice.exact,
                    "prefill_instance": choice.placement.prefill.instance_id if choice.placement else "",
                    "decode_instance": choice.placement.decode.instance_id if choice.placement else "",
                    "stages": {name: getattr(choice.timings, name) for name in _STAGES},
                }
                for choice in choices
            ],
        }
