"""Keys of the public client, such that two owners can never seal different bytes under one key.

    content-derived:  tag of the namespace, then the first 12 bytes of SHA-256(data)
    granted:          tag of the namespace, then the master's term (4 bytes) and a number of that term (8 bytes)
    computed:         tag of the namespace, then 12 bytes that the caller computes from what the block means

The first costs a hash of the data and finds equal data again; the second costs a number out of a range that the master
gives to nobody else, and each number serves one put. The third is for callers who know a block's key before its bytes
(KV of tokens): whoever shares the namespace must compute it from all that decides the bytes. Two of them may make bytes
that mean the same and differ in the last bit; the ones that were sealed first count.
"""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import KEY_BYTES, TAG_BYTES, tenant_tag
from kvmesh.storeclient.arguments import whole
from kvmesh.storeclient.calls import in_thread, left, turn
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.directory import Directory
from kvmesh.storeclient.memory import Data, Source, Span, memory_of, source_of

MAX_GRANTED = 65_536
INLINE_HASH = 1 << 20  # about a millisecond; a thread costs a tenth of that
MAX_NAME_BYTES = 1024
_GRANTED = struct.Struct(">IQ")

Ref = bytes | str


def content_key(data: bytes | bytearray | memoryview, namespace: str = "") -> bytes:
    """Returns the key of exactly these bytes in this namespace: 16 bytes."""
    return tenant_tag(namespace) + hashlib.sha256(data).digest()[: KEY_BYTES - TAG_BYTES]


def granted_key(tag: bytes, term: int, number: int) -> bytes:
    """Returns the key of a granted number. Raises ValueError for a malformed tag, or a term that no master gets to."""
    if len(tag) != TAG_BYTES:
        raise ValueError(f"a tag has {TAG_BYTES} bytes, not {len(tag)}")
    if not 0 <= term < 1 << 32:
        raise ValueError(f"term={term}: not in 0..2^32-1")
    return tag + _GRANTED.pack(term, number)


class GrantedKeys:
    """Ranges of numbers that only this client has, as pure bookkeeping. Each number is given out once."""

    def __init__(self, tag: bytes, most: int = 65_536) -> None:
        self._tag = tag
        self._most = most
        self._ranges: deque[tuple[int, int, int]] = deque()  # term, next number, end
        self._asked = 256

    @property
    def left(self) -> int:
        return sum(end - first for _, first, end in self._ranges)

    def wanted(self, n: int) -> int:
        """Returns how many numbers to ask the master for, so that `n` can be taken; 0 for none. Each range is twice the
        last one."""
        missing = n - self.left
        if missing <= 0:
            return 0
        self._asked = min(self._asked * 2, self._most)
        return min(max(missing, self._asked), self._most)

    def add(self, term: int, first: int, count: int) -> None:
        self._ranges.append((term, first, first + count))

    def take(self, n: int) -> list[bytes]:
        """Returns `n` keys that nobody had before. Raises ValueError when fewer are left."""
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
    """Raises InvalidRequest unless the key has 16 bytes."""
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise InvalidRequest.of(field, key, f"a key has {KEY_BYTES} bytes")
    return key


def check_name(name: str) -> str:
    """Raises InvalidRequest when the name is empty, longer than 1024 bytes of UTF-8, or not UTF-8."""
    if not isinstance(name, str) or not name:
        raise InvalidRequest.of("name", name, "must be text, not empty")
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidRequest.of("name", name, "cannot be written as UTF-8") from None
    if length > MAX_NAME_BYTES:
        raise InvalidRequest.of("name", name, f"{length} bytes of UTF-8, at most {MAX_NAME_BYTES}")
    return name


# ── one client's own ─────────────────────────────────────────────────────────────────────────────────


class OwnKeys:
    """Manages the keys and names of one client. It belongs to the event loop; its methods raise KvmeshError."""

    def __init__(self, config: ClientConfig, directory: Directory) -> None:
        self.tag = tenant_tag(config.namespace)
        self._config = config
        self._directory = directory
        self._grants = GrantedKeys(self.tag)
        self._unused: set[bytes] = set()  # granted to the caller, not put yet
        self._granting = asyncio.Lock()

    def of_content(self, data: Source) -> bytes:
        return content_key(memory_of(source_of(data)), self._config.namespace)

    async def grant(self, n: int, deadline: float) -> list[bytes]:
        """Returns keys for the caller, who may put one block under each."""
        n = whole("n", n, 1, MAX_GRANTED)
        keys = await self._take(n, deadline)
        self._unused.update(keys)
        return keys

    async def of(self, datas: Sequence[Data | Span], keys: Sequence[bytes] | None, deadline: float) -> list[bytes]:
        """Returns the keys that these blocks are put under, such that nobody else can seal other bytes under one of
        them."""
        if self._config.keys == "computed":
            return self._computed(len(datas), keys)
        if keys is None and self._config.keys == "granted":
            return await self._take(len(datas), deadline)
        if keys is None:
            return await self._hashed(datas)
        if len(keys) != len(datas):
            raise InvalidRequest.of("keys", len(keys), f"{len(datas)} blocks, as many keys")
        for key in keys:
            check_key(key)
        own = []
        for at, key in enumerate(keys):
            if key in self._unused:
                self._unused.discard(key)  # before the next await, as it serves one put
            else:
                own.append(at)
        for at, hashed in zip(own, await self._hashed([datas[at] for at in own]), strict=True):
            if keys[at] != hashed:
                key = keys[at]
                why = "neither content_key of this data nor a key of grant() that was not used yet"
                raise InvalidRequest.of("key", key.hex(), why)
        return list(keys)

    def _computed(self, count: int, keys: Sequence[bytes] | None) -> list[bytes]:
        """Returns the caller's keys. Raises InvalidRequest unless each block has one of this namespace."""
        if keys is None or len(keys) != count:
            why = f"{count} blocks, as many keys: a client with keys='computed' makes none itself"
            raise InvalidRequest.of("keys", None if keys is None else len(keys), why)
        for key in keys:
            if not check_key(key).startswith(self.tag):
                why = f"does not begin with {self.tag.hex()}, the tag of namespace {self._config.namespace!r}"
                raise InvalidRequest.of("key", key.hex(), why)
        return list(keys)

    async def _hashed(self, datas: Sequence[Data | Span]) -> list[bytes]:
        """Returns the key of each block's content. Much data is hashed in a thread, so that the event loop can serve
        others."""
        memories = [memory_of(one) for one in datas]
        work = partial(_content_keys, memories, self._config.namespace)
        return await in_thread(work) if sum(map(len, memories)) > INLINE_HASH else work()

    async def _take(self, n: int, deadline: float) -> list[bytes]:
        async with turn(self._granting, deadline):
            while count := self._grants.wanted(n):
                term, first = await self._directory.grant(count, left(deadline))
                self._grants.add(term, first, count)
            return self._grants.take(n)

    # ── names ────────────────────────────────────────────────────────────────────────────────────

    async def bind(
        self, named: dict[str, bytes], replace: bool, deadline: float, holders: Mapping[bytes, str] | None = None
    ) -> None:
        """Binds names. `holders` are nodes that have just sealed some of the keys. Raises InvalidRequest when a name
        stands for another block, and is not to be replaced."""
        space = self._config.namespace
        bound = await self._directory.bind(space, named, left(deadline), replace=replace, holders=holders)
        taken = [name for name, key in named.items() if bound[name] != key]
        if taken:
            why = f"stands for block {bound[taken[0]].hex()}; remove or replace it, or take another name"
            raise InvalidRequest.of("name", taken[0], why)

    async def unbind_removed(self, names: Sequence[str], deadline: float) -> None:
        """Forgets those names whose blocks have been removed; one that somebody has bound anew since stays."""
        if names:
            await self._directory.unbind(self._config.namespace, dict.fromkeys(names), left(deadline))

    async def resolved(self, refs: Sequence[Ref], deadline: float) -> list[bytes | None]:
        """Returns the key of each ref; None for a name that is bound to none."""
        names = list(dict.fromkeys(check_name(ref) for ref in refs if isinstance(ref, str)))
        bound: dict[str, bytes | None] = {}
        if names:
            found = await self._directory.resolve(self._config.namespace, names, left(deadline))
            bound = dict(zip(names, found, strict=True))
        return [bound[ref] if isinstance(ref, str) else check_key(ref) for ref in refs]


def _content_keys(memories: Sequence[Data], namespace: str) -> list[bytes]:
    return [content_key(one, namespace) for one in memories]
