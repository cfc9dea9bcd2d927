"""Names are regular, and a process serves the metrics of its own services."""

from __future__ import annotations

import re
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.errors import ConfigError
from kvmesh.telemetry import names


@pytest.fixture(autouse=True)
def nothing_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_active", [])


UNITS = "total|seconds|bytes|tokens|requests|count|bool|info|ratio"


@pytest.mark.parametrize("service", names.SERVICES)
def test_metric_names_are_kvmesh_service_what_unit(service: str) -> None:
    families = list(names.REGISTRIES[service].collect())
    assert len(families) >= 5
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        assert re.fullmatch(rf"kvmesh_{service}_[a-z0-9_]+_({UNITS})", name), name
        assert family.documentation.endswith("."), name


def test_span_and_attribute_names_are_unique_and_of_a_known_family() -> None:
    texts = [
        value
        for name, value in vars(names).items()
        if name.isupper() and isinstance(value, str) and name not in ("CONTENT_TYPE_LATEST",)
    ]
    assert len(texts) == len(set(texts))
    for text in texts:
        assert re.fullmatch(r"(gen_ai|kvmesh)\.[a-z_.]+|error\.type|chat|text_completion", text), text


def served() -> set[str]:
    return {family.name for family in text_string_to_metric_families(names.render()[0].decode())}


def test_only_active_services_are_shown() -> None:
    assert not [name for name in served() if name.startswith("kvmesh_")]
    names.activate("store")
    names.activate("store")
    names.activate("rank")  # no service of this list: nothing to show
    shown = {name for name in served() if name.startswith("kvmesh_")}
    assert shown
    assert all(name.startswith("kvmesh_store_") for name in shown)
    assert "process_cpu_seconds" in served()


def test_metrics_are_served_until_closed() -> None:
    names.activate("conductor")
    names.CONDUCTOR_DECISIONS.labels(outcome="placed").inc()
    port, close = names.serve_metrics("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        assert 'kvmesh_conductor_decisions_total{outcome="placed"} ' in text
        assert "kvmesh_conductor_build_info{version=" in text
        with pytest.raises(ConfigError, match=f"metrics_port={port}: the port is in use on 127.0.0.1"):
            names.serve_metrics("127.0.0.1", port)
    finally:
        close()
    again, close = names.serve_metrics("127.0.0.1", port)
    close()
    assert again == port
