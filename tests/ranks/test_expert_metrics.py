"""How uneven the experts of a layer are: from counts by hand, and from a real rank's pongs and profile."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.ranks import protocol as m
from kvmesh.ranks.expert_metrics import WINDOW, ExpertMetrics, ExpertStats, forget, imbalance
from kvmesh.telemetry import names
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.rank_driver import rank


@pytest.fixture(autouse=True)
def only_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_active", [])
    names.activate("node")


def shown(name: str) -> dict[str, float]:
    """Layer ("" where there is none) → value."""
    families = text_string_to_metric_families(names.render()[0].decode())
    return {s.labels.get("layer", ""): s.value for family in families for s in family.samples if s.name == name}


def test_imbalance_by_hand() -> None:
    assert imbalance([4, 4, 4, 4]) == 1 and imbalance([0, 16, 0, 0]) == 4 and imbalance([0, 0]) == 0
    assert imbalance([1, 2, 3]) == pytest.approx(1.5)


def test_a_layer_is_described_by_what_it_has_had_since_it_was_described_last() -> None:
    metrics, full = ExpertMetrics(), WINDOW * 4
    metrics.tell("a", ExpertStats((3, 7), ((full, 0, 0, 0), (full // 4,) * 4)))
    assert shown("kvmesh_node_expert_imbalance_ratio") == {"3": 4.0, "7": 1.0}
    assert shown("kvmesh_node_expert_idle_count") == {"3": 3, "7": 0}
    assert shown("kvmesh_node_expert_choices_total") == {"": 2 * full}
    # One choice too few at layer 3: it stays as it was described; at layer 7 two experts have had all since.
    metrics.tell(
        "a", ExpertStats((3, 7), ((full, full - 1, 0, 0), (full // 4, full // 4, *[full // 4 + full // 2] * 2)))
    )
    assert shown("kvmesh_node_expert_imbalance_ratio") == {"3": 4.0, "7": 2.0}
    assert shown("kvmesh_node_expert_idle_count") == {"3": 3, "7": 2}
    metrics.tell("a", ExpertStats((3, 7), ((full, full // 2, full // 2, 0), (full, 0, 0, full))))
    assert shown("kvmesh_node_expert_imbalance_ratio")["3"] == 2.0
    forget("a")
    assert shown("kvmesh_node_expert_imbalance_ratio") == {} == shown("kvmesh_node_expert_choices_total")


async def test_a_rank_tells_what_its_steps_chose_and_a_profile_each_expert_s_tokens(tmp_path: Path) -> None:
    """Its warm-up is not counted."""
    checkpoint = make_checkpoint(tmp_path / "experts", **FAMILY_ZOO["qwen3_moe"])
    async with rank("p", checkpoint) as driver:
        driver.client.send(m.Profile(5, 1, time.monotonic_ns() + 30_000_000_000))
        item = m.PrefillItem(1, tuple(range(5, 25)), 0, (20, 21, 22), None, False)
        driver.client.send(m.PrefillStep(1, (item,)))
        await driver.take(m.PrefillStepDone)
        profiled = await driver.take(m.Profiled)
        chosen = sum(sum(one.tokens) for one in profiled.experts)
        assert profiled.experts and all(sum(one.tokens) % 20 == 0 for one in profiled.experts) and chosen
        async with asyncio.timeout(20):
            while shown("kvmesh_node_expert_choices_total") != {"": chosen}:
                driver.client.ping()
                await asyncio.sleep(0.01)
    assert shown("kvmesh_node_expert_choices_total") == {}
