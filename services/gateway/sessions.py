"""One multiplexed Session stream per decode instance: starts, cancels and credit out; tokens of each step in.

A Session lives as long as its stream. When the stream breaks, every request in it fails with HandoffLost and the
next request opens a new Session. Slots name requests within a Session and are never used twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from kvmesh.errors import KvmeshError, Unavailable
from kvmesh.rpc import protocol, status
from kvmesh.rpc.bidi import ClientStream
from kvmesh.rpc.pb import common_pb2, decode_pb2, decode_pb2_grpc
from kvmesh.services.gateway.text.completion import Alternatives
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

_LAST_SLOT = 2**32 - 1

Key = tuple[str, int]
"""(instance_id, incarnation)."""


class SessionSink(Protocol):
    """Whoever gets a request's tokens. Called from the Session's reader; must not block nor raise."""

    def on_prefilled(
        self, cached_tokens: int, timings: common_pb2.StageTimings, scores: common_pb2.PromptLogprobs | None
    ) -> None:
        """`scores` are None where none are told."""
        ...

    def on_token(self, token_id: int, token_index: int, logprobs: Alternatives | None) -> None: ...

    def on_finished(self, finished: decode_pb2.Finished) -> None: ...

    def on_failed(self, err: KvmeshError, *, at_decode: bool) -> None:
        """`at_decode`: the decode instance itself is the suspect."""
        ...


class SessionLane:
    """One request's place in a Session."""

    __slots__ = ("_session", "slot")

    def __init__(self, session: Session, slot: int) -> None:
        self._session = session
        self.slot = slot

    def cancel(self, reason: str) -> None:
        """Tell decode to drop the request; its sink hears nothing more. Again, or after the end: nothing."""
        self._session.cancel(self.slot, reason)

    def grant(self, tokens: int) -> None:
        """Let decode send `tokens` more."""
        self._session.grant(self.slot, tokens)


class Session:
    """An open stream to one incarnation of a decode instance."""

    def __init__(self, ref: common_pb2.InstanceRef, on_end: Callable[[Session], None]) -> None:
        self.ref = ref
        self.key: Key = (ref.instance_id, ref.incarnation)
        self.error: KvmeshError | None = None
        self.leaving = False
        self.closing = False
        self._on_end = on_end
        self._sinks: dict[int, SessionSink] = {}
        self._next_slot = 1
        self._stream = ClientStream[decode_pb2.SessionRequest, decode_pb2.SessionResponse](
            f"decode instance {ref.instance_id} at {ref.address}",
            ref.address,
            lambda channel: decode_pb2_grpc.DecodeStub(channel).Session(),
        )
        self._reader: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        return self.error is None and not self.leaving and self._next_slot <= _LAST_SLOT

    @property
    def idle(self) -> bool:
        return not self._sinks

    async def open(self, gateway_id: str, incarnation: int, timeout_s: float) -> None:
        """Dial and exchange Hellos. Unavailable: nobody (or another incarnation) answers there; ProtocolMismatch."""
        hello = decode_pb2.SessionHello(
            protocol_version=protocol.PROTOCOL_VERSION, gateway_id=gateway_id, incarnation=incarnation
        )
        first = await self._stream.open(decode_pb2.SessionRequest(hello=hello), timeout_s)
        met = first.hello.instance
        if (met.instance_id, met.incarnation) != self.key:
            who = self._stream.who
            raise Unavailable(f"{who} is another life now ({met.instance_id}, incarnation {met.incarnation})")
        self._reader = asyncio.create_task(self._read(), name=f"session {self.ref.instance_id}")

    def start(self, sink: SessionSink, request: decode_pb2.StartRequest) -> SessionLane:
        """Send `request` in a new slot. Raises the session's error when it is broken."""
        if self.error is not None:
            raise self.error
        slot = self._next_slot
        self._next_slot += 1
        request.slot = slot
        self._sinks[slot] = sink
        self._send(decode_pb2.SessionRequest(start=request))
        return SessionLane(self, slot)

    def cancel(self, slot: int, reason: str) -> None:
        """See SessionLane."""
        if self._sinks.pop(slot, None) is not None:
            self._send(decode_pb2.SessionRequest(cancel=decode_pb2.CancelRequest(slot=slot, reason=reason)))
            self._settle()

    def grant(self, slot: int, tokens: int) -> None:
        """See SessionLane."""
        if slot in self._sinks:
            self._send(decode_pb2.SessionRequest(credit=decode_pb2.Credit(slot=slot, tokens=tokens)))

    def retire(self) -> None:
        """No new requests; ends once the running ones have."""
        self.leaving = True
        self._settle()

    def _settle(self) -> None:
        if self.leaving and self.idle and self.error is None:
            self.break_(Unavailable(f"decode instance {self.ref.instance_id} has left"))

    def _send(self, message: decode_pb2.SessionRequest) -> None:
        if self.error is None:
            self._stream.send(message)

    def break_(self, err: KvmeshError) -> None:
        """The stream is of no more use: every request in it fails with `err`. Idempotent."""
        if self.error is not None:
            return
        self.error = err
        sinks, self._sinks = self._sinks, {}
        if sinks:
            log.warning("session to %s ends with %d requests: %s", self.ref.instance_id, len(sinks), err)
        for sink in sinks.values():
            sink.on_failed(err, at_decode=True)
        self._on_end(self)

    async def close(self) -> None:
        """Break it if it lives; afterwards no task nor socket of it is left."""
        self.break_(Unavailable("the gateway closes this session"))
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._stream.close()

    async def _read(self) -> None:
        self.break_(await self._stream.read(self._dispatch))

    def _dispatch(self, message: decode_pb2.SessionResponse) -> None:
        sinks = self._sinks
        for one in message.prefilled:
            if sink := sinks.get(one.slot):
                scores = one.prompt_logprobs if one.HasField("prompt_logprobs") else None
                sink.on_prefilled(one.cached_tokens, one.timings, scores)
        tokens = message.tokens
        if tokens.slot:
            logprobs = _logprobs(tokens.logprobs, len(tokens.slot))
            for slot, token_id, index, logprob in zip(
                tokens.slot, tokens.token_id, tokens.token_index, logprobs, strict=True
            ):
                if sink := sinks.get(slot):
                    sink.on_token(token_id, index, logprob)
        for finished in message.finished:
            if sink := sinks.pop(finished.slot, None):
                sink.on_finished(finished)
        for failed in message.failed:
            if sink := sinks.pop(failed.slot, None):
                sink.on_failed(status.from_detail(failed.error), at_decode=False)
        if self.leaving:
            self._settle()


def _logprobs(entries: Sequence[common_pb2.TokenLogprobs], tokens: int) -> Sequence[Alternatives | None]:
    if not entries:
        return (None,) * tokens
    return [(entry.logprob, tuple((top.token_id, top.logprob) for top in entry.top)) for entry in entries]


class Sessions:
    """All Sessions of this gateway; owns them and their closing."""

    def __init__(self, gateway_id: str, incarnation: int, timeout_s: float) -> None:
        self._gateway_id = gateway_id
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._open: dict[Key, Session] = {}  # where new requests go
        self._living: set[Session] = set()  # those, and older ones whose requests go on
        self._opening: dict[Key, asyncio.Task[Session]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._open)

    async def get(self, ref: common_pb2.InstanceRef) -> Session:
        """The Session to that incarnation, opened if need be (once, for all who wait)."""
        key = (ref.instance_id, ref.incarnation)
        session = self._open.get(key)
        if session is not None and session.usable:
            return session
        if self._closed:
            raise Unavailable("the gateway is shutting down")
        task = self._opening.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._dial(key, ref), name=f"dial {ref.instance_id}")
            self._opening[key] = task
            task.add_done_callback(lambda done: self._dialled(key, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # not the caller: `close` ended it
                raise Unavailable("the gateway is shutting down") from None
            raise

    async def _dial(self, key: Key, ref: common_pb2.InstanceRef) -> Session:
        session = Session(ref, self._ended)
        try:
            await session.open(self._gateway_id, self._incarnation, self._timeout_s)
        except BaseException:
            self._close(session)
            raise
        if session.error is not None:  # it broke before anybody could use it
            raise session.error
        self._open[key] = session
        self._living.add(session)
        names.GATEWAY_STREAMS.set(len(self._open))
        return session

    def _dialled(self, key: Key, task: asyncio.Task[Session]) -> None:
        self._opening.pop(key, None)
        if not task.cancelled():
            task.exception()  # waiters have it; nobody may be waiting any more

    def _ended(self, session: Session) -> None:
        self._living.discard(session)
        if self._open.get(session.key) is session:
            del self._open[session.key]
            names.GATEWAY_STREAMS.set(len(self._open))
        self._close(session)

    def _close(self, session: Session) -> None:
        if session.closing:
            return
        session.closing = True
        task = asyncio.get_running_loop().create_task(session.close(), name=f"close {session.ref.instance_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def keep_only(self, living: Collection[Key]) -> None:
        """Retire the Sessions of instances that are not among `living` any more."""
        for key, session in list(self._open.items()):
            if key not in living:
                session.retire()

    async def close(self) -> None:
        """Break everything; nothing is left afterwards."""
        self._closed = True
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        for session in list(self._living):
            session.break_(Unavailable("the gateway is shutting down"))
        while self._closing:
            await asyncio.gather(*list(self._closing), return_exceptions=True)
