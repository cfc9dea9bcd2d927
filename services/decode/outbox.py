"""What one gateway is to be told, gathered until its stream takes it; tokens beyond a request's credit wait here.

Pure and on the per-token path: a token costs a few list appends; a whole engine step becomes one message.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvmesh.errors import KvmeshError
from kvmesh.ranks.protocol import Logprobs
from kvmesh.services.decode.events import Reason
from kvmesh.services.decode.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Finish:
    """A complete answer."""

    reason: Reason
    prompt_tokens: int
    completion_tokens: int
    times: Timeline


@dataclass(slots=True)
class OutgoingTokens:
    """One message's worth: parallel lists, one entry a token; then what began, finished and failed."""

    slots: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by position in the lists
    prefilled: list[tuple[int, Timeline]] = field(default_factory=list)
    finished: list[tuple[int, Finish]] = field(default_factory=list)
    failed: list[tuple[int, KvmeshError]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.slots or self.prefilled or self.finished or self.failed)


class Outbox:
    """One gateway's. Owned by the session that drains it."""

    def __init__(self, session: int) -> None:
        self.session = session
        self.parcel = OutgoingTokens()
        self.streams: dict[int, GatewayStream] = {}

    def open(self, slot: int, handle: int, credit: int, deadline_ns: int) -> GatewayStream:
        """A request begins. KeyError: the slot is in use."""
        if slot in self.streams:
            raise KeyError(slot)
        stream = self.streams[slot] = GatewayStream(self, slot, handle, credit, deadline_ns)
        return stream

    def refuse(self, slot: int, error: KvmeshError) -> None:
        """A request that never began."""
        self.parcel.failed.append((slot, error))

    def take(self) -> OutgoingTokens:
        """Everything gathered so far; the caller has it from here on."""
        parcel, self.parcel = self.parcel, OutgoingTokens()
        return parcel


class GatewayStream:
    """One request's way to its gateway. It ends once: with Finish after its last token, or with an error."""

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
        """Send a token, or keep it until there is credit; True when there is something to send."""
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
        """More tokens may be sent; True when some go now."""
        self.credit += tokens
        sent = bool(self._backlog) and self.credit > 0
        while self._backlog and self.credit > 0:
            self.credit -= 1
            self._send(*self._backlog.popleft())
        self._close_if_complete()
        return sent

    def prefilled(self, times: Timeline) -> None:
        """Goes before the first token."""
        self.box.parcel.prefilled.append((self.slot, times))

    def finish(self, end: Finish) -> None:
        """The answer is complete; told after the last token."""
        self._end = end
        self._close_if_complete()

    @property
    def held_back(self) -> bool:
        """Finished, but the gateway has not made room for all of it."""
        return self._end is not None and self.box.streams.get(self.slot) is self

    def _close_if_complete(self) -> None:
        if self._end is not None and not self._backlog and self.box.streams.get(self.slot) is self:
            self.box.parcel.finished.append((self.slot, self._end))
            del self.box.streams[self.slot]

    def fail(self, error: KvmeshError) -> None:
        """End with an error; tokens without credit are dropped."""
        if self.box.streams.get(self.slot) is self:
            self.box.parcel.failed.append((self.slot, error))
            del self.box.streams[self.slot]
        self._backlog.clear()
