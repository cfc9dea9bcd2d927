"""Blocks, explanations and hostile callers over real gRPC, with a real store master."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.errors import InvalidRequest, Overloaded, Unavailable, UnknownRequest
from kvmesh.rpc import channels
from kvmesh.rpc.pb import common_pb2, conductor_pb2, store_pb2
from kvmesh.services.store import main as store_main
from kvmesh.services.store.config import StoreConfig
from tests.conductor.test_service import (
    CARD,
    TIMEOUT,
    Mesh,
    beat,
    failing,
    meshed,
    ref,
    registering,
    scheduling,
)
from tests.support import hostile
from tests.support.services import running, until

KEYS = b"".join(i.to_bytes(16, "big") for i in range(1, 61))
PROMPT = 60 * 16 + 5


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with meshed() as found:
        for name in ("p0", "p1", "d0"):
            await found.join(name)
            await found.add(name)
        await found.join("m0")  # a pool node
        yield found


async def announce(mesh: Mesh, name: str, keys: bytes = b"", *, seq: int = 1, incarnation: int = 1, **more: Any) -> Any:
    told = store_pb2.Announcement(store_id=name, incarnation=incarnation, seq=seq, sealed=keys, **more)
    return await mesh.store.Announce(store_pb2.AnnounceRequest(announcement=told), timeout=TIMEOUT)


async def indexed(mesh: Mesh, **expected: int) -> None:
    async def so() -> bool:
        counts = {i.instance.instance_id: i.indexed_blocks for i in (await mesh.status()).instances}
        return all(counts[name] == blocks for name, blocks in expected.items())

    await until(so)


async def explained(mesh: Mesh, request_id: str) -> Any:
    return await mesh.conductor.Explain(conductor_pb2.ExplainRequest(request_id=request_id), timeout=TIMEOUT)


async def test_announced_blocks_draw_fetches_from_their_holders(mesh: Mesh) -> None:
    await announce(mesh, "m0", KEYS)
    await announce(mesh, "d0", KEYS[:160])
    await indexed(mesh, d0=10)
    status = await mesh.status()
    assert "m0" not in {i.instance.instance_id for i in status.instances}

    async def placed() -> Any:  # what the pool node holds is in no status
        placement = await mesh.schedule(PROMPT, block_keys=KEYS)
        return placement if placement.pulls else None

    placement = await until(placed)
    assert [(r.holder.instance_id, r.first_block, r.blocks) for r in placement.pulls] == [("m0", 0, 60)]
    assert placement.pulls[0].holder == ref("m0")
    assert [(r.holder.instance_id, r.first_block, r.blocks) for r in placement.decode_pulls] == [("m0", 10, 50)]
    assert Counter_of(placement.sources) == {"AT_DECODE": 10, "DECODE_PULLS": 50, "PREFILL_PUSHES": 1}
    assert placement.predicted_cached_tokens == 60 * 16


def Counter_of(sources: bytes) -> dict[str, int]:  # noqa: N802
    names = [conductor_pb2.BlockSource.Name(b).removeprefix("BLOCK_SOURCE_") for b in sources]  # type: ignore[arg-type]
    return {name: names.count(name) for name in dict.fromkeys(names)}


async def test_death_and_a_new_life_take_the_blocks(mesh: Mesh) -> None:
    await announce(mesh, "p0", KEYS)
    await announce(mesh, "p1", KEYS)
    await indexed(mesh, p0=60, p1=60)
    await mesh.store.Leave(store_pb2.LeaveRequest(instance=ref("p0")), timeout=TIMEOUT)
    await indexed(mesh, p0=0, p1=60)
    await mesh.join("p1", 2)
    await mesh.add("p1", 2)
    await indexed(mesh, p1=0)
    placement = await mesh.schedule(PROMPT, block_keys=KEYS)
    assert placement.prefill == ref("p1", 2)
    assert (placement.predicted_cached_tokens, list(placement.pulls)) == (0, [])
    await announce(mesh, "p1", KEYS[:320], incarnation=2)
    await indexed(mesh, p1=20)


async def test_a_restarted_master_takes_nothing_that_its_members_still_hold() -> None:
    async with meshed() as mesh:
        for name in ("p0", "p1", "d0"):
            await mesh.join(name)
            await mesh.add(name)
        await announce(mesh, "p0", KEYS)
        await indexed(mesh, p0=60)
        port = mesh.store_service.port
        await mesh.store_service.stop()

        async def lost() -> bool:
            return "no connection" in (await mesh.status()).store_master

        await until(lost)
        await indexed(mesh, p0=60)
        await mesh.conductor.Heartbeat(beat("p0", seq=2, queued_tokens=100_000), timeout=TIMEOUT)
        assert (await mesh.schedule(PROMPT, block_keys=KEYS, request_id="lost")).pulls[0].holder == ref("p0")
        store_config = StoreConfig(heartbeat_interval_ms=50, lease_ms=60_000, port=port)
        async with running(store_main.run, store_config):

            async def found() -> bool:
                return bool((await mesh.status()).store_master == "connected")

            await until(found)
            await indexed(mesh, p0=60)  # its member may still come back
            await mesh.join("p0")
            answer = await announce(mesh, "p0", KEYS[:16], seq=2)
            assert answer.want_snapshot
            await announce(mesh, "p0", KEYS[:32], seq=3, snapshot=True)
            await indexed(mesh, p0=2)


async def test_explain_tells_candidates_terms_and_choice(mesh: Mesh) -> None:
    await announce(mesh, "p0", KEYS)
    await indexed(mesh, p0=60)
    load = beat("p0", seq=2, queued_tokens=100_000)
    await mesh.conductor.Heartbeat(load, timeout=TIMEOUT)
    placement = await mesh.schedule(PROMPT, block_keys=KEYS, request_id="why")
    assert placement.prefill.instance_id == "p1"
    answer = await explained(mesh, "why")
    assert (answer.request_id, answer.model, answer.outcome, answer.message) == ("why", "demo", "placed", "")
    assert (answer.prompt_tokens, answer.prompt_blocks, answer.best_prefix_blocks) == (PROMPT, 60, 60)
    placement.ClearField("weights_epoch")  # of now: what is explained is past
    assert answer.placement == placement
    assert not answer.reported
    found = {(c.instance.instance_id, c.role): c for c in answer.candidates}
    assert set(found) == {
        ("p0", common_pb2.ROLE_PREFILL),
        ("p1", common_pb2.ROLE_PREFILL),
        ("d0", common_pb2.ROLE_DECODE),
    }
    p0, p1 = (found[name, common_pb2.ROLE_PREFILL] for name in ("p0", "p1"))
    assert p1.chosen
    assert p1.verdict == "chosen"
    assert (p1.local_blocks, p1.pulled_blocks) == (0, 60)
    terms = {t.name: t.value for t in p1.terms}
    always = {"queue_ms", "prefill_ms", "transfer_tail_ms", "landing_wait_ms", "ttft_ms"}
    assert set(terms) == always | {"pull_ms", "ttft_other_way_ms"}
    assert terms["ttft_ms"] < terms["ttft_other_way_ms"]
    assert not p0.chosen
    assert (p0.local_blocks, p0.pulled_blocks) == (60, 0)
    assert p0.verdict == f"slower by {p0.score_ms - p1.score_ms:,.1f} ms"
    assert {t.name for t in p0.terms} == always
    sample = conductor_pb2.PrefillSample(
        request_id="why", computed_tokens=5, cached_tokens=960, duration_us=7500, pulled_tokens=960
    )
    report = beat("p1", seq=2)
    report.prefill_samples.append(sample)
    await mesh.conductor.Heartbeat(report, timeout=TIMEOUT)
    later = await explained(mesh, "why")
    assert (later.reported, later.cached_tokens, later.prefill_ms) == (True, 960, 8)


async def test_refusals_are_explained(mesh: Mesh) -> None:
    assert isinstance(await mesh.refused(request_id="slow", ttft_slo_ms=1), Overloaded)
    answer = await explained(mesh, "slow")
    assert answer.outcome == "ttft"
    assert "TTFT" in answer.message
    verdicts = [c.verdict for c in answer.candidates if c.role == common_pb2.ROLE_PREFILL]
    assert verdicts and all(
        said.startswith("over the TTFT SLO: ") and said.endswith(", at most 1.0") for said in verdicts
    )
    assert not answer.HasField("placement")
    for name in ("p0", "p1"):
        await mesh.conductor.Heartbeat(
            conductor_pb2.HeartbeatRequest(instance=ref(name), seq=9, not_ready_reason="no rank"), timeout=TIMEOUT
        )
    assert isinstance(await mesh.refused(request_id="none"), Unavailable)
    answer = await explained(mesh, "none")
    assert answer.outcome == "no_instance"
    assert {c.instance.instance_id: c.verdict for c in answer.candidates} == {
        "p0": "not ready: no rank",
        "p1": "not ready: no rank",
        "d0": "not weighed",
    }
    assert isinstance(await mesh.refused(request_id="odd", block_keys=bytes(16 * 9)), InvalidRequest)
    assert (await explained(mesh, "odd")).outcome == "invalid"


async def test_what_was_never_decided_cannot_be_explained(mesh: Mesh) -> None:
    request = conductor_pb2.ExplainRequest(request_id="nobody")
    error = await failing(mesh.conductor.Explain(request, timeout=TIMEOUT))
    assert isinstance(error, UnknownRequest)
    assert error.field == "request_id"
    assert "nobody" in error.message
    error = await failing(mesh.conductor.Explain(conductor_pb2.ExplainRequest(), timeout=TIMEOUT))
    assert isinstance(error, InvalidRequest)


async def test_two_models_are_listed_and_kept_apart(mesh: Mesh) -> None:
    for name in ("p8", "d8"):
        request = registering(name)
        request.model.CopyFrom(CARD)
        request.model.name, request.model.fingerprint = "other", "g"
        await mesh.conductor.Register(request, timeout=TIMEOUT)
        await mesh.conductor.Heartbeat(beat(name), timeout=TIMEOUT)
    models = (await mesh.conductor.ListModels(conductor_pb2.ListModelsRequest(), timeout=TIMEOUT)).models
    assert sorted(m.name for m in models) == ["demo", "other"]
    assert {i.instance.instance_id: i.model for i in (await mesh.status()).instances}["p8"] == "other"
    placement = await mesh.schedule(model="other")
    assert (placement.prefill.instance_id, placement.decode.instance_id) == ("p8", "d8")


async def test_the_load_of_stores_is_told(mesh: Mesh) -> None:
    counters = {
        "store_blocks": 7,
        "store_capacity": 9,
        "prompt_tokens": 100,
        "device_hit_tokens": 1,
        "host_hit_tokens": 2,
        "remote_hit_tokens": 3,
        "pulled_bytes": 4,
    }
    await mesh.conductor.Heartbeat(beat("p0", seq=2, **counters), timeout=TIMEOUT)
    found = next(i for i in (await mesh.status()).instances if i.instance.instance_id == "p0")
    assert {name: getattr(found.load, name) for name in counters} == counters


SERVICE = conductor_pb2.DESCRIPTOR.services_by_name["Conductor"]


def holding(*models: str) -> conductor_pb2.ListModelsRequest:
    return conductor_pb2.ListModelsRequest(held=[conductor_pb2.HeldRequests(model=m, requests=1) for m in models])


async def test_hostile_callers_break_nothing(mesh: Mesh) -> None:
    sample = conductor_pb2.PrefillSample(request_id="r", computed_tokens=9, duration_us=9, pull_bytes=9, pull_us=9)
    report = beat("p0", seq=2)
    report.prefill_samples.append(sample)
    report.decode_samples.append(conductor_pb2.DecodeSample(batch=1, context_tokens=9, duration_us=9))
    report.finished_request_ids.append("r")
    valid = {
        "Register": registering("p7"),
        "Heartbeat": report,
        "Schedule": scheduling(PROMPT, block_keys=KEYS, avoid_instance_ids=["p9"]),
        "ListModels": holding("demo"),
        "Release": conductor_pb2.ReleaseRequest(
            requests=[conductor_pb2.ReleasedRequest(request_id="r", served_by="p0", outcome=conductor_pb2.OUTCOME_DONE)]
        ),
        "GetStatus": conductor_pb2.GetConductorStatusRequest(),
        "Explain": conductor_pb2.ExplainRequest(request_id="r"),
        "Cordon": conductor_pb2.CordonRequest(instance_id="r"),
        "GetScaleHints": conductor_pb2.GetScaleHintsRequest(),
        "PauseModel": conductor_pb2.PauseModelRequest(model="r"),
        "ResumeModel": conductor_pb2.ResumeModelRequest(model="r"),
        "GatherModel": conductor_pb2.GatherModelRequest(model="r"),
        "UpdateModelWeights": conductor_pb2.UpdateModelWeightsRequest(model="r", deadline_ms=1),
        "SleepModel": conductor_pb2.SleepModelRequest(model="r", deadline_ms=1),
        "WakeModel": conductor_pb2.WakeModelRequest(model="r", deadline_ms=1),
    }
    async with channels.connect(mesh.conductor_service.address) as channel:
        seen = await hostile.assault(channel, SERVICE, valid, seed=7, rounds=12)
        assert seen["Schedule", "INVALID_ARGUMENT"]
        await hostile.refused(
            channel,
            SERVICE,
            [
                hostile.Case("Schedule", scheduling(PROMPT, block_keys=b"x" * 17), "INVALID_ARGUMENT", "block_keys"),
                hostile.Case("Schedule", scheduling(20, block_keys=bytes(32)), "INVALID_ARGUMENT", "block_keys"),
                hostile.Case("Schedule", scheduling(0), "INVALID_ARGUMENT", "prompt_tokens"),
                hostile.Case("Schedule", scheduling(request_id=""), "INVALID_ARGUMENT", "request_id"),
                hostile.Case("Schedule", scheduling(2**32 - 1), "INVALID_ARGUMENT", "prompt_tokens"),
                hostile.Case("ListModels", holding(*[f"m{n}" for n in range(65)]), "INVALID_ARGUMENT", "held"),
                hostile.Case("ListModels", holding(""), "INVALID_ARGUMENT", "held.model"),
                hostile.Case("ListModels", holding("m" * 257), "INVALID_ARGUMENT", "held.model"),
                hostile.Case("Heartbeat", beat("p0", 99), "NOT_FOUND"),
                hostile.Case("Register", registering("p7", 0), "INVALID_ARGUMENT", "instance.incarnation"),
                hostile.Case("Explain", conductor_pb2.ExplainRequest(request_id="?"), "NOT_FOUND", "request_id"),
            ],
        )
    for name in ("p0", "p1", "d0"):  # whoever was thrown out by nonsense of its own name comes back
        await mesh.add(name, 10)
    placement = await mesh.schedule(PROMPT, request_id="after")
    assert placement.predicted_ttft_ms < 60_000
