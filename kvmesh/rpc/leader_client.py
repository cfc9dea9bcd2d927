"""Calls to a service of which one process leads: which address to call next, and by which path.

A mesh has several store masters, of which one leads, and several conductors. `LeaderTracker` is the pure book-keeping
over their addresses; `ServiceClient` calls one address over gRPC, or over the fast path what is called often;
`LeaderClient` puts both together: it calls whichever of several leads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import Any

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from kvmesh.errors import (
    DeadlinePassed,
    KvmeshError,
    NotLeader,
    ProtocolMismatch,
    StaleTerm,
    Unavailable,
)
from kvmesh.rpc import channels
from kvmesh.rpc.addresses import split
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.fastpath.caller import FastCaller, control_calls
from kvmesh.rpc.status import NotServed
from kvmesh.rpc.terms import LeaderTerms

RETRY_S = 0.05, 0.5  # after all addresses were asked in vain: first, and at most
GRPC_ONLY_S = 30.0  # after a fast path that swallowed a call: something on the way may swallow others


class LeaderTracker:
    """Knows which of several addresses to ask next, of which one leads. Pure. `terms` is shared by everything in this
    process that listens to leaders."""

    def __init__(self, addresses: str, terms: LeaderTerms | None = None, *, field: str = "store") -> None:
        """`addresses` is a list, "a:1,b:2". Raises ConfigError, which names `field`, when it holds none."""
        self.addresses = split(addresses, field)
        self.field = field
        self.terms = terms or LeaderTerms()
        self._at = 0
        self._elsewhere = ""  # a leader that was named and is not in the list
        self._failed: set[str] = set()  # since the last success

    def __str__(self) -> str:
        return ",".join(self.addresses)

    @property
    def current(self) -> str:
        """The address to ask now."""
        return self._elsewhere or self.addresses[self._at]

    def succeeded(self, term: int = 0) -> None:
        """Notes that `current` has answered. `term` is its own by its answer, 0 where answers do not say.

        Raises StaleTerm, after going on to the next address, when the answer is that of an earlier leader.
        """
        if term:
            try:
                self.terms.hear(term)
            except StaleTerm:
                self.failed()
                raise
        self._failed.clear()

    def failed(self) -> bool:
        """Goes on to the next address, because `current` does not answer or cannot. Returns True when all have been
        tried since the last success, so that the caller waits before it asks again."""
        self._failed.add(self.current)
        if self._elsewhere:
            self._elsewhere = ""
        else:
            self._at = (self._at + 1) % len(self.addresses)
        if not self._failed.issuperset(self.addresses):
            while self.addresses[self._at] in self._failed:
                self._at = (self._at + 1) % len(self.addresses)
            return False
        self._failed.clear()
        return True

    def redirected(self, leader: str) -> bool:
        """Goes on to `leader`, which `current` named as the leader ("" if it does not know). Returns what `failed`
        does. A leader that has failed since the last success is not tried again, so that two masters cannot send a
        caller back and forth for ever."""
        before = self.current
        if not leader or leader == before or leader in self._failed:
            return self.failed()
        self._failed.add(before)
        if leader in self.addresses:
            self._at, self._elsewhere = self.addresses.index(leader), ""
        else:
            self._elsewhere = leader
        return False

    def move_on(self, error: KvmeshError) -> bool:
        """Does what `failed` or `redirected` does, depending on `error`."""
        return self.redirected(error.leader) if isinstance(error, NotLeader) else self.failed()


def moves_on(error: KvmeshError) -> bool:
    """Says whether another master, or the same one a little later, may answer what this one refused."""
    return isinstance(error, NotLeader | StaleTerm | Unavailable | DeadlinePassed)


_SERVED_BY = {"kvmesh.v1.StoreMaster": ServerRole.STORE, "kvmesh.v1.Conductor": ServerRole.CONDUCTOR}


class ServiceClient:
    """Calls one service at one address at a time. It is open from `connect` to `close`, any number of times, and keeps
    what it learnt of fast paths. Methods in `fast`, which are called often, use the fast path while there is one; the
    others use gRPC. It lives on one event loop."""

    def __init__(
        self, service: ServiceDescriptor, fast: Collection[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._fast = frozenset(fast)
        self._clock = clock
        self._address = ""
        self._channel: grpc.aio.Channel | None = None
        self._calls: FastCaller | None = None
        self._grpc_only_until = float("-inf")

    @property
    def address(self) -> str:
        """The address that it is connected to, "" while it is closed."""
        return self._address

    def connect(self, address: str) -> None:
        """Opens the client, which must be closed. The first call makes the connection itself."""
        assert self._channel is None, f"it is connected to {self._address}"
        self._address = address
        self._channel = channels.connect(address, _SERVED_BY.get(self._service.full_name, ServerRole.MEMBER))
        self._calls = control_calls(address, self._channel, self._service)

    @property
    def via_fastpath(self) -> bool:
        """Whether a call of a method in `fast` would use the fast path now."""
        return self._calls is not None and self._calls.by_door and self._clock() >= self._grpc_only_until

    def seek_fastpath(self) -> None:
        """Looks for a fast path, before a call needs it."""
        if self._calls is not None and self._clock() >= self._grpc_only_until:
            self._calls.seek()

    async def call(self, name: str, request: Message, timeout_s: float) -> Any:
        """Returns the answer; the client must be open. Raises KvmeshError: the service's own, or what became of the
        call."""
        calls = self._calls
        assert calls is not None, "it is not connected"
        if name not in self._fast or self._clock() < self._grpc_only_until:
            return await calls.over_grpc(name, request, timeout_s)
        by_door = calls.by_door
        try:
            return await calls.call(name, request, timeout_s)
        except DeadlinePassed:
            if by_door and not calls.by_door:  # not a word in all that time
                self._grpc_only_until = self._clock() + GRPC_ONLY_S
            raise

    async def close(self) -> None:
        """Closes the client; it is idempotent. The next `connect` begins afresh, so that gRPC's reconnect back-off
        cannot delay it."""
        calls, self._calls = self._calls, None
        channel, self._channel = self._channel, None
        self._address = ""
        if calls is not None:
            await calls.close()
        if channel is not None:
            await channel.close(grace=None)


class LeaderClient:
    """Calls whichever of several addresses leads. Several calls may run at once. It owns its connections and must be
    closed."""

    def __init__(self, service: ServiceDescriptor, leaders: LeaderTracker, fast: Collection[str] = ()) -> None:
        """`fast` is as in ServiceClient."""
        self.leaders = leaders
        self._service = service
        self._fast = fast
        self._clients: dict[str, ServiceClient] = {}

    async def call(
        self, name: str, request: Message, timeout_s: float, check: Callable[[Any], None] | None = None
    ) -> Any:
        """Returns the leader's answer. Others are asked while it cannot be reached or does not lead any more, which
        `check` may conclude from an answer (it raises NotLeader). The call must be harmless when executed twice. Raises
        the leader's own refusal, or after `timeout_s` the last error."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        pause_s = RETRY_S[0]
        last: KvmeshError | None = None
        while True:
            left = deadline - loop.time()
            if left <= 0:
                raise last or DeadlinePassed(f"no store master answered within {timeout_s:.1f} s ({self.leaders})")
            asked = self.leaders.current
            client = self._at(asked)
            # One silent address must not eat the time of all, nor a silent fast path that of gRPC.
            fast = name in self._fast and client.via_fastpath
            share_s = left / 2 if fast or len(self.leaders.addresses) > 1 else left
            try:
                answer = await client.call(name, request, share_s)
                if check is not None:
                    check(answer)
            except KvmeshError as error:
                last = self._named(asked, error)
                if not moves_on(last):
                    raise last from None
                # Another call may have gone on meanwhile.
                round_over = asked == self.leaders.current and self.leaders.move_on(last)
            else:
                try:
                    self._succeeded(asked, getattr(answer, "term", 0))
                    return answer
                except StaleTerm as error:
                    last, round_over = error, False
            if round_over:
                await asyncio.sleep(min(pause_s, max(0.0, deadline - loop.time())))
                pause_s = min(2 * pause_s, RETRY_S[1])

    @property
    def via_fastpath(self) -> bool:
        """Whether the leader, if known, would be called over the fast path now."""
        client = self._clients.get(self.leaders.current)
        return client is not None and client.via_fastpath

    def _succeeded(self, asked: str, term: int) -> None:
        if asked == self.leaders.current:
            self.leaders.succeeded(term)
        elif term:
            self.leaders.terms.hear(term)

    def _named(self, asked: str, error: KvmeshError) -> KvmeshError:
        """Returns the error of a call; if the process is no leader at all, an error that says so."""
        if isinstance(error, NotServed):
            field = self.leaders.field
            what = f"what answers there is not what {field} must name, but another service, or of another version"
            return ProtocolMismatch(f"{field}={asked!r}: {what}", field=field)
        return error

    def _at(self, address: str) -> ServiceClient:
        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = ServiceClient(self._service, self._fast)
            client.connect(address)
        return client

    async def close(self) -> None:
        """Closes the connections; the client may be used again."""
        open_, self._clients = self._clients, {}
        await asyncio.gather(*(client.close() for client in open_.values()))

    async def __aenter__(self) -> LeaderClient:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.close()
