"""Messages for one gateway are gathered here until its stream takes them. Tokens beyond a request's credit wait here.

The outbox is pure and on the path of every token: a token costs a few list appends, and a whole engine step becomes one
message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.ranks.protocol import Logprobs, PromptScores
from kvmesh.services.decode.events import Reason
from kvmesh.services.decode.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Finish:
    """Is the end of a complete answer."""

    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    times: Timeline


@dataclass(slots=True)
class OutgoingTokens:
    """Has the content of one message: parallel lists with one entry for each token, then what began, finished and
    failed."""

    slots: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by position in the lists
    prefilled: list[tuple[int, Timeline, PromptScores | None]] = field(default_factory=list)
    finished: list[tuple[int, Finish]] = field(default_factory=list)
    failed: list[tuple[int, KvmeshError]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.slots or self.prefilled or self.finished or self.failed)


class Outbox:
    """Gathers the messages for one gateway. The session that sends them owns the outbox."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.parcel = OutgoingTokens()
        self.streams: dict[int, GatewayStream] = {}

    def open(self, slot: int, handle: int, credit: int, deadline_ns: int) -> GatewayStream:
        """Opens the stream of a new request. Raises KeyError when the slot is in use."""
        if slot in self.streams:
            raise KeyError(slot)
        stream = self.streams[slot] = GatewayStream(self, slot, handle, credit, deadline_ns)
        return stream

    def refuse(self, slot: int, error: KvmeshError) -> None:
        """Fails the slot of a request that was never opened."""
        self.parcel.failed.append((slot, error))

    def take(self) -> OutgoingTokens:
        """Returns everything gathered so far; it is the caller's from here on."""
        parcel, self.parcel = self.parcel, OutgoingTokens()
        return parcel


class GatewayStream:
    """Sends one request's tokens to its gateway. A stream ends once: with Finish after the last token, or with an
    error."""

    __slots__ = ("_backlog", "_end", "box", "credit", "deadline_ns", "handle", "slot")

    def __init__(self, box: Outbox, slot: int, handle: int, credit: int, deadline_ns: int) -> None:
        self.box = box
        self.slot = slot
        self.handle = handle
        self.credit = credit
        self.deadline_ns = deadline_ns
        self._backlog: deque[tuple[int, int, Logprobs | None]] = deque()  # at most max_tokens of them
        self._end: Finish | None = None

    def push(self, token_id: int, index: int, logprobs: Logprobs | None) -> bool:
        """Sends a token, or keeps it until there is credit; returns whether there is something to send."""
        if self.credit <= 0:
            self._backlog.append((token_id, index, logprobs))
            return False
        self.credit -= 1
        self._send(token_id, index, logprobs)
        return True

    def _send(self, token_id: int, index: int, logprobs: Logprobs | None) -> None:
        parcel = self.box.parcel
        if logprobs is not None:
            parcel.logprobs[len(parcel.slots)] = logprobs
        parcel.slots.append(self.slot)
        parcel.token_ids.append(token_id)
        parcel.indices.append(index)

    def add_credit(self, tokens: int) -> bool:
        """Allows `tokens` more tokens; returns whether some are sent now."""
        self.credit += tokens
        sent = bool(self._backlog) and self.credit > 0
        while self._backlog and self.credit > 0:
            self.credit -= 1
            self._send(*self._backlog.popleft())
        self._close_if_complete()
        return sent

    def prefilled(self, times: Timeline, scores: PromptScores | None = None) -> None:
        """Reports that the prompt is computed. It must be called before the first token is pushed."""
        self.box.parcel.prefilled.append((self.slot, times, scores))

    def finish(self, end: Finish) -> None:
        """Ends a complete answer; the gateway is told after the last token."""
        self._end = end
        self._close_if_complete()

    @property
    def held_back(self) -> bool:
        """Whether the answer has finished but waits for the gateway's credit."""
        return self._end is not None and self.box.streams.get(self.slot) is self

    def _close_if_complete(self) -> None:
        if self._end is not None and not self._backlog and self.box.streams.get(self.slot) is self:
            self.box.parcel.finished.append((self.slot, self._end))
            del self.box.streams[self.slot]

    def fail(self, error: KvmeshError) -> None:
        """Ends the stream with an error; tokens that wait for credit are dropped."""
        if self.box.streams.get(self.slot) is self:
            self.box.parcel.failed.append((self.slot, error))
            del self.box.streams[self.slot]
        self._backlog.clear()
