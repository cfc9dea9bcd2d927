"""Keys of the public client, such that two owners can never seal different bytes under one key.

    content-derived:  tag of the namespace, then the first 12 bytes of SHA-256(data)
    granted:          tag of the namespace, then the master's term (4 bytes) and a number of that term (8 bytes)

The first costs a hash of the data and finds equal data again; the second costs a number out of a range that the master
gives to nobody else, and each number serves one put.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import KEY_BYTES, TAG_BYTES, tenant_tag

MAX_NAME_BYTES = 1024
_GRANTED = struct.Struct(">IQ")


def content_key(data: bytes | bytearray | memoryview, namespace: str = "") -> bytes:
    """The key of exactly these bytes in this namespace: 16 bytes."""
    return tenant_tag(namespace) + hashlib.sha256(data).digest()[: KEY_BYTES - TAG_BYTES]


def granted_key(tag: bytes, term: int, number: int) -> bytes:
    """The key of a granted number. ValueError: the tag is none, or a term that no master gets to."""
    if len(tag) != TAG_BYTES:
        raise ValueError(f"a tag has {TAG_BYTES} bytes, not {len(tag)}")
    if not 0 <= term < 1 << 32:
        raise ValueError(f"term={term}: not in 0..2^32-1")
    return tag + _GRANTED.pack(term, number)


class Grants:
    """Ranges of numbers that are this client's alone; pure book-keeping. Each number is given out once."""

    def __init__(self, tag: bytes, most: int = 65_536) -> None:
        self._tag = tag
        self._most = most
        self._ranges: deque[tuple[int, int, int]] = deque()  # term, next number, end
        self._asked = 256

    @property
    def left(self) -> int:
        return sum(end - first for _, first, end in self._ranges)

    def wanted(self, n: int) -> int:
        """How many to ask the master for, so that `n` can be taken; 0: none. Each range is twice the last one."""
        missing = n - self.left
        if missing <= 0:
            return 0
        self._asked = min(self._asked * 2, self._most)
        return min(max(missing, self._asked), self._most)

    def add(self, term: int, first: int, count: int) -> None:
        self._ranges.append((term, first, first + count))

    def take(self, n: int) -> list[bytes]:
        """So many keys that nobody had before. ValueError: there are fewer left."""
        if n > self.left:
            raise ValueError(f"{n} keys wanted, {self.left} granted ones are left")
        keys: list[bytes] = []
        while len(keys) < n:
            term, first, end = self._ranges.popleft()
            some = min(end - first, n - len(keys))
            keys += (granted_key(self._tag, term, number) for number in range(first, first + some))
            if first + some < end:
                self._ranges.appendleft((term, first + some, end))
        return keys


def check_key(key: bytes, field: str = "key") -> bytes:
    """InvalidRequest: not 16 bytes."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise InvalidRequest.of(field, key, f"a key has {KEY_BYTES} bytes")
    return key


def check_name(name: str) -> str:
    """InvalidRequest: empty, longer than 1024 bytes of UTF-8, or no UTF-8 at all."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest.of("name", name, "must be text, not empty")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest.of("name", name, "cannot be written as UTF-8") from None
    if length > MAX_NAME_BYTES:
        raise InvalidRequest.of("name", name, f"{length} bytes of UTF-8, at most {MAX_NAME_BYTES}")
    return name
