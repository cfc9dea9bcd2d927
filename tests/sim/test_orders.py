"""What conductors order and refuse in a simulation: replicas, roles, the paper's baseline, retries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmesh.services.conductor.domain import Replicate, Role, SwitchRole
from kvmesh.services.conductor.settings import AdmissionSettings, Mode
from kvmesh.sim.cluster import Cluster
from kvmesh.sim.loop import Loop
from kvmesh.sim.report.records import DONE, REFUSED, MeshSample, Record
from kvmesh.sim.run import run
from tests.support.sim.fleets import BLOCK, NEVER_REFUSE, mesh, node, request, served


def test_a_replica_that_is_ordered_is_pulled_and_then_known() -> None:
    loop, records = Loop(), list[Record]()
    cluster = Cluster(mesh(2, 1), loop, records.append)
    first = request(0, 0.0, 320, 1)
    cluster.submit(first)
    loop.run(deadline_s=2.0)
    holder = records[0].prefill
    other = next(name for name in cluster.prefills if name != holder)
    assert not cluster.nodes[other].store.holds(first.keys[0])
    order = Replicate(first.keys, cluster.nodes[holder].ref, cluster.nodes[other].ref, "hot")
    cluster._orders.carry_out(order)
    assert not cluster.quiet
    loop.run(deadline_s=4.0)
    assert cluster.quiet
    assert cluster.nodes[other].store.peek(first.keys) == 320 // BLOCK
    held = {view.ref.instance_id: view.indexed_blocks for view in cluster.brains.states[0].views(loop.now)}
    assert held[holder] == held[other] == 320 // BLOCK
    cluster.check_empty()


def test_an_instance_changes_its_role_when_it_has_ended_what_it_has() -> None:
    loop, records = Loop(), list[Record]()
    cluster = Cluster(mesh(2, 1), loop, records.append)
    for n in range(8):
        cluster.submit(request(n, 0.0, 800, 30))
    loop.run(deadline_s=0.001)
    busy = next(name for name, prefiller in cluster.prefills.items() if prefiller.lives)
    cluster._orders.carry_out(SwitchRole(cluster.nodes[busy].ref, Role.DECODE, "too few decode"))
    loop.run(deadline_s=0.6)  # one heartbeat on: it is not ready, and has its work still
    views = {view.ref.instance_id: view for view in cluster.brains.states[0].views(loop.now)}
    assert "to become decode" in views[busy].not_ready_reason or views[busy].role is Role.DECODE
    loop.run(lambda: len(records) == 8)
    loop.run(deadline_s=loop.now + 1.0)
    assert cluster.roles[busy] is Role.DECODE
    views = {view.ref.instance_id: view for view in cluster.brains.states[0].views(loop.now)}
    assert (views[busy].role, views[busy].ready) == (Role.DECODE, True)
    cluster.submit(request(8, 0.0, 800, 30))
    cluster.submit(request(9, 0.0, 800, 30))
    loop.run(lambda: len(records) == 10)
    assert {record.outcome for record in records} == {DONE}
    assert busy in {record.decode for record in records[8:]}
    assert busy not in {record.prefill for record in records[8:]}
    cluster.check_empty()


def test_the_baseline_pays_for_prompts_that_decode_refuses() -> None:
    asked = [request(n, 0.1 * n, 400, 400) for n in range(40)]
    conductor = replace(NEVER_REFUSE, admission=AdmissionSettings(mode=Mode.BASELINE), slo_ttft_s=1e6, slo_tbt_s=0.02)
    late = [record for record in served(mesh(conductor=conductor), asked) if record.outcome == REFUSED]
    assert late
    assert {record.reason for record in late} == {"decode"}
    assert all(record.prefill_gpu_s > 0 for record in late)
    early = replace(conductor, admission=AdmissionSettings(mode=Mode.EARLY))
    turned = [record for record in served(mesh(conductor=early), asked) if record.outcome == REFUSED]
    assert turned
    assert all(record.prefill_gpu_s == 0 for record in turned)


def test_who_is_refused_comes_back_as_often_as_told() -> None:
    conductor = replace(NEVER_REFUSE, admission=AdmissionSettings(mode=Mode.EARLY), slo_ttft_s=0.5, slo_tbt_s=10.0)
    asked = [request(n, 0.001 * n, 2000, 2) for n in range(12)]
    once = served(mesh(conductor=conductor), asked)
    again = served(mesh(conductor=conductor, retries=50), asked)
    assert sum(record.outcome == REFUSED for record in once) > sum(record.outcome == REFUSED for record in again)
    assert all(record.retries == 0 for record in once)
    tried = [record for record in again if record.outcome == DONE and record.retries]
    assert tried
    assert all(record.ttft_s > 0.1 for record in tried)  # the waiting counts


@pytest.mark.slow
def test_roles_follow_a_load_that_needs_them() -> None:
    """Prompts are short and answers long: prefill instances become decode instances, and nothing is lost."""
    balance = replace(NEVER_REFUSE.balance, switch_roles=True)
    conductor = replace(NEVER_REFUSE, balance=balance, slo_tbt_s=0.03, slo_ttft_s=5.0)
    roomy = node(kv_tokens=65536, dram_tokens=1 << 20)
    config = mesh(4, 1, roomy, conductor=conductor, orders=True)
    samples: list[MeshSample] = []
    summary = run(config, [request(n, 0.1 * n, 64, 300) for n in range(450)], samples=samples.append)
    assert summary.outcomes == {DONE: 450}
    assert samples[-1].pools["decode"].instances > 1


@pytest.mark.slow
def test_who_is_to_keep_its_role_keeps_it() -> None:
    """Prompts are long and answers short: all decode instances but one would become prefill instances."""
    balance = replace(NEVER_REFUSE.balance, switch_roles=True)
    conductor = replace(NEVER_REFUSE, balance=balance, slo_ttft_s=1.0, slo_tbt_s=1.0)
    asked = [request(n, 0.05 * n, 1600, 2) for n in range(500)]
    left = {}
    for kept in (0, 2):
        samples: list[MeshSample] = []
        config = mesh(1, 3, node(dram_tokens=1 << 20), conductor=conductor, orders=True, kept_decodes=kept)
        run(config, asked, samples=samples.append)
        left[kept] = min(sample.pools["decode"].instances for sample in samples)
    assert left[0] < left[2] == 2
