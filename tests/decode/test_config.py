from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.services.decode.config import DecodeConfig
from kvmesh.services.decode.limits import Limits


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_running", -1),
        ("max_waiting", -1),
        ("lease_ms", 0),
        ("lease_margin_ms", 5_000),
        ("watermark_percent", 91),
        ("landing", "moon"),
        ("port", 70_000),
    ],
)
def test_bad_values_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        dataclasses.replace(DecodeConfig(), **{key: value}).limits()
    assert refused.value.field == key
    assert repr(value) in refused.value.message


def test_the_defaults_of_brain_and_service_are_the_same() -> None:
    assert dataclasses.replace(DecodeConfig(), max_running=64).limits() == Limits()
