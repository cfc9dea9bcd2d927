"""Nonsense at every RPC of the store master: an error that names the field, a living service, nothing kept."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from google.protobuf.message import Message

from kvmesh.rpc import channels
from kvmesh.rpc.pb import common_pb2, ranks_pb2, store_pb2
from kvmesh.services.store import main
from kvmesh.services.store.config import StoreConfig
from kvmesh.services.store.state import MAX_REPLACED
from tests.support.hostile import Case, assault, refused, send
from tests.support.services import running
from tests.support.store.mesh import joining, keys

SERVICE = store_pb2.DESCRIPTOR.services_by_name["StoreMaster"]
HUGE = 2**64 - 1
KEY = keys(1)[0]
KEY2 = keys(1, salt=1)[0]


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    config = StoreConfig(heartbeat_interval_ms=50, lease_ms=60_000, max_store_blocks=100_000, max_members=50)
    async with running(main.run, config) as service, channels.connect(service.address) as channel:
        yield channel


async def ask(channel: grpc.aio.Channel, method: str, request: Message, answer: type[Message]) -> Any:
    outcome = await send(channel, SERVICE, method, request)
    assert outcome.code == "OK", outcome
    return answer.FromString(outcome.messages[0])


async def status_of(channel: grpc.aio.Channel) -> store_pb2.GetStoreStatusResponse:
    found = await ask(channel, "GetStatus", store_pb2.GetStoreStatusRequest(), store_pb2.GetStoreStatusResponse)
    assert isinstance(found, store_pb2.GetStoreStatusResponse)
    return found


def join(**member: Any) -> store_pb2.JoinRequest:
    request = joining("a")
    for path, value in member.items():
        target: Any = request.member.instance if path in ("instance_id", "address", "incarnation") else request.member
        setattr(target, path, value)
    return request


def announce(**fields: Any) -> store_pb2.AnnounceRequest:
    said = {"store_id": "a", "incarnation": 1, "seq": 1, **fields}
    return store_pb2.AnnounceRequest(announcement=store_pb2.Announcement(**said))


def bind(**fields: Any) -> store_pb2.BindRequest:
    return store_pb2.BindRequest(**fields)


def quota(**fields: Any) -> store_pb2.SetQuotaRequest:
    return store_pb2.SetQuotaRequest(quota=store_pb2.Quota(**{"tag": b"1234", "blocks": 1, **fields}))


def lend(**fields: Any) -> store_pb2.LendRanksRequest:
    ref = common_pb2.InstanceRef(instance_id="r", address="127.0.0.1:9", incarnation=1)
    host = ranks_pb2.RankHostState(**{"instance": ref, "node_id": "n", "build": "b", "max_ranks": 8, **fields})
    return store_pb2.LendRanksRequest(protocol_version=common_pb2.PROTOCOL_VERSION_1, host=host)


def place(**fields: Any) -> store_pb2.PlaceRanksRequest:
    ref = common_pb2.InstanceRef(instance_id="d", incarnation=1)
    return store_pb2.PlaceRanksRequest(**{"instance": ref, "build": "b", "hosts": 1, "ranks_each": 1, **fields})


BAD = "INVALID_ARGUMENT"
CASES = [
    Case("LendRanks", store_pb2.LendRanksRequest(), BAD, "host.instance.instance_id"),
    Case("LendRanks", lend(node_id="n" * 10_000), BAD, "host"),
    Case("LendRanks", lend(uses=[ranks_pb2.RankHostUse(ranks=range(2000))]), BAD, "host.uses"),
    Case("LendRanks", lend(uses=[ranks_pb2.RankHostUse(ranks=range(1000))] * 2), BAD, "host.uses"),
    Case("PlaceRanks", store_pb2.PlaceRanksRequest(), BAD, "instance.instance_id"),
    Case("PlaceRanks", place(hosts=2**32 - 1), BAD, "hosts"),
    Case("PlaceRanks", place(fingerprint="f" * 10_000), BAD, "fingerprint"),
    Case("Join", joining("a", version=HUGE >> 33), "FAILED_PRECONDITION", "protocol_version"),
    Case("Join", store_pb2.JoinRequest(), "FAILED_PRECONDITION", "protocol_version"),
    Case("Join", store_pb2.JoinRequest(protocol_version=common_pb2.PROTOCOL_VERSION_1), BAD, "member.role"),
    Case("Join", join(role=77), BAD, "member.role"),
    Case("Join", join(instance_id=""), BAD, "member.instance.instance_id"),
    Case("Join", join(instance_id="x" * 1_000_000), BAD, "member.instance.instance_id"),
    Case("Join", join(instance_id="x\ny"), BAD, "member.instance.instance_id"),
    Case("Join", join(incarnation=0), BAD, "member.instance.incarnation"),
    Case("Join", join(address="h"), BAD, "member.instance.address"),
    Case("Join", join(address="h:0"), BAD, "member.instance.address"),
    Case("Join", join(address="h:٣"), BAD, "member.instance.address"),
    Case("Join", join(store_id="another"), BAD, "member.store_id"),
    Case("Join", join(node_id="n" * 10_000), BAD, "member.node_id"),
    Case("Beat", store_pb2.BeatRequest(), "NOT_FOUND", "instance"),
    Case("Beat", store_pb2.BeatRequest(instance=join(incarnation=HUGE).member.instance), "NOT_FOUND", "instance"),
    Case("Beat", store_pb2.BeatRequest(instance=join(instance_id="y" * 100_000).member.instance), "NOT_FOUND"),
    Case("Announce", store_pb2.AnnounceRequest(), BAD, "announcement.store_id"),
    Case("Announce", announce(store_id="z" * 100_000), BAD, "announcement.store_id"),
    Case("Announce", announce(store_id="nobody"), "NOT_FOUND", "announcement.store_id"),
    Case("Announce", announce(incarnation=0), BAD, "announcement.incarnation"),
    Case("Announce", announce(incarnation=2), "NOT_FOUND", "announcement.store_id"),
    Case("Announce", announce(incarnation=HUGE), "NOT_FOUND", "announcement.store_id"),
    Case("Announce", announce(sealed=b"x" * 15), BAD, "announcement.sealed"),
    Case("Announce", announce(sealed=b"x" * 33), BAD, "announcement.sealed"),
    Case("Announce", announce(removed=b"x"), BAD, "announcement.removed"),
    Case("Announce", announce(sealed=bytes(16 * 65_537)), BAD, "announcement.sealed"),
    Case("Announce", announce(removed=bytes(32 << 20)), BAD, "announcement.removed"),
    Case("Announce", announce(seq=0, sealed=KEY), BAD, "announcement.seq"),
    Case("Announce", announce(seq=0, snapshot=True), BAD, "announcement.seq"),
    Case("Announce", announce(part=3), BAD, "announcement.part"),
    Case("Announce", announce(more=True), BAD, "announcement.more"),
    Case("Announce", announce(snapshot=True, part=2**32 - 1), BAD, "announcement.part"),
    Case("Announce", announce(snapshot=True, removed=KEY), BAD, "announcement.removed"),
    Case("Lookup", store_pb2.LookupRequest(keys=b"x" * 17), BAD, "keys"),
    Case("Lookup", store_pb2.LookupRequest(keys=bytes(16 * 4097)), BAD, "keys"),
    Case("Lookup", store_pb2.LookupRequest(keys=bytes(48 << 20)), BAD, "keys"),
    Case("Find", store_pb2.FindRequest(keys=b"x" * 17), BAD, "keys"),
    Case("Find", store_pb2.FindRequest(keys=bytes(16 * 4097)), BAD, "keys"),
    Case("ListKeys", store_pb2.ListKeysRequest(prefix=b"x" * 17), BAD, "prefix"),
    Case("ListKeys", store_pb2.ListKeysRequest(after=b"x" * 15), BAD, "after"),
    Case("ListKeys", store_pb2.ListKeysRequest(limit=2**32 - 1), BAD, "limit"),
    Case("Grant", store_pb2.GrantRequest(), BAD, "count"),
    Case("Grant", store_pb2.GrantRequest(count=65_537), BAD, "count"),
    Case("Bind", bind(namespace="n" * 257), BAD, "namespace"),
    Case("Bind", bind(namespace="a\0b"), BAD, "namespace"),
    Case("Bind", bind(names=[store_pb2.NamedKey(name="", key=KEY2)]), BAD, "names.name"),
    Case("Bind", bind(names=[store_pb2.NamedKey(name="é" * 513, key=KEY2)]), BAD, "names.name"),
    Case("Bind", bind(names=[store_pb2.NamedKey(name="n\0", key=KEY2)]), BAD, "names.name"),
    Case("Bind", bind(names=[store_pb2.NamedKey(name="n", key=KEY2[:15])]), BAD, "names.key"),
    Case("Bind", bind(names=[store_pb2.NamedKey(name="n", key=bytes(16))]), BAD, "names.key"),
    Case("Bind", bind(names=[store_pb2.NamedKey(name=str(i), key=KEY2) for i in range(4097)]), BAD, "names"),
    Case("Resolve", store_pb2.ResolveRequest(names=["n"] * 4097), BAD, "names"),
    Case("Resolve", store_pb2.ResolveRequest(names=["n" * 1025], unbind=True), BAD, "names"),
    Case("Remove", store_pb2.RemoveRequest(), BAD, "prefix"),
    Case("Remove", store_pb2.RemoveRequest(keys=KEY, prefix=b"x"), BAD, "prefix"),
    Case("Remove", store_pb2.RemoveRequest(prefix=b"x" * 17), BAD, "prefix"),
    Case("Remove", store_pb2.RemoveRequest(keys=b"x" * 15), BAD, "keys"),
    Case("Remove", store_pb2.RemoveRequest(keys=bytes(16 * 65_537)), BAD, "keys"),
    Case("ChangeReplica", store_pb2.ChangeReplicaRequest(keys=b"x", replicas=1), BAD, "keys"),
    Case("ChangeReplica", store_pb2.ChangeReplicaRequest(keys=bytes(16 * 4097), replicas=1), BAD, "keys"),
    Case("ChangeReplica", store_pb2.ChangeReplicaRequest(keys=KEY, replicas=65), BAD, "replicas"),
    Case("ChangeReplica", store_pb2.ChangeReplicaRequest(keys=KEY, hard=True), BAD, "hard"),
    Case("Drain", store_pb2.DrainRequest(), "NOT_FOUND", "instance_id"),
    Case("Drain", store_pb2.DrainRequest(instance_id="y" * 100_000), "NOT_FOUND", "instance_id"),
    Case("SetQuota", store_pb2.SetQuotaRequest(), BAD, "quota.tag"),
    Case("SetQuota", quota(tag=b"12345"), BAD, "quota.tag"),
    Case("SetQuota", quota(name="n" * 257), BAD, "quota.name"),
    Case("Leave", store_pb2.LeaveRequest(), "OK"),
    Case("Leave", store_pb2.LeaveRequest(instance=join(incarnation=HUGE).member.instance), "OK"),
    Case("Announce", bytes(70 << 20), "RESOURCE_EXHAUSTED"),
]


async def test_each_wrong_field_is_named_and_nothing_is_kept(channel: grpc.aio.Channel) -> None:
    await ask(channel, "Join", joining("a"), store_pb2.JoinResponse)
    before = await status_of(channel)
    await refused(channel, SERVICE, CASES)
    assert await status_of(channel) == before
    assert [s.member.instance.instance_id for s in before.stores] == ["a"]


@pytest.mark.slow
async def test_noise_at_every_method(channel: grpc.aio.Channel) -> None:
    await ask(channel, "Join", joining("a"), store_pb2.JoinResponse)
    ref = joining("a").member.instance
    valid = {
        "Join": joining("a"),
        "Beat": store_pb2.BeatRequest(instance=ref, seq=1, usage=store_pb2.StoreUsage(capacity_bytes=1, free_bytes=1)),
        "Announce": announce(sealed=KEY, removed=KEY),
        "Watch": store_pb2.WatchRequest(),
        "Lookup": store_pb2.LookupRequest(keys=KEY),
        "GetStatus": store_pb2.GetStoreStatusRequest(),
        "ListMembers": store_pb2.ListMembersRequest(),
        "Leave": store_pb2.LeaveRequest(instance=ref),
        "Find": store_pb2.FindRequest(keys=KEY),
        "ListKeys": store_pb2.ListKeysRequest(prefix=KEY[:4], after=KEY, limit=9),
        "Grant": store_pb2.GrantRequest(count=7),
        "Bind": store_pb2.BindRequest(namespace="n", names=[store_pb2.NamedKey(name="x", key=b"k" * 16)]),
        "Resolve": store_pb2.ResolveRequest(namespace="n", names=["x", "y"]),
        "Remove": store_pb2.RemoveRequest(keys=KEY),
        "ChangeReplica": store_pb2.ChangeReplicaRequest(keys=KEY, replicas=2, hard=True),
        "Drain": store_pb2.DrainRequest(instance_id="a"),
        "SetQuota": store_pb2.SetQuotaRequest(quota=store_pb2.Quota(tag=KEY[:4], blocks=9, name="t")),
        "ListQuotas": store_pb2.ListQuotasRequest(),
        "LendRanks": lend(),
        "PlaceRanks": place(),
        "ListRankHosts": store_pb2.ListRankHostsRequest(),
    }
    seen = await assault(channel, SERVICE, valid, seed=7)
    assert {method for method, _ in seen} == set(valid)
    assert {("Announce", "INVALID_ARGUMENT"), ("Announce", "NOT_FOUND"), ("Join", "OK")} <= set(seen)
    status = await status_of(channel)
    assert len(status.stores) <= 50
    assert status.replicas <= 1


async def test_huge_numbers_from_a_member_do_no_harm(channel: grpc.aio.Channel) -> None:
    """What is well-formed and absurd is heard, and costs what it says, no more."""
    await ask(channel, "Join", joining("a", incarnation=HUGE), store_pb2.JoinResponse)
    ref = joining("a", incarnation=HUGE).member.instance
    usage = store_pb2.StoreUsage(capacity_bytes=HUGE, free_bytes=HUGE, blocks=2**32 - 1)
    await ask(channel, "Beat", store_pb2.BeatRequest(instance=ref, seq=HUGE, usage=usage), store_pb2.BeatResponse)
    gap = announce(incarnation=HUGE, seq=HUGE, sealed=KEY)
    assert (await ask(channel, "Announce", gap, store_pb2.AnnounceResponse)).want_snapshot
    whole = announce(incarnation=HUGE, seq=HUGE, sealed=KEY * 1000, snapshot=True)
    assert (await ask(channel, "Announce", whole, store_pb2.AnnounceResponse)).seq == HUGE
    assert (await status_of(channel)).replicas == 1
    found = await ask(channel, "Lookup", store_pb2.LookupRequest(keys=KEY), store_pb2.LookupResponse)
    assert list(found.holders[0].store_ids) == ["a"]
    await ask(channel, "Leave", store_pb2.LeaveRequest(instance=ref), store_pb2.LeaveResponse)
    assert (await status_of(channel)).replicas == 0


async def test_no_term_that_anybody_tells_moves_the_masters_far(channel: grpc.aio.Channel) -> None:
    """`term` stands in Join, Beat and Announce; noise and extremes of it are in `assault`, too."""
    first = (await status_of(channel)).term
    await ask(channel, "Join", joining("a"), store_pb2.JoinResponse)
    ref, stranger = joining("a").member.instance, joining("b").member.instance
    for term in (1 << 30, (1 << 31) - 2, (1 << 31) - 1):
        await send(channel, SERVICE, "Beat", store_pb2.BeatRequest(instance=stranger, term=term))
        await send(channel, SERVICE, "Beat", store_pb2.BeatRequest(instance=ref, term=term))
        said = announce()
        said.term = term
        await send(channel, SERVICE, "Announce", said)
    assert (await status_of(channel)).term == first
    for _ in range(100):
        term = (await status_of(channel)).term + 1
        await send(channel, SERVICE, "Beat", store_pb2.BeatRequest(instance=ref, term=term))
    assert (await status_of(channel)).term < first + 100, "a liar makes it rise some times at once, then once a second"
    for term in (1 << 31, 1 << 40, HUGE):
        outcome = await send(channel, SERVICE, "Beat", store_pb2.BeatRequest(instance=ref, term=term))
        assert outcome.code == BAD and outcome.error is not None and outcome.error.field == "term"
    assert (await ask(channel, "Beat", store_pb2.BeatRequest(instance=ref), store_pb2.BeatResponse)).term < first + 100


async def test_no_member_can_fill_the_map(channel: grpc.aio.Channel) -> None:
    await ask(channel, "Join", joining("a"), store_pb2.JoinResponse)
    full = announce(sealed=b"".join(keys(65_536)))
    await ask(channel, "Announce", full, store_pb2.AnnounceResponse)
    more = announce(seq=2, sealed=b"".join(keys(65_536, salt=1)))
    parts = [announce(seq=9, snapshot=True, part=i, more=True, sealed=b"".join(keys(65_536, i))) for i in range(2)]
    for request in (parts[0], more):
        await ask(channel, "Announce", request, store_pb2.AnnounceResponse)
    assert (await status_of(channel)).replicas == 100_000
    await ask(channel, "Announce", parts[1], store_pb2.AnnounceResponse)
    gone = b"".join(keys(65_536, salt=3))
    for seq in range(10, 13):  # what is not there makes no room
        fresh = announce(seq=seq, sealed=b"".join(keys(65_536, salt=seq)), removed=gone)
        await ask(channel, "Announce", fresh, store_pb2.AnnounceResponse)
    assert (await status_of(channel)).replicas == 100_000


async def test_no_caller_can_fill_the_membership(channel: grpc.aio.Channel) -> None:
    for i in range(50):
        await ask(channel, "Join", joining(f"m{i}"), store_pb2.JoinResponse)
    await refused(channel, SERVICE, [Case("Join", joining("one-more"), "RESOURCE_EXHAUSTED")])
    assert len((await status_of(channel)).stores) == 50
    assert MAX_REPLACED < 10_000  # names taken over are remembered, but not all of them for ever
