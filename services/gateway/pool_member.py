"""What pools of endpoints ask their members: the load of this gateway's models, under the names that vLLM gave it.

Pickers and autoscalers (the Gateway API Inference Extension, llm-d, KEDA's examples) read these names of whatever
serves models. Queues are this gateway's own requests, so that several gateways of one mesh can be told apart; KV is the
mesh's, as the conductor last told it (at most 5 s ago). Histograms and counters are those that kvmesh has under its own
names, with the same observations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvmesh.services.gateway.models import Model
from kvmesh.telemetry import names

# kvmesh's own metric, and the name that pools read. Counters without the `_total` that is shown.
_SAME = (
    (names.GATEWAY_TTFT, "vllm:time_to_first_token_seconds"),
    (names.GATEWAY_TBT, "vllm:inter_token_latency_seconds"),
    (names.GATEWAY_TBT, "vllm:time_per_output_token_seconds"),  # its name of before, which dashboards still ask for
    (names.GATEWAY_REQUEST_SECONDS, "vllm:e2e_request_latency_seconds"),
    (names.GATEWAY_PROMPT_TOKENS, "vllm:prompt_tokens"),
    (names.GATEWAY_PROMPT_TOKENS, "vllm:prefix_cache_queries"),
    (names.GATEWAY_CACHED_TOKENS, "vllm:prefix_cache_hits"),
    (names.GATEWAY_OUTPUT_TOKENS, "vllm:generation_tokens"),
)


# Names, what each tells, and its labels.
_GAUGES = {
    "vllm:num_requests_waiting": ("Requests without their first token.", ("model_name",)),
    "vllm:num_requests_running": ("Requests that get tokens.", ("model_name",)),
    "vllm:kv_cache_usage_perc": ("Share of the pages where answers are made; 1: all.", ("model_name",)),
    "vllm:cache_config_info": ("1.", ("model_name", "block_size", "num_gpu_blocks", "cache_dtype")),
    "vllm:lora_requests_info": (
        "1: no adapters are served.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
}


def pool_member_families() -> list[tuple[str, str, tuple[str, ...]]]:
    """Returns name, kind and labels of each family that a gateway shows to pools."""
    gauges = [(name, "gauge", labels) for name, (_, labels) in _GAUGES.items()]
    return gauges + [(name, own._type, ("model_name",)) for own, name in _SAME]


class PoolMemberMetrics(Collector):
    """The metrics of one gateway as a member of a pool. `queues()` gives of each model the requests that wait for
    their first token, and those that have it. It is called by the thread that answers scrapes."""

    def __init__(self, models: Collection[Model], queues: Callable[[], dict[str, tuple[int, int]]]) -> None:
        self._models = models
        self._queues = queues

    def describe(self) -> list[Metric]:
        """Registries ask for names before there is a value."""
        return []

    def collect(self) -> Iterator[Metric]:
        queues = self._queues()
        gauges = [GaugeMetricFamily(name, text, labels=labels) for name, (text, labels) in _GAUGES.items()]
        waiting, running, usage, cache, adapters = gauges
        for model in self._models:
            waits, runs = queues.get(model.name, (0, 0))
            waiting.add_metric([model.name], waits)
            running.add_metric([model.name], runs)
            if (kv := model.kv) is not None and model.facts is not None:
                usage.add_metric([model.name], kv.used_share)
                cache.add_metric([model.name, str(kv.block_tokens), str(kv.pages), model.facts.kv_dtype], 1)
        adapters.add_metric(["0", "", ""], 1)
        yield from gauges
        for own, name in _SAME:
            for family in own.collect():
                yield _renamed(family, name)


def _renamed(family: Metric, name: str) -> Metric:
    kinds = {"counter": CounterMetricFamily, "histogram": HistogramMetricFamily}
    told: Metric = kinds[family.type](name, family.documentation)
    for sample in family.samples:
        if model := sample.labels["model"]:
            labels = {"model_name": model, **{key: value for key, value in sample.labels.items() if key != "model"}}
            told.samples.append(Sample(sample.name.replace(family.name, name, 1), labels, sample.value))
    return told
