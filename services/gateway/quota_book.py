"""Keeps what the keys of a gateway have used: in Redis, for all gateways of a mesh, or in this process alone.

One script in Redis decides and charges in one step; it reckons as quotas.py does. Where Redis does not answer, each
gateway decides by itself with its share of every quota, 1 / the gateways that were there last, and says so (a header
of its answers, a metric). What was used meanwhile is told to Redis once it answers again. With no Redis configured, a
gateway is taken to be the only one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from kvmesh.errors import ConfigError, Unavailable
from kvmesh.leader.redis_lease import Redis
from kvmesh.services.gateway.api_keys import Tenant
from kvmesh.services.gateway.quotas import (
    FIELDS,
    MINUTE_S,
    RUNNING,
    RUNNING_RETRY_S,
    KeyQuota,
    Levels,
    QuotaCost,
    QuotaStanding,
    QuotaUse,
    QuotaVerdict,
    check_possible,
    decide,
    needs,
    refusal,
)
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0  # of one call: a request waits for it, and after the first that took longer none does
BEAT_S = 1.0
LEASE_S = 10.0  # a gateway that has not been heard of for so long is gone, and so is what ran there
CLOSE_S = 1.0
MAX_SETTLING = 1024  # calls to Redis about requests that have ended; what comes then is told with later calls
FORGET_S = 2 * MINUTE_S
NOTHING: Levels = (0.0, 0.0, 0.0)
_REDIS_PART = "{quotas}"  # all keys in one slot: the script reaches several

# KEYS: what the key has used, answers running by gateway, gateways by the end of their lease. ARGV: gateway, 1 to
# decide or 0 to charge in any case, answers running at this gateway without the request and with it, then capacities
# (requests, prompt, answer, running; 0: no limit), needs (3), charges of the request (3), charges in any case (3).
# Returns the exceeded field (-1: none), seconds to wait, three levels and the answers running, as of before.
_SCRIPT = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
local known = redis.call('HMGET', KEYS[1], 'at', 'requests', 'prompt', 'answer')
local at = tonumber(known[1]) or now
local passed = math.max(0, now - at)
local level, exceeded, wait = {}, -1, 0
local check = ARGV[2] == '1'
for n = 1, 3 do
  local capacity = tonumber(ARGV[4 + n])
  local left = math.max(0, (tonumber(known[n + 1]) or 0) - passed * capacity / 60)
  level[n] = capacity > 0 and math.max(0, left + tonumber(ARGV[14 + n])) or 0
  if check and capacity > 0 then
    local late = (level[n] + tonumber(ARGV[8 + n]) - capacity) * 60 / capacity
    if late > math.max(1e-6, wait) then
      exceeded, wait = n - 1, late
    end
  end
end
local running, others = tonumber(ARGV[3]), redis.call('HGETALL', KEYS[2])
for n = 1, #others, 2 do
  if others[n] ~= ARGV[1] then
    local ends = redis.call('ZSCORE', KEYS[3], others[n])
    if ends and tonumber(ends) >= now then
      running = running + tonumber(others[n + 1])
    else
      redis.call('HDEL', KEYS[2], others[n])
    end
  end
end
local most, own = math.floor(tonumber(ARGV[8])), tonumber(ARGV[4]) - tonumber(ARGV[3])
if check and most > 0 and running > 0 and running + own > most and wait < 1 then
  exceeded, wait = 3, 1
end
local answer = {tostring(exceeded), string.format('%.6f', wait)}
local longest = 1
for n = 1, 3 do
  answer[n + 2] = string.format('%.6f', level[n])
  if exceeded < 0 then
    level[n] = math.max(0, level[n] + tonumber(ARGV[11 + n]))
  end
  local capacity = tonumber(ARGV[4 + n])
  if capacity > 0 then
    longest = math.max(longest, level[n] / capacity)
  end
end
answer[6] = tostring(running)
redis.call('HSET', KEYS[1], 'at', string.format('%.6f', math.max(at, now)), 'requests', string.format('%.6f', level[1]),
  'prompt', string.format('%.6f', level[2]), 'answer', string.format('%.6f', level[3]))
redis.call('PEXPIRE', KEYS[1], math.floor(math.min(longest, 10000) * 60000 + 60000))
local mine = exceeded < 0 and ARGV[4] or ARGV[3]
if tonumber(mine) > 0 then
  redis.call('HSET', KEYS[2], ARGV[1], mine)
  redis.call('PEXPIRE', KEYS[2], 86400000)
else
  redis.call('HDEL', KEYS[2], ARGV[1])
end
return answer
"""

# KEYS: gateways. ARGV: gateway, lease in seconds; 0: it leaves. Returns how many there are.
_BEAT = """
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000
if tonumber(ARGV[2]) > 0 then
  redis.call('ZADD', KEYS[1], string.format('%.6f', now + ARGV[2]), ARGV[1])
else
  redis.call('ZREM', KEYS[1], ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.6f', now))
redis.call('PEXPIRE', KEYS[1], 60000)
return redis.call('ZCARD', KEYS[1])
"""


class RedisQuotas:
    """Asks Redis; decides nothing. Every call has a deadline and raises Unavailable."""

    def __init__(self, url: str, mesh: str) -> None:
        """Raises ConfigError, which names the setting."""
        try:
            self._redis = Redis(url, mesh, TIMEOUT_S, _REDIS_PART)
        except ConfigError as err:
            raise ConfigError(f"quota_redis: {err.message}", field="quota_redis") from None
        self._gateway = secrets.token_hex(8)  # of this life: what ran in an earlier one runs no more
        self._script = self._redis.client.register_script(_SCRIPT)
        self._beat = self._redis.client.register_script(_BEAT)

    async def call(
        self,
        name: str,
        quota: KeyQuota,
        running: tuple[int, int],
        *,
        cost: QuotaCost | None = None,
        charge: Levels = NOTHING,
        owed: Levels = NOTHING,
    ) -> QuotaVerdict:
        """Decides whether a request of `cost` may begin (None: nothing is asked), and then charges `charge`; `owed` is
        charged in any case. `running`: the answers of this key here without it, and with it."""
        caps = [quota.capacity(which, 1.0) for which in range(len(FIELDS))]
        wanted = NOTHING if cost is None else needs(quota, 1.0, cost)
        keys = [self._redis.key(f"used:{name}"), self._redis.key(f"running:{name}"), self._redis.key("gateways")]
        args = [self._gateway, int(cost is not None), *running, *caps, *wanted, *charge, *owed]
        found = await self._redis.within(self._script(keys, args), TIMEOUT_S)
        exceeded, wait_s, requests, prompt, answer, everywhere = found
        levels = (float(requests), float(prompt), float(answer))
        return QuotaVerdict(int(exceeded), float(wait_s), levels, int(float(everywhere)))

    async def beat(self, lease_s: float) -> int:
        """Tells that this gateway lives, or with 0 that it leaves; returns how many live."""
        keys = [self._redis.key("gateways")]
        return int(await self._redis.within(self._beat(keys, [self._gateway, lease_s]), TIMEOUT_S))

    async def close(self) -> None:
        """Leaves the other gateways and closes the connections."""
        with contextlib.suppress(Unavailable):
            await self.beat(0)
        await self._redis.close()


@dataclass(slots=True)
class _KeyUse:
    """What one key has used at this gateway: all of it, and what Redis has not been told."""

    use: QuotaUse
    quota: KeyQuota
    running: int = 0
    owed: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    refused: tuple[int, float] = (-1, 0.0)  # by a field that refuses whatever comes, until then

    def owe(self, charge: Levels) -> None:
        """Notes what Redis is to be told: of each field a minute's quota at most, since more has drained or will."""
        limits = self.quota.limits
        self.owed = [
            min(max(-limits[which], owed + more), 2 * limits[which])
            for which, (owed, more) in enumerate(zip(self.owed, charge, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class QuotaGrant:
    """A request that was taken. `charged` is what it is given back if it fails before its first token."""

    name: str
    quota: KeyQuota
    answers: int
    charged: Levels
    standing: QuotaStanding


class QuotaBook:
    """Takes and refuses requests by the quotas of their keys. `shared` None: there is no Redis."""

    def __init__(self, shared: RedisQuotas | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = shared
        self._clock = clock
        self._keys: dict[str, _KeyUse] = {}
        self._up = shared is not None
        self._gateways = 1  # that were there last
        self._settling: set[asyncio.Task[None]] = set()
        names.GATEWAY_QUOTA_SHARE.set(self.share)

    @property
    def share(self) -> float:
        """The part of each quota that this gateway may use by itself; 1: all of it, or Redis decides."""
        return 1 / self._gateways if self._shared is not None and not self._up else 1.0

    def check_early(self, tenant: Tenant, answers: int) -> None:
        """Refuses what is known to be over a quota, before its prompt costs anything. Raises QuotaExceeded."""
        quota = tenant.quota
        key = self._keys.get(tenant.name)
        if key is None or key.quota != quota:
            return
        (which, until), now = key.refused, self._clock()
        most = int(quota.capacity(RUNNING, self.share))
        if which >= 0 and until > now:
            self.refuse(tenant, QuotaStanding(quota, self.share, NOTHING, which, until - now))
        if most and key.running and key.running + answers > most:
            self.refuse(tenant, QuotaStanding(quota, self.share, NOTHING, RUNNING, RUNNING_RETRY_S))

    async def enter(self, tenant: Tenant, prompt_tokens: int, answers: int) -> QuotaGrant | QuotaStanding | None:
        """Takes a request, or returns where its key stands when a quota refuses it; None: its key has no quota. Raises
        QuotaTooSmall."""
        quota = tenant.quota
        if not any(quota.limits):
            return None
        cost = QuotaCost(prompt_tokens, answers)
        check_possible(tenant.name, quota, cost)
        key = self._key(tenant)
        charge: Levels = (1.0, float(prompt_tokens), 0.0)
        key.running += answers  # while Redis is asked, too: others that come meanwhile count it
        taken = False
        try:
            verdict, share = await self._decide(tenant.name, key, cost, charge)
            taken = verdict.exceeded < 0
        finally:
            if not taken:
                key.running -= answers
        if taken:
            after = tuple(level + more for level, more in zip(verdict.levels, charge, strict=True))
            standing = QuotaStanding(quota, share, (after[0], after[1], after[2]))
            return QuotaGrant(tenant.name, quota, answers, charge, standing)
        if verdict.exceeded in (0, 2):
            key.refused = verdict.exceeded, self._clock() + verdict.wait_s
        return QuotaStanding(quota, share, verdict.levels, verdict.exceeded, verdict.wait_s)

    async def _decide(self, name: str, key: _KeyUse, cost: QuotaCost, charge: Levels) -> tuple[QuotaVerdict, float]:
        if self._shared is not None and self._up:
            owed, key.owed = (key.owed[0], key.owed[1], key.owed[2]), [0.0, 0.0, 0.0]
            running = key.running - cost.answers, key.running
            try:
                verdict = await self._shared.call(name, key.quota, running, cost=cost, charge=charge, owed=owed)
            except Unavailable as err:
                key.owe(owed)
                self._lost(err)
            except asyncio.CancelledError:
                key.owe(owed)
                self._settle(name, key)
                raise
            else:
                if verdict.exceeded < 0:
                    key.use.drain(key.quota, 1.0, self._clock())
                    key.use.add(charge)
                return verdict, 1.0
        share = self.share
        levels = key.use.drain(key.quota, share, self._clock())
        verdict = decide(levels, key.running - cost.answers, key.quota, share, cost)
        if verdict.exceeded < 0:
            key.use.add(charge)
            if self._shared is not None:
                key.owe(charge)
        return verdict, share

    def leave(self, grant: QuotaGrant, answer_tokens: int, *, refund: bool) -> None:
        """The request of `grant` has ended with so many tokens. `refund`: it failed, and nobody had anything of it."""
        key = self._keys[grant.name]
        key.running -= grant.answers
        back = grant.charged if refund else NOTHING
        charge: Levels = (-back[0], -back[1], float(answer_tokens) - back[2])
        key.use.drain(key.quota, self.share, self._clock())
        key.use.add(charge)
        if refund:
            key.refused = (-1, 0.0)
        if self._shared is not None:
            key.owe(charge)
            self._settle(grant.name, key)

    def _settle(self, name: str, key: _KeyUse) -> None:
        if self._up and len(self._settling) < MAX_SETTLING:
            task = asyncio.get_running_loop().create_task(self._tell(name, key))
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _tell(self, name: str, key: _KeyUse) -> None:
        assert self._shared is not None, "only then something is owed"
        owed, key.owed = (key.owed[0], key.owed[1], key.owed[2]), [0.0, 0.0, 0.0]
        try:
            await self._shared.call(name, key.quota, (key.running, key.running), owed=owed)
        except Unavailable as err:
            key.owe(owed)
            self._lost(err)

    def _key(self, tenant: Tenant) -> _KeyUse:
        key = self._keys.get(tenant.name)
        if key is None:
            key = self._keys[tenant.name] = _KeyUse(QuotaUse(self._clock()), tenant.quota)
        elif key.quota != tenant.quota:  # the file of keys has changed
            key.quota, key.refused = tenant.quota, (-1, 0.0)
        return key

    def refuse(self, tenant: Tenant, standing: QuotaStanding) -> NoReturn:
        """Raises the QuotaExceeded that `standing` tells of."""
        names.GATEWAY_QUOTA_REFUSED.labels(field=FIELDS[standing.exceeded]).inc()
        raise refusal(tenant.name, standing)

    # ── whether Redis answers ─────────────────────────────────────────────────────────────────────

    def _lost(self, err: Unavailable) -> None:
        names.GATEWAY_QUOTA_REDIS_FAILURES.inc()
        if self._up:
            self._up = False
            names.GATEWAY_QUOTA_SHARE.set(self.share)
            log.error("quotas: %s; this gateway has 1/%d of every quota until Redis answers", err, self._gateways)

    async def run(self) -> None:
        """Tells Redis that this gateway lives, and finds out whether Redis does, until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)

    async def beat(self) -> None:
        """Does one round of that, and forgets keys that nobody uses."""
        now = self._clock()
        for name in [n for n, key in self._keys.items() if not key.running and now - key.use.at > FORGET_S]:
            if not any(self._keys[name].use.drain(self._keys[name].quota, self.share, now)):
                del self._keys[name]
        if self._shared is None:
            return
        try:
            self._gateways = max(1, await self._shared.beat(LEASE_S))
        except Unavailable as err:
            self._lost(err)
            return
        if not self._up:
            self._up = True
            log.warning("quotas: Redis answers again; quotas are shared by %d gateways", self._gateways)
            for name, key in self._keys.items():
                self._settle(name, key)
        names.GATEWAY_QUOTA_SHARE.set(self.share)

    async def close(self) -> None:
        """Tells Redis what is still owed, within a bound, and leaves it."""
        if self._settling:
            await asyncio.wait(set(self._settling), timeout=CLOSE_S)
        if self._shared is not None:
            await self._shared.close()
