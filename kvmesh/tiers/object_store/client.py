"""The object store as the tier sees it: whole blocks by key, checked. Blocking calls, for the tier's threads.

    <url>/<hash of the identity>/<key in hex>      a head of 48 bytes, then the block's bytes
    <url>/<hash of the identity>/identity          the identity, for people and for `purge`: never read here

The head says which block it is, how long, and its xxh3_64: an object that is cut, changed, or lies under another's name
is never taken for the block.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import obstore
import xxhash
from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from kvmesh.errors import ConfigError, Unavailable
from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.tiers.object_store.config import ObjectConfig

HEAD = struct.Struct("<8s16sQQ8x")  # magic, key, bytes, xxh3_64
MAGIC = b"kvm-obj1"
DELETE_KEYS = 1000  # in one request
IDENTITY = "identity"
MAX_IDENTITY = 4096


class Damaged(Exception):
    """An object does not hold the block of its name."""


class Client:
    """A thread-safe client of one folder in object storage. Raises ConfigError for an unusable URL, a missing bucket or
    no access, and Unavailable when nothing answers."""

    def __init__(self, config: ObjectConfig) -> None:
        self._url = config.url
        self._identity = config.identity
        folder = hashlib.sha256(config.identity.encode()).hexdigest()[:32]
        path = f"{config.url.rstrip('/')}/{folder}"
        self._store = open_store(path, config.timeout_s, config.connect_s, config.retries, told=config.url)
        self.said = False  # whose folder it is

    def list(self) -> Iterator[tuple[bytes, int]]:
        """Yields (key, bytes) of every block stored; objects with other names are skipped."""
        try:
            for found in obstore.list(self._store):
                for meta in found:
                    key, nbytes = _key(meta["path"]), meta["size"] - HEAD.size
                    if key is not None and nbytes > 0:
                        yield key, nbytes
                    self.said |= meta["path"] == IDENTITY
        except (BaseError, OSError) as error:
            raise named_error(self._url, error) from None

    def say(self) -> None:
        """Writes the folder's identity down unless that was done. Raises the library's errors."""
        if not self.said:
            obstore.put(self._store, IDENTITY, self._identity.encode()[:MAX_IDENTITY], use_multipart=False)
            self.said = True

    def put(self, key: bytes, data: memoryview) -> None:
        """Stores a block. Raises the library's errors."""
        body = bytearray(HEAD.size + len(data))
        HEAD.pack_into(body, 0, MAGIC, key, len(data), xxhash.xxh3_64_intdigest(data))
        body[HEAD.size :] = data
        obstore.put(self._store, key.hex(), body, use_multipart=False)

    def get_into(self, key: bytes, into: memoryview) -> None:
        """Reads exactly this block into `into`. Raises FileNotFoundError, Damaged, or the library's errors."""
        body = memoryview(obstore.get(self._store, key.hex()).bytes())
        if len(body) != HEAD.size + len(into):
            raise Damaged(f"{len(body)} bytes, not {HEAD.size + len(into)}")
        data = body[HEAD.size :]
        if HEAD.unpack_from(body) != (MAGIC, key, len(into), xxhash.xxh3_64_intdigest(data)):
            raise Damaged("its bytes are not those that were put")
        into[:] = data

    def delete(self, keys: Iterable[bytes]) -> None:
        """Deletes blocks; missing ones are no error. Raises the library's other errors."""
        names = [key.hex() for key in keys]
        for at in range(0, len(names), DELETE_KEYS):
            try:
                obstore.delete(self._store, names[at : at + DELETE_KEYS])
            except FileNotFoundError:  # of one of them: some stores stop there
                for name in names[at : at + DELETE_KEYS]:
                    self._delete_one(name)

    def _delete_one(self, name: str) -> None:
        try:
            obstore.delete(self._store, name)
        except FileNotFoundError:
            pass


def open_store(url: str, timeout_s: float = 10.0, connect_s: float = 2.0, retries: int = 3, told: str = "") -> Any:
    """Returns the library's store at `url`. Raises ConfigError when there can be none; `told` is the user's name for
    the URL."""
    limit = timedelta(seconds=timeout_s)
    try:
        return obstore.store.from_url(
            url,
            client_options={
                "timeout": limit,
                "connect_timeout": timedelta(seconds=connect_s),
                # The library reads this variable only when it gets no options at all.
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
            },
            retry_config={"max_retries": retries, "retry_timeout": limit},
        )
    except Exception as error:  # each backend has its own
        raise ConfigError(f"url={told or url!r}: {_line(error)}", field="url") from None


def named_error(url: str, error: Exception) -> ConfigError | Unavailable:
    """Returns the named error for a failed request: ConfigError for a missing bucket or no access, which people must
    mend, else Unavailable."""
    denied = isinstance(error, PermissionError | PermissionDeniedError | UnauthenticatedError)
    if denied or "status code: 4" in _line(error):  # the library has no class for a bucket that is not there
        return ConfigError(f"url={url!r}: {_line(error)}", field="url")
    return Unavailable(f"object store {url}: {_line(error)}")


def _key(path: str) -> bytes | None:
    try:
        key = bytes.fromhex(path)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and path == key.hex() else None


def _line(error: Exception) -> str:
    """Returns the first line of the library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
