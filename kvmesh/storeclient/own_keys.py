"""Keys and names of one client: made of contents, granted by the master, bound to names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import tenant_tag
from kvmesh.storeclient.arguments import whole
from kvmesh.storeclient.calls import Source, left, memory_of, source_of, turn
from kvmesh.storeclient.config import ClientConfig
from kvmesh.storeclient.directory import Directory
from kvmesh.storeclient.memory import Data, Span, in_thread
from kvmesh.storeclient.naming import Grants, check_key, check_name, content_key

MAX_GRANTED = 65_536
INLINE_HASH = 1 << 20  # about a millisecond; a thread costs a tenth of that

Ref = bytes | str


class OwnKeys:
    """On the event loop. Raises KvmeshError."""

    def __init__(self, config: ClientConfig, directory: Directory) -> None:
        self.tag = tenant_tag(config.namespace)
        self._config = config
        self._directory = directory
        self._grants = Grants(self.tag)
        self._unused: set[bytes] = set()  # granted to the caller, not put yet
        self._granting = asyncio.Lock()

    def of_content(self, data: Source) -> bytes:
        return content_key(memory_of(source_of(data)), self._config.namespace)

    async def grant(self, n: int, deadline: float) -> list[bytes]:
        """For the caller, who may put one block under each."""
        n = whole("n", n, 1, MAX_GRANTED)
        keys = await self._take(n, deadline)
        self._unused.update(keys)
        return keys

    async def of(self, datas: Sequence[Data | Span], keys: Sequence[bytes] | None, deadline: float) -> list[bytes]:
        """The keys that these are put under, such that nobody else can seal other bytes under one of them."""
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
                self._unused.discard(key)  # before anybody else may run: it serves one put
            else:
                own.append(at)
        for at, hashed in zip(own, await self._hashed([datas[at] for at in own]), strict=True):
            if keys[at] != hashed:
                key = keys[at]
                why = "neither content_key of this data nor a key of grant() that was not used yet"
                raise InvalidRequest.of("key", key.hex(), why)
        return list(keys)

    async def _hashed(self, datas: Sequence[Data | Span]) -> list[bytes]:
        """The key of each one's content. Many bytes are hashed by a thread: the event loop has others to serve."""
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
        """`holders`: nodes that have just sealed some of the keys. Raises InvalidRequest when a name stands for another
        block, and is not to be replaced."""
        space = self._config.namespace
        bound = await self._directory.bind(space, named, left(deadline), replace=replace, holders=holders)
        taken = [name for name, key in named.items() if bound[name] != key]
        if taken:
            why = f"stands for block {bound[taken[0]].hex()}; remove or replace it, or take another name"
            raise InvalidRequest.of("name", taken[0], why)

    async def unbind_removed(self, names: Sequence[str], deadline: float) -> None:
        """Forget those of them whose blocks have been removed; one that somebody has bound anew since stays."""
        if names:
            await self._directory.unbind(self._config.namespace, dict.fromkeys(names), left(deadline))

    async def resolved(self, refs: Sequence[Ref], deadline: float) -> list[bytes | None]:
        """The key of each; None: a name that is bound to none."""
        names = list(dict.fromkeys(check_name(ref) for ref in refs if isinstance(ref, str)))
        bound: dict[str, bytes | None] = {}
        if names:
            found = await self._directory.resolve(self._config.namespace, names, left(deadline))
            bound = dict(zip(names, found, strict=True))
        return [bound[ref] if isinstance(ref, str) else check_key(ref) for ref in refs]


def _content_keys(memories: Sequence[Data], namespace: str) -> list[bytes]:
    return [content_key(one, namespace) for one in memories]
