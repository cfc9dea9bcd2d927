"""Hostile input at every internal RPC of a running mesh: an error that names the field, nothing held, all alive.

Services' own tests go into detail (`tests/*/test_hostile.py`, `tests/blockservice/test_servicer.py`); here the real
processes meet it, with brains, ranks and transfer engines behind them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import blocks_pb2, conductor_pb2, decode_pb2, prefill_pb2, store_pb2
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.rpc.protocol import PROTOCOL_VERSION
from tests.support import hostile
from tests.support.hostile import Case
from tests.support.mesh.client import Answer, packed
from tests.support.mesh.direct import Direct, blocks_at, node_store
from tests.support.mesh.harness import Running, running_mesh

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

# A deadline of a millisecond is a wish that is granted.
ENDS = hostile.BORNE | {"DEADLINE_EXCEEDED"}
PROMPT = [(i * 31 + i * i) % 200 + 20 for i in range(150)]
STRANGER = pb.InstanceRef(instance_id="stranger", address="127.0.0.1:1", incarnation=7)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    flags = {"*": {"num_pages": 96, "num_extents": 96}}
    run_dir = tmp_path_factory.mktemp("hostile")
    async with running_mesh(demo_path, run_dir, prefill=1, decode=1, pool=1, flags=flags) as running:
        yield running


def service(module: Any, name: str) -> Any:
    return module.DESCRIPTOR.services_by_name[name]


async def whole(mesh: Running, before: Answer) -> None:
    """Nothing is held anywhere, and the same question has the same answer."""
    await mesh.settled()
    again = await mesh.client.generate(PROMPT, 8)
    assert (again.error, again.tokens) == (None, before.tokens)
    await mesh.settled()


def start_request(direct: Direct, slot: int = 1, **changes: Any) -> decode_pb2.SessionRequest:
    keys, digest = direct._chain(PROMPT, "hostile")
    fields: dict[str, Any] = {
        "slot": slot,
        "request_id": f"hostile-{slot}",
        "model_fingerprint": direct.card.fingerprint,
        "token_ids": packed(PROMPT),
        "block_keys": keys,
        "chain_digest": digest,
        "sampling": pb.SamplingParams(max_tokens=2, top_p=1.0),
        "placement": conductor_pb2.Placement(prefill=direct.members["prefill-0"], decode=direct.members["decode-0"]),
        "deadline_ms": 5_000,
        "credit_tokens": 64,
    }
    return decode_pb2.SessionRequest(start=decode_pb2.StartRequest(**(fields | changes)))


def session_hello(version: int = PROTOCOL_VERSION) -> decode_pb2.SessionRequest:
    hello = decode_pb2.SessionHello(protocol_version=version, gateway_id="hostile", incarnation=3)  # type: ignore[arg-type]
    return decode_pb2.SessionRequest(hello=hello)


@pytest.mark.parametrize("seed", [1, 2])
async def test_decode(seed: int, mesh: Running) -> None:
    before = await mesh.client.generate(PROMPT, 8)
    direct = await Direct.of(mesh)
    decode = service(decode_pb2, "Decode")
    valid = {"Session": [session_hello(), start_request(direct)], "GetPools": pb.GetPoolsRequest()}
    async with connect(mesh.mesh.addresses["decode-0"]) as channel:
        await hostile.assault(channel, decode, valid, seed=seed, rounds=20, borne=ENDS)
        await hostile.refused(channel, decode, [
            Case("Session", [start_request(direct)], "INVALID_ARGUMENT", "kind"),
            Case("Session", [session_hello(77)], "FAILED_PRECONDITION", ""),
        ])  # fmt: skip
    await whole(mesh, before)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": b"abc"}, "token_ids"),
        ({"token_ids": b"\xff\xff\xff\x7f" * 70}, "token_ids"),
        ({"block_keys": b"k" * 5}, "block_keys"),
        ({"block_keys": b"k" * 16 * 1000}, "block_keys"),
        ({"chain_digest": b"short"}, "chain_digest"),
        ({"sampling": pb.SamplingParams(max_tokens=0, top_p=1.0)}, "max_tokens"),
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"model_fingerprint": "another"}, "model_fingerprint"),
        ({"placement": conductor_pb2.Placement()}, "placement.prefill.address"),
    ],
)
async def test_one_bad_request_of_a_session_names_its_field(changes: dict[str, Any], field: str, mesh: Running) -> None:
    """The session itself goes on: its other requests are answered."""
    direct = await Direct.of(mesh)
    messages = [session_hello(), start_request(direct, 1, **changes), start_request(direct, 2)]
    async with connect(mesh.mesh.addresses["decode-0"]) as channel:
        outcome = await hostile.send(channel, service(decode_pb2, "Decode"), "Session", messages)
    told = [decode_pb2.SessionResponse.FromString(raw) for raw in outcome.messages]
    failed = [f for message in told for f in message.failed]
    assert [(f.slot, f.error.field) for f in failed] == [(1, field)], outcome
    assert field.rsplit(".", 1)[-1] in failed[0].error.message
    await mesh.settled()


@pytest.mark.parametrize(
    ("first", "blocks", "address", "incarnation"),
    [(0, 2**32 - 1, "127.0.0.1:1", 7), (2**32 - 1, 2, "127.0.0.1:1", 7), (0, 1, "", 7), (0, 1, "127.0.0.1:1", 0)],
)
async def test_bad_pull_ranges(first: int, blocks: int, address: str, incarnation: int, mesh: Running) -> None:
    direct = await Direct.of(mesh)
    start = start_request(direct)
    holder = pb.InstanceRef(instance_id="stranger", address=address, incarnation=incarnation)
    start.start.placement.decode_pulls.add(holder=holder, first_block=first, blocks=blocks)
    async with connect(mesh.mesh.addresses["decode-0"]) as channel:
        outcome = await hostile.send(channel, service(decode_pb2, "Decode"), "Session", [session_hello(), start])
    told = [decode_pb2.SessionResponse.FromString(raw) for raw in outcome.messages]
    (failed,) = [f for message in told for f in message.failed]
    assert "decode_pulls" in failed.error.field
    assert "decode_pulls" in failed.error.message
    await mesh.settled()


@pytest.mark.parametrize("seed", [1, 2])
async def test_prefill(seed: int, mesh: Running) -> None:
    before = await mesh.client.generate(PROMPT, 8)
    direct = await Direct.of(mesh)
    prefill = service(prefill_pb2, "Prefill")
    hello = prefill_pb2.HandoffHello(protocol_version=PROTOCOL_VERSION, instance=STRANGER)
    keys, _ = direct._chain(PROMPT, "hostile")
    start = prefill_pb2.StartPrefill(
        handle=1,
        request_id="hostile",
        model_fingerprint=direct.card.fingerprint,
        token_ids=packed(PROMPT),
        block_keys=keys,
        sampling=pb.SamplingParams(max_tokens=2, top_p=1.0),
        deadline_ms=3_000,
        pulls=[pb.PullRange(holder=STRANGER, first_block=0, blocks=2)],
    )
    messages = [prefill_pb2.HandoffRequest(hello=hello), prefill_pb2.HandoffRequest(start=start)]
    landing = prefill_pb2.Landing(handle=1, handoff_epoch=1, lease_ms=2**32 - 1)
    landing.ranks.add(rank=2**32 - 1, segment="nowhere", offset=[2**64 - 1], first_block=2**32 - 1)
    valid = {"Handoff": [*messages, prefill_pb2.HandoffRequest(landing=landing)], "GetPools": pb.GetPoolsRequest()}
    async with connect(mesh.mesh.addresses["prefill-0"]) as channel:
        await hostile.assault(channel, prefill, valid, seed=seed, rounds=20, borne=ENDS)
        await mesh.settled()  # a start that finds no room ends at once, and its handle is free
        junk = prefill_pb2.HandoffHello(
            protocol_version=PROTOCOL_VERSION, instance=STRANGER, segment_descriptors=[b"no descriptor"]
        )
        await hostile.refused(channel, prefill, [
            Case("Handoff", messages[1:], "INVALID_ARGUMENT", "kind"),
            Case("Handoff", [prefill_pb2.HandoffRequest(hello=junk)], "INVALID_ARGUMENT", "segment_descriptors"),
            Case("Handoff", [messages[0], messages[0]], "INVALID_ARGUMENT", "kind"),
            Case("Handoff", [*messages, messages[1]], "INVALID_ARGUMENT", "handle"),
        ])  # fmt: skip
    await whole(mesh, before)


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "pool-0"])
async def test_node_store(name: str, mesh: Running) -> None:
    before = await mesh.client.generate(PROMPT, 8)
    await mesh.settled()
    address = mesh.mesh.addresses[name]
    held = await blocks_at(address)
    key = next(iter(held), b"k" * 16)
    valid = {
        "Lease": blocks_pb2.LeaseRequest(reader="x", keys=key, lease_ms=100, layout="?", want_descriptors=True),
        "RenewLease": blocks_pb2.RenewBlocksRequest(lease_id=1, lease_ms=100),
        "ReleaseLease": blocks_pb2.ReleaseBlocksRequest(lease_id=1),
        "Pull": blocks_pb2.PullBlocksRequest(
            keys=b"p" * 32, holders=[STRANGER], layout="?", shard_bytes=64, timeout_ms=200
        ),
        "ListBlocks": blocks_pb2.ListBlocksRequest(),
        "GetStore": blocks_pb2.GetNodeStoreRequest(),
        "Exists": blocks_pb2.ExistsRequest(keys=key, layout="?"),
        "Remove": blocks_pb2.RemoveBlocksRequest(keys=b"q" * 16, term=1),
        "Pin": blocks_pb2.PinBlocksRequest(keys=b"q" * 16, layout="?", kind=blocks_pb2.PIN_KIND_SOFT, ttl_ms=50),
        "Put": blocks_pb2.PutBlocksRequest(
            keys=b"q" * 16, layout="bytes", segment="x/0@1", offset=[0], nbytes=[64], read_within_ms=50
        ),
        "Doors": blocks_pb2.DoorsRequest(),
        "Touch": blocks_pb2.TouchBlocksRequest(keys=key * 2, layout="?"),
    }
    nodes = service(blocks_pb2, "NodeStore")
    async with connect(address) as channel:
        await hostile.assault(channel, nodes, valid, seed=5, rounds=15, borne=ENDS)
        await hostile.refused(channel, nodes, [
            Case("Lease", blocks_pb2.LeaseRequest(keys=b"x" * 17, lease_ms=9), "INVALID_ARGUMENT", "keys"),
            Case("Lease", blocks_pb2.LeaseRequest(keys=bytes(16) * 70_000, lease_ms=9), "INVALID_ARGUMENT", "keys"),
            Case("Lease", blocks_pb2.LeaseRequest(keys=key, lease_ms=9, holder_incarnation=3), "NOT_FOUND", ""),
            Case("RenewLease", blocks_pb2.RenewBlocksRequest(lease_id=2**64 - 1, lease_ms=9), "NOT_FOUND", ""),
            Case("Pull", blocks_pb2.PullBlocksRequest(keys=b"x" * 3), "INVALID_ARGUMENT", "keys"),
            Case("Touch", blocks_pb2.TouchBlocksRequest(keys=b"x" * 3), "INVALID_ARGUMENT", "keys"),
            Case("Touch", blocks_pb2.TouchBlocksRequest(keys=key, holder_incarnation=3), "NOT_FOUND", ""),
        ])  # fmt: skip
    await whole(mesh, before)
    assert held <= await blocks_at(address), "what was sealed is sealed"
    found = await node_store(address)
    assert (found.pools.store_leases, found.pools.store_writing, found.pools.pulls) == (0, 0, 0)


async def test_store_master_and_conductor(mesh: Running) -> None:
    before = await mesh.client.generate(PROMPT, 8)
    member = store_pb2.Member(instance=STRANGER, role=pb.ROLE_PREFILL, node_id="n", store_id="stranger")
    announcement = store_pb2.Announcement(store_id="stranger", incarnation=7, seq=1, sealed=b"k" * 32)
    master = {
        "Join": store_pb2.JoinRequest(protocol_version=PROTOCOL_VERSION, member=member),
        "Beat": store_pb2.BeatRequest(instance=STRANGER, seq=1),
        "Leave": store_pb2.LeaveRequest(instance=STRANGER),
        "ListMembers": store_pb2.ListMembersRequest(),
        "Announce": store_pb2.AnnounceRequest(announcement=announcement),
        "Watch": store_pb2.WatchRequest(),
        "Lookup": store_pb2.LookupRequest(keys=b"k" * 16),
        "GetStatus": store_pb2.GetStoreStatusRequest(),
        "Find": store_pb2.FindRequest(keys=b"k" * 16),
        "ListKeys": store_pb2.ListKeysRequest(prefix=b"kkkk", limit=9),
        "Grant": store_pb2.GrantRequest(count=7),
        "Bind": store_pb2.BindRequest(namespace="n", names=[store_pb2.NamedKey(name="x", key=b"k" * 16)]),
        "Resolve": store_pb2.ResolveRequest(namespace="n", names=["x", "y"]),
        "Remove": store_pb2.RemoveRequest(keys=b"k" * 16),
        "ChangeReplica": store_pb2.ChangeReplicaRequest(keys=b"k" * 16, replicas=2, hard=True),
        "Drain": store_pb2.DrainRequest(instance_id="stranger"),
        "SetQuota": store_pb2.SetQuotaRequest(quota=store_pb2.Quota(tag=b"kkkk", blocks=9, name="t")),
        "ListQuotas": store_pb2.ListQuotasRequest(),
        "LendRanks": store_pb2.LendRanksRequest(protocol_version=PROTOCOL_VERSION, leaves=True),
        "PlaceRanks": store_pb2.PlaceRanksRequest(instance=STRANGER, build="b", hosts=1, ranks_each=1),
        "ListRankHosts": store_pb2.ListRankHostsRequest(),
    }
    async with connect(mesh.mesh.addresses["store"]) as channel:
        await hostile.assault(channel, service(store_pb2, "StoreMaster"), master, seed=3, rounds=15, borne=ENDS)
    conductor = {
        "Register": conductor_pb2.RegisterInstanceRequest(protocol_version=PROTOCOL_VERSION, instance=STRANGER),
        "Heartbeat": conductor_pb2.HeartbeatRequest(instance=STRANGER, seq=1),
        "Schedule": conductor_pb2.ScheduleRequest(request_id="x", model="none", prompt_tokens=9, max_tokens=1),
        "ListModels": conductor_pb2.ListModelsRequest(held=[conductor_pb2.HeldRequests(model="m", requests=1)]),
        "Release": conductor_pb2.ReleaseRequest(
            requests=[conductor_pb2.ReleasedRequest(request_id="x", outcome=conductor_pb2.OUTCOME_DONE)]
        ),
        "GetStatus": conductor_pb2.GetConductorStatusRequest(),
        "Explain": conductor_pb2.ExplainRequest(request_id="x"),
        "Cordon": conductor_pb2.CordonRequest(instance_id="x"),
        "GetScaleHints": conductor_pb2.GetScaleHintsRequest(),
        "PauseModel": conductor_pb2.PauseModelRequest(model="x"),
        "ResumeModel": conductor_pb2.ResumeModelRequest(model="x"),
        "GatherModel": conductor_pb2.GatherModelRequest(model="x"),
        "UpdateModelWeights": conductor_pb2.UpdateModelWeightsRequest(model="x"),
        "SleepModel": conductor_pb2.SleepModelRequest(model="x"),
        "WakeModel": conductor_pb2.WakeModelRequest(model="x"),
    }
    async with connect(mesh.mesh.addresses["conductor"]) as channel:
        await hostile.assault(channel, service(conductor_pb2, "Conductor"), conductor, seed=3, rounds=15, borne=ENDS)
    await whole(mesh, before)
