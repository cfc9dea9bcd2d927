"""The part of a node that NodeStore's RPCs need, and the checks that all of them make before anything is changed."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from kvmesh.blockservice.checksums import ChecksumClient
from kvmesh.blockservice.copies import Copies
from kvmesh.blockservice.lease_spans import LeaseSpans
from kvmesh.blockservice.leasing import Leasing
from kvmesh.blockservice.object_family import GroupPlace
from kvmesh.blockservice.partitions import CLASS_MARK, Partitions
from kvmesh.blockservice.puts import Puts
from kvmesh.blockservice.removal_applier import RemovalApplier
from kvmesh.errors import InvalidRequest, Overloaded
from kvmesh.kvcache.keys import KEY_BYTES, split
from kvmesh.kvcache.sources import PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.terms import MAX_JUMP, LeaderTerms, first_term

MAX_KEYS = 65_536
MAX_HOLDERS = 64
MAX_LAYOUT = 1024
MAX_TEXT = 1024
MAX_PREFIX = 16
MAX_U63 = (1 << 63) - 1
MS = 1_000_000
SEQ_TERM_SHIFT = 32  # a removal's number begins with the term under which it was ordered


class DescribedBlocks(Protocol):
    """The part of `FastPathServers` that the servicer needs."""

    def describe(self, context: Any) -> pb.DoorsResponse:
        """Returns what callers are told of the fast paths to this incarnation."""


class ServedNode(Protocol):
    """The part of `BlockService` that the servicer needs."""

    partitions: Partitions
    max_lease_ms: int
    leasing: Leasing
    lease_spans: LeaseSpans
    copies: Copies
    puts: Puts
    removals: RemovalApplier
    sums: ChecksumClient
    terms: LeaderTerms

    @property
    def fast_paths(self) -> DescribedBlocks: ...

    @property
    def ref(self) -> pb_common.InstanceRef: ...

    @property
    def segments(self) -> Sequence[tuple[str, bytes]]:
        """The name and descriptor of each rank's segment."""

    @property
    def draining(self) -> bool:
        """Whether this node takes no new blocks."""

    def leases_changed(self) -> None: ...

    def stage(self, keys: Sequence[bytes], layout: str, timeout_s: float) -> Awaitable[dict[bytes, Tier]]:
        """Brings blocks that lie below DRAM into it; returns where each block that can be leased now was found."""

    def stage_objects(
        self, keys: Sequence[bytes], masks: Sequence[int], places: Mapping[int, GroupPlace], timeout_s: float
    ) -> Awaitable[dict[int, dict[bytes, Tier]]]:
        """Brings objects that lie below DRAM into it; returns, of each group, where each was found."""

    def used(self, layout: str, keys: Sequence[bytes]) -> None:
        """Notes that these blocks were read in memory."""

    def below(self, layout: str, key: bytes) -> tuple[Tier, str, int, int] | None:
        """Returns tier, layout, bytes and mask of cache groups of a block that lies below DRAM."""

    @property
    def counters(self) -> pb.GetNodeStoreResponse: ...

    def listed(self) -> list[tuple[Tier, Sequence[bytes], int, bytes]]:
        """Returns (tier, keys, number of its last announcement, masks of the keys or none), the fastest tier first."""


def keys_in(packed: bytes, *, once: bool = True) -> list[bytes]:
    """Splits packed keys. Raises InvalidRequest when they are none or too many, or, with `once`, when one comes
    twice."""
    if not packed or len(packed) % KEY_BYTES:
        raise InvalidRequest(f"keys: {len(packed)} bytes, not one or more times {KEY_BYTES}", field="keys")
    if len(packed) > MAX_KEYS * KEY_BYTES:
        raise InvalidRequest(f"keys: {len(packed) // KEY_BYTES} keys, at most {MAX_KEYS} in one call", field="keys")
    keys = split(packed)
    if once and len(set(keys)) != len(keys):
        raise InvalidRequest("keys: one of them stands there twice", field="keys")
    return keys


def masks_in(groups: bytes, keys: Sequence[bytes]) -> bytes:
    """Returns the masks of cache groups, one a key. Raises InvalidRequest when they are not as many."""
    if len(groups) != len(keys):
        raise InvalidRequest(f"groups: {len(groups)} masks for {len(keys)} keys", field="groups")
    return groups


def lease_ms_in(asked: int, most: int) -> int:
    """Returns the lease time that was asked for, at most `most`. Raises InvalidRequest if it is 0."""
    if not asked:
        raise InvalidRequest.of("lease_ms", asked, "must be at least 1")
    return min(asked, most)


def layout_in(layout: str, *, any_: bool = False) -> str:
    """Checks a layout's name; with `any_` it may be empty. Raises InvalidRequest."""
    if len(layout) > MAX_LAYOUT or not (layout or any_):
        raise InvalidRequest.of("layout", layout, f"must have {int(not any_)}..{MAX_LAYOUT} characters")
    if layout.startswith(CLASS_MARK):
        raise InvalidRequest.of("layout", layout, f"names that begin with {CLASS_MARK!r} are this node's own")
    return layout


def within(field: str, value: int, least: int, most: int) -> int:
    """Returns `value`. Raises InvalidRequest unless it is between `least` and `most`."""
    if not least <= value <= most:
        raise InvalidRequest.of(field, value, f"must be in {least}..{most}")
    return value


def as_many(field: str, found: Sequence[object], keys: Iterable[bytes]) -> None:
    """Raises InvalidRequest unless there is one for each key."""
    count = sum(1 for _ in keys)
    if len(found) != count:
        raise InvalidRequest(f"{field}: {len(found)} of them for {count} keys", field=field)


def patience_s(context: Any, most: float) -> float:
    """Returns how long to wait in s: `most`, or half of the time that the caller still waits, so that the answer
    reaches it."""
    left = None if context is None else context.time_remaining()
    return most if left is None else min(most, left / 2)


def order_in(node: ServedNode, term: int, seq: int = 0) -> None:
    """Checks a master's order under `term` (0: not from a master); `seq` is the number of a removal. Neither is learnt
    from the order: terms come from masters that this node has asked itself. Raises StaleTerm when that master leads no
    more, and InvalidRequest when no master can have sent the number."""
    if term:
        node.terms.check(term)
    if seq:
        known = max(node.terms.highest, node.removals.removed_seq >> SEQ_TERM_SHIFT, first_term())
        within("seq", seq, 1, ((known + MAX_JUMP + 1) << SEQ_TERM_SHIFT) - 1)


def takes_more(node: ServedNode) -> None:
    """Raises Overloaded while the node drains."""
    if node.draining:
        raise Overloaded(f"{node.ref.instance_id} drains: it takes no more blocks", retry_after_ms=5_000)


def ranges_in(holders: Sequence[pb_common.InstanceRef], keys: int, own: str) -> list[PullRange]:
    """Returns the pull ranges of the holders, this node itself left out. Raises InvalidRequest."""
    if not 0 < len(holders) <= MAX_HOLDERS:
        raise InvalidRequest(f"holders: {len(holders)} of them, not 1..{MAX_HOLDERS}", field="holders")
    for holder in holders:
        if not holder.instance_id or not _dialable(holder.address):
            raise InvalidRequest.of("holders.address", holder.address, "must be host:port of a named instance")
    return [PullRange(h.instance_id, h.address, h.incarnation, 0, keys) for h in holders if h.instance_id != own]


def _dialable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and len(address) < 300 and port.isascii() and port.isdigit() and 0 < int(port) < 65536
