"""The lease of the leader in Redis. Every call has a deadline; nothing is decided here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable
from typing import Any
from urllib.parse import urlsplit

from kvmesh import extras
from kvmesh.config import without_password
from kvmesh.errors import ConfigError, Unavailable
from kvmesh.leader.leader import Ask, LeaseGranted, LeaseHeld, LeaseRefused, LeaseSilent
from kvmesh.rpc.terms import EARLIEST, EPOCH_S, LATEST, MAX_JUMP, MAX_TERM

log = logging.getLogger(__name__)

# Gives or renews the lease in one step. KEYS: lease, terms. ARGV: token, address, ms, the term of a renewal (else 0),
# floor, the first term of all, the maximum, the greatest jump, and of the clock of terms: its epoch, earliest, latest.
# Returns: GIVEN, HELD or REFUSED; term; who holds it; unsure or ms left; what cannot be a leader's, as it was found.
#
# A renewal also restores what a Redis that was started anew has lost, and what somebody else has written over. A Redis
# that has been started anew since it gave the last term may have forgotten some, which every answer about the next
# lease tells; one whose term no leader can have had counts as one that has forgotten. A lease that would never end, or
# that cannot be read, ends after one lease.
_LEASE = """
local token, address, ms = ARGV[1], ARGV[2], tonumber(ARGV[3])
local mine, floor, first = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local limit, jump = tonumber(ARGV[7]), tonumber(ARGV[8])
local info = redis.pcall('INFO', 'server')
local run = type(info) == 'string' and string.match(info, 'run_id:(%x+)') or 'unknown'
local known = redis.call('HMGET', KEYS[2], 'term', 'run')
local highest, odd = 0, ''
if known[1] then
  local digits = #known[1] <= 10 and string.match(known[1], '^%d+$')
  highest = digits and tonumber(digits) or limit
  if highest >= limit - 1 then
    highest, odd = 0, 'term ' .. string.sub(known[1], 1, 80)
  end
end
local clock = tonumber(redis.call('TIME')[1]) - tonumber(ARGV[9])
clock = math.min(math.max(clock, tonumber(ARGV[10])), tonumber(ARGV[11]))
local most = math.min(math.max(highest, first, clock) + jump, limit - 2)
local function write(term, unsure, ttl)
  local text = string.format('%d', term)
  redis.call('HSET', KEYS[2], 'term', text, 'run', run)
  redis.call('SET', KEYS[1], text .. ' ' .. token .. ' ' .. unsure .. ' ' .. address, 'PX', ttl)
  return text
end
local held = redis.call('GET', KEYS[1])
if held then
  local text, owner, unsure, leader = string.match(held, '^(%d+) (%S+) (%d) (%S*)$')
  local left = redis.call('PTTL', KEYS[1])
  if not text or #text > 10 or left < 0 then
    if left < 0 or left > ms then
      redis.call('PEXPIRE', KEYS[1], ms)
      left = ms
    end
    return {0, '0', '', left, 'leader ' .. string.sub(held, 1, 80)}
  end
  local term = tonumber(text)
  if owner ~= token then
    return {0, text, leader, left, ''}
  end
  if mine > 0 and floor > term and floor > most then
    return {2, text, '', 0, ''}
  end
  local risen = mine > 0 and math.max(term, floor) or term
  if highest > risen then
    risen = math.min(highest + 1, limit - 1)
  end
  if risen ~= highest then
    return {1, write(risen, unsure, ms), '', tonumber(unsure), odd}
  end
  redis.call('PEXPIRE', KEYS[1], ms)
  return {1, text, '', tonumber(unsure), odd}
end
if mine > 0 and highest > mine then
  return {0, known[1], '', 0, odd}
end
if floor > most then
  return {2, string.format('%d', highest), '', 0, odd}
end
local term = mine > 0 and math.max(mine, floor) or math.max(highest, floor) + 1
if mine == 0 and highest == 0 then
  term = math.max(term, first)
end
local unsure = (mine == 0 and (known[2] ~= run or odd ~= '')) and 1 or 0
return {1, write(term, unsure, ms), '', unsure, odd}
"""
GIVEN, HELD, REFUSED = 1, 0, 2

_RELEASE = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+ (%S+)') == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""


def check_url(url: str) -> None:
    """Raises ConfigError, which names `redis`, when the URL is malformed."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"redis={without_password(url)!r}: must be redis://host:port/0, rediss://... or unix://...", field="redis"
        )


class Redis:
    """One connection pool. `mesh` separates several meshes in one Redis, `part` the kinds of leaders in a mesh."""

    def __init__(self, url: str, mesh: str, timeout_s: float, part: str = "") -> None:
        """Raises ConfigError for a malformed URL, or when the client library is missing."""
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
        """Returns the key in Redis for `name`."""
        return self._prefix + name

    async def within(self, call: Awaitable[Any], timeout_s: float) -> Any:
        """Returns the answer of `call`. Raises Unavailable when it fails or takes longer than `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except self.failures as err:
            raise Unavailable(f"redis: {str(err) or f'no answer within {timeout_s:.1f} s'}") from None

    async def close(self) -> None:
        """Closes every connection."""
        with contextlib.suppress(*self.failures):
            async with asyncio.timeout(self.timeout_s):
                await self.client.aclose()


class RedisLease:
    """The lease of one process, which others reach at `address`. Values in Redis that no leader can have written are
    logged, once each."""

    def __init__(self, redis: Redis, address: str, lease_ms: int) -> None:
        self._redis = redis
        self._address = address
        self._lease_ms = lease_ms
        self._process = secrets.token_hex(8)
        self._lease = redis.client.register_script(_LEASE)
        self._release = redis.client.register_script(_RELEASE)
        self._odd = ""  # what was told last

    async def ask(self, ask: Ask) -> LeaseGranted | LeaseHeld | LeaseSilent | LeaseRefused:
        """Asks Redis for the lease. Raises nothing but CancelledError."""
        keys = [self._redis.key("leader"), self._redis.key("terms")]
        args = [self._token(ask.life), self._address, self._lease_ms, ask.term, ask.floor, ask.first]
        args += [MAX_TERM, MAX_JUMP, EPOCH_S, EARLIEST, LATEST]
        try:
            code, term, leader, rest, odd = await self._redis.within(self._lease(keys, args), self._redis.timeout_s)
        except Unavailable as err:
            return LeaseSilent(ask.number, err.message)
        self._tell(odd.decode("utf-8", "replace"))
        if code == GIVEN:
            return LeaseGranted(ask.number, int(term), bool(rest))
        if code == REFUSED:
            log.error("redis refuses terms above %d: far above %d, the highest that it knows", ask.floor, int(term))
            return LeaseRefused(ask.number, int(term))
        return LeaseHeld(ask.number, int(term), leader.decode("utf-8", "replace"), max(0, rest) / 1000)

    def _tell(self, odd: str) -> None:
        if odd and odd != self._odd:
            which, _, value = odd.partition(" ")
            key = self._redis.key("leader" if which == "leader" else "terms")
            what = "it ends after one lease" if which == "leader" else "a new one is written"
            text = "redis: %s holds a %s that no leader can have written, so %s: %r (`kvmesh terms show` shows all)"
            log.error(text, key, "lease" if which == "leader" else "term", what, value)
        self._odd = odd

    async def release(self, life: int) -> None:
        """Gives the lease back if it is still that life's; a lost call costs others the rest of the lease. Raises
        nothing but CancelledError."""
        with contextlib.suppress(Unavailable):
            keys = [self._redis.key("leader")]
            await self._redis.within(self._release(keys, [self._token(life)]), self._redis.timeout_s)

    def _token(self, life: int) -> str:
        return f"{self._process}.{life}"
