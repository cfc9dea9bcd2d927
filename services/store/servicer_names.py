"""StoreMaster over gRPC: numbers and names of the public client. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache.keys import KEY_BYTES, split
from kvmesh.rpc.pb import store_pb2 as pb
from services.store.checks import MAX_TEXT
from services.store.domain import Tick
from services.store.policy import grants
from services.store.servicer_base import Base, text

MAX_NAMES = 4096
MAX_NAME_BYTES = 1024
MAX_NAMESPACE_BYTES = 256
UNKNOWN = bytes(KEY_BYTES)


class NamesServicer(Base):
    """Grant, Bind and Resolve."""

    async def Grant(self, request: pb.GrantRequest, context: Any) -> pb.GrantResponse:  # noqa: N802
        """Raises InvalidRequest, NotLeader."""
        if not 0 < request.count <= grants.MAX_COUNT:
            raise InvalidRequest.of("count", request.count, f"must be in 1..{grants.MAX_COUNT}")
        self._step(Tick())
        return pb.GrantResponse(term=self.term, first=self._state.policy.grants.take(request.count))

    async def Bind(self, request: pb.BindRequest, context: Any) -> pb.BindResponse:  # noqa: N802
        """Raises InvalidRequest, Overloaded (too many names), NotLeader, Unavailable."""
        namespace = text("namespace", request.namespace, MAX_NAMESPACE_BYTES)
        _few("names", request.names)
        names = []
        sealed: dict[str, list[bytes]] = {}
        for each in request.names:
            if len(each.key) != KEY_BYTES or each.key == UNKNOWN:
                raise InvalidRequest.of("names.key", each.key, f"must have {KEY_BYTES} bytes, not all of them 0")
            names.append((text("names.name", each.name, MAX_NAME_BYTES, empty=False), each.key))
            if each.holder:
                sealed.setdefault(text("names.holder", each.holder, MAX_TEXT), []).append(each.key)
        async with self._books:
            self._step(Tick())
            policy = self._state.policy
            keys, writes, bound = policy.bind(namespace, names, self._clock(), replace=request.replace)
            await self._keep(writes)
            self._sealed(sealed)
            bound()  # nobody is told before, and nothing has changed when that failed
        return pb.BindResponse(keys=b"".join(keys))

    def _sealed(self, keys: Mapping[str, Sequence[bytes]]) -> None:
        """Of each store that is a member: what it is about to announce."""
        for store_id, some in keys.items():
            known = self._state.known(store_id)
            if known is not None:
                self._state.policy.sealed(some, store_id, known[0].incarnation, self._clock())

    async def Resolve(self, request: pb.ResolveRequest, context: Any) -> pb.ResolveResponse:  # noqa: N802
        """Raises InvalidRequest, NotLeader, Unavailable."""
        namespace = text("namespace", request.namespace, MAX_NAMESPACE_BYTES)
        _few("names", request.names)
        names = [text("names", name, MAX_NAME_BYTES, empty=False) for name in request.names]
        policy = self._state.policy
        wanted = _wanted(request, len(names))
        if not request.unbind:
            self._step(Tick())
            return _resolved(policy.names.resolve(namespace, names))
        async with self._books:
            self._step(Tick())
            keys = policy.names.resolve(namespace, names)
            writes, unbound = policy.unbind(namespace, names, wanted)
            await self._keep(writes)
            unbound()
        return _resolved(keys)


def _resolved(keys: Sequence[bytes | None]) -> pb.ResolveResponse:
    return pb.ResolveResponse(keys=b"".join(key or UNKNOWN for key in keys))


def _wanted(request: pb.ResolveRequest, names: int) -> list[bytes | None] | None:
    """What each name must stand for to be forgotten, None: for nothing; none: that does not matter."""
    if not request.keys:
        return None
    if not request.unbind or len(request.keys) != names * KEY_BYTES:
        why = f"has {len(request.keys)} bytes; with unbind {KEY_BYTES} for each of {names} names, else none"
        raise InvalidRequest.of("keys", request.keys[:24], why)
    return [None if key == UNKNOWN else key for key in split(request.keys)]


def _few(field: str, names: Sequence[object]) -> None:
    if len(names) > MAX_NAMES:
        raise InvalidRequest.of(field, f"{len(names)} names", f"one message holds at most {MAX_NAMES}")
