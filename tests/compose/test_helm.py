"""The Helm chart: Kubernetes takes what it renders, services take their settings, and operators find what they need."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh.cli.serve import SERVICES, config_class, known_keys
from kvmesh.config import load
from kvmesh.instance.front import check_hosts
from kvmesh.rpc.authorisation import ROLE_NAME
from kvmesh.services.conductor.domain import Role
from kvmesh.telemetry import names
from tests.support.compose import chart, programs
from tests.support.compose.chart import (
    CHART,
    Helm,
    Manifest,
    component,
    environment,
    main_container,
    named,
    of_kind,
    workloads,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kubernetes_validate

CASES: dict[str, Manifest | Path | None] = {
    "defaults": None,
    "gpu": CHART / "values-gpu.yaml",
    "everything": chart.EVERYTHING,
    "on_nodes": chart.ON_NODES,
    "several_pods": chart.SEVERAL_PODS,
}
CUSTOM = ("PodMonitor", "ScaledObject", "InferencePool", "HTTPRoute")  # kinds that are not Kubernetes' own
KUBERNETES = ("1.29", "1.34")  # the chart's oldest, and a late one
WANTED = "kvmesh_conductor_scale_wanted_count"
HELD = "kvmesh_gateway_held_requests"


@pytest.fixture(scope="session")
def helm(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(programs.helm(pytestconfig), tmp_path_factory.mktemp("values"))


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> dict[str, list[Manifest]]:
    return {name: helm.manifests(values) for name, values in CASES.items()}


every_case = pytest.mark.parametrize("case", CASES)


@every_case
def test_helm_finds_nothing_to_say(helm: Helm, case: str) -> None:
    done = helm.run("lint", CASES[case], "--strict")
    assert done.returncode == 0, done.stdout


@every_case
@pytest.mark.parametrize("release", KUBERNETES)
@pytest.mark.slow
def test_kubernetes_takes_it(rendered: dict[str, list[Manifest]], case: str, release: str) -> None:
    for manifest in rendered[case]:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, release, strict=True)


def test_kubernetes_would_not_take_a_slip(rendered: dict[str, list[Manifest]]) -> None:
    broken = copy.deepcopy(workloads(rendered["defaults"])[0])
    broken["spec"]["template"]["spec"]["terminationGracePeriod"] = 30
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES[0], strict=True)


@every_case
def test_each_workload_has_what_operators_need(rendered: dict[str, list[Manifest]], case: str) -> None:
    found = {component(one): list(chart.faults(one, rendered[case])) for one in workloads(rendered[case])}
    assert {"gateway", "conductor", "store", "prefill", "decode"} <= found.keys()
    assert not any(found.values()), found


def _drop(*path: str) -> Callable[[Manifest], None]:
    def change(workload: Manifest) -> None:
        *parents, last = path
        at: Any = workload["spec"]["template"]["spec"]
        for key in parents:
            at = at[key][0] if key == "containers" else at[key]
        del at[last]

    return change


def _set(value: Any, *path: str) -> Callable[[Manifest], None]:
    def change(workload: Manifest) -> None:
        *parents, last = path
        at: Any = workload["spec"]["template"]["spec"]
        for key in parents:
            at = at[key][0] if key == "containers" else at[key]
        at[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _drop("containers", "startupProbe"),
        _drop("containers", "livenessProbe"),
        _set({"httpGet": {"path": "/metrics", "port": "metrics"}}, "containers", "readinessProbe"),
        _drop("containers", "resources", "limits", "memory"),
        _drop("containers", "resources", "requests", "cpu"),
        _drop("containers", "volumeMounts"),
        _set(60, "terminationGracePeriodSeconds"),
        _set(True, "enableServiceLinks"),
        _drop("securityContext", "runAsNonRoot"),
        _set(False, "containers", "securityContext", "readOnlyRootFilesystem"),
        _set([], "containers", "securityContext", "capabilities", "drop"),
        _set(["IPC_LOCK"], "containers", "securityContext", "capabilities", "add"),
    ],
)
def test_a_missing_piece_is_seen(rendered: dict[str, list[Manifest]], change: Callable[[Manifest], None]) -> None:
    manifests = rendered["defaults"]
    broken = copy.deepcopy(named(manifests, "Deployment", "chat-kvmesh-decode"))
    change(broken)
    try:
        seen = list(chart.faults(broken, manifests))
    except KeyError:
        return
    assert seen


def test_a_gateway_that_stops_at_once_is_seen(rendered: dict[str, list[Manifest]]) -> None:
    broken = copy.deepcopy(named(rendered["defaults"], "Deployment", "chat-kvmesh-gateway"))
    _drop("containers", "lifecycle")(broken)
    assert any("preStop" in fault for fault in chart.faults(broken, rendered["defaults"]))


def test_a_missing_budget_is_seen(rendered: dict[str, list[Manifest]]) -> None:
    (workload, *_), others = workloads(rendered["defaults"]), []
    assert "0 disruption budgets instead of one" in chart.faults(workload, others)


@every_case
def test_each_service_takes_its_settings(rendered: dict[str, list[Manifest]], case: str) -> None:
    for workload in workloads(rendered[case]):
        if component(workload) == "redis":
            continue
        container = main_container(workload)
        verb, service = container["args"]
        assert (verb, service) == ("serve", "ranks" if "-ranks-" in component(workload) else component(workload))
        assert service in SERVICES
        cls, env = config_class(service), environment(container)
        ours = {name: value for name, value in env.items() if name.startswith("KVMESH_")}
        fields = {f"KVMESH_{name.upper()}" for name in cls.__dataclass_fields__}
        assert not ours.keys() - fields, f"{service} knows no {sorted(ours.keys() - fields)}"
        config = load(cls, {}, toml=None, env=ours, also_known=known_keys())
        ports = {one["name"]: one["containerPort"] for one in container["ports"]}
        assert (config.host, config.port, config.metrics_port) == ("0.0.0.0", ports["grpc"], ports["metrics"])
        assert getattr(config, "http_port", None) == ports.get("http")


@every_case
def test_addresses_lead_to_somebody(rendered: dict[str, list[Manifest]], case: str) -> None:
    manifests = rendered[case]
    seen = set()
    for workload in workloads(manifests):
        env = environment(main_container(workload))
        for key in ("KVMESH_CONDUCTOR", "KVMESH_STORE"):
            for address in filter(None, env.get(key, "").split(",")):
                host, _, port = address.partition(":")
                pod, _, service = host.partition(".")
                name, _, number = pod.rpartition("-")
                members, headless = named(manifests, "StatefulSet", name), named(manifests, "Service", service)
                assert members["spec"]["serviceName"] == service and headless["spec"]["clusterIP"] == "None"
                assert headless["spec"]["publishNotReadyAddresses"], "they find each other before they are ready"
                assert int(number) < members["spec"]["replicas"]
                assert int(port) == int(environment(main_container(members))["KVMESH_PORT"])
                seen.add(address)
    masters = [one for one in workloads(manifests) if component(one) in ("conductor", "store")]
    assert len(seen) == sum(one["spec"]["replicas"] for one in masters), "each member is somebody's peer"


@every_case
def test_services_lead_to_ports_that_are_there(rendered: dict[str, list[Manifest]], case: str) -> None:
    for service in of_kind(rendered[case], "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        behind = [
            one
            for one in workloads(rendered[case])
            if chart.selects(selector, one["spec"]["template"]["metadata"]["labels"])
        ]
        assert len(behind) == 1, service["metadata"]["name"]
        ports = {one["name"] for one in main_container(behind[0])["ports"]}
        assert {one["targetPort"] for one in service["spec"]["ports"]} <= ports


def test_a_pool_of_gateways_asks_the_picker(rendered: dict[str, list[Manifest]]) -> None:
    manifests = rendered["everything"]
    (pool,), (route,) = of_kind(manifests, "InferencePool"), of_kind(manifests, "HTTPRoute")
    assert not of_kind(rendered["defaults"], "InferencePool", "HTTPRoute")
    gateway = named(manifests, "Deployment", "mesh-gateway")["spec"]["template"]
    labels = gateway["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {one["name"]: one["containerPort"] for one in gateway["spec"]["containers"][0]["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    asked = pool["spec"]["endpointPickerRef"]
    picker = named(manifests, "Service", asked["name"])
    assert asked["port"]["number"] in [one["port"] for one in picker["spec"]["ports"]]
    assert asked["failureMode"] == "FailOpen"
    told = environment(main_container(named(manifests, "Deployment", "mesh-picker")))
    host, _, port = told["KVMESH_GATEWAYS"].partition(":")
    pods = named(manifests, "Service", host)
    assert (pods["spec"]["clusterIP"], port) == ("None", str(ports["http"]))
    assert pods["spec"]["selector"] == pool["spec"]["selector"]["matchLabels"]
    (rule,) = route["spec"]["rules"]
    assert rule["backendRefs"][0]["name"] == pool["metadata"]["name"]
    assert route["spec"]["parentRefs"] == [{"name": "inference"}]


@pytest.mark.parametrize("case", ["gpu", "everything"])
def test_autoscalers_ask_for_what_the_conductor_says(rendered: dict[str, list[Manifest]], case: str) -> None:
    labels = names.CONDUCTOR_SCALE_WANTED._labelnames
    assert {f"{one.name}" for one in names.REGISTRIES["conductor"].collect()} >= {WANTED}
    scalers = of_kind(rendered[case], "HorizontalPodAutoscaler", "ScaledObject")
    assert len(scalers) >= 2
    for one in scalers:
        target = named(rendered[case], "Deployment", one["spec"]["scaleTargetRef"]["name"])
        assert "replicas" not in target["spec"], "an upgrade would undo what the autoscaler did"
        if one["kind"] == "ScaledObject":
            (query,) = [trigger["metadata"]["query"] for trigger in one["spec"]["triggers"]]
            asked = dict(re.findall(r'(\w+)="([^"]*)"', query))
            assert query.startswith(f"max({WANTED}{{")
        else:
            metric = one["spec"]["metrics"][0]["external"]
            asked = metric["metric"]["selector"]["matchLabels"]
            assert (metric["metric"]["name"], metric["target"]["averageValue"]) == (WANTED, "1")
        assert set(asked) == set(labels)
        assert Role(asked["role"]) is {"coupled": Role.BOTH}.get(component(target)) or asked["role"] == component(
            target
        )


@pytest.mark.parametrize("kind", ["keda", "hpa"])
def test_to_zero_and_back(helm: Helm, kind: str) -> None:
    zero = {"afterSeconds": 900, "holdRequests": 64, "holdSeconds": 240}
    manifests = helm.manifests({"autoscaling": {"kind": kind, "zero": zero}, "decode": {"autoscale": {"min": 2}}})
    scalers = of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject")
    assert len(scalers) == 2
    for one in scalers:
        if kind == "hpa":
            assert one["spec"]["minReplicas"] == 0
            kubernetes_validate.validate(one, KUBERNETES[0], strict=True)
            continue
        assert (one["spec"]["minReplicaCount"], one["spec"]["cooldownPeriod"]) == (0, 300)
        wanted, held = (trigger["metadata"] for trigger in one["spec"]["triggers"])
        assert wanted["query"].startswith(f"max({WANTED}{{")
        assert held["query"] == f'clamp_max(sum({HELD}{{model="demo"}}), 1)', "never one pod for each that waits"
        assert {one.name for one in names.REGISTRIES["gateway"].collect()} >= {HELD}
        assert all(each["threshold"] == "1" for each in (wanted, held))
    told = environment(main_container(named(manifests, "Deployment", "chat-kvmesh-gateway")))
    gateway: Any = load(config_class("gateway"), {}, toml=None, env={k: v for k, v in told.items() if "KVMESH_" in k})
    assert (gateway.hold_requests, gateway.hold_ms) == (64, 240_000)
    told = environment(main_container(named(manifests, "StatefulSet", "chat-kvmesh-conductor")))
    conductor: Any = load(
        config_class("conductor"),
        {},
        toml=None,
        env={"KVMESH_SCALE_TO_ZERO_AFTER_S": told["KVMESH_SCALE_TO_ZERO_AFTER_S"]},
    )
    assert conductor.scale_to_zero_after_s == 900


def test_by_default_nothing_goes_to_zero(rendered: dict[str, list[Manifest]]) -> None:
    for one in of_kind(rendered["gpu"], "ScaledObject"):
        assert one["spec"]["minReplicaCount"] == 2 and len(one["spec"]["triggers"]) == 1
    told = environment(main_container(named(rendered["gpu"], "Deployment", "chat-kvmesh-gateway")))
    assert "KVMESH_HOLD_REQUESTS" not in told


def test_no_more_is_open_than_must_be(rendered: dict[str, list[Manifest]]) -> None:
    manifests = rendered["on_nodes"]
    policies = of_kind(manifests, "NetworkPolicy")
    for workload in workloads(manifests):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        covering = [one for one in policies if chart.selects(one["spec"]["podSelector"], labels)]
        assert covering, f"anybody reaches {component(workload)}"
        rules = [rule for one in covering for rule in one["spec"]["ingress"] if "from" not in rule]
        open_to_all = {port["port"] for rule in rules for port in rule["ports"]}
        assert open_to_all == {"gateway": {8000, 8001, 9100}, "redis": set()}.get(component(workload), {9100})


@pytest.mark.parametrize(
    "slip",
    [
        "decode.replica=2",
        "gatway.replicas=2",
        "image.tags=x",
        "model.source=ftp",
        "prefill.device=gpu",
        "prefill.rdma.resource=hca",
        "prefill.resources.limits.memory=4gib",
        "conductor.replicas=0",
        "autoscaling.kind=vpa",
        "autoscaling.zero.holdRequests=0",
        "redis.url=localhost:6379",
        "decode.config.port=7021",
        "decode.config.max-running=64",
        "store.nodeSelector=ssd",
        "model.blockTokens=48",
    ],
)
def test_a_slip_in_the_values_is_refused(helm: Helm, slip: str) -> None:
    done = helm.run("template", None, "--set", slip)
    assert done.returncode != 0 and "schema" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"redis": {"enabled": False}}, "need Redis"),
        ({"tls": {"secrets": {"store": "stores"}}}, "is needed, as others have one"),
        ({"decode": {"device": "cuda"}}, "each rank takes a GPU of its own"),
        (
            {"decode": {"mesh": "tp=3", "rankHosts": 1}},
            "decode: rankHosts=1: 2 pods do not have equal parts of 3 ranks",
        ),
        ({"decode": {"mesh": "dcp=2,tp=2", "rankHosts": 3}}, "4 pods do not have equal parts of 2 ranks"),
        ({"decode": {"mesh": "tp=2", "rankHosts": 1, "ssd": {"capacityMb": 1}}}, "decode: ssd.capacityMb"),
        ({"tls": {"secretName": "x"}, "decode": {"mesh": "tp=2", "rankHosts": 1}}, "decode: rankNetwork: with TLS"),
        ({"autoscaling": {"zero": {"afterSeconds": 60}}}, "autoscaling.zero.afterSeconds: nothing would"),
        ({"model": {"source": "pvc"}}, "model.claim"),
        ({"model": {"source": "hostPath"}}, "model.hostPath"),
        (
            {
                "tls": {"secretName": "mesh-tls"},
                "decode": {"rdma": {"resource": "rdma/hca"}},
            },
            'decode: rdma.resource="rdma/hca": RDMA carries KV unencrypted',
        ),
    ],
)
def test_values_that_do_not_go_together_are_refused(helm: Helm, values: Manifest, says: str) -> None:
    done = helm.run("template", values)
    assert done.returncode != 0 and says in done.stderr


def test_each_pod_has_the_certificate_of_its_role_alone(helm: Helm, rendered: dict[str, list[Manifest]]) -> None:
    def mounted(manifests: list[Manifest]) -> dict[str, str]:
        found = {}
        for one in workloads(manifests):
            volumes = one["spec"]["template"]["spec"].get("volumes", [])
            if names := [each["secret"]["secretName"] for each in volumes if each["name"] == "tls"]:
                found[component(one)] = ",".join(names)
                told = environment(main_container(one))
                assert told["KVMESH_TLS_SERVER_NAME"] == ROLE_NAME
                assert told["KVMESH_TLS_CERT"] == "/etc/kvmesh/tls/tls.crt"
        return found

    instances = dict.fromkeys(("prefill", "decode", "coupled"), "instances")
    others = {"store": "stores", "pool": "stores", "conductor": "conductors", "gateway": "gateways"}
    picker = {"picker": "gateways"}  # it asks the conductor as a gateway does
    assert mounted(rendered["everything"]) == {**instances, **others, **picker}
    partly = {"tls": {"secrets": {"store": "stores"}, "secretName": "mesh-tls"}}
    wanted = dict.fromkeys(("prefill", "decode", "conductor", "gateway"), "mesh-tls")
    assert mounted(helm.manifests(partly)) == {**wanted, "store": "stores"}
    assert mounted(rendered["defaults"]) == {}


def test_an_instance_in_several_pods_calls_those_of_its_number(rendered: dict[str, list[Manifest]]) -> None:
    manifests = rendered["several_pods"]
    front = named(manifests, "StatefulSet", "chat-kvmesh-decode")
    told = environment(main_container(front))
    assert (told["KVMESH_MESH"], told["KVMESH_RANK_NETWORK"]) == ("pp=3,tp=2,ep=tp", "10.0.0.0/8")
    assert "KVMESH_TENSOR_PARALLEL" not in told
    addresses = told["KVMESH_RANK_HOSTS"].split(",")
    sets = [named(manifests, "StatefulSet", f"chat-kvmesh-decode-ranks-{i}") for i in range(2)]
    for address, lenders in zip(addresses, sets, strict=True):
        name, service = lenders["metadata"]["name"], lenders["spec"]["serviceName"]
        assert address == f"{name}-{told['POD_INDEX']}.{service}:7050"
        headless = named(manifests, "Service", service)["spec"]
        assert headless["clusterIP"] == "None" and headless["publishNotReadyAddresses"]
        assert lenders["spec"]["replicas"] == front["spec"]["replicas"] == 2, "one of each for every instance"
        container = main_container(lenders)
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
        env = environment(container)
        assert (env["KVMESH_TLS_CERT"], env["KVMESH_RDMA_MTU"]) == ("/etc/kvmesh/tls/tls.crt", "4096")
        assert "KVMESH_MAX_RUNNING" not in env, "that is the instance's own"
        volumes = {one["name"]: one for one in lenders["spec"]["template"]["spec"]["volumes"]}
        assert volumes["tls"]["secret"]["secretName"] == "instances" and "models" in volumes
    config = load(config_class("decode"), {}, toml=None, env={k: v for k, v in told.items() if "KVMESH_" in k})
    check_hosts(config)  # type: ignore[arg-type]
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in of_kind(manifests, "HorizontalPodAutoscaler")}
    assert scaled == {"chat-kvmesh-prefill"}, "nothing would scale its rank hosts beside it"
    labels = sets[0]["spec"]["template"]["metadata"]["labels"]
    policies = [one["spec"] for one in of_kind(manifests, "NetworkPolicy")]
    assert any(chart.selects(one["podSelector"], labels) for one in policies), "anybody reaches its ranks"


@pytest.mark.parametrize("network", ["trusted", "untrusted"])
def test_instances_are_told_whether_the_network_may_see_kv(helm: Helm, network: str) -> None:
    told_network = {"transferNetwork": network} if network == "trusted" else {}
    manifests = helm.manifests({"tls": {"secretName": "mesh-tls", **told_network}})
    told = [environment(main_container(one)).get("KVMESH_TRANSFER_NETWORK") for one in workloads(manifests)]
    assert set(told) == {None, network}, "of those that move KV, and of nobody else"


def test_without_tls_nothing_is_said_of_the_network(helm: Helm) -> None:
    manifests = helm.manifests({})
    assert all("KVMESH_TRANSFER_NETWORK" not in environment(main_container(one)) for one in workloads(manifests))


def test_alone_without_redis(helm: Helm) -> None:
    values = {"redis": {"enabled": False}, "conductor": {"replicas": 1}, "store": {"replicas": 1}}
    manifests = helm.manifests(values)
    assert not of_kind(manifests, "PersistentVolumeClaim")
    assert all("KVMESH_REDIS" not in environment(main_container(one)) for one in workloads(manifests))
    assert not any(list(chart.faults(one, manifests)) for one in workloads(manifests))


def test_each_value_is_used() -> None:
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def leaves(of: Manifest) -> set[str]:
        return set().union(*(leaves(v) if isinstance(v, dict) and v else {k} for k, v in of.items()))

    unused = {key for key in leaves(values) - {"cpu", "memory"} if not re.search(rf"\.{key}\b", templates)}
    assert not unused


OBVIOUS = {"replicas", "requests", "limits", "nodeSelector", "tolerations", "topologySpreadConstraints", "image"}


def test_each_value_says_what_it_is_for() -> None:
    """Those that several services have are told once."""
    told = set(OBVIOUS)
    for line in (CHART / "values.yaml").read_text().splitlines():
        key = re.match(r"\s*(\w+): +\S", line)
        if key and key[1] not in told:
            assert re.search(r"\s# \S", line), line
            told.add(key[1])


@pytest.mark.parametrize("where", ["image", "volume"])
def test_the_model_is_fetched_once_for_all(tmp_path: Path, where: str) -> None:
    script, link = CHART / "files" / "fetch_model.py", tmp_path / "chat"
    model = ""
    if where == "volume":  # as the hub's cache lies there
        model = str(tmp_path / "hub" / "snapshot")
        Path(model).mkdir(parents=True)
        Path(model, "config.json").write_text("{}")
    command = [sys.executable, "-c", script.read_text(), model, str(link)]
    both = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [one.wait(60) for one in both] == [0, 0]
    assert (link / "config.json").is_file() and link.is_symlink() == (where == "volume")
    assert {path.name for path in tmp_path.iterdir()} - {"hub"} == {"chat"}, "no half of it stays"


def test_by_default_the_mesh_is_closed_and_redis_asks_for_a_password(rendered: dict[str, list[Manifest]]) -> None:
    manifests = rendered["defaults"]
    assert len(of_kind(manifests, "NetworkPolicy")) == 3
    (secret,) = of_kind(manifests, "Secret")
    assert len(secret["data"]["password"]) >= 40, "32 characters in base64"
    redis = main_container(named(manifests, "StatefulSet", "chat-kvmesh-redis"))
    (entry,) = redis["env"]
    asked = {"name": secret["metadata"]["name"], "key": "password"}
    assert (entry["name"], entry["valueFrom"]) == ("REDISCLI_AUTH", {"secretKeyRef": asked})
    for service in ("conductor", "store"):
        container = main_container(named(manifests, "StatefulSet", f"chat-kvmesh-{service}"))
        assert environment(container)["KVMESH_REDIS"] == "redis://:pw@chat-kvmesh-redis:6379/0"
        assert asked in [one["valueFrom"].get("secretKeyRef") for one in container["env"] if "valueFrom" in one]
    assert "lookup" in (CHART / "templates" / "redis.yaml").read_text(), "kept over upgrades"


def test_a_password_of_ones_own_makes_no_secret(helm: Helm) -> None:
    assert not of_kind(helm.manifests({"redis": {"passwordSecret": "mine"}}), "Secret")


def test_prometheus_follows_tls(rendered: dict[str, list[Manifest]]) -> None:
    (monitor,) = of_kind(rendered["everything"], "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    tls = {"ca": {"secret": {"name": "gateways", "key": "ca.crt"}}, "serverName": "member.kvmesh.internal"}
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", tls)
    (monitor,) = of_kind(rendered["gpu"], "PodMonitor")
    assert "scheme" not in monitor["spec"]["podMetricsEndpoints"][0]


def test_redis_takes_the_password_as_the_chart_gives_it(rendered: dict[str, list[Manifest]], tmp_path: Path) -> None:
    container = main_container(named(rendered["defaults"], "StatefulSet", "chat-kvmesh-redis"))
    (script,) = container["args"]
    seen = tmp_path / "seen"
    fake = tmp_path / "redis-server"
    fake.write_text(f'#!/bin/sh\necho "$@" > {seen}\ncat >> {seen}\n')
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REDISCLI_AUTH": "abc"}
    subprocess.run([*container["command"], script], env=env, check=True, timeout=30)
    arguments, config = seen.read_text().splitlines()
    assert arguments.startswith("- --dir /data --appendonly yes") and config == "requirepass abc"


def test_compose_publishes_on_loopback_unless_told() -> None:
    ports = yaml.safe_load((CHART.parents[1] / "compose.yaml").read_text())["services"]["gateway"]["ports"]
    assert len(ports) == 2 and all(port.startswith("${KVMESH_PUBLISH:-127.0.0.1}:") for port in ports)
