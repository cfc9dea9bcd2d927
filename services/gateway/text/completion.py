"""One answer as it grows: token ids in, readable text out, cut at stop strings, logprobs beside their text."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from kvmesh.services.gateway.text.answers.parsed import AnswerParser, CallDelta, Parsed
from kvmesh.services.gateway.text.detokenize import Detokenizer
from kvmesh.services.gateway.text.stops import StopMatcher

STOP = "stop"
LENGTH = "length"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's logprob and those of the best alternatives; `start` is where its text begins in the
    answer, in characters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    start: int


@dataclass(slots=True)
class Delta:
    """What a few tokens added to an answer. `finish` is set on the last one; `token_ids` are those that
    arrived, up to the one that completed a stop; their text may be cut or not readable yet."""

    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""
    first: int = 0
    """Index in the answer of `token_ids[0]`."""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def shows(self) -> bool:
        """Whether there is something to send."""
        return bool(self.text or self.reasoning or self.calls or self.logprobs or self.finish)

    def add(self, parsed: Parsed) -> None:
        """Appends what a parser made of more text."""
        self.text += parsed.content
        self.reasoning += parsed.reasoning
        self.calls += parsed.calls


class WholeAnswer:
    """Gathers the deltas of an answer that is not streamed."""

    __slots__ = ("_arguments", "_calls", "_reasoning", "_texts", "entries")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[list[str]] = []
        self.entries: list[TokenLogprob] = []

    def add(self, delta: Delta) -> None:
        """Appends a delta."""
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self.entries += delta.logprobs
        for call in delta.calls:
            if call.index == len(self._calls):
                self._calls.append(call)
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[CallDelta]:
        """Whole calls, in order."""
        return [
            replace(call, arguments="".join(parts)) for call, parts in zip(self._calls, self._arguments, strict=True)
        ]


Alternatives = tuple[float, tuple[tuple[int, float], ...]]
"""A sampled token's logprob, and (token id, logprob) of the best others."""


class Completion:
    """The state of one choice. `silent` tokens end answers and are never shown (EOS). With `parser` the text of deltas
    is what it calls content; reasoning and calls stand beside it. With `scores_end` the logprobs of silent tokens are
    told, too."""

    __slots__ = (
        "_detokenizer", "_matcher", "_parser", "_read", "_scores_end", "_shown", "_silent", "_waiting", "finish",
        "logprob", "reasoning_tokens", "said",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None = None,
        silent: Collection[int] = (),
        parser: AnswerParser | None = None,
        *,
        scores_end: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._silent = silent
        self._parser = parser
        self._scores_end = scores_end
        self.reasoning_tokens = 0
        self.logprob = 0.0
        """Of all tokens taken; 0 where none were told."""
        self._read = 0  # characters detokenized
        self._shown = 0  # characters handed out
        self._waiting: list[TokenLogprob] = []
        self.said = array("I")
        """Tokens taken."""
        self.finish = ""
        """"stop" once a stop string was found, or as `end` was told."""

    @property
    def count(self) -> int:
        """How many tokens were taken."""
        return len(self.said)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the answer; "" when something else did."""
        return "" if self._matcher is None else self._matcher.found

    @property
    def mean_logprob(self) -> float:
        """The log-probability a token."""
        return self.logprob / max(1, len(self.said))

    def settled(self, max_tokens: int) -> str:
        """Returns how the engine must have ended an answer whose end was not heard; "" when it goes on."""
        if self.said and self.said[-1] in self._silent:
            return STOP
        return LENGTH if len(self.said) >= max_tokens else ""

    def push(self, token_ids: Sequence[int], logprobs: Sequence[Alternatives] = ()) -> Delta:
        """Take tokens; sets `finish` when their text completes a stop string, and drops the tokens after it."""
        first = len(self.said)
        if self._matcher is None and not logprobs and self._parser is None:
            self.said.extend(token_ids)
            visible = [token for token in token_ids if token not in self._silent]
            return Delta(self._show(self._detokenizer.push(visible)), token_ids=token_ids, first=first)
        delta = Delta(first=first)
        for index, token in enumerate(token_ids):
            self.reasoning_tokens += self._parser is not None and self._parser.reasoning
            self.logprob += logprobs[index][0] if logprobs else 0.0
            self._add(delta, self._one(token, logprobs[index] if logprobs else None))
            if self.finish:
                token_ids = token_ids[: index + 1]
                break
        self.said.extend(token_ids)
        delta.token_ids = token_ids
        self._settle(delta)
        return delta

    def end(self, finish: str) -> Delta:
        """The engine is done: whatever was held back is text. Sets `finish`, unless a stop string was first."""
        delta = Delta(first=len(self.said))
        self._add(delta, self._show(self._detokenizer.finish()))
        if self._matcher is not None and not self._matcher.stopped:
            rest = self._matcher.finish()
            self._shown += len(rest)
            self._add(delta, rest)
        self.finish = self.finish or finish
        self._settle(delta)
        delta.logprobs += self._waiting  # tokens without text at the very end
        self._waiting = []
        return delta

    def _add(self, delta: Delta, text: str) -> None:
        if self._parser is None:
            delta.text += text
        elif text:
            delta.add(self._parser.feed(text))

    def _one(self, token_id: int, logprob: Alternatives | None) -> str:
        silent = token_id in self._silent
        if logprob is not None and (self._scores_end or not silent):
            self._waiting.append(TokenLogprob(token_id, logprob[0], logprob[1], self._read))
        if silent:
            return ""
        return self._show(self._detokenizer.push((token_id,)))

    def _show(self, text: str) -> str:
        self._read += len(text)
        if self._matcher is not None:
            text = self._matcher.push(text)
            if self._matcher.stopped:
                self.finish = self.finish or STOP
        self._shown += len(text)
        return text

    def _settle(self, delta: Delta) -> None:
        """Logprobs go with the first character of their text; those of cut text never go."""
        ready = 0
        while ready < len(self._waiting) and self._waiting[ready].start < self._shown:
            ready += 1
        delta.logprobs, self._waiting = self._waiting[:ready], self._waiting[ready:]
        if self._matcher is not None and self._matcher.stopped:
            self._waiting = []
        delta.finish = self.finish
        if self.finish and self._parser is not None:
            delta.add(self._parser.finish())
