"""Decode's own check of the TBT, in virtual time: what the service refuses by, and what becomes of the refused."""

from __future__ import annotations

from math import inf

import pytest

from kvmesh.services.conductor.settings import AdmissionSettings, Settings
from kvmesh.services.conductor.settings import Mode as Admission
from kvmesh.services.decode.step_times import ENOUGH
from kvmesh.sim.changes import SlowPhase
from kvmesh.sim.cluster import PATIENCE, Cluster
from kvmesh.sim.config import SimConfig
from kvmesh.sim.report.records import DONE, REFUSED, Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest
from tests.support.sim.fleets import Linear, mesh, request

SLO_S = 0.05  # a step of a few rows takes 7 to 10 ms
SLOW = 10.0  # ... and so many times as long where it is slow
DECIDES = Settings(slo_ttft_s=1e6, slo_tbt_s=SLO_S)
OFF = Settings(admission=AdmissionSettings(mode=Admission.OFF), slo_ttft_s=1e6, slo_tbt_s=SLO_S)


def slowed(*names: str, decodes: int = 2, **changes: object) -> SimConfig:
    """Conductors know the hardware and hear nothing of how slow it has become: that is decode's alone to see."""
    slow = tuple(SlowPhase(name, 0.0, inf, SLOW) for name in names)
    told = {"conductor": DECIDES, "heartbeat_s": 60.0} | changes
    told["conductor"] = Settings(**{**vars(told["conductor"]), "lease_s": 1e6})  # type: ignore[arg-type]
    return mesh(1, decodes, slow=slow, **told)


def served(config: SimConfig, requests: list[SimRequest]) -> tuple[list[Record], Cluster]:
    """Records by index, and what served them."""
    records: list[Record] = []
    systems: list[Cluster] = []
    run(config, requests, sink=records.append, last=lambda system: systems.append(system))  # type: ignore[arg-type]
    return sorted(records, key=lambda record: record.index), systems[0]


# A long answer at each of two instances, then others when these have made steps enough to learn from.
LONG = [request(n, 0.0, 32, 200) for n in range(2)]
LATER = [request(2 + n, 7.0 + n, 32, 20) for n in range(4)]


def test_what_a_slow_instance_refuses_is_answered_by_another() -> None:
    records, cluster = served(slowed("d0"), [*LONG, *LATER])
    assert [one.outcome for one in records] == [DONE] * 6
    assert {one.decode for one in records[:2]} == {"d0", "d1"}, "alone, nobody is refused"
    assert {one.decode for one in records[2:]} == {"d1"}
    assert cluster.decodes["d0"].refusals > 0 and cluster.decodes["d1"].refusals == 0


def test_nobody_is_refused_where_conductors_refuse_nobody_by_tbt() -> None:
    records, cluster = served(slowed("d0", conductor=OFF), [*LONG, *LATER])
    assert [one.outcome for one in records] == [DONE] * 6
    assert "d0" in {one.decode for one in records[2:]}
    assert not any(one.refusals for one in cluster.decodes.values())


def test_where_all_refuse_it_the_client_is_told() -> None:
    records, cluster = served(slowed("d0", decodes=1), [LONG[0], LATER[0]])
    assert [(one.outcome, one.reason) for one in records] == [(DONE, ""), (REFUSED, "decode")]
    assert cluster.decodes["d0"].refusals == 1 + PATIENCE.max_retries


def test_a_refused_client_that_comes_again_is_answered_when_the_rows_are_gone() -> None:
    records, cluster = served(slowed("d0", decodes=1, retries=100), [LONG[0], LATER[0]])
    assert [one.outcome for one in records] == [DONE, DONE]
    assert records[1].retries > 0 and cluster.decodes["d0"].refusals > 1
    assert records[1].first_token_s > records[0].finish_s


@pytest.mark.parametrize("scattered", [0.0, 0.1])
def test_it_learns_how_long_its_steps_take(scattered: float) -> None:
    config = mesh(1, 1, conductor=DECIDES, noise=scattered)
    _, cluster = served(config, [request(0, 0.0, 32, 4 * ENOUGH), request(1, 0.3, 32, 4)])
    times = cluster.decodes["d0"].step_times
    rows, context = 1, 64
    assert times.predict_ns(rows, context) / 1e9 == pytest.approx(Linear().decode_s(rows, context), rel=0.1)
