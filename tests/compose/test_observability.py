"""Dashboards and alerts name metrics that there are, and what is started reads what it is given."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.cli.serve import SERVICES
from kvmesh.telemetry import names
from tests.support.compose import programs, promql
from tests.support.paths import ROOT

COMPOSE = ROOT / "compose"
OBSERVABILITY = COMPOSE / "observability"
DASHBOARDS = sorted((OBSERVABILITY / "grafana" / "dashboards").glob("*.json"))
OURS = re.compile(r"\bkvmesh_[a-z0-9_]+\b")

Json = dict[str, Any]


def read(name: str) -> Json:
    return dict(yaml.safe_load((OBSERVABILITY / name).read_text()))


def rules() -> list[Json]:
    """Alerts, and what is recorded for programs."""
    return [rule for group in read("alerts.yml")["groups"] for rule in group["rules"]]


def alerts() -> list[Json]:
    return [rule for rule in rules() if "alert" in rule]


def panels(path: Path) -> list[Json]:
    return list(json.loads(path.read_text())["panels"])


def shown(path: Path) -> Iterator[tuple[str, Json]]:
    """Expressions with what Grafana puts for its variables, and their panels."""
    for panel in panels(path):
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "1m")
            yield re.sub(r'"\$\w+"', '"1.0"', text), panel


every_dashboard = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


@every_dashboard
def test_dashboards_name_what_there_is(path: Path) -> None:
    series = promql.known()
    found = {panel["title"]: list(promql.faults(expr, series)) for expr, panel in shown(path)}
    assert len(found) > 10 and not any(found.values()), {title: what for title, what in found.items() if what}


def test_alerts_name_what_there_is() -> None:
    series = promql.known()
    found = {rule.get("alert", rule.get("record")): list(promql.faults(rule["expr"], series)) for rule in rules()}
    assert not any(found.values()), {name: what for name, what in found.items() if what}
    for rule in alerts():
        for listed in re.findall(r'outcome=~"([^"]+)"', rule["expr"]):
            assert not set(listed.split("|")) - promql.outcomes(), rule["alert"]


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ('sum(kvmesh_gateway_ready{job="kvmesh"})', "there is no kvmesh_gateway_ready"),
        ('sum(rate(kvmesh_gateway_requests{job="kvmesh"}[1m]))', "there is no kvmesh_gateway_requests"),
        ('sum(kvmesh_gateway_requests_total{job="kvmesh"})', "kvmesh_gateway_requests_total only grows"),
        ('rate(kvmesh_gateway_ready_bool{job="kvmesh"}[1m])', "kvmesh_gateway_ready_bool is a gauge"),
        ("sum(kvmesh_gateway_ready_bool)", "kvmesh_gateway_ready_bool is not of our job"),
        ('sum(kvmesh_gateway_ready_bool{job="kvmesh",model="a"})', "kvmesh_gateway_ready_bool has no label model"),
        ('sum by (tier) (kvmesh_gateway_ready_bool{job="kvmesh"})', "grouped by tier"),
        ('sum(vllm:num_requests_swapped{job="kvmesh"})', "there is no vllm:num_requests_swapped"),
        ('sum by (model) (vllm:num_requests_waiting{job="kvmesh"})', "grouped by model"),
        ('rate(vllm:num_requests_waiting{job="kvmesh"}[1m])', "vllm:num_requests_waiting is a gauge"),
        (
            'histogram_quantile(0.5, sum(rate(kvmesh_gateway_ttft_seconds_bucket{job="kvmesh"}[1m])))',
            "a quantile without le",
        ),
    ],
)
def test_a_slip_in_an_expression_is_seen(expression: str, fault: str) -> None:
    assert any(found.startswith(fault) for found in promql.faults(expression, promql.known()))


@every_dashboard
def test_names_that_are_matched_are_there(path: Path) -> None:
    series = promql.known()
    for expr, _ in shown(path):
        for before, several, after in re.findall(r'__name__=~"(\w*)\(([^)]*)\)(\w*)"', expr):
            assert all(f"{before}{one}{after}" in series for one in several.split("|"))


@every_dashboard
def test_legends_name_labels_that_are_left(path: Path) -> None:
    for panel in panels(path):
        for target in panel.get("targets", []):
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            if " by " not in target["expr"] and "sum(" not in target["expr"] and "max(" not in target["expr"]:
                continue  # nothing is taken away
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_dashboards_are_those_of_the_panels() -> None:
    spec = importlib.util.spec_from_file_location("dashboards", OBSERVABILITY / "grafana" / "dashboards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = module.dashboards()
    assert sorted(made) == [path.name for path in DASHBOARDS]
    for path in DASHBOARDS:
        assert path.read_text() == made[path.name], "run compose/observability/grafana/dashboards.py"


def test_dashboards_are_told_apart() -> None:
    uids = [json.loads(path.read_text())["uid"] for path in DASHBOARDS]
    assert len(uids) == len(set(uids)) == 4


@every_dashboard
def test_grafana_finds_what_it_needs(path: Path) -> None:
    whole = json.loads(path.read_text())
    variables = {one["name"] for one in whole["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", path.read_text())) - {"__rate_interval"}
    assert used <= variables and "datasource" in used
    ids = [panel["id"] for panel in whole["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in whole["panels"]:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] == "row" or (panel["targets"] and panel["fieldConfig"]["defaults"]["unit"])
        assert all(target["datasource"] == panel["datasource"] for target in panel.get("targets", []))
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        rows, columns = range(place["y"], place["y"] + place["h"]), range(place["x"], place["x"] + place["w"])
        taken = set(itertools.product(rows, columns))
        assert not taken & cells, f"{panel['title']} lies upon another"
        cells |= taken


def test_slos_to_choose_are_bounds_of_buckets() -> None:
    overview = json.loads((OBSERVABILITY / "grafana" / "dashboards" / "overview.json").read_text())
    choices = {one["name"]: one for one in overview["templating"]["list"]}
    for name, histogram in (("ttft", names.GATEWAY_TTFT), ("tbt", names.GATEWAY_TBT)):
        bounds = {str(float(bound)) for bound in histogram._upper_bounds}
        assert set(choices[name]["query"].split(",")) <= bounds
        assert choices[name]["current"]["value"] in bounds


def test_alerts_say_what_to_do() -> None:
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    for rule in alerts():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and len(rule["annotations"]["description"]) > 40


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_prometheus_takes_its_files(pytestconfig: pytest.Config) -> None:
    run(programs.promtool(pytestconfig), "check", "config", "--lint-fatal", "prometheus.yml", folder=OBSERVABILITY)


@every_dashboard
def test_prometheus_reads_each_query(pytestconfig: pytest.Config, tmp_path: Path, path: Path) -> None:
    rules = [{"record": f"panel:{n}", "expr": expr} for n, (expr, _) in enumerate(shown(path))]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": path.stem, "rules": rules}]}))
    run(programs.promtool(pytestconfig), "check", "rules", "rules.yml", folder=tmp_path)


def test_alerts_fire_when_they_should(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    for file in (OBSERVABILITY / "alerts.yml", Path(__file__).with_name("alerts_test.yml")):
        shutil.copy(file, tmp_path)
    run(programs.promtool(pytestconfig), "test", "rules", "alerts_test.yml", folder=tmp_path)


def test_the_collector_is_wired() -> None:
    config = read("otel-collector.yaml")
    for pipeline in config["service"]["pipelines"].values():
        for part, members in pipeline.items():
            assert members and set(members) <= config[part].keys()
    overlay = yaml.safe_load((COMPOSE / "compose.observability.yaml").read_text())["services"]
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert overlay["gateway"]["environment"] == {"KVMESH_OTLP_ENDPOINT": f"http://otel-collector:{port}"}
    assert config["exporters"]["otlp"]["endpoint"].partition(":")[0] in overlay


def test_the_overlay_fits_the_mesh() -> None:
    mesh = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    overlay = yaml.safe_load((COMPOSE / "compose.observability.yaml").read_text())
    ours = {name for name in mesh["services"] if name in SERVICES}
    side = overlay["services"].keys() - mesh["services"].keys()
    assert overlay["services"].keys() - side == ours, "every service sends its spans"
    (scraped,) = [job for job in read("prometheus.yml")["scrape_configs"] if job["job_name"] == "kvmesh"]
    (found,) = scraped["dns_sd_configs"]
    assert set(found["names"]) == ours and found["port"] == 9100
    for name in side:
        service = overlay["services"][name]
        assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+", service["image"]), "a tag that stays what it is"
        assert set(service["networks"]) <= mesh["networks"].keys()
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (COMPOSE / source).exists() if source.startswith(".") else source in overlay["volumes"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nobody is asked who he is"


def test_compose_takes_the_overlay() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not installed")
    run(docker, "compose", "-f", "compose.yaml", "-f", "compose.observability.yaml", "config", "-q", folder=COMPOSE)


@pytest.mark.parametrize("page", ["observability.md", "kubernetes.md"])
def test_pages_name_what_there_is(page: str) -> None:
    series = promql.known()
    families = set(series) | {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in series}
    assert not set(OURS.findall((ROOT / "docs" / "operate" / page).read_text())) - families
