"""The lease of the leader in Redis. Every call has a deadline; decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable
from typing import Any
from urllib.parse import urlsplit

from kvmesh import extras
from kvmesh.leader.leader import Ask, Granted, Held, Silent
from kvmesh.rpc.errors import ConfigError, Unavailable

# Gives or renews the lease in one step. KEYS: lease, terms. ARGV: token, address, ms, the term of a renewal (else 0),
# floor, the first term of all. A renewal also restores what a Redis that was started anew has lost; a Redis that has
# been started anew since it gave the last term may have forgotten some, which every answer about the next lease tells.
_LEASE = """
local token, address, ms = ARGV[1], ARGV[2], ARGV[3]
local mine, floor, first = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local held = redis.call('GET', KEYS[1])
if held then
  local term, owner, unsure, leader = string.match(held, '^(%d+) (%S+) (%d) (%S*)$')
  if owner ~= token then
    return {0, term, leader, redis.call('PTTL', KEYS[1])}
  end
  redis.call('PEXPIRE', KEYS[1], ms)
  return {1, term, '', tonumber(unsure)}
end
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or 'unknown'
local known = redis.call('HMGET', KEYS[2], 'term', 'run')
local highest = tonumber(known[1] or '0')
if mine > 0 and highest > mine then
  return {0, known[1], '', 0}
end
local term = mine > 0 and mine or math.max(highest, floor) + 1
if mine == 0 and not known[1] then
  term = math.max(term, first)
end
local unsure = (mine == 0 and known[2] ~= run) and 1 or 0
local text = string.format('%d', term)
redis.call('HSET', KEYS[2], 'term', text, 'run', run)
redis.call('SET', KEYS[1], text .. ' ' .. token .. ' ' .. unsure .. ' ' .. address, 'NX', 'PX', ms)
return {1, text, '', unsure}
"""

_RELEASE = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+ (%S+)') == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""


def without_password(url: str) -> str:
    """As it may be shown: whatever stands before the last "@" is left out but for a user's name."""
    credentials, at, rest = url.rpartition("@")
    if not at:
        return url
    scheme, sep, user = credentials.rpartition("://")
    return f"{scheme}{sep}{user.partition(':')[0]}:***@{rest}"


def check_url(url: str) -> None:
    """Raises ConfigError naming `redis` when the URL cannot be one."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"redis={without_password(url)!r}: must be redis://host:port/0, rediss://... or unix://...", field="redis"
        )


class Redis:
    """One connection pool. `mesh` keeps several meshes apart in one Redis, `part` kinds of leaders in a mesh."""

    def __init__(self, url: str, mesh: str, timeout_s: float, part: str = "") -> None:
        """Raises ConfigError: a bad URL, or the client library is missing."""
        check_url(url)
        try:
            from redis import asyncio as client
            from redis.exceptions import RedisError
        except ImportError:
            raise ConfigError(f"redis: needs the package redis: {extras.install('ha')}", field="redis") from None
        self.failures: tuple[type[Exception], ...] = (RedisError, OSError, TimeoutError)
        try:
            self.client: Any = client.from_url(
                url, socket_timeout=None, socket_connect_timeout=timeout_s, retry_on_timeout=False
            )
        except ValueError as err:
            raise ConfigError(f"redis={without_password(url)!r}: {err}", field="redis") from None
        self.timeout_s = timeout_s
        self._prefix = f"kvmesh:{mesh}:{part}:" if part else f"kvmesh:{mesh}:"

    def key(self, name: str) -> str:
        """What `name` is called in Redis."""
        return self._prefix + name

    async def within(self, call: Awaitable[Any], timeout_s: float) -> Any:
        """Its answer. Raises Unavailable."""
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except self.failures as err:
            raise Unavailable(f"redis: {str(err) or f'no answer within {timeout_s:.1f} s'}") from None

    async def close(self) -> None:
        """Close every connection."""
        with contextlib.suppress(*self.failures):
            async with asyncio.timeout(self.timeout_s):
                await self.client.aclose()


class RedisLease:
    """The lease of one process, which others reach at `address`."""

    def __init__(self, redis: Redis, address: str, lease_ms: int) -> None:
        self._redis = redis
        self._address = address
        self._lease_ms = lease_ms
        self._process = secrets.token_hex(8)
        self._lease = redis.client.register_script(_LEASE)
        self._release = redis.client.register_script(_RELEASE)

    async def ask(self, ask: Ask) -> Granted | Held | Silent:
        """Carry it out. Raises nothing but CancelledError."""
        keys = [self._redis.key("leader"), self._redis.key("terms")]
        args = [self._token(ask.life), self._address, self._lease_ms, ask.term, ask.floor, ask.first]
        try:
            mine, term, leader, rest = await self._redis.within(self._lease(keys, args), self._redis.timeout_s)
        except Unavailable as err:
            return Silent(ask.number, err.message)
        if mine:
            return Granted(ask.number, int(term), bool(rest))
        return Held(ask.number, int(term), leader.decode(), max(0, rest) / 1000)

    async def release(self, life: int) -> None:
        """Give it back if it is that life's. Raises nothing but CancelledError; a lost call costs others a lease."""
        with contextlib.suppress(Unavailable):
            keys = [self._redis.key("leader")]
            await self._redis.within(self._release(keys, [self._token(life)]), self._redis.timeout_s)

    def _token(self, life: int) -> str:
        return f"{self._process}.{life}"
