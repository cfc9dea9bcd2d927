"""Numbers that others count, as Prometheus reads them."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.telemetry.sampled import Buckets, SampledFamily, SampledMetrics

BYTES = SampledFamily("kvmesh_x_moved_bytes", "Moved.", "counter", ("rank", "nic"))
DEPTH = SampledFamily("kvmesh_x_depth_count", "Deep.", "gauge", ("rank",))
TIME = SampledFamily("kvmesh_x_time_seconds", "Long.", "histogram", ("rank",))


def shown(sampled: SampledMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    registry = CollectorRegistry()
    registry.register(sampled)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_what_is_told_is_shown_added_up_and_forgotten() -> None:
    sampled = SampledMetrics((BYTES, DEPTH, TIME))
    assert shown(sampled) == {}
    one = Buckets((0.1, 1.0), (2, 1, 1), 3.5)
    sampled.tell("a", {BYTES: {("0", "x"): 10, ("0", ""): 1}, DEPTH: {("0",): 3}, TIME: {("0",): one}})
    sampled.tell("a", {BYTES: {("0", "x"): 12, ("0", ""): 1}, DEPTH: {("0",): 2}, TIME: {("0",): one}})
    sampled.tell("b", {BYTES: {("0", "x"): 5, ("1", "x"): 7}, TIME: {("0",): Buckets((0.1, 1.0), (1, 0, 0), 0.05)}})
    found = shown(sampled)

    def moved(rank: str, nic: str) -> float:
        return found["kvmesh_x_moved_bytes_total", (("nic", nic), ("rank", rank))]

    assert (moved("0", "x"), moved("0", ""), moved("1", "x")) == (17, 1, 7)
    assert found["kvmesh_x_depth_count", (("rank", "0"),)] == 2
    buckets = {math.inf: 5.0, 1.0: 4.0, 0.1: 3.0}
    for bound, count in buckets.items():
        le = "+Inf" if bound == math.inf else str(bound)
        assert found["kvmesh_x_time_seconds_bucket", (("le", le), ("rank", "0"))] == count
    assert found["kvmesh_x_time_seconds_count", (("rank", "0"),)] == 5
    assert found["kvmesh_x_time_seconds_sum", (("rank", "0"),)] == 3.55
    sampled.forget("b")
    sampled.forget("b")
    assert shown(sampled)["kvmesh_x_moved_bytes_total", (("nic", "x"), ("rank", "0"))] == 12
