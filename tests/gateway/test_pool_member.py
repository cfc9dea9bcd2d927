"""The gateway's metrics under the names that pools of endpoints read."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.rpc.pb import common_pb2, conductor_pb2
from kvmesh.services.gateway.models import Model, ServedModelFacts, kv_usage
from kvmesh.services.gateway.pool_member import PoolMemberMetrics
from kvmesh.telemetry import names


def instance(role: common_pb2.Role, pages: int, free: int, model: str = "m", ready: bool = True) -> object:
    card = common_pb2.ModelCard(name=model, block_tokens=16)
    load = conductor_pb2.Load(free_pages=free)
    return conductor_pb2.InstanceStatus(
        role=role, model=model, ready=ready, capacity_blocks=pages, load=load, card=card
    )


def test_pages_are_those_where_answers_are_made() -> None:
    both, decode, prefill = common_pb2.ROLE_BOTH, common_pb2.ROLE_DECODE, common_pb2.ROLE_PREFILL
    instances = [
        instance(decode, 100, 25),
        instance(both, 100, 75),
        instance(prefill, 100, 0),
        instance(decode, 100, 0, ready=False),
        instance(decode, 100, 0, model="other"),
    ]
    usage = kv_usage("m", instances)  # type: ignore[arg-type]
    assert (usage.block_tokens, usage.pages, usage.free_pages, usage.used_share) == (16, 200, 100, 0.5)
    assert kv_usage("unknown", instances).used_share == 0  # type: ignore[arg-type]


def test_each_model_is_told_as_pools_read_it() -> None:
    model, silent = Model("pool-m", None), Model("pool-silent", None)  # type: ignore[arg-type]
    model.facts = ServedModelFacts("f", 16, "bf16", 4096, 100, frozenset(), 0)
    model.kv = kv_usage("pool-m", [instance(common_pb2.ROLE_DECODE, 10, 4, model="pool-m")])  # type: ignore[list-item]
    names.GATEWAY_TTFT.labels("pool-m").observe(0.3)
    names.GATEWAY_TTFT.labels("").observe(0.3)
    names.GATEWAY_CACHED_TOKENS.labels("pool-m").inc(48)
    registry = CollectorRegistry()
    registry.register(PoolMemberMetrics([model, silent], lambda: {"pool-m": (3, 2)}))
    families = {one.name: one for one in text_string_to_metric_families(generate_latest(registry).decode())}

    def value(family: str, suffix: str = "", **labels: str) -> float:
        wanted = {"model_name": "pool-m", **labels}
        [found] = [s for s in families[family].samples if s.name == family + suffix and s.labels == wanted]
        return found.value

    assert value("vllm:num_requests_waiting") == 3
    assert value("vllm:num_requests_running") == 2
    assert value("vllm:num_requests_running", model_name="pool-silent") == 0
    assert abs(value("vllm:kv_cache_usage_perc") - 0.6) < 1e-9
    assert value("vllm:cache_config_info", block_size="16", num_gpu_blocks="10", cache_dtype="bf16") == 1
    assert value("vllm:time_to_first_token_seconds", "_bucket", le="0.5") == 1
    assert value("vllm:time_to_first_token_seconds", "_bucket", le="0.25") == 0
    assert value("vllm:prefix_cache_hits", "_total") == 48
    [adapters] = families["vllm:lora_requests_info"].samples
    assert adapters.labels["running_lora_adapters"] == ""
    assert not [s for family in families.values() for s in family.samples if s.labels.get("model_name") == ""]
