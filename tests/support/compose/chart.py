"""The Helm chart as Kubernetes gets it, and what is wrong with a workload in it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvmesh.cli.serve import STOP_S
from tests.support.paths import ROOT

CHART = ROOT / "compose" / "helm" / "kvmesh"
RELEASE = "chat"

Manifest = dict[str, Any]

# Everything that the default leaves off, so that each line of the templates is rendered once.
EVERYTHING: Manifest = {
    "fullnameOverride": "mesh",
    "image": {"tag": "1", "pullSecrets": ["registry"]},
    "otlpEndpoint": "http://otel-collector:4317",
    "podAnnotations": {"a": "b"},
    "podLabels": {"team": "serving"},
    "priorityClassName": "high",
    "serviceAccount": {"annotations": {"role": "reader"}},
    "model": {"name": "Org/Chat 8B", "id": "org/chat-8b", "claim": "models", "tokenSecret": "hub"},
    "tls": {
        "secrets": {"instance": "instances", "store": "stores", "conductor": "conductors", "gateway": "gateways"},
        "transferNetwork": "trusted",
    },
    "objectStorage": {"url": "s3://bucket/kv", "secretName": "s3"},
    "gateway": {
        "apiKeysSecret": "keys",
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "ingress": {"enabled": True, "className": "nginx", "tlsSecret": "tls", "annotations": {"a": "b"}},
        "config": {"timeout_s": 900.5, "max_body_bytes": 100_000_000},
        "affinity": {"nodeAffinity": {}},
    },
    "picker": {
        "enabled": True,
        "failureMode": "FailOpen",
        "route": {"parent": {"name": "inference"}, "hostnames": ["models.example.com"]},
        "config": {"fallbacks": 3},
    },
    "conductor": {"replicas": 3, "config": {"switch_roles": True, "scale_target": 0.6}, "nodeSelector": {"a": "b"}},
    "store": {
        "replicas": 1,
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}
        ],
    },
    "redis": {"enabled": False, "urlSecret": "redis"},
    "prefill": {"ssd": {"capacityMb": 100_000}, "podAnnotations": {"network": "rdma"}},
    "coupled": {"enabled": True, "device": "cuda", "gpus": 2, "tensorParallel": 2, "config": {"role": "decode"}},
    "pool": {"enabled": True, "replicas": 2},
    "autoscaling": {"kind": "hpa"},
    "monitoring": {"podMonitor": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {
        "enabled": True,
        "clients": [{"namespaceSelector": {"matchLabels": {"name": "apps"}}}],
        "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
    },
}
ON_NODES: Manifest = {
    "model": {"source": "hostPath", "hostPath": "/srv/models", "folder": "chat/"},
    "redis": {"storageClass": "fast"},
    "serviceAccount": {"create": False},
    "networkPolicy": {"enabled": True},
}


# Decode instances whose ranks are in three pods each, under TLS.
SEVERAL_PODS: Manifest = {
    "tls": {"secrets": {one: f"{one}s" for one in ("instance", "store", "conductor", "gateway")}},
    "decode": {
        "replicas": 2,
        "mesh": "pp=3,tp=2,ep=tp",
        "rankHosts": 2,
        "rankNetwork": "10.0.0.0/8",
        "device": "cuda",
        "gpus": 2,
        "config": {"max_running": 8, "rdma_mtu": 4096},
    },
    "autoscaling": {"kind": "hpa"},
}


@dataclass(frozen=True)
class Helm:
    """Renders the chart. `program`: helm's path."""

    program: str
    folder: Path  # for files of values

    def run(self, verb: str, values: Manifest | Path | None, *options: str) -> subprocess.CompletedProcess[str]:
        """`helm VERB`, whatever it says."""
        command = [self.program, verb, *([RELEASE] if verb == "template" else []), str(CHART), *options]
        if isinstance(values, dict):
            path = self.folder / "values.yaml"
            path.write_text(yaml.safe_dump(values))
            command += ["-f", str(path)]
        elif values is not None:
            command += ["-f", str(values)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def manifests(self, values: Manifest | Path | None = None) -> list[Manifest]:
        """What would be installed. AssertionError with helm's words: it does not render."""
        done = self.run("template", values)
        assert done.returncode == 0, done.stderr
        return [one for one in yaml.safe_load_all(done.stdout) if one]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Of that kind and name; KeyError: there is none."""
    for one in of_kind(manifests, kind):
        if one["metadata"]["name"] == name:
            return one
    raise KeyError(f"{kind}/{name}")


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return of_kind(manifests, "Deployment", "StatefulSet")


def component(workload: Manifest) -> str:
    return str(workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"])


def main_container(workload: Manifest) -> Manifest:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return dict(container)


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """A LabelSelector's word on labels; operators that the chart does not use raise KeyError."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    tests = {"In": lambda v, some: v in some, "NotIn": lambda v, some: v not in some}
    return all(
        tests[one["operator"]](labels.get(one["key"]), one["values"]) for one in selector.get("matchExpressions", [])
    )


def environment(container: Manifest) -> dict[str, str]:
    """As the process will see it: references filled with what such a thing looks like."""
    like = {"status.podIP": "10.1.2.3", "spec.nodeName": "node-7", "metadata.name": "chat-kvmesh-pod-x1"}
    like["metadata.labels['apps.kubernetes.io/pod-index']"] = "1"
    found: dict[str, str] = {}
    for entry in container.get("env", []):
        assert entry["name"] not in found, f"{entry['name']} is set twice"
        if "valueFrom" in entry:
            source = entry["valueFrom"]
            secrets = {"password": "pw", "url": "redis://:pw@redis:6379/0"}
            text = (
                like[source["fieldRef"]["fieldPath"]]
                if "fieldRef" in source
                else secrets[source["secretKeyRef"]["key"]]
            )
        else:
            text = entry["value"]
            assert isinstance(text, str), f"{entry['name']}={text!r}: Kubernetes takes text only"
        for name, value in found.items():
            text = text.replace(f"$({name})", value)
        assert "$(" not in text, f"{entry['name']}={text}: refers to what is not set before it"
        found[entry["name"]] = text
    return found


def faults(workload: Manifest, manifests: list[Manifest]) -> Iterator[str]:
    """What an operator would miss in it, each in one line."""
    spec, container = workload["spec"]["template"]["spec"], main_container(workload)
    yield from _probe_faults(component(workload), container)
    yield from _stop_faults(component(workload), spec, container)
    yield from _security_faults(spec, container)
    labels = workload["spec"]["template"]["metadata"]["labels"]
    if not selects(workload["spec"]["selector"], labels):
        yield "does not select its own pods"
    budgets = [one for one in of_kind(manifests, "PodDisruptionBudget") if selects(one["spec"]["selector"], labels)]
    if len(budgets) != 1:
        yield f"{len(budgets)} disruption budgets instead of one"
    for one in budgets:
        if one["spec"].get("minAvailable", -1) == workload["spec"].get("replicas"):
            yield "its disruption budget lets no node be drained"
    mounted = {mount["name"] for every in _containers(spec) for mount in every.get("volumeMounts", [])}
    claims = {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", [])}
    if mounted != {volume["name"] for volume in spec.get("volumes", [])} | claims:
        yield "volumes and mounts differ"


def _containers(spec: Manifest) -> list[Manifest]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def _probe_faults(service: str, container: Manifest) -> Iterator[str]:
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    scheme = "HTTPS" if "KVMESH_TLS_CERT" in environment(container) else "HTTP"
    for kind, path in (("startup", "/live"), ("liveness", "/live"), ("readiness", "/ready")):
        probe = container.get(f"{kind}Probe")
        if probe is None:
            yield f"no {kind} probe"
        elif service == "redis":
            if "exec" not in probe:
                yield f"{kind} probe asks no redis-cli"
        elif (
            probe.get("httpGet") != {"path": path, "port": "metrics", "scheme": scheme} or ports.get("metrics") != 9100
        ):
            yield f"{kind} probe does not ask {path} of port 9100"


def _stop_faults(service: str, spec: Manifest, container: Manifest) -> Iterator[str]:
    command = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
    if service == "gateway" and command[:1] != ["sleep"]:
        yield "no preStop hook: load balancers send requests to what has stopped"
    env = environment(container)
    grace_ms = sum(int(env.get(name, 0)) for name in ("KVMESH_STOP_GRACE_MS", "KVMESH_EVACUATE_MS"))
    before_s = sum(map(int, command[1:]))
    if spec["terminationGracePeriodSeconds"] <= before_s + grace_ms / 1000 + STOP_S:
        yield "is killed before its stop grace is over"


def _security_faults(spec: Manifest, container: Manifest) -> Iterator[str]:
    if spec["enableServiceLinks"]:
        yield "Services of the namespace come as KVMESH_ settings"
    if not (spec["securityContext"].get("runAsNonRoot") and spec["securityContext"].get("runAsUser")):
        yield "may run as root"
    rdma = any(name.startswith("rdma/") for name in container["resources"]["limits"])
    for one in _containers(spec):
        context = one.get("securityContext", {})
        if not context.get("readOnlyRootFilesystem") or context.get("allowPrivilegeEscalation") is not False:
            yield f"{one['name']}: writes its image, or may become more than it is"
        if context.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{one['name']}: keeps capabilities"
        if ("IPC_LOCK" in context.get("capabilities", {}).get("add", [])) != (rdma and one is spec["containers"][0]):
            yield f"{one['name']}: IPC_LOCK does not go with RDMA"
        if "/tmp" not in {mount["mountPath"] for mount in one["volumeMounts"]}:
            yield f"{one['name']}: has nowhere to write"
        resources = one.get("resources", {})
        if {"cpu", "memory"} - resources.get("requests", {}).keys() or "memory" not in resources.get("limits", {}):
            yield f"{one['name']}: asks for no amount, or has no limit"
