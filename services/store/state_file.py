"""What no node knows, in a file of the only master (`--state-path`): SQLite, one transaction a change."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvmesh.errors import ConfigError, StaleTerm, Unavailable
from kvmesh.rpc.terms import MAX_TERM
from services.store.durable import KINDS, Kept, nothing

log = logging.getLogger(__name__)

FORMAT = 1
WRITE_S = 5.0


class StateFile:
    """See services.store.durable.Durable. `path`: made when it is not there; its folder must be. One process at a time.
    ConfigError names state_path: it cannot be used. `close` it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(1, "state file")
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._refused(error) from None
        try:
            self.term = self._open()  # the highest under which it was written; 0: it is new
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
        """All that is kept. From now on under `term`, which must be above `self.term`. Blocks. ConfigError."""
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
        """See Durable."""
        kept: Kept = await self._within(lambda: self.begin(self.term))
        return kept

    async def put(self, kind: str, items: Mapping[bytes, bytes], term: int) -> None:
        """See Durable."""
        sql = "INSERT OR REPLACE INTO kept VALUES (?, ?, ?)"
        await self._within(lambda: self._change(term, sql, [(kind, key, value) for key, value in items.items()]))

    async def delete(self, kind: str, keys: Collection[bytes], term: int) -> None:
        """See Durable."""
        sql = "DELETE FROM kept WHERE kind = ? AND key = ?"
        await self._within(lambda: self._change(term, sql, [(kind, key) for key in keys]))

    def _change(self, term: int, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """All or nothing. On the thread, or before it has begun."""
        if term < self.term:
            raise StaleTerm(f"term={term}: the store has been written under term {self.term}", field="term")
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
            if db.in_transaction:  # a full disk has ended it already
                db.execute("ROLLBACK")
            raise
        self.term = term

    async def _within(self, work: Callable[[], Any]) -> Any:
        """Raises Unavailable."""
        try:
            async with asyncio.timeout(WRITE_S):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except TimeoutError:
            raise Unavailable(f"state_path={self._path!r}: the disk took more than {WRITE_S:.0f} s") from None
        except (sqlite3.Error, ConfigError) as error:
            raise Unavailable(f"state_path={self._path!r}: {error}") from None

    async def close(self) -> None:
        """Once; what is being written is waited for, within WRITE_S."""
        try:
            async with asyncio.timeout(WRITE_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        except TimeoutError:
            pass  # the process ends anyway, and the file is whole at every moment
        self._thread.shutdown(wait=False)
