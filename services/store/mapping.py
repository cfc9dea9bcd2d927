"""Converts protos to the brain's records and back. Raises InvalidRequest naming the field that cannot be read."""

from __future__ import annotations

from kvmesh.errors import InvalidRequest
from kvmesh.kvcache import keys
from kvmesh.kvcache.announce import MAX_KEYS, Announcement
from kvmesh.kvcache.tiers import MARK, Tier, split_name, store_name, tier_of
from kvmesh.rpc.pb import common_pb2 as pb_common
from kvmesh.rpc.pb import ranks_pb2 as pb_ranks
from kvmesh.rpc.pb import store_pb2 as pb
from kvmesh.services.store.domain import (
    MAX_TEXT,
    Change,
    NodeRole,
    Publish,
    RegisteredNode,
    Relay,
    check_rank_host,
)
from kvmesh.services.store.rank_hosts import RankHost, RankPlaces

_ROLES = {
    pb_common.ROLE_PREFILL: NodeRole.PREFILL,
    pb_common.ROLE_DECODE: NodeRole.DECODE,
    pb_common.ROLE_BOTH: NodeRole.BOTH,
    pb_common.ROLE_POOL: NodeRole.POOL,
}
_ROLES_OUT = {role: number for number, role in _ROLES.items()}
_TIERS = ", ".join(f"{tier.value} ({tier.name})" for tier in Tier)
_CHANGES_OUT = {
    Change.JOINED: pb.MEMBER_CHANGE_JOINED,
    Change.LEFT: pb.MEMBER_CHANGE_LEFT,
    Change.DIED: pb.MEMBER_CHANGE_DIED,
}


def packed_keys(field: str, packed: bytes, max_keys: int = MAX_KEYS) -> tuple[bytes, ...]:
    """Splits packed keys. Raises InvalidRequest when the bytes are no whole number of keys, or more than `max_keys` of
    them."""
    if len(packed) % keys.KEY_BYTES:
        why = f"{len(packed)} bytes are no whole number of keys of {keys.KEY_BYTES} bytes"
        raise InvalidRequest.of(field, packed[:24], why)
    if len(packed) > max_keys * keys.KEY_BYTES:
        count = len(packed) // keys.KEY_BYTES
        raise InvalidRequest.of(field, f"{count} keys", f"one message holds at most {max_keys}")
    return tuple(keys.split(packed))


def member_in(member: pb.Member) -> RegisteredNode:
    """Returns the member of a message. Raises InvalidRequest for an unknown role; the brain checks the other fields."""
    role = _ROLES.get(member.role)
    if role is None:
        raise InvalidRequest.of("member.role", member.role, "must be prefill, decode, both or pool")
    ref = member.instance
    return RegisteredNode(ref.instance_id, ref.address, ref.incarnation, role, member.node_id, member.store_id)


def member_out(member: RegisteredNode) -> pb.Member:
    """The inverse of `member_in`."""
    return pb.Member(
        instance=ref_out(member), role=_ROLES_OUT[member.role], node_id=member.node_id, store_id=member.store_id
    )


MAX_USES, MAX_RANKS = 256, 1024  # of one rank host


def rank_host_in(said: pb_ranks.RankHostState) -> RankHost:
    """Returns the rank host of a message. Raises InvalidRequest."""
    ref, uses = said.instance, said.uses
    if len(uses) > MAX_USES or sum(len(use.ranks) for use in uses) > MAX_RANKS:
        raise InvalidRequest.of("host.uses", len(uses), f"at most {MAX_USES} instances, {MAX_RANKS} ranks in all")
    names = [use.instance_id for use in uses]
    texts = (said.node_id, said.build, said.fingerprint)
    check_rank_host(ref.instance_id, ref.address, ref.incarnation, *texts, *names)
    used = tuple((use.instance_id, tuple(use.ranks)) for use in uses)
    shape = (said.max_ranks, said.gpus, said.memory_bytes)
    return RankHost(
        ref.instance_id, ref.incarnation, ref.address, said.node_id, said.build, *shape, used, said.fingerprint
    )


def rank_host_out(host: RankHost) -> pb_ranks.RankHostState:
    """The inverse of `rank_host_in`."""
    ref = pb_common.InstanceRef(instance_id=host.name, address=host.address, incarnation=host.incarnation)
    return pb_ranks.RankHostState(
        instance=ref,
        node_id=host.node_id,
        build=host.build,
        max_ranks=host.max_ranks,
        gpus=host.gpus,
        memory_bytes=host.memory_bytes,
        fingerprint=host.fingerprint,
        uses=[pb_ranks.RankHostUse(instance_id=name, ranks=ranks) for name, ranks in host.used],
    )


def rank_places_in(asked: pb.PlaceRanksRequest) -> RankPlaces:
    """Returns what an instance asks for. Raises InvalidRequest."""
    ref = asked.instance
    for field, text in (("instance.instance_id", ref.instance_id), ("build", asked.build)):
        if not text or len(text) > MAX_TEXT or not text.isprintable():
            raise InvalidRequest.of(field, text[:MAX_TEXT], f"must have 1 to {MAX_TEXT} characters")
    if len(asked.fingerprint) > MAX_TEXT:
        raise InvalidRequest.of("fingerprint", asked.fingerprint[:MAX_TEXT], f"has at most {MAX_TEXT} characters")
    for field, count in (("hosts", asked.hosts), ("ranks_each", asked.ranks_each)):
        if not 1 <= count <= MAX_RANKS:
            raise InvalidRequest.of(field, count, f"in 1..{MAX_RANKS}")
    return RankPlaces(
        ref.instance_id, ref.incarnation, asked.build, asked.hosts, asked.ranks_each, asked.gpus, asked.fingerprint
    )


def ref_out(member: RegisteredNode) -> pb_common.InstanceRef:
    """Returns the reference (id, address, incarnation) of a member."""
    return pb_common.InstanceRef(instance_id=member.instance_id, address=member.address, incarnation=member.incarnation)


def usage_in(usage: pb.StoreUsage) -> pb.StoreUsage:
    """Returns a member's usage as it is kept: no more is free than there is, whatever the member says, and tiers that
    this build does not know are left out."""
    read = pb.StoreUsage()
    read.CopyFrom(usage)
    read.free_bytes = min(usage.free_bytes, usage.capacity_bytes)
    del read.tiers[:]
    read.tiers.extend(use for use in usage.tiers[: len(Tier)] if use.tier and tier_of(use.tier) is not None)
    return read


def announcement_in(said: pb.Announcement) -> Announcement:
    """Returns an announcement under the name of its tier. Raises InvalidRequest for a tier that does not exist, or a
    store id that looks like the name of a tier; the brain checks the other fields."""
    tier = tier_of(said.tier)
    if tier is None:
        raise InvalidRequest.of("announcement.tier", said.tier, f"must be 0 (DRAM) or one of {_TIERS}")
    if MARK in said.store_id:
        raise InvalidRequest.of("announcement.store_id", said.store_id[:300], f"must not hold {MARK!r}")
    return Announcement(
        store_name(said.store_id, tier),
        said.incarnation,
        said.seq,
        packed_keys("announcement.sealed", said.sealed),
        packed_keys("announcement.removed", said.removed),
        said.snapshot,
        said.part,
        said.more,
        said.groups,
    )


def announcement_out(said: Announcement) -> pb.Announcement:
    """The inverse of `announcement_in`."""
    store_id, tier = split_name(said.store_id)
    return pb.Announcement(
        store_id=store_id,
        tier=tier.value,  # type: ignore[arg-type]
        incarnation=said.incarnation,
        seq=said.seq,
        sealed=b"".join(said.sealed),
        removed=b"".join(said.removed),
        snapshot=said.snapshot,
        part=said.part,
        more=said.more,
        groups=said.groups,
    )


def event_out(event: Publish | Relay) -> pb.StoreEvent:
    """Returns one event of the watch stream."""
    if isinstance(event, Relay):
        return pb.StoreEvent(seq=event.seq, blocks=announcement_out(event.announcement))
    change = pb.MemberEvent(change=_CHANGES_OUT[event.change], member=member_out(event.member))
    return pb.StoreEvent(seq=event.seq, member=change)
