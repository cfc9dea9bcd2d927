"""`kvmesh up --set`: what is told to whom, and what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvmesh.cli.up.plan import Ports, ProcessSpec, chosen, merged, plan
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.errors import ConfigError

PROCESSES = [
    ("redis", "redis"), ("store", "store"), ("conductor", "conductor"),
    ("decode-0", "decode"), ("decode-1", "decode"), ("gateway", "gateway"),
]  # fmt: skip


def planned(tmp_path: Path, *texts: str) -> dict[str, ProcessSpec]:
    settings = MeshSettings(model="m", decode=2, set=texts, http_port=1, grpc_port=2)
    return {spec.name: spec for spec in plan(settings, tmp_path, Ports(1))}


def test_a_service_one_process_and_all_are_told(tmp_path: Path) -> None:
    specs = planned(
        tmp_path,
        "conductor.policy=least_loaded",
        "decode.max_running=16",
        "decode-1.max-running=8",
        "*.log_level=debug",
    )
    assert "--policy=least_loaded" in specs["conductor"].argv
    assert "--max-running=16" in specs["decode-0"].argv
    assert "--max-running=8" in specs["decode-1"].argv
    assert all("--log-level=debug" in spec.argv for spec in specs.values())


def test_switches_and_values_with_equals_signs_and_commas(tmp_path: Path) -> None:
    argv = planned(tmp_path, "conductor.replicate=no", "conductor.slo_by_model=a=1:2,b=3:4")["conductor"].argv
    assert "--no-replicate" in argv
    assert "--slo-by-model=a=1:2,b=3:4" in argv


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("policy=random", "must be PROCESS.KEY=VALUE"),
        ("conductor.policy", "must be PROCESS.KEY=VALUE"),
        ("conductor.policy=", "must be PROCESS.KEY=VALUE"),
        ("prefill.max_queue=1", "this mesh has no 'prefill'; there are store, conductor, decode, gateway, decode-0"),
        ("redis.save=1", "this mesh has no 'redis'"),
        ("conductor.polcy=random", "did you mean policy?"),
        ("conductor.policy=rnd", "choose one of kvcache, cache_aware"),
        ("decode.max_running=many", "must be a whole number"),
        ("decode.max_running=-1", "must be at least 0"),
        ("gateway.port=3", "gateway has no key 'port' that can be set"),
    ],
)
def test_what_cannot_be_set_is_refused_in_its_own_words(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("?", r"\?")) as caught:
        chosen([text], PROCESSES)
    assert text in caught.value.message


def test_the_last_word_counts() -> None:
    told = chosen(["decode.max_running=3", "decode.max_running=4"], PROCESSES)
    assert told == {"decode": {"max_running": "4"}}
    assert merged({"decode": {"max_running": 1, "x": 2}}, told) == {"decode": {"max_running": "4", "x": 2}}
