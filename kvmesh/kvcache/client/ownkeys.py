"""Keys and names of one client: made of contents, granted by the master, bound to names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvmesh.kvcache.client.calls import Source, left, memory_of, source_of, turn
from kvmesh.kvcache.client.config import ClientConfig
from kvmesh.kvcache.client.directory import Directory
from kvmesh.kvcache.client.memory import Data, Span
from kvmesh.kvcache.client.naming import Grants, check_key, check_name, content_key
from kvmesh.kvcache.keys import tenant_tag
from kvmesh.rpc.errors import InvalidRequest

MAX_GRANTED = 65_536

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
        if not 0 < n <= MAX_GRANTED:
            raise InvalidRequest.of("n", n, f"must be in 1..{MAX_GRANTED}")
        keys = await self._take(n, deadline)
        self._unused.update(keys)
        return keys

    async def of(self, datas: Sequence[Data | Span], keys: Sequence[bytes] | None, deadline: float) -> list[bytes]:
        """The keys that these are put under, such that nobody else can seal other bytes under one of them."""
        if keys is None and self._config.keys == "granted":
            return await self._take(len(datas), deadline)
        if keys is None:
            return [self.of_content(one) for one in datas]
        if len(keys) != len(datas):
            raise InvalidRequest.of("keys", len(keys), f"{len(datas)} blocks, as many keys")
        for key, data in zip(keys, datas, strict=True):
            check_key(key)
            if key in self._unused:
                self._unused.discard(key)
            elif key != self.of_content(data):
                why = "neither content_key of this data nor a key of grant() that was not used yet"
                raise InvalidRequest.of("key", key.hex(), why)
        return list(keys)

    async def _take(self, n: int, deadline: float) -> list[bytes]:
        async with turn(self._granting, deadline):
            while count := self._grants.wanted(n):
                term, first = await self._directory.grant(count, left(deadline))
                self._grants.add(term, first, count)
            return self._grants.take(n)

    # ── names ────────────────────────────────────────────────────────────────────────────────────

    async def bind(self, named: dict[str, bytes], replace: bool, deadline: float) -> None:
        """InvalidRequest: a name stands for another block, and is not to be replaced."""
        space = self._config.namespace
        bound = await self._directory.bind(space, named, left(deadline))
        taken = [name for name, key in named.items() if bound[name] != key]
        if taken and replace:
            await self._directory.unbind(space, {name: bound[name] for name in taken}, left(deadline))
            bound |= await self._directory.bind(space, {name: named[name] for name in taken}, left(deadline))
            taken = [name for name in taken if bound[name] != named[name]]
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
