"""What goes wrong around a decode instance: writers that die or freeze, pools that run out, ranks that are killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmesh.errors import InternalError
from kvmesh.rpc.pb import common_pb2 as pb
from kvmesh.services.decode import main
from kvmesh.services.decode.config import DecodeConfig
from tests.support.checkpoints import prompts
from tests.support.decode.bench import Bench, ScriptedPrefill, bench
from tests.support.rank_driver import BLOCK, rank
from tests.support.reference import assert_matches_reference
from tests.support.services import Running, until
from tests.support.warm_processes import children

pytestmark = pytest.mark.timeout(240)
PROMPT = [(7 * i * i + 3 * i) % 90 + 5 for i in range(37)]


@pytest.mark.parametrize(("transports", "landing"), [("tcp", "host"), ("shm", "auto")])
@pytest.mark.slow
async def test_a_full_pool_preempts_and_the_tokens_stay_right(checkpoint: Path, transports: str, landing: str) -> None:
    async with bench(checkpoint, transports, num_pages=8, num_extents=40, landing=landing) as mesh:
        async with mesh.gateway() as gateway:
            mesh.prefill.before_end.close()
            # Any two of them need more pages at their ends than there are: whoever runs beside another is in its way.
            asked = {await gateway.start(prompt, 64): prompt for prompt in prompts(6, 90, low=5, high=40)}

            # All six set out together: on a busy machine one by one would fit the pool.
            async def landed() -> bool:
                return mesh.prefill.before_end.waiting == 6

            await until(landed)
            mesh.prefill.before_end.open()
            for slot, prompt in asked.items():
                answer = await gateway.over(slot)
                assert not answer.failed
                assert len(answer.tokens) == 64
                assert_matches_reference(checkpoint, prompt, answer.tokens)
        await mesh.full()
        text = await metrics(mesh)
    assert landing == "auto" or counted(text, "kvmesh_decode_load_seconds_count") >= 6
    assert counted(text, "kvmesh_decode_preemptions_total") >= 1, "the pool was not small enough to show anything"


async def metrics(mesh: Bench) -> str:
    host, _, port = mesh.service.metrics.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return text


def counted(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.slow
async def test_without_extents_to_go_to_one_clear_retryable_error(checkpoint: Path) -> None:
    async with bench(checkpoint, num_pages=12, num_extents=1) as mesh:
        async with mesh.gateway() as gateway:
            # Each of them alone fills the pool; the second comes long before the first is done.
            first = await gateway.start(PROMPT[:17], 170)
            second = await gateway.start(PROMPT[:17], 170)
            refused = await gateway.over(second)
            assert refused.failed is not None
            assert (refused.code, refused.failed.retryable) == ("overloaded", True)
            assert refused.failed.retry_after_ms > 0
            answer = await gateway.over(first)
            assert_matches_reference(checkpoint, PROMPT[:17], answer.tokens)
            assert len(answer.tokens) == 170
        await mesh.full()


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.slow
async def test_a_frozen_writer_is_given_up_and_its_late_bytes_go_nowhere(checkpoint: Path, transports: str) -> None:
    async with bench(checkpoint, transports, lease_ms=400, lease_margin_ms=100, drain_ms=300, num_pages=4) as mesh:
        async with mesh.gateway() as gateway:
            mesh.prefill.before_push.close()
            slot = await gateway.start(PROMPT, 20)
            await gateway.has(slot, 1)
            os.kill(mesh.prefill.writer.client.pid, signal.SIGSTOP)
            mesh.prefill.before_push.open()
            answer = await gateway.over(slot)
            assert answer.failed is not None
            assert (answer.code, answer.failed.retryable) == ("handoff_lost", True)
            await mesh.full()  # fenced: the sleeper can hurt nobody
            os.kill(mesh.prefill.writer.client.pid, signal.SIGCONT)

        # The same pages serve the next ones.
        async with mesh.gateway() as gateway:
            for prompt in prompts(4, 90, low=20, high=40):
                answer = await gateway.over(await gateway.start(prompt, 8))
                assert not answer.failed
                assert_matches_reference(checkpoint, prompt, answer.tokens)
        await mesh.full()


@pytest.mark.slow
async def test_a_killed_prefill_fails_its_fills_and_only_those(checkpoint: Path) -> None:
    async with bench(checkpoint) as mesh, mesh.gateway() as gateway:
        running = await gateway.start(PROMPT, 200)
        await gateway.has(running, 2)
        mesh.prefill.before_push.close()
        filling = await gateway.start(PROMPT, 20)
        await gateway.has(filling, 1)
        await mesh.prefill.server.stop(0)
        lost = await gateway.over(filling)
        assert lost.failed is not None
        assert (lost.code, lost.failed.retryable) == ("handoff_lost", True)
        answer = await gateway.over(running)
        assert len(answer.tokens) == 200
        assert_matches_reference(checkpoint, PROMPT, answer.tokens)
        await mesh.full()
        # Another instance takes over; nothing of the lost one is in the way.
        async with rank("prefill-1", checkpoint) as writer:
            old, mesh.prefill = mesh.prefill, ScriptedPrefill(writer)
            await mesh.prefill.server.start()
            answer = await gateway.over(await gateway.start(PROMPT, 5))
            assert len(answer.tokens) == 5
            await mesh.prefill.server.stop(0)
            mesh.prefill = old


@pytest.mark.slow
async def test_stop_lets_answers_finish_and_tells_the_rest(checkpoint: Path) -> None:
    async with bench(checkpoint, stop_grace_ms=1_000) as mesh, mesh.gateway() as gateway:
        mesh.prefill.before_push.close()
        stuck = await gateway.start(PROMPT, 20)
        await gateway.has(stuck, 1)
        stopping = asyncio.create_task(mesh.service.stop())
        refused = await gateway.start(PROMPT, 4)
        answer = await gateway.over(stuck)
        assert (answer.code, answer.failed and answer.failed.retryable) == ("unavailable", True)
        assert "shutting down" in str(answer.failed)
        assert (await gateway.over(refused)).code == "unavailable"
        await stopping
    assert not [p for p in children() if p.status() != psutil.STATUS_ZOMBIE]


async def test_a_killed_rank_ends_every_request_and_then_the_instance(checkpoint: Path) -> None:
    config = DecodeConfig(model=str(checkpoint), num_pages=24, num_extents=24, block_tokens=BLOCK)
    async with rank("prefill-0", checkpoint) as writer:
        prefill = ScriptedPrefill(writer)
        await prefill.server.start()
        service = await Running(main.run, config).started()
        mesh = Bench(service, prefill, checkpoint)
        async with mesh.gateway() as gateway:
            slot = await gateway.start(PROMPT, 300)
            await gateway.has(slot, 2)
            ranks = [c for c in children() if c.pid != writer.client.pid]
            assert len(ranks) == 1
            ranks[0].kill()
            answer = await gateway.over(slot)
            assert (answer.code, answer.failed and answer.failed.retryable) == ("unavailable", True)
            assert "lost a rank" in str(answer.failed)
        await mesh.close()
        with pytest.raises(InternalError, match="lost a rank"):
            await service.stop()
        await prefill.server.stop(0)


def spans_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob("decode-*.jsonl") for line in path.read_text().splitlines()]


async def test_spans_have_honest_borders_and_go_on_to_prefill(checkpoint: Path, tmp_path: Path) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    async with bench(checkpoint, trace_dir=str(tmp_path), landing="host") as mesh:
        async with mesh.gateway() as gateway:
            slot = await gateway.start(PROMPT, 6, traceparent=f"00-{trace}-{parent}-01")
            await gateway.over(slot)
            bad = await gateway.start(PROMPT, 0, traceparent=f"00-{trace}-{parent}-01")
            await gateway.over(bad)
            nobody = pb.InstanceRef(instance_id="prefill-9", address="127.0.0.1:1", incarnation=9)
            pulls = [pb.PullRange(holder=nobody, first_block=0, blocks=1)]
            where = {"prefill": mesh.prefill.ref, "decode_pulls": pulls}
            fetching = await gateway.start(PROMPT[::-1], 3, traceparent=f"00-{trace}-{parent}-01", placement=where)
            assert len((await gateway.over(fetching)).tokens) == 3
        await mesh.full()
        handed_on = mesh.prefill.requests[0].start.traceparent
    found = spans_in(tmp_path)
    assert {s["trace_id"] for s in found} == {trace}
    whole, refused, fetched = sorted((s for s in found if s["name"] == "kvmesh.request"), key=lambda s: s["start_ns"])
    assert whole["parent"] == parent
    assert handed_on == f"00-{trace}-{whole['span_id']}-01"
    assert "max_tokens" in refused["status"]
    stages = {s["name"]: s for s in found if s["parent"] == whole["span_id"]}
    names = ["kvmesh.admit", "kvmesh.reserve", "kvmesh.load", "kvmesh.first_decode", "kvmesh.generate"]
    assert sorted(stages) == sorted(names)
    for earlier, later in itertools.pairwise(names):
        assert stages[earlier]["start_ns"] < stages[earlier]["end_ns"] <= stages[later]["start_ns"], (earlier, later)
    assert whole["start_ns"] <= stages["kvmesh.admit"]["start_ns"]
    assert stages["kvmesh.generate"]["end_ns"] <= whole["end_ns"]
    assert whole["attributes"]["gen_ai.usage.output_tokens"] == 6
    assert whole["attributes"]["kvmesh.outcome"] == "length"
    assert whole["attributes"]["kvmesh.at_decode_tokens"] == 0
    (pull,) = [s for s in found if s["name"] == "kvmesh.pull"]
    assert pull["parent"] == fetched["span_id"]
    assert (pull["attributes"]["kvmesh.blocks"], pull["status"] != "") == (0, True)
    assert fetched["attributes"]["kvmesh.decode.pulled_tokens"] == 0


@pytest.mark.slow
async def test_an_overload_is_refused_with_a_time_to_come_again(checkpoint: Path) -> None:
    async with bench(checkpoint, max_running=1, max_waiting=1) as mesh, mesh.gateway() as gateway:
        mesh.prefill.before_begin.close()
        slots = [await gateway.start(PROMPT, 4) for _ in range(3)]
        refused = await gateway.over(slots[2])
        assert refused.code == "overloaded"
        assert refused.failed is not None
        assert refused.failed.retry_after_ms >= 100
        mesh.prefill.before_begin.open()
        for slot in slots[:2]:
            assert len((await gateway.over(slot)).tokens) == 4
        await mesh.full()

        async def heard() -> bool:
            return counted(await metrics(mesh), 'kvmesh_decode_requests_total{outcome="overloaded"}') >= 1

        await until(heard)
