"""What a client wants, whichever door it came through: the domain of the gateway's brain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.protocol import (
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_GRAMMAR_BYTES,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
)
from kvmesh.services.gateway.config import GatewayLimits
from kvmesh.services.gateway.text.chat import Chat
from kvmesh.services.gateway.text.grammars.asked import AskedForm

MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 2.0
PRIORITY_BOUND = 2**31 - 1
MAX_SALT_CHARS = 256
MAX_SLO_MS = 24 * 3600 * 1000
MAX_BELONGING_CHARS = 256  # of a session's or an origin's name
INTERACTIVE, BATCH = LANES = ("interactive", "batch")
# The batch lane stands so many steps of priority behind the others: what it yields to conductor's reckoning, prefill's
# line and decode's seats must see, too.
BATCH_STEPS = 20
MAX_VOCABULARY = 2**32 - 1

Prompt = str | list[int] | Chat
"""Text, token ids, or a chat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One validated request: `n` answers to each prompt."""

    model: str
    prompts: tuple[Prompt, ...]
    max_tokens: int | None = None  # None: what the context leaves
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    seed: int | None = None
    ignore_eos: bool = False
    form: AskedForm | None = None  # of every answer
    parsed: bool = False  # answers are told as content, reasoning and tool calls
    stops: tuple[str, ...] = ()
    logprobs: int = -1  # -1: none; n: the sampled token's and those of n alternatives
    prompt_logprobs: int = -1  # -1: none; n: those of the prompt's tokens and of n others beside each
    n: int = 1
    returned: int | None = None  # of the n, so many: those with the highest log-probability a token; None: all
    echo: bool = False
    cache_salt: str = ""
    priority: int | None = None  # smaller goes first; None: 0
    timeout_s: float | None = None
    ttft_slo_ms: int | None = None  # None: the gateway's, else the model's, also the next one
    tbt_slo_ms: int | None = None
    lane: str | None = None  # None: interactive
    session: str | None = None  # requests of one conversation
    origin: str | None = None  # requests that share much of their prompts
    expected_tokens: int | None = None  # of the answer: the client's own guess
    grammar: str = ""  # that every token of an answer keeps to, in llguidance's own form; "": none

    @property
    def choices(self) -> int:
        """Answers asked for."""
        return self.n * len(self.prompts)

    @property
    def scored(self) -> bool:
        """Whether the log-probabilities of sampled tokens are needed."""
        return self.logprobs >= 0 or self.returned is not None

    @property
    def prompt_only(self) -> bool:
        """Whether no token of an answer is wanted."""
        return self.max_tokens == 0

    @property
    def is_batch(self) -> bool:
        """Whether the request takes only what nobody else wants."""
        return self.lane == BATCH

    @property
    def urgency(self) -> int:
        """The priority as the services see it: the smaller goes first."""
        return min(PRIORITY_BOUND, (self.priority or 0) + (BATCH_STEPS if self.is_batch else 0))

    def check(self, limits: GatewayLimits, *, salt_field: str = "cache_salt") -> Generation:
        """Itself, when every value is in range. InvalidRequest names field and value."""
        # A client that wants to know of its prompt may want no answer.
        between("max_tokens", self.max_tokens, 0 if self.echo or self.prompt_logprobs >= 0 else 1, MAX_TOKENS)
        between("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if not 0.0 < self.top_p <= 1.0:
            raise refused("top_p", self.top_p, "must be over 0 and at most 1")
        between("top_k", self.top_k, 0, MAX_TOKENS)
        between("min_p", self.min_p, 0.0, 1.0)
        between("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        between("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        between("repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
        _check_biases(self.logit_bias)
        if len(self.grammar) > MAX_GRAMMAR_BYTES or len(self.grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise refused("grammar", self.grammar, f"must have at most {MAX_GRAMMAR_BYTES} bytes")
        between("seed", self.seed, 0, MAX_SEED)
        between("n", self.n, 1, limits.max_choices)
        self.check_wishes()
        between("logprobs", self.logprobs, -1, MAX_TOP_LOGPROBS)
        between("prompt_logprobs", self.prompt_logprobs, -1, MAX_TOP_LOGPROBS)
        if self.choices > limits.max_choices:
            raise refused("n", self.n, f"{len(self.prompts)} prompts x n must be at most {limits.max_choices}")
        check_stops(self.stops, limits)
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise refused(salt_field, self.cache_salt, f"must have at most {MAX_SALT_CHARS} characters")
        for prompt in self.prompts:
            if isinstance(prompt, Chat):
                if not prompt.messages:
                    raise refused("messages", [], "must not be empty")
            elif not prompt:
                raise refused("prompt", prompt, "must not be empty")
        return self

    def check_wishes(self) -> None:
        """Checks the fields that headers may tell, too. Raises as `check`."""
        between("priority", self.priority, -PRIORITY_BOUND, PRIORITY_BOUND)
        between("ttft_slo_ms", self.ttft_slo_ms, 1, MAX_SLO_MS)
        between("tbt_slo_ms", self.tbt_slo_ms, 1, MAX_SLO_MS)
        between("expected_tokens", self.expected_tokens, 1, MAX_TOKENS)
        if self.lane is not None and self.lane not in LANES:
            raise refused("lane", self.lane, f"must be one of {', '.join(LANES)}")
        for name, text in (("session", self.session), ("origin", self.origin)):
            if text is not None and (len(text) > MAX_BELONGING_CHARS or not text.isprintable()):
                raise refused(name, text, f"must have at most {MAX_BELONGING_CHARS} characters, all printable")


def between(name: str, value: float | None, low: float, high: float) -> None:
    """InvalidRequest unless `value` is None or in [low, high]; NaN is in no range."""
    if value is not None and not low <= value <= high:
        raise refused(name, value, f"must be between {low} and {high}")


def _check_biases(biases: tuple[tuple[int, float], ...]) -> None:
    if len(biases) > MAX_BIASED_TOKENS:
        raise InvalidRequest(f"logit_bias: {len(biases)} tokens; at most {MAX_BIASED_TOKENS}", field="logit_bias")
    seen: set[int] = set()
    for token_id, bias in biases:
        between(f"logit_bias.{token_id}", bias, -MAX_BIAS, MAX_BIAS)
        if token_id in seen:
            raise refused(f"logit_bias.{token_id}", bias, "this token is named twice")
        seen.add(token_id)


def check_stops(stops: Any, limits: GatewayLimits, field: str = "stop") -> None:
    """InvalidRequest unless `stops` are few, short, non-empty strings. The count is looked at first."""
    if len(stops) > limits.max_stops:
        raise refused(field, stops, f"{len(stops)} stop strings; at most {limits.max_stops} are allowed")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise refused(field, stop, "a stop must be a string that is not empty")
        if len(stop) > limits.max_stop_chars:
            raise refused(field, stop, f"a stop may have at most {limits.max_stop_chars} characters")


def refused(field: str, value: Any, why: str) -> InvalidRequest:
    """InvalidRequest naming field and value, both shortened before they are printed: a value may be megabytes."""
    return InvalidRequest(f"{brief(field)}={brief_repr(value)}: {why}", field=brief(field))


def brief(text: str, limit: int = 80) -> str:
    """Returns at most `limit` characters of a name."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def brief_repr(value: Any) -> str:
    """About 80 characters that tell what `value` is, whatever its size."""
    if isinstance(value, str):
        return repr(brief(value, 60))
    if isinstance(value, dict):
        return f"{{{len(value)} keys}}" if value else "{}"
    if isinstance(value, list | tuple) and (len(value) > 3 or any(isinstance(v, list | tuple | dict) for v in value)):
        return f"[{len(value)} items]"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(brief_repr(v) if not isinstance(v, list | tuple) else "[...]" for v in value) + "]"
    return brief(repr(value))
