"""One answer's attempts: what has arrived, whether it can be made again, where it runs. A Sink of its Session."""

from __future__ import annotations

from typing import Protocol

from kvmesh.rpc.errors import InternalError, KvmeshError, Overloaded
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2
from kvmesh.telemetry import names
from services.gateway.choice import LENGTH, STOP, Alternatives, Answer, Delta, TokenLogprob
from services.gateway.prepare import Prepared
from services.gateway.sessions import Lane

_REASONS: dict[int, str] = {common_pb2.FINISH_REASON_STOP: STOP, common_pb2.FINISH_REASON_LENGTH: LENGTH}


class Owner(Protocol):
    """The request that a choice belongs to."""

    @property
    def credit_tokens(self) -> int:
        """Tokens that may be on the way and not yet taken."""
        ...

    @property
    def wants_logprobs(self) -> bool: ...

    def touch(self, choice: Choice) -> None:
        """`choice` has something to take."""
        ...

    def new_answer(self, prompt: Prepared) -> Answer:
        """An empty answer to `prompt`."""
        ...


class Choice:
    """`delivered`: the client has seen some of it, so it cannot be made again; `done`: the answer is whole."""

    __slots__ = (
        "_consumed", "_expected", "_finished", "_logprobs", "_problem", "_suspect_decode", "_tokens", "_touched",
        "answer", "attempt", "avoid", "cached_tokens", "delivered", "done", "entries", "index", "lane",
        "last_token", "owner", "placement", "prompt", "seed", "texts", "timings",
    )  # fmt: skip

    def __init__(self, owner: Owner, index: int, prompt: Prepared, seed: int) -> None:
        self.owner = owner
        self.index = index
        self.prompt = prompt
        self.seed = seed
        self.attempt = 0
        self.avoid: list[str] = []
        self.placement: conductor_pb2.Placement | None = None
        self.done = False
        self.delivered = False
        self.begin()

    def begin(self) -> None:
        """Forget whatever an earlier attempt brought."""
        self.answer = self.owner.new_answer(self.prompt)
        self.lane: Lane | None = None
        self.cached_tokens = 0
        self.timings = common_pb2.StageTimings()
        self.texts: list[str] = []
        self.entries: list[TokenLogprob] = []
        self.last_token = 0.0
        self._tokens: list[int] = []
        self._logprobs: list[Alternatives] = []
        self._expected = 0
        self._consumed = 0
        self._finished: decode_pb2.Finished | None = None
        self._problem: KvmeshError | None = None
        self._suspect_decode = False
        self._touched = False

    def on_prefilled(self, cached_tokens: int, timings: common_pb2.StageTimings) -> None:
        """See Sink."""
        self.cached_tokens = cached_tokens
        self.timings = timings

    def on_token(self, token_id: int, token_index: int, logprobs: Alternatives | None) -> None:
        """See Sink. Tokens come in order, each once: a repeated one is dropped, a gap is an error."""
        if token_index != self._expected:
            if token_index > self._expected:
                gap = f"token {self._expected} of the answer is missing (got {token_index})"
                self._fail(InternalError(gap), suspect_decode=True)
            return
        self._expected += 1
        self._tokens.append(token_id)
        if self.owner.wants_logprobs:
            self._logprobs.append(logprobs or (0.0, ()))
        if not self._touched:
            self._touched = True
            self.owner.touch(self)

    def on_finished(self, finished: decode_pb2.Finished) -> None:
        """See Sink."""
        self._finished = finished
        self.cached_tokens = finished.cached_tokens
        self.timings = finished.timings
        self.owner.touch(self)

    def on_failed(self, err: KvmeshError, *, at_decode: bool) -> None:
        """See Sink."""
        self.lane = None
        self._fail(err, suspect_decode=at_decode or isinstance(err, Overloaded))

    def _fail(self, err: KvmeshError, *, suspect_decode: bool) -> None:
        self._problem = self._problem or err
        self._suspect_decode = suspect_decode
        self.owner.touch(self)

    def take(self, now: float) -> Delta:
        """What arrived since the last call. Raises the error of a failed attempt."""
        self._touched = False
        if self._problem is not None:
            raise self._problem
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        delta = self.answer.push(tokens, logprobs) if tokens else Delta()
        if tokens:
            self._account(len(tokens), now)
        if self.answer.finish:
            self.cancel("a stop string was found")
        elif self._finished is not None:
            self._end(delta, self._finished)
        self.done = bool(delta.finish)
        return delta

    def _end(self, delta: Delta, finished: decode_pb2.Finished) -> None:
        if finished.completion_tokens != self.answer.count:
            raise InternalError(f"decode made {finished.completion_tokens} tokens, {self.answer.count} arrived")
        last = self.answer.end(_REASONS.get(finished.reason, STOP))
        delta.text += last.text
        delta.logprobs += last.logprobs
        delta.finish = last.finish
        self.lane = None

    def _account(self, tokens: int, now: float) -> None:
        if self.last_token:
            gap = (now - self.last_token) / tokens
            for _ in range(tokens):
                names.GATEWAY_TBT.observe(gap)
        self.last_token = now
        names.GATEWAY_OUTPUT_TOKENS.inc(tokens)
        self._consumed += tokens
        if 2 * self._consumed >= self.owner.credit_tokens and self.lane is not None:
            self.lane.grant(self._consumed)
            self._consumed = 0

    def retry(self) -> str:
        """Prepare the next attempt; returns why, for the metrics."""
        assert self._problem is not None, "only failed attempts are made again"
        why = self._problem.code
        self.cancel("this attempt failed")
        if self.placement is not None:
            suspect = self.placement.decode if self._suspect_decode else self.placement.prefill
            self.avoid.append(suspect.instance_id)
        self.attempt += 1
        self.begin()
        return why

    def cancel(self, reason: str) -> None:
        """Have decode drop it, if decode has it."""
        if self.lane is not None:
            self.lane.cancel(reason)
            self.lane = None
