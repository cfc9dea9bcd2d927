"""Keeps what a new leader needs and no node knows: quotas, bindings of names, replica targets and pins, configuration.

Records are written under a term, and refused once a record of a later term has been written: so a write that a frozen
leader had under way when another took over changes nothing. Records are kept in memory (one master, for its own life),
in a file (one master, over restarts), or in Redis (several masters).
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kvmesh.errors import ConfigError, StaleTerm, Unavailable
from kvmesh.leader.redis_lease import Redis
from kvmesh.rpc.terms import MAX_TERM

log = logging.getLogger(__name__)

QUOTA, NAME, TARGET, SETTING = "quota", "name", "target", "setting"
TOMBSTONE, DRAIN, UNPIN, CONFIG = "tombstone", "drain", "unpin", "config"
KINDS = (QUOTA, NAME, TARGET, SETTING, TOMBSTONE, DRAIN, UNPIN, CONFIG)

Kept = dict[str, dict[bytes, bytes]]  # by kind; every kind is there


def nothing() -> Kept:
    """Returns an empty set of records of every kind."""
    return {kind: {} for kind in KINDS}


class Durable(Protocol):
    """Is the interface to where records are kept. Every call ends within a deadline of its own."""

    async def load(self) -> Kept:
        """Returns all that is kept. Raises Unavailable."""

    async def put(self, kind: str, items: Mapping[bytes, bytes], term: int) -> None:
        """Keeps all of `items`, over what was there. Raises StaleTerm (nothing is kept) or Unavailable (whether they
        are kept is unknown)."""

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        """Forgets these records. Raises StaleTerm or Unavailable."""


def check_term(term: int, written: int) -> None:
    """Raises StaleTerm if `term` is lower than the term under which the store was `written` last."""
    if term < written:
        raise StaleTerm(f"term={term}: the store has been written under term {written}", field="term")


class MemoryDurable:
    """Keeps records as long as the process lives."""

    def __init__(self) -> None:
        self._kept = nothing()
        self._term = 0

    async def load(self) -> Kept:
        return {kind: dict(items) for kind, items in self._kept.items()}

    async def put(self, kind: str, items: Mapping[bytes, bytes], term: int) -> None:
        self._fence(term)
        self._kept[kind].update(items)

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        self._fence(term)
        for key in keys:
            self._kept[kind].pop(key, None)

    def _fence(self, term: int) -> None:
        check_term(term, self._term)
        self._term = term


# ── in Redis ──────────────────────────────────────────────────────────────────────────────────────

LOAD_PAGE = 2048  # entries in one call
LOAD_PAGE_S = 5.0
REDIS_WRITE_S = 2.0

# KEYS: terms, hash. ARGV: term, "HSET" or "HDEL", then the fields, with their values for HSET. Returns 0, or the later
# term under which somebody has led, if the write is refused.
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
    """Keeps records in Redis, for the next leader. Every call has a deadline."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._write = redis.client.register_script(_WRITE)

    async def load(self) -> Kept:
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
        await self._change(kind, "HSET", [part for item in items.items() for part in item], term)

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        await self._change(kind, "HDEL", list(keys), term)

    async def _change(self, kind: str, how: str, parts: list[bytes], term: int) -> None:
        if not parts:
            return
        keys = [self._redis.key("terms"), self._redis.key(kind)]
        later = await self._redis.within(self._write(keys, [term, how, *parts]), REDIS_WRITE_S)
        check_term(term, int(later))


# ── in a file ─────────────────────────────────────────────────────────────────────────────────────

FORMAT = 1
FILE_WRITE_S = 5.0


class StateFile:
    """Keeps records in a file of the only master (`--state-path`): an SQLite database, one transaction for each change.
    The file `path` is made when it is not there; its folder must exist. One process uses it at a time, and must `close`
    it. Raises ConfigError naming state_path when the file cannot be used."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "state file")
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._refused(error) from None
        try:
            self.term = self._open()  # the highest term under which the file was written; 0: the file is new
        except (sqlite3.Error, ValueError) as error:
            self._db.close()
            raise self._refused(error) from None

    def _open(self) -> int:
        db = self._db
        db.execute("PRAGMA locking_mode=EXCLUSIVE")  # another master of the same file is refused from here on
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("BEGIN IMMEDIATE")
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            raise ValueError(f"it has format {found}, this master reads {FORMAT}")
        db.execute("CREATE TABLE IF NOT EXISTS term (term INTEGER)")
        row = "kind TEXT, key BLOB, value BLOB, PRIMARY KEY (kind, key)"
        db.execute(f"CREATE TABLE IF NOT EXISTS kept ({row}) WITHOUT ROWID")
        db.execute(f"PRAGMA user_version={FORMAT}")
        db.execute("COMMIT")
        term = db.execute("SELECT coalesce(max(term), 0) FROM term").fetchone()[0]
        if isinstance(term, int) and 0 <= term < MAX_TERM - 1:
            return term
        text = "state_path=%r: holds term %r, under which no leader can have written: a new one is begun"
        log.error(text, self._path, term)
        return 0

    def _refused(self, error: Exception) -> ConfigError:
        return ConfigError(f"state_path={self._path!r}: {error}", field="state_path")

    def begin(self, term: int) -> Kept:
        """Returns all that is kept; from now on records are written under `term`, which must be above `self.term`. It
        blocks. Raises ConfigError."""
        kept = nothing()
        try:
            self._change(term, "", ())
            for kind, key, value in self._db.execute("SELECT kind, key, value FROM kept"):
                if kind in KINDS:
                    kept[kind][key] = value
        except sqlite3.Error as error:
            raise self._refused(error) from None
        return kept

    async def load(self) -> Kept:
        kept: Kept = await self._within(lambda: self.begin(self.term))
        return kept

    async def put(self, kind: str, items: Mapping[bytes, bytes], term: int) -> None:
        sql = "INSERT OR REPLACE INTO kept VALUES (?, ?, ?)"
        await self._within(lambda: self._change(term, sql, [(kind, key, value) for key, value in items.items()]))

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        sql = "DELETE FROM kept WHERE kind = ? AND key = ?"
        await self._within(lambda: self._change(term, sql, [(kind, key) for key in keys]))

    def _change(self, term: int, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """Carries out all of a change or nothing. It runs on the thread, or before the thread is used."""
        check_term(term, self.term)
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        try:
            if sql:
                db.executemany(sql, rows)
            if term > self.term:
                db.execute("DELETE FROM term")
                db.execute("INSERT INTO term VALUES (?)", (term,))
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # not so where a full disk has ended it already
                db.execute("ROLLBACK")
            raise
        self.term = term

    async def _within(self, work: Callable[[], Any]) -> Any:
        """Returns the result of `work`, which runs on the thread. Raises Unavailable when it fails or takes longer than
        FILE_WRITE_S."""
        try:
            async with asyncio.timeout(FILE_WRITE_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            raise Unavailable(f"state_path={self._path!r}: the disk took more than {FILE_WRITE_S:.0f} s") from None
        except (sqlite3.Error, ConfigError) as error:
            raise Unavailable(f"state_path={self._path!r}: {error}") from None

    async def close(self) -> None:
        """Closes the file; to be called once. A write under way is waited for, at most FILE_WRITE_S."""
        try:
            async with asyncio.timeout(FILE_WRITE_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        except TimeoutError:
            pass  # the process ends anyway, and the file is whole at every moment
        self._thread.shutdown(wait=False)
