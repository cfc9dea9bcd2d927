"""Several store masters, of which one leads, or several conductors: which to ask next, and which answers count."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvmesh.errors import (
    ConfigError,
    DeadlinePassed,
    KvmeshError,
    NotLeader,
    ProtocolMismatch,
    StaleTerm,
    Unavailable,
)
from kvmesh.rpc import channels, status
from kvmesh.rpc.terms import LeaderTerms

T = TypeVar("T")

RETRY_S = 0.05, 0.5  # after all masters were asked in vain: first, and at most


class Masters:
    """Pure book-keeping over a list of addresses. `terms`: shared by all that listen to masters in this process."""

    def __init__(self, addresses: str, terms: LeaderTerms | None = None, *, field: str = "store") -> None:
        """`addresses`: "a:1,b:2". Raises ConfigError naming `field`: there is none in it."""
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
        """Whom to ask now."""
        return self._elsewhere or self.addresses[self._at]

    def succeeded(self, term: int = 0) -> None:
        """`current` has answered; `term`: what it said of its own, 0 where answers do not tell.

        Raises StaleTerm, having gone on to the next: the answer is that of a leader of yesterday."""
        if term:
            try:
                self.terms.hear(term)
            except StaleTerm:
                self.failed()
                raise
        self._failed.clear()

    def failed(self) -> bool:
        """`current` does not answer, or cannot: go on to the next. True: all have been tried since the last success,
        so wait before asking again."""
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
        """`current` does not lead and thinks that `leader` does ("": does not know). True: see `failed`. A leader that
        has failed since the last success is not believed in, so that two masters cannot send us round for ever."""
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
        """As `failed` or `redirected`, whichever `error` says."""
        return self.redirected(error.leader) if isinstance(error, NotLeader) else self.failed()


def split(addresses: str, field: str = "store") -> tuple[str, ...]:
    """The addresses of a list with commas, each once. Raises ConfigError naming `field`."""
    found = tuple(dict.fromkeys(part.strip() for part in addresses.split(",") if part.strip()))
    if not found:
        raise ConfigError(f"{field}={addresses!r}: names no address (host:port,host:port,...)", field=field)
    return found


def check_addresses(addresses: str, field: str = "store") -> None:
    """Raises ConfigError naming `field` unless each can be dialled: a host and a port."""
    for one in split(addresses, field):
        if why := _wrong(one):
            raise ConfigError(f"{field}={one!r}: {why}", field=field)


def _wrong(address: str) -> str:
    """Why this is no HOST:PORT; "": it is one."""
    if "/" in address:
        return "must be HOST:PORT, without a scheme or a path"
    host, colon, port = address.rpartition(":")
    if not host or not colon:
        return "must be HOST:PORT, and has no port" if not colon else "must be HOST:PORT, and has no host"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        return f"its port {port!r} is not in 1..65535"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return "an IPv6 address is written [ADDRESS]:PORT"
    if any(letter.isspace() or not letter.isprintable() for letter in host):
        return "its host holds spaces or signs that cannot be printed"
    return ""


def moves_on(error: KvmeshError) -> bool:
    """Whether another master, or the same a little later, may answer what this one refused."""
    return isinstance(error, NotLeader | StaleTerm | Unavailable | DeadlinePassed)


class Caller:
    """Asks whichever master leads. Several calls may run at once. Owns its channels; `close` it."""

    def __init__(self, masters: Masters) -> None:
        self.masters = masters
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def call(self, method: Callable[[grpc.aio.Channel, float], Awaitable[T]], timeout_s: float) -> T:
        """`method(channel, timeout_s)` at the leader; again at others while it is unreachable or leads no more, which
        `method` may find out itself (NotLeader). What it asks must be harmless when done twice. Raises the master's own
        refusal, or after `timeout_s` the last error."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        pause_s = RETRY_S[0]
        last: KvmeshError | None = None
        while True:
            left = deadline - loop.time()
            if left <= 0:
                raise last or DeadlinePassed(f"no store master answered within {timeout_s:.1f} s ({self.masters})")
            asked = self.masters.current
            # One silent master must not eat the time of all.
            share_s = left if len(self.masters.addresses) == 1 else left / 2
            try:
                answer = await method(self._channel(asked), share_s)
                term = getattr(answer, "term", 0)
                if asked == self.masters.current:
                    self.masters.succeeded(term)
                elif term:
                    self.masters.terms.hear(term)
                return answer
            except StaleTerm as error:
                last, round_over = error, False
            except (grpc.RpcError, NotLeader) as raised:
                last = raised if isinstance(raised, NotLeader) else self._named(asked, raised)
                if not moves_on(last):
                    raise last from None
                # Another call may have gone on meanwhile.
                round_over = asked == self.masters.current and self.masters.move_on(last)
            if round_over:
                await asyncio.sleep(min(pause_s, max(0.0, deadline - loop.time())))
                pause_s = min(2 * pause_s, RETRY_S[1])

    def _named(self, asked: str, error: grpc.RpcError) -> KvmeshError:
        """The error of a call; of a process that is no leader at all, one that says so."""
        if getattr(error, "code", lambda: None)() is grpc.StatusCode.UNIMPLEMENTED:
            field = self.masters.field
            what = f"what answers there is not what {field} must name, but another service, or of another version"
            return ProtocolMismatch(f"{field}={asked!r}: {what}", field=field)
        return status.from_rpc_error(error)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = channels.connect(address)
        return self._channels[address]

    async def close(self) -> None:
        """Close what is open; it may be used again."""
        open_, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close(grace=None) for channel in open_.values()))

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.close()
