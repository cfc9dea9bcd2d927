"""What a conductor is told of admission: flags to settings, fields to a Schedule, refusals by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.rpc.pb import conductor_pb2 as pb
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.conductor.domain import Lane
from kvmesh.services.conductor.main import settings_of
from kvmesh.services.conductor.mapping import MAX_BELONGING, schedule_in
from kvmesh.services.conductor.settings import Mode


def test_flags_become_settings() -> None:
    config = ConductorConfig(
        admission="early", slo_by_model=("a=500:20", " b = 30000 : 100 "), batch_share=0.1, batch_slowdown=0.5
    )
    admission = settings_of(config).admission
    assert admission.mode is Mode.EARLY
    assert admission.by_model == (("a", 0.5, 0.02), ("b", 30.0, 0.1))
    assert (admission.batch_share, admission.batch_slowdown) == (0.1, 0.5)
    assert settings_of(ConductorConfig()).admission.mode is Mode.PREDICTED
    assert settings_of(ConductorConfig()).admission.batch_slowdown == 0.2
    named = ConductorConfig(slo_by_model=("hub/model=v2=1:2",))  # the last sign parts name and figures
    assert named.slos == (("hub/model=v2", 0.001, 0.002),)


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"admission": "maybe"}, "admission", "'maybe': choose one of off, baseline, early, predicted"),
        ({"batch_share": 1.5}, "batch_share", "batch_share=1.5: must be between 0 and 1"),
        ({"batch_share": float("nan")}, "batch_share", "=nan"),
        ({"batch_slowdown": -0.1}, "batch_slowdown", "batch_slowdown=-0.1: must be a number, at least 0"),
        ({"batch_slowdown": float("nan")}, "batch_slowdown", "=nan"),
        ({"batch_slowdown": float("inf")}, "batch_slowdown", "=inf"),
        ({"slo_by_model": ("a",)}, "slo_by_model", "'a': must be NAME=TTFT_MS:TBT_MS"),
        ({"slo_by_model": ("a=5",)}, "slo_by_model", "'a=5': must be"),
        ({"slo_by_model": ("=5:5",)}, "slo_by_model", "must be NAME"),
        ({"slo_by_model": ("a=0:5",)}, "slo_by_model", "at least 1"),
        ({"slo_by_model": ("a=1:-5",)}, "slo_by_model", "whole milliseconds"),
        ({"slo_by_model": ("a=1:2", "a=3:4")}, "slo_by_model", "'a=3:4': there are two SLOs of this model"),
    ],
)
def test_bad_flags_are_named(given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ConductorConfig(**given)
    assert refused.value.field == field
    assert words in str(refused.value)


def asked(**fields: Any) -> pb.ScheduleRequest:
    return pb.ScheduleRequest(request_id="r", model="m", prompt_tokens=5, **fields)


def test_what_is_asked_for_reaches_the_brain() -> None:
    request = schedule_in(
        asked(
            ttft_slo_ms=1500,
            tbt_slo_ms=20,
            priority=-3,
            lane=pb.LANE_BATCH,
            session="t/s",
            origin="t/o",
            tenant="t",
            endpoint="chat",
            expected_output_tokens=9,
        )
    )
    assert (request.ttft_slo_s, request.tbt_slo_s, request.priority, request.lane) == (1.5, 0.02, -3, Lane.BATCH)
    assert (request.session, request.origin, request.tenant, request.endpoint) == ("t/s", "t/o", "t", "chat")
    assert request.expected_output_tokens == 9
    assert schedule_in(asked()).lane is Lane.INTERACTIVE


@pytest.mark.parametrize("field", ["session", "origin", "tenant", "endpoint"])
def test_long_names_are_refused(field: str) -> None:
    schedule_in(asked(**{field: "x" * MAX_BELONGING}))
    with pytest.raises(InvalidRequest, match=f"{field}='xxx.*longer than {MAX_BELONGING} characters"):
        schedule_in(asked(**{field: "x" * (MAX_BELONGING + 1)}))


def test_an_unknown_lane_is_refused() -> None:
    request = asked()
    request.MergeFromString(b"\x58\x07")  # field 11, 7: of a newer peer
    with pytest.raises(InvalidRequest, match="lane=7: must be one of LANE_UNSPECIFIED, LANE_INTERACTIVE, LANE_BATCH"):
        schedule_in(request)
