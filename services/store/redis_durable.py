"""What a new store master must know, in Redis. Every call has a deadline; decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvmesh.errors import StaleTerm
from kvmesh.leader.redis_lease import Redis
from services.store.durable import KINDS, Kept

LOAD_PAGE = 2048  # entries in one call
LOAD_PAGE_S = 5.0
WRITE_S = 2.0

# KEYS: terms, hash. ARGV: term, "HSET" or "HDEL", then what it takes, without a value for HDEL. 0, or the later term.
_WRITE = """
local highest = tonumber(redis.call('HGET', KEYS[1], 'term') or '0')
if highest > tonumber(ARGV[1]) then
  return highest
end
if ARGV[2] == 'HSET' then
  for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
else
  for i = 3, #ARGV do redis.call('HDEL', KEYS[2], ARGV[i]) end
end
return 0
"""


class RedisDurable:
    """See services.store.durable.Durable."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._write = redis.client.register_script(_WRITE)

    async def load(self) -> Kept:
        """See Durable."""
        return {kind: await self._load(kind) for kind in KINDS}

    async def _load(self, kind: str) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = {}
        cursor = 0
        while True:
            call = self._redis.client.hscan(self._redis.key(kind), cursor, count=LOAD_PAGE)
            cursor, page = await self._redis.within(call, LOAD_PAGE_S)
            found.update(page)
            if not int(cursor):
                return found

    async def put(self, kind: str, items: Mapping[bytes, bytes], term: int) -> None:
        """See Durable."""
        await self._change(kind, "HSET", [part for item in items.items() for part in item], term)

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        """See Durable."""
        await self._change(kind, "HDEL", list(keys), term)

    async def _change(self, kind: str, how: str, parts: list[bytes], term: int) -> None:
        if not parts:
            return
        keys = [self._redis.key("terms"), self._redis.key(kind)]
        later = await self._redis.within(self._write(keys, [term, how, *parts]), WRITE_S)
        if later:
            raise StaleTerm(f"term={term}: the store has been written under term {later}", field="term")
