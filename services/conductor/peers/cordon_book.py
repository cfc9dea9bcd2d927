"""Cordons in Redis, where all conductors of a mesh read them and a later conductor finds them. A version number tells
when to read again. Every call has a deadline; nothing is decided here.

A Redis that has lost its data is told again by the conductor that knows the latest version, because only an operator
may end a cordon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kvmesh.errors import Overloaded, Unavailable
from kvmesh.leader.redis_lease import Redis
from kvmesh.services.conductor.domain import Cordon, CordonState
from kvmesh.services.conductor.fleet.cordons import MAX_CORDONS, Word, changes

log = logging.getLogger(__name__)

POLL_S = 0.5
FORGOTTEN, FULL = -1, -2

# KEYS: version, words. ARGV: the version we know, a name, its word ("": none), the most words. The new version.
_PUT = """
local version = tonumber(redis.call('GET', KEYS[1]) or '0')
if version < tonumber(ARGV[1]) then
  return -1
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[2], ARGV[2])
else
  if redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 and redis.call('HLEN', KEYS[2]) >= tonumber(ARGV[4]) then
    return -2
  end
  redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
end
return redis.call('INCR', KEYS[1])
"""

# KEYS: version, words. ARGV: the version we know, names and words. Writes them unless a version as late is there.
_RESTORE = """
if tonumber(redis.call('GET', KEYS[1]) or '0') < tonumber(ARGV[1]) then
  redis.call('DEL', KEYS[2])
  for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1]) end
  redis.call('SET', KEYS[1], ARGV[1])
end
"""


class CordonBook:
    """Shares cordons through Redis. `deliver` gives the brain what others have written, as Cordons that are `kept`."""

    def __init__(self, redis: Redis, deliver: Callable[[Cordon], object]) -> None:
        self._redis = redis
        self._deliver = deliver
        self._keys = [redis.key("cordons_version"), redis.key("cordons")]
        self._put = redis.client.register_script(_PUT)
        self._restore = redis.client.register_script(_RESTORE)
        self._version = 0
        self._words: dict[str, Word] = {}
        self._turn = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Reads what there is, and follows changes. A Redis that does not answer is asked again and again."""
        with contextlib.suppress(Unavailable):
            await self.sync()
        self._following = asyncio.create_task(self._follow(), name="cordons")

    async def close(self) -> None:
        """Stops following."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def put(self, event: Cordon) -> None:
        """Stores a cordon, which has reached the brain when this returns. Raises Overloaded or Unavailable when it was
        not stored. If only the answer was lost it is stored, and comes with the next reading."""
        word = "" if event.state is CordonState.OPEN else f"{event.state.value} {event.reason}"
        while True:
            args = [self._version, event.instance_id, word, MAX_CORDONS]
            done = int(await self._within(self._put(self._keys, args)))
            if done == FULL:
                raise Overloaded(f"instance_id={event.instance_id!r}: {MAX_CORDONS} instances are cordoned already")
            await self.sync()  # which restores what was forgotten
            if done != FORGOTTEN:
                return

    async def sync(self) -> None:
        """Brings the brain up to date. Raises Unavailable."""
        async with self._turn:
            version = int(await self._within(self._redis.client.get(self._keys[0])) or 0)
            if version < self._version:
                log.warning("redis has forgotten cordons: telling it again of %d", len(self._words))
                pairs = [part for name, word in self._words.items() for part in (name, _written(word))]
                await self._within(self._restore(self._keys, [self._version, *pairs]))
            elif version > self._version:
                pipe = self._redis.client.pipeline(transaction=True)
                version, found = await self._within(pipe.get(self._keys[0]).hgetall(self._keys[1]).execute())
                self._take(int(version or 0), found)

    def _take(self, version: int, found: Mapping[bytes, bytes]) -> None:
        words = {name.decode(): word for name, text in found.items() if (word := _read(text)) is not None}
        before, self._words, self._version = self._words, words, version
        for event in changes(before, words):
            log.info("%s: %s%s", event.instance_id, event.state.value, f": {event.reason}" if event.reason else "")
            self._deliver(event)

    async def _follow(self) -> None:
        silent = False
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.sync()
                silent = False
            except Unavailable as err:
                if not silent:
                    log.warning("cordons of other conductors cannot be read: %s", err.message)
                silent = True

    async def _within(self, call: Awaitable[Any]) -> Any:
        return await self._redis.within(call, self._redis.timeout_s)


def _written(word: Word) -> str:
    return f"{word[0].value} {word[1]}"


def _read(text: bytes) -> Word | None:
    state, _, reason = text.decode("utf-8", "replace").partition(" ")
    known = {one.value: one for one in CordonState if one is not CordonState.OPEN}
    return (known[state], reason) if state in known else None
