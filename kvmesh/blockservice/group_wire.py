"""Cache groups of a model as a ModelCard tells them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.kvcache.cache_groups import MAX_GROUPS, CacheGroup, CacheKind, CacheLayout, check_groups, is_single
from kvmesh.rpc.pb import common_pb2 as pb

_KINDS = {
    CacheKind.ALL: pb.CACHE_KIND_ALL,
    CacheKind.WINDOW: pb.CACHE_KIND_WINDOW,
    CacheKind.CHUNK: pb.CACHE_KIND_CHUNK,
    CacheKind.STATE: pb.CACHE_KIND_STATE,
}


def groups_to_wire(groups: Sequence[CacheGroup], object_bytes: Sequence[int]) -> list[pb.CacheGroup]:
    """Returns one message a group, none for a model of one group that keeps all. `object_bytes` has, for each group,
    the bytes of one block at all ranks together."""
    if is_single(groups):
        return []
    return [
        pb.CacheGroup(
            name=group.name,
            layers=group.layers,
            kind=_KINDS[group.kind],
            keep=group.keep,
            optional=group.optional,
            planes=group.layout.planes,
            heads=group.layout.heads,
            dim=group.layout.dim,
            dtype=group.layout.dtype,
            object_bytes=nbytes,
        )
        for group, nbytes in zip(groups, object_bytes, strict=True)
    ]


def groups_from_wire(messages: Iterable[pb.CacheGroup], field: str) -> tuple[tuple[CacheGroup, int], ...]:
    """Returns (group, bytes of a block) of each message; () stands for one group that keeps all. Raises InvalidRequest
    naming `field`."""
    told = list(messages)
    if not told:
        return ()
    if len(told) > MAX_GROUPS:
        raise InvalidRequest.of(field, f"{len(told)} groups", f"at most {MAX_GROUPS}")
    try:
        groups = tuple(
            CacheGroup(
                one.name,
                tuple(one.layers),
                CacheLayout(one.planes, one.heads, one.dim, one.dtype),
                CacheKind(one.kind),
                one.keep,
                one.optional,
            )
            for one in told
        )
        check_groups(groups)
    except (ConfigError, ValueError) as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from None
    if not all(one.object_bytes for one in told):
        raise InvalidRequest.of(field, "object_bytes=0", "at least 1 in every group")
    return tuple(zip(groups, (one.object_bytes for one in told), strict=True))
