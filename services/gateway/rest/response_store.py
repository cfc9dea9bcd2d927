"""The responses that a gateway remembers: each tenant's own, bounded in number, bytes and time since their last use, in
this process, in a SQLite file or in Redis.

A response is kept as two texts: its head (the response without its output, and what came before it) and its items
(input and output). A conversation of many turns is read by its items alone, so that instructions and tools, which
stand in every turn's head, are read once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import orjson

from kvmesh.errors import ConfigError, InvalidRequest, KvmeshError, Unavailable
from kvmesh.leader.redis_lease import Redis
from kvmesh.services.gateway.rest.response_bounds import ResponseBounds
from kvmesh.telemetry import names

if TYPE_CHECKING:
    from kvmesh.services.gateway.rest.response_events import ResponseWriter

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
MAX_PENDING = 256  # calls of the store at once; a store that hangs must not gather answers
_SQLITE_BUSY_MS = 1000
_SQLITE_CHUNK = 500  # keys of one statement
_REDIS_PART = "{responses}"  # all keys in one slot: the scripts below reach several

T = TypeVar("T")
Key = tuple[str, str]
"""Tenant and id of a response."""


class UnknownResponse(KvmeshError):
    """No such response is stored: it never was, its time is up, or it is another tenant's."""

    code = "response_not_found"
    http_status = 404
    openai_type = "invalid_request_error"


class PreviousResponseNotFound(InvalidRequest):
    """The response that a request goes on from, or one before that, is not stored."""

    code = "previous_response_not_found"


class ResponseStoreUnavailable(Unavailable):
    """The store of responses failed or did not answer in time."""

    code = "response_store_unavailable"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, its input and output, and the ids of those before it, oldest first. `chain_items` and `chain_bytes`
    are those of the whole conversation up to and with this response."""

    response: dict[str, Any]
    input: list[dict[str, Any]]
    output: list[dict[str, Any]]
    chain: list[str]
    chain_items: int
    chain_bytes: int

    @classmethod
    def after(
        cls, earlier: StoredResponse | None, response: dict[str, Any], given: list[dict[str, Any]]
    ) -> StoredResponse:
        """Returns what is stored of `response` to the input `given`, which went on from `earlier`."""
        output = response["output"]
        size = len(orjson.dumps(given)) + len(orjson.dumps(output))
        if earlier is None:
            return cls(response, given, output, [], len(given) + len(output), size)
        chain = [*earlier.chain, earlier.response["id"]]
        count = earlier.chain_items + len(given) + len(output)
        return cls(response, given, output, chain, count, earlier.chain_bytes + size)

    def head(self) -> bytes:
        response = {**self.response, "output": []}
        about = {"chain": self.chain, "chain_items": self.chain_items, "chain_bytes": self.chain_bytes}
        return orjson.dumps({"response": response, **about})

    def items(self) -> bytes:
        return orjson.dumps({"input": self.input, "output": self.output})

    @classmethod
    def parse(cls, head: bytes, items: bytes) -> StoredResponse:
        about, both = orjson.loads(head), orjson.loads(items)
        response = {**about["response"], "output": both["output"]}
        sizes = (about["chain"], about["chain_items"], about["chain_bytes"])
        return cls(response, both["input"], both["output"], *sizes)


class ResponseBackend(Protocol):
    """Where responses are kept. What it raises says that it failed."""

    async def put(self, key: Key, head: bytes, items: bytes) -> None:
        """Keeps a response; those used longest ago go where there is no room."""

    async def get(self, key: Key) -> tuple[bytes, bytes] | None:
        """Returns head and items of a response, and notes that it was used."""

    async def items(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Returns the items of each, and notes that they were used."""

    async def delete(self, key: Key) -> bool:
        """Forgets a response. Returns whether there was one."""

    async def close(self) -> None: ...


class ResponseStore:
    """All responses of a gateway: those under way here (`underway`) and stored ones."""

    def __init__(self, backend: ResponseBackend, bounds: ResponseBounds, *, timeout_s: float = TIMEOUT_S) -> None:
        self._backend = backend
        self._bounds = bounds
        self._timeout_s = timeout_s
        self._pending = 0
        # A writer lives as long as its request is served.
        self.underway: WeakValueDictionary[Key, ResponseWriter] = WeakValueDictionary()

    async def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keeps a response; one that cannot be kept is logged and counted. Raises nothing but CancelledError."""
        response_id = stored.response["id"]
        head, items = stored.head(), stored.items()
        if len(head) + len(items) > self._bounds.size:
            names.GATEWAY_RESPONSES_NOT_STORED.labels(reason="too_large").inc()
            log.warning("%s is not stored: its %d bytes are over max_response_bytes", response_id, len(head + items))
            return
        try:
            await self._within(lambda: self._backend.put((tenant, response_id), head, items))
        except ResponseStoreUnavailable as err:
            names.GATEWAY_RESPONSES_NOT_STORED.labels(reason="unavailable").inc()
            log.warning("%s is not stored: %s", response_id, err)

    async def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Returns a response. Raises UnknownResponse and ResponseStoreUnavailable."""
        found = await self._within(lambda: self._backend.get((tenant, response_id)))
        if found is None:
            raise unknown(response_id)
        return StoredResponse.parse(*found)

    async def history(self, tenant: str, stored: StoredResponse) -> list[dict[str, Any]]:
        """Returns input and output of all responses before `stored`, and its own input, in order. Raises
        UnknownResponse where one of them is gone, and ResponseStoreUnavailable."""
        found: list[dict[str, Any]] = []
        if stored.chain:
            keys = [(tenant, one) for one in stored.chain]
            texts = await self._within(lambda: self._backend.items(keys))
            for response_id, text in zip(stored.chain, texts, strict=True):
                if text is None:
                    raise unknown(response_id)
                both = orjson.loads(text)
                found += both["input"] + both["output"]
        return found + stored.input

    async def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response. Raises UnknownResponse and ResponseStoreUnavailable."""
        if not await self._within(lambda: self._backend.delete((tenant, response_id))):
            raise unknown(response_id)

    async def close(self) -> None:
        with contextlib.suppress(ResponseStoreUnavailable):
            await self._within(self._backend.close)

    async def _within(self, call: Callable[[], Awaitable[T]]) -> T:
        if self._pending >= MAX_PENDING:
            raise ResponseStoreUnavailable(f"response_store: {self._pending} calls wait for it", retry_after_ms=1000)
        self._pending += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call()
        except TimeoutError:
            raise ResponseStoreUnavailable(f"response_store: no answer within {self._timeout_s:g} s") from None
        except Exception as err:  # any failure of a backend, whatever its library calls it
            raise ResponseStoreUnavailable(f"response_store: {type(err).__name__}: {str(err)[:200]}") from None
        finally:
            self._pending -= 1


def unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(f"response_id={response_id[:80]!r}: no such response is stored", field="response_id")


async def open_store(where: str, bounds: ResponseBounds, mesh: str) -> ResponseStore:
    """Opens the store that the setting response_store names: "" (this process), redis://... or a file of SQLite. Raises
    ConfigError, which names the setting."""
    if not where:
        return ResponseStore(MemoryResponses(bounds), bounds)
    if "://" in where:
        try:
            redis = Redis(where, mesh, TIMEOUT_S, _REDIS_PART)
        except ConfigError as err:
            raise ConfigError(f"response_store: {err.message}", field="response_store") from None
        return ResponseStore(RedisResponses(redis, bounds), bounds)
    try:
        return ResponseStore(await SqliteResponses.open(Path(where), bounds), bounds)
    except (OSError, sqlite3.Error) as err:
        raise ConfigError(f"response_store={where[:200]!r}: {err}", field="response_store") from None


# ── in this process ───────────────────────────────────────────────────────────────────────────────


class MemoryResponses:
    """Keeps responses as long as the process lives."""

    def __init__(self, bounds: ResponseBounds, now: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._now = now
        self._kept: OrderedDict[Key, tuple[bytes, bytes, float]] = OrderedDict()  # used longest ago first
        self.size = 0

    async def put(self, key: Key, head: bytes, items: bytes) -> None:
        self._expire()
        self._drop(key)
        self._kept[key] = (head, items, self._now())
        self.size += len(head) + len(items)
        while len(self._kept) > self._bounds.count or self.size > self._bounds.size:
            self._drop(next(iter(self._kept)))

    async def get(self, key: Key) -> tuple[bytes, bytes] | None:
        self._expire()
        found = self._kept.pop(key, None)
        if found is None:
            return None
        self._kept[key] = (found[0], found[1], self._now())
        return found[0], found[1]

    async def items(self, keys: Sequence[Key]) -> list[bytes | None]:
        found = [await self.get(key) for key in keys]
        return [one and one[1] for one in found]

    async def delete(self, key: Key) -> bool:
        self._expire()
        return self._drop(key)

    async def close(self) -> None:
        self._kept.clear()

    def _expire(self) -> None:
        oldest = self._now() - self._bounds.ttl_s
        while self._kept:
            key, (_, _, used) = next(iter(self._kept.items()))
            if used >= oldest:
                return
            self._drop(key)

    def _drop(self, key: Key) -> bool:
        found = self._kept.pop(key, None)
        if found is None:
            return False
        self.size -= len(found[0]) + len(found[1])
        return True


# ── in a file ─────────────────────────────────────────────────────────────────────────────────────

_SQLITE_VERSION = 1
_SQLITE_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    tenant TEXT NOT NULL, id TEXT NOT NULL, used REAL NOT NULL, size INTEGER NOT NULL,
    head BLOB NOT NULL, items BLOB NOT NULL, PRIMARY KEY (tenant, id)
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used, size);
"""


class SqliteResponses:
    """Keeps responses in a file, which several gateways of one machine may share. One thread works on it."""

    def __init__(self, bounds: ResponseBounds, now: Callable[[], float] = time.time) -> None:
        self._bounds = bounds
        self._now = now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._base: sqlite3.Connection

    @classmethod
    async def open(cls, path: Path, bounds: ResponseBounds, now: Callable[[], float] = time.time) -> SqliteResponses:
        """Raises OSError and sqlite3.Error for what is no file of responses, or cannot be written."""
        store = cls(bounds, now)
        try:
            async with asyncio.timeout(10 * TIMEOUT_S):
                await store._run(store._open, path)
        except BaseException:
            store._thread.shutdown(wait=False)
            raise
        return store

    async def put(self, key: Key, head: bytes, items: bytes) -> None:
        await self._run(self._put, key, head, items)

    async def get(self, key: Key) -> tuple[bytes, bytes] | None:
        found = await self._run(self._read, [key], "head")
        return found.get(key)

    async def items(self, keys: Sequence[Key]) -> list[bytes | None]:
        found = await self._run(self._read, keys, "''")
        return [found[key][1] if key in found else None for key in keys]

    async def delete(self, key: Key) -> bool:
        return await self._run(self._delete, key)

    async def close(self) -> None:
        try:
            await self._run(self._base.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)

    def _open(self, path: Path) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # conversations are nobody else's
        base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        base.execute(f"PRAGMA busy_timeout = {_SQLITE_BUSY_MS}")
        version = base.execute("PRAGMA user_version").fetchone()[0]
        tables = base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if version not in (0, _SQLITE_VERSION) or (version == 0 and tables):
            base.close()
            raise sqlite3.DatabaseError(f"is no store of responses of version {_SQLITE_VERSION}")
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = NORMAL")
        base.executescript(_SQLITE_TABLE)
        base.execute(f"PRAGMA user_version = {_SQLITE_VERSION}")
        self._base = base

    def _put(self, key: Key, head: bytes, items: bytes) -> None:
        base, now, size = self._base, self._now(), len(head) + len(items)
        with self._writing():
            base.execute("DELETE FROM responses WHERE used < ?", (now - self._bounds.ttl_s,))
            values = (*key, now, size, head, items)
            base.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?)", values)
            count, total = base.execute("SELECT count(*), total(size) FROM responses").fetchone()
            if count <= self._bounds.count and total <= self._bounds.size:
                return
            for row, one in base.execute("SELECT rowid, size FROM responses ORDER BY used").fetchall():
                base.execute("DELETE FROM responses WHERE rowid = ?", (row,))
                count, total = count - 1, total - one
                if count <= self._bounds.count and total <= self._bounds.size:
                    return

    def _read(self, keys: Sequence[Key], head: str) -> dict[Key, tuple[bytes, bytes]]:
        """All keys are of one tenant; `head` is what is read beside the items."""
        found: dict[Key, tuple[bytes, bytes]] = {}
        now = self._now()
        for start in range(0, len(keys), _SQLITE_CHUNK):
            some = keys[start : start + _SQLITE_CHUNK]
            where = f"tenant = ? AND used >= ? AND id IN ({','.join('?' * len(some))})"
            values: list[Any] = [some[0][0], now - self._bounds.ttl_s, *(one for _, one in some)]
            asked = f"SELECT id, {head}, items FROM responses WHERE {where}"
            rows = self._base.execute(asked, values).fetchall()
            found |= {(some[0][0], one): (about, items) for one, about, items in rows}
            if rows:
                with self._writing():
                    self._base.execute(f"UPDATE responses SET used = ? WHERE {where}", [now, *values])
        return found

    def _delete(self, key: Key) -> bool:
        with self._writing():
            values = (*key, self._now() - self._bounds.ttl_s)
            found = self._base.execute("DELETE FROM responses WHERE tenant = ? AND id = ? AND used >= ?", values)
            return found.rowcount > 0

    @contextlib.contextmanager
    def _writing(self) -> Any:
        self._base.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._base.execute("ROLLBACK")
            raise
        self._base.execute("COMMIT")


# ── in Redis ──────────────────────────────────────────────────────────────────────────────────────

# KEYS: the response, index (by last use), sizes, total. ARGV: member, head, items, size, ttl (ms), count and bytes that
# are allowed, prefix of responses' keys.
_PUT = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function drop(member)
  local size = redis.call('HGET', KEYS[3], member)
  if size then
    redis.call('DEL', ARGV[8] .. member)
    redis.call('HDEL', KEYS[3], member)
    redis.call('DECRBY', KEYS[4], size)
  end
  redis.call('ZREM', KEYS[2], member)
end
drop(ARGV[1])
redis.call('HSET', KEYS[1], 'head', ARGV[2], 'items', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('ZADD', KEYS[2], now, ARGV[1])
redis.call('HSET', KEYS[3], ARGV[1], ARGV[4])
redis.call('INCRBY', KEYS[4], ARGV[4])
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[5], 'LIMIT', 0, 100)) do
  drop(member)
end
local rest = redis.call('ZCARD', KEYS[2])
while rest > 1 and (rest > tonumber(ARGV[6]) or tonumber(redis.call('GET', KEYS[4])) > tonumber(ARGV[7])) do
  drop(redis.call('ZRANGE', KEYS[2], 0, 0)[1])
  rest = rest - 1
end
"""

# KEYS: index, then responses. ARGV: ttl (ms), 1 where heads are wanted, members. Returns head ('' where it is not
# wanted) and items of each, false for what is not there.
_READ = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local found = {}
for n = 2, #KEYS do
  local items = redis.call('HGET', KEYS[n], 'items')
  if items then
    redis.call('PEXPIRE', KEYS[n], ARGV[1])
    redis.call('ZADD', KEYS[1], 'XX', now, ARGV[n + 1])
    found[#found + 1] = ARGV[2] == '1' and redis.call('HGET', KEYS[n], 'head') or ''
    found[#found + 1] = items
  else
    found[#found + 1] = false
    found[#found + 1] = false
  end
end
return found
"""

_DELETE = """
local size = redis.call('HGET', KEYS[3], ARGV[1])
if size then
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('DECRBY', KEYS[4], size)
end
redis.call('ZREM', KEYS[2], ARGV[1])
return redis.call('DEL', KEYS[1])
"""


class RedisResponses:
    """Keeps responses in Redis, for all gateways of a mesh."""

    def __init__(self, redis: Redis, bounds: ResponseBounds) -> None:
        self._redis = redis
        self._bounds = bounds
        self._ttl_ms = max(1, int(1000 * bounds.ttl_s))
        self._put = redis.client.register_script(_PUT)
        self._read = redis.client.register_script(_READ)
        self._delete = redis.client.register_script(_DELETE)
        self._prefix = redis.key("response:")
        self._shared = [redis.key(name) for name in ("index", "sizes", "total")]

    async def put(self, key: Key, head: bytes, items: bytes) -> None:
        member, size = self._member(key), len(head) + len(items)
        bounds = (self._ttl_ms, self._bounds.count, self._bounds.size)
        await self._put([self._prefix + member, *self._shared], [member, head, items, size, *bounds, self._prefix])

    async def get(self, key: Key) -> tuple[bytes, bytes] | None:
        head, items = await self._fetch([key], heads=True)
        return None if items is None or head is None else (head, items)

    async def items(self, keys: Sequence[Key]) -> list[bytes | None]:
        return (await self._fetch(keys, heads=False))[1::2]

    async def delete(self, key: Key) -> bool:
        member = self._member(key)
        return bool(await self._delete([self._prefix + member, *self._shared], [member]))

    async def close(self) -> None:
        await self._redis.close()

    async def _fetch(self, keys: Sequence[Key], *, heads: bool) -> list[bytes | None]:
        members = [self._member(key) for key in keys]
        places = [self._shared[0], *(self._prefix + member for member in members)]
        found: list[bytes | None] = await self._read(places, [self._ttl_ms, int(heads), *members])
        return found

    def _member(self, key: Key) -> str:
        return "/".join(key)  # no tenant's name holds a slash
