"""One answer and its attempts: what has arrived, what the next starts from, where it runs. A SessionSink."""

from __future__ import annotations

from array import array
from typing import Protocol

from kvmesh.errors import HandoffLost, InternalError, KvmeshError, Overloaded, Paused, WeightsChanged
from kvmesh.kvcache.keys import TOKEN_BYTES, Namespace, chain_tip, extend, pack_tokens
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2
from kvmesh.services.gateway.migration import Migration
from kvmesh.services.gateway.recovery import AttemptRecovery, Failure, RecoveryPatience
from kvmesh.services.gateway.sessions import SessionLane
from kvmesh.services.gateway.text.completion import LENGTH, STOP, Alternatives, Completion, Delta, WholeAnswer
from kvmesh.services.gateway.text.prepare import Prepared
from kvmesh.services.gateway.text.prompt_logprobs import ScoredPrompt
from kvmesh.telemetry import names

# What an attempt starts from: the prompt, and what came of its answer before. Pure.


class ResumePoint:
    """`token_ids`, `keys` and `chain_digest` as in Prepared, over the prompt and the first `answered` tokens of its
    answer. What was hashed once is not hashed again."""

    __slots__ = ("_step", "answered", "chain_digest", "keys", "token_ids", "tokens", "weights_epoch")

    def __init__(self, prompt: Prepared, block_tokens: int) -> None:
        self._step = block_tokens * TOKEN_BYTES
        self.answered = 0
        self.tokens = prompt.tokens
        self.token_ids = prompt.token_ids
        self.keys = prompt.keys
        self.chain_digest = prompt.chain_digest
        self.weights_epoch = prompt.weights_epoch

    def follow(self, namespace: Namespace, block_tokens: int) -> None:
        """Name the blocks as those of other weights are named: none that older weights have made is found by these."""
        self.keys, self.chain_digest = chain_tip(namespace, self.token_ids, block_tokens)
        self.weights_epoch = namespace.weights_epoch

    def extend(self, said: array[int]) -> None:
        """Carry `said`, the whole answer so far: it begins with what is carried already."""
        hashed = self.tokens * TOKEN_BYTES // self._step * self._step
        new = said[self.answered :]
        self.answered += len(new)
        self.tokens += len(new)
        self.token_ids += pack_tokens(new)
        keys, view = [self.keys], memoryview(self.token_ids)
        for end in range(hashed + self._step, len(view) + 1, self._step):
            key, self.chain_digest = extend(self.chain_digest, view[end - self._step : end])
            keys.append(key)
        self.keys = b"".join(keys)


_REASONS: dict[int, str] = {common_pb2.FINISH_REASON_STOP: STOP, common_pb2.FINISH_REASON_LENGTH: LENGTH}


class AttemptOwner(Protocol):
    """The request that a choice belongs to."""

    @property
    def credit_tokens(self) -> int:
        """Tokens that may be on the way and not yet taken."""
        ...

    @property
    def served_model(self) -> str:
        """The name that metrics have."""
        ...

    @property
    def wants_logprobs(self) -> bool: ...

    @property
    def prompt_logprobs(self) -> int:
        """How many others are wanted beside each token of the prompt; -1: no log-probabilities of it are."""
        ...

    @property
    def prompt_only(self) -> bool:
        """Whether the answer is to have no token."""
        ...

    @property
    def patience(self) -> RecoveryPatience:
        """With attempts that fail."""
        ...

    @property
    def goes_on_exactly(self) -> bool:
        """Whether an answer that goes on elsewhere is the one that it would have been."""
        ...

    @property
    def block_tokens(self) -> int: ...

    def touch(self, choice: AnswerAttempts) -> None:
        """`choice` has something to take."""
        ...

    def new_answer(self, prompt: Prepared) -> Completion:
        """An empty answer to `prompt`."""
        ...


class AnswerAttempts:
    """`delivered`: the client has seen some of it; `done`: the answer is whole; `max_tokens`: of the whole answer.

    An attempt counts its tokens from 0; those that came before it are `carried`. Only one attempt has a lane, and only
    through its lane can tokens come."""

    __slots__ = (
        "_consumed", "_expected", "_finished", "_granted", "_logprobs", "_problem", "_suspects", "_taken", "_tokens",
        "_told_intervals", "_told_tokens", "_touched", "_watched", "_watched_since", "answer", "attempt", "avoid",
        "cached_tokens", "carried", "delivered", "done", "epochs", "exact", "index", "lane", "last_token", "max_tokens",
        "migration", "owner", "placement", "prompt", "recovery", "scored_prompt", "seed", "timings", "whole",
    )  # fmt: skip

    def __init__(self, owner: AttemptOwner, index: int, prompt: Prepared, seed: int, max_tokens: int) -> None:
        self.owner = owner
        self.index = index
        self.prompt = prompt
        self.seed = seed
        self.max_tokens = max_tokens
        self.attempt = 0
        self.avoid: list[str] = []
        self.placement: conductor_pb2.Placement | None = None
        self.recovery = AttemptRecovery(owner.patience)
        self.migration: Migration | None = None
        self.done = False
        self.delivered = False
        self._told_tokens = names.GATEWAY_OUTPUT_TOKENS.labels(owner.served_model)
        self._told_intervals = names.GATEWAY_TBT.labels(owner.served_model)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget whatever earlier attempts brought."""
        self.answer = self.owner.new_answer(self.prompt)
        self.carried = ResumePoint(self.prompt, self.owner.block_tokens)
        self.cached_tokens = 0
        self.scored_prompt: ScoredPrompt | None = None
        self.whole = WholeAnswer()
        self.exact = True  # see AttemptOwner.goes_on_exactly
        self.epochs: list[tuple[int, int]] = []  # (its first token, weights epoch), as they have changed
        self.last_token = 0.0
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        """After what is carried."""
        self.lane: SessionLane | None = None
        self.timings = common_pb2.StageTimings()
        self._tokens: list[int] = []
        self._logprobs: list[Alternatives] = []
        self._expected = 0
        self._consumed = 0
        self._granted = self.owner.credit_tokens
        self._taken = False
        self._finished: decode_pb2.Finished | None = None
        self._problem: KvmeshError | None = None
        self._suspects: list[str] = []
        self._touched = False
        self._watched: tuple[int, int] | None = None
        self._watched_since = 0.0

    # ── from the session ──────────────────────────────────────────────────────────────────────────

    def started(self, lane: SessionLane) -> None:
        """An instance has it now, unless its session broke at once."""
        self._taken = True
        self.lane = lane if self._problem is None else None

    @property
    def asks_for_scores(self) -> bool:
        """Whether its next attempt is to tell the log-probabilities of the prompt."""
        return self.owner.prompt_logprobs >= 0 and self.scored_prompt is None

    def on_prefilled(
        self, cached_tokens: int, timings: common_pb2.StageTimings, scores: common_pb2.PromptLogprobs | None
    ) -> None:
        """See SessionSink."""
        if self.asks_for_scores:
            try:
                if scores is None:
                    raise InternalError("no log-probabilities of the prompt came")
                self.scored_prompt = ScoredPrompt(scores, self.prompt.token_ids)
            except InternalError as err:
                self._fail(err, [self._prefill, self.decode_instance])
        if not self.carried.answered:  # the client's prompt, not what is carried
            self.cached_tokens = cached_tokens
        self.timings = timings

    def on_token(self, token_id: int, token_index: int, logprobs: Alternatives | None) -> None:
        """See SessionSink. Tokens come in order, each once: a repeated one is dropped, a gap is an error."""
        if token_index != self._expected:
            if token_index > self._expected:
                at = self.carried.answered
                gap = f"token {at + self._expected} of the answer is missing (got {at + token_index})"
                self._fail(InternalError(gap), [self.decode_instance])
            return
        if not self._expected:
            self._note_epoch()
        self._expected += 1
        self._tokens.append(token_id)
        if self.owner.wants_logprobs:
            self._logprobs.append(logprobs or (0.0, ()))
        if not self._touched:
            self._touched = True
            self.owner.touch(self)

    def _note_epoch(self) -> None:
        """The first token of an attempt has come: it and those behind it are of the weights that it was made for, as
        no instance takes a request for others, nor changes its weights while it has one."""
        epoch = self.carried.weights_epoch
        if not self.epochs or self.epochs[-1][1] != epoch:
            self.epochs.append((self.carried.answered, epoch))

    def epochs_of(self, first: int, count: int) -> list[tuple[int, int]]:
        """Returns by which weights so many tokens were made from `first` on, each pair with its first token among
        them; [] while only the checkpoint's own have been."""
        if not count or all(epoch == 0 for _, epoch in self.epochs):
            return []
        ends = [start for start, _ in self.epochs[1:]] + [first + count]
        return [
            (max(start, first), epoch)
            for (start, epoch), end in zip(self.epochs, ends, strict=True)
            if start < first + count and end > first
        ]

    def on_finished(self, finished: decode_pb2.Finished) -> None:
        """See SessionSink."""
        self._finished = finished
        if not self.carried.answered:
            self.cached_tokens = finished.cached_tokens
        self.timings = finished.timings
        self.owner.touch(self)

    def on_failed(self, err: KvmeshError, *, at_decode: bool) -> None:
        """See SessionSink."""
        self.lane = None
        self._fail(err, self._suspected(err, at_decode=at_decode))

    def refused(self, err: KvmeshError) -> None:
        """The conductor knows no place for it."""
        self.lane = None
        self._fail(err, [])

    def _suspected(self, err: KvmeshError, *, at_decode: bool) -> list[str]:
        """Instances to be avoided next: whoever may have failed it."""
        if isinstance(err, Paused | WeightsChanged):
            return []
        if at_decode or isinstance(err, Overloaded):
            return [self.decode_instance]
        if isinstance(err, HandoffLost):
            return [self._prefill]
        # Refused at a door, which may be either one's; once tokens came prefill's part was over.
        return [self.decode_instance] if self._expected > 1 else [self._prefill, self.decode_instance]

    @property
    def decode_instance(self) -> str:
        """The decode instance of the attempt under way; "": none is placed."""
        return self.placement.decode.instance_id if self.placement is not None else ""

    @property
    def _prefill(self) -> str:
        return self.placement.prefill.instance_id if self.placement is not None else ""

    def _fail(self, err: KvmeshError, suspects: list[str]) -> None:
        self._problem = self._problem or err
        self._suspects = suspects
        self.owner.touch(self)

    # ── for the request ───────────────────────────────────────────────────────────────────────────

    def take(self, now: float) -> Delta:
        """What arrived since the last call; a failed attempt's last words, too. See `failure`."""
        self._touched = False
        if self._problem is not None and not self.owner.patience.max_migrations:
            return Delta()  # it ends, or is made anew: either way they are of no use
        tokens, self._tokens = self._tokens, []
        logprobs, self._logprobs = self._logprobs, []
        if self.owner.prompt_only:
            tokens = []  # an attempt makes one at least
        delta = self.answer.push(tokens, logprobs) if tokens else Delta(first=self.answer.count)
        if tokens:
            self._account(len(tokens), now)
        if self.answer.finish:
            self.cancel("a stop string was found")
        elif self._finished is not None:
            self._end(delta, self._finished)
        elif self._problem is not None and self._problem.retryable:
            self._close(delta, self.answer.settled(self.max_tokens))
        self.done = bool(delta.finish)
        return delta

    def _end(self, delta: Delta, finished: decode_pb2.Finished) -> None:
        self.lane = None
        if finished.completion_tokens != self._expected:
            wrong = f"decode made {finished.completion_tokens} tokens, {self._expected} arrived"
            self._fail(InternalError(wrong), [self.decode_instance])
            return
        self._close(delta, LENGTH if self.owner.prompt_only else _REASONS.get(finished.reason, STOP))

    def _close(self, delta: Delta, finish: str) -> None:
        """The answer is whole; `finish` "": it is not."""
        if finish:
            last = self.answer.end(finish)
            delta.text += last.text
            delta.reasoning += last.reasoning
            delta.calls += last.calls
            delta.logprobs += last.logprobs
            delta.finish = last.finish

    def _account(self, tokens: int, now: float) -> None:
        if self.last_token:
            gap = (now - self.last_token) / tokens
            for _ in range(tokens):
                self._told_intervals.observe(gap)
        self.last_token = now
        self._told_tokens.inc(tokens)
        self._consumed += tokens
        if 2 * self._consumed >= self.owner.credit_tokens and self.lane is not None:
            self.lane.grant(self._consumed)
            self._granted += self._consumed
            self._consumed = 0

    def failure(self) -> Failure | None:
        """What became of the attempt, once; None: it goes on, or has ended well."""
        error, self._problem = self._problem, None
        if error is None or self.done:
            return None
        return Failure(
            error,
            self.decode_instance,
            answered=self.answer.count,
            fresh=self.answer.count - self.carried.answered,
            delivered=self.delivered,
            taken=self._taken,
        )

    def again(self, *, anew: bool) -> None:
        """Prepare the next attempt: `anew`, or after what has come."""
        self.cancel("this attempt failed")
        fresh = self.answer.count - self.carried.answered
        # Whoever failed it long ago may be well again.
        kept = [] if fresh else self.avoid
        self.avoid = list(dict.fromkeys(name for name in (*kept, *self._suspects) if name))
        self.attempt += 1
        if anew:
            self._begin_anew()
        else:
            self.exact = self.exact and self.owner.goes_on_exactly
            self.carried.extend(self.answer.said)
            self._begin_attempt()

    @property
    def has_news(self) -> bool:
        """Something has arrived and was not taken."""
        return bool(self._tokens) or self._finished is not None or self._problem is not None

    def cancel(self, reason: str) -> None:
        """Have decode drop it, if decode has it."""
        if self.lane is not None:
            self.lane.cancel(reason)
            self.lane = None

    def watch(self, now: float, timeout_s: float) -> None:
        """Look, now and then, whether tokens still come. The attempt has failed when there were some, decode may send
        more, and for `timeout_s` none came."""
        may_send = 0 < self._expected < self._granted and self.lane is not None and self._finished is None
        state = (self._expected, self._granted) if may_send else None
        if state is None or state != self._watched:
            self._watched, self._watched_since = state, now
        elif now - self._watched_since >= timeout_s:
            silent = f"decode instance {self.decode_instance} has sent no token for token_timeout_s={timeout_s:g}"
            self.cancel(silent)
            self.on_failed(HandoffLost(silent), at_decode=True)
