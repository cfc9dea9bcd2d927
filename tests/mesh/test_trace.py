"""One request, one trace: real OTLP over gRPC from five services, the tree, the attributes, honest borders."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.mesh.client import until
from tests.support.mesh.harness import Running
from tests.support.mesh.otlp import Collector, Span, collector

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

# child → (parent, service)
TREE = {
    "kvmesh.tokenize": ("root", "gateway"),
    "kvmesh.schedule": ("root", "gateway"),
    "kvmesh.place": ("kvmesh.schedule", "conductor"),
    "kvmesh.request": ("root", "decode"),
    "kvmesh.admit": ("kvmesh.request", "decode"),
    "kvmesh.prefill": ("kvmesh.request", "prefill"),
    "kvmesh.queue": ("kvmesh.prefill", "prefill"),
    "kvmesh.compute": ("kvmesh.prefill", "prefill"),
    "kvmesh.transfer": ("kvmesh.prefill", "prefill"),
    "kvmesh.reserve": ("kvmesh.request", "decode"),
    "kvmesh.load": ("kvmesh.request", "decode"),
    "kvmesh.first_decode": ("kvmesh.request", "decode"),
    "kvmesh.generate": ("kvmesh.request", "decode"),
}
# Processes convert monotonic to wall time each with its own offset, taken once: they may differ by this much.
SLACK_NS = 2_000_000

MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


async def traced(running: Running, keeper: Collector, prompt: list[int]) -> dict[str, Span]:
    """Spans of one streamed completion, by name ("root" is the gateway's)."""
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    body = {"model": "demo-model", "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(
            f"{running.http}/v1/completions", json=body, headers={"traceparent": f"00-{trace_id}-{parent}-01"}
        )
    assert answer.status_code == 200, answer.text

    async def complete() -> list[Span]:
        found = keeper.trace(trace_id)
        return found if len(found) >= len(TREE) + 1 else []

    spans: list[Span] = await until(complete, "all spans of the trace")
    by_name = {"root" if s.parent == parent else s.name: s for s in spans}
    assert len(by_name) == len(spans), "a span was sent twice"
    return by_name


async def test_the_trace_of_a_request(demo_path: Path, mesh: MeshFactory) -> None:
    prompt = [(i * 37 + i * i) % 200 + 20 for i in range(300)]
    with collector() as (keeper, endpoint):
        async with mesh(demo_path, otlp_endpoint=endpoint, flags={"prefill": {"prefill_chunk_tokens": 128}}) as running:
            cold = await traced(running, keeper, prompt)
            warm = await traced(running, keeper, prompt)
    check_tree(cold)
    check_tree(warm)
    check_attributes(cold, cached=0, chunks=3)
    check_attributes(warm, cached=256, chunks=1)
    check_borders(cold)
    check_borders(warm)


def check_tree(spans: dict[str, Span]) -> None:
    assert set(spans) == {*TREE, "root"}
    for name, (parent, service) in TREE.items():
        span = spans[name]
        assert (name, span.parent) == (name, spans[parent].span_id)
        assert service in span.service
        assert not span.error


def check_attributes(spans: dict[str, Span], cached: int, chunks: int) -> None:
    root, compute, transfer = spans["root"].attributes, spans["kvmesh.compute"], spans["kvmesh.transfer"]
    assert root["gen_ai.operation.name"] == "text_completion"
    assert root["gen_ai.request.model"] == "demo-model"
    assert root["gen_ai.usage.input_tokens"] == 300
    assert root["gen_ai.usage.output_tokens"] == 12
    assert root["gen_ai.usage.cache_read.input_tokens"] == cached
    prefill: dict[str, Any] = {**spans["kvmesh.prefill"].attributes, **compute.attributes}
    assert prefill["kvmesh.cached_tokens"] == cached
    assert prefill["kvmesh.computed_tokens"] == 300 - cached
    assert prefill["kvmesh.chunks"] == chunks
    moved = transfer.attributes
    assert moved["kvmesh.transfer.bytes"] > 0
    assert moved["kvmesh.transfer.transport"] == "shm"
    assert moved["kvmesh.transfer.rails"] == f"shm={moved['kvmesh.transfer.bytes']}"
    assert (moved["kvmesh.transfer.operation"], moved["kvmesh.transfer.retries"]) == ("write", 0)
    ids = {s.attributes.get("kvmesh.request_id") for s in (spans["kvmesh.request"], spans["kvmesh.prefill"])}
    assert len(ids) == 1
    assert None not in ids


def check_borders(spans: dict[str, Span]) -> None:
    """Nested spans lie inside their parents, and the stages follow each other without overlap or hidden time."""
    for name, (parent, _) in TREE.items():
        span, around = spans[name], spans[parent]
        assert span.start_ns <= span.end_ns, name
        assert span.start_ns >= around.start_ns - SLACK_NS, f"{name} begins before {parent}"
        assert span.end_ns <= around.end_ns + SLACK_NS, f"{name} ends after {parent}"
    queue, compute, transfer = spans["kvmesh.queue"], spans["kvmesh.compute"], spans["kvmesh.transfer"]
    load, first = spans["kvmesh.load"], spans["kvmesh.first_decode"]
    assert queue.start_ns >= spans["kvmesh.prefill"].start_ns
    assert abs(compute.start_ns - queue.end_ns) <= SLACK_NS, "queue ends where computing begins"
    assert transfer.start_ns >= compute.start_ns, "no byte before a layer was written"
    assert transfer.end_ns >= compute.start_ns
    assert load.start_ns >= spans["kvmesh.reserve"].start_ns, "its own blocks may come before any is computed"
    assert first.start_ns >= load.end_ns - SLACK_NS, "decode starts only after the KV is there"
    assert first.start_ns >= transfer.end_ns - SLACK_NS
    assert spans["kvmesh.generate"].start_ns >= first.end_ns - SLACK_NS
