"""One request, one trace: real OTLP over gRPC from five services, the tree, the attributes, honest borders."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.rpc.channels import connect
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
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
# ... where blocks were fetched; holders are prefill and decode instances.
FETCH = {
    "kvmesh.pull": ("kvmesh.prefill", "prefill"),
    "kvmesh.fetch": ("kvmesh.pull", "prefill"),
    "fetched": ("kvmesh.fetch", "prefill"),
    "kvmesh.lease": ("kvmesh.fetch", ""),
    "kvmesh.serve": ("kvmesh.fetch", ""),
    "kvmesh.read": ("kvmesh.serve", ""),
    "loaded": ("kvmesh.prefill", "prefill"),
}
# Processes convert monotonic to wall time each with its own offset, taken once: they may differ by this much.
SLACK_NS = 2_000_000

LENGTH, CHUNK = 1_500, 128
MeshFactory = Callable[..., AbstractAsyncContextManager[Running]]


async def ask(
    running: Running,
    prompt: list[int],
    *,
    flags: str = "01",
    status: int = 200,
    max_tokens: int = 12,
    timeout_ms: str = "",
) -> tuple[str, str]:
    """One completion; its trace and the client's span."""
    trace_id, parent = secrets.token_hex(16), secrets.token_hex(8)
    body = {"model": "demo-model", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    headers = {"traceparent": f"00-{trace_id}-{parent}-{flags}"}
    if timeout_ms:
        headers["x-request-timeout-ms"] = timeout_ms
    async with httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(f"{running.http}/v1/completions", json=body, headers=headers)
    assert answer.status_code == status, answer.text
    return trace_id, parent


async def traced(
    running: Running, keeper: Collector, prompt: list[int], *, spans: int = len(TREE) + 1, **more: Any
) -> dict[str, Span]:
    """So many spans of one completion, by name: "root" is the gateway's, "fetched" what a fetch moved, "loaded" a load
    at prefill."""
    trace_id, parent = await ask(running, prompt, **more)

    async def complete() -> list[Span]:
        found = keeper.trace(trace_id)
        return found if len(found) >= spans else []

    found: list[Span] = await until(complete, "all spans of the trace")
    fetches = {span.span_id for span in found if span.name == "kvmesh.fetch"}

    def named(span: Span) -> str:
        if span.parent == parent:
            return "root"
        if span.parent in fetches and span.name == "kvmesh.transfer":
            return "fetched"
        return "loaded" if (span.name, span.service) == ("kvmesh.load", "prefill") else span.name

    by_name = {named(span): span for span in found}
    assert len(by_name) == len(found) == spans, "a span was sent twice"
    return by_name


async def test_the_trace_of_a_request(demo_path: Path, mesh: MeshFactory) -> None:
    prompts = [[(i * 37 + i * i * n) % 200 + 20 for i in range(LENGTH)] for n in (1, 3, 5)]
    # On a fast machine computing a prompt may be predicted to be sooner than fetching it.
    flags = {"prefill": {"prefill_chunk_tokens": CHUNK}, "*": {"transports": "tcp"}, "conductor": {"fetch": "always"}}
    with collector() as (keeper, endpoint):
        async with mesh(demo_path, prefill=2, otlp_endpoint=endpoint, flags=flags) as running:
            await cordon(running, "prefill-1")
            cold, *_ = [await traced(running, keeper, prompt) for prompt in prompts]
            warm = await traced(running, keeper, prompts[0])
            await cordon(running, "prefill-0")
            await cordon(running, "prefill-1", conductor_pb2.CORDON_STATE_UNSPECIFIED)
            fetched = [await traced(running, keeper, prompt, spans=len(TREE) + 1 + len(FETCH)) for prompt in prompts]
            # Nobody samples these two. The one that fails has gone well at prefill and at the conductor.
            fine, _ = await ask(running, prompts[1], flags="00")
            lost = await traced(running, keeper, prompts[1], flags="00", status=504, timeout_ms="500", max_tokens=3000)
    assert lost["root"].error and not lost["kvmesh.prefill"].error and not lost["kvmesh.place"].error
    assert not keeper.trace(fine)
    for trace in (cold, warm, *fetched):
        check_tree(trace, TREE if trace not in fetched else TREE | FETCH)
        check_borders(trace)
    check_attributes(cold, cached=0, chunks=-(-LENGTH // CHUNK))
    check_attributes(warm, cached=(LENGTH - 1) // 64 * 64, chunks=1)
    # The first call of a holder is over gRPC, and three fetches from two holders call one of them again.
    paths = [check_fetch(trace) for trace in fetched]
    assert paths[0] == "grpc" and "fast path" in paths


async def cordon(running: Running, name: str, state: Any = conductor_pb2.CORDON_STATE_CORDONED) -> None:
    async with connect(running.mesh.addresses["conductor"]) as channel:
        request = conductor_pb2.CordonRequest(instance_id=name, state=state)
        await conductor_pb2_grpc.ConductorStub(channel).Cordon(request, timeout=10)


def check_fetch(spans: dict[str, Span]) -> str:
    """The holder's side: what it leased, how the lease ended, and the READ that its transfer engine served. Returns how
    the holder was called."""
    fetch, lease, serve, read = (spans[f"kvmesh.{name}"] for name in ("fetch", "lease", "serve", "read"))
    nbytes = fetch.attributes["kvmesh.pull.bytes"]
    assert nbytes > 0 and fetch.attributes["kvmesh.pull.holder"] in ("prefill-0", "decode-0")
    assert lease.attributes["kvmesh.lease.reader"] == fetch.attributes["kvmesh.instance_id"]
    assert lease.attributes["kvmesh.lease.tiers"] == f"dram={(LENGTH - 1) // 64}"
    assert serve.attributes["kvmesh.lease.bytes"] == read.attributes["kvmesh.read.bytes"] == nbytes
    assert serve.attributes["kvmesh.lease.end"] == "given back"
    assert serve.attributes["kvmesh.read.seen"] is True
    assert spans["fetched"].attributes["kvmesh.transfer.transport"] == "tcp"
    return str(lease.attributes["kvmesh.call.path"])


def check_tree(spans: dict[str, Span], tree: dict[str, tuple[str, str]]) -> None:
    assert set(spans) == {*tree, "root"}
    for name, (parent, service) in tree.items():
        span = spans[name]
        assert (name, span.parent) == (name, spans[parent].span_id)
        assert service in span.service
        assert not span.error


def check_attributes(spans: dict[str, Span], cached: int, chunks: int) -> None:
    root, compute, transfer = spans["root"].attributes, spans["kvmesh.compute"], spans["kvmesh.transfer"]
    assert root["gen_ai.operation.name"] == "text_completion"
    assert root["gen_ai.request.model"] == "demo-model"
    assert root["gen_ai.usage.input_tokens"] == LENGTH
    assert root["gen_ai.usage.output_tokens"] == 12
    assert root["gen_ai.usage.cache_read.input_tokens"] == cached
    prefill: dict[str, Any] = {**spans["kvmesh.prefill"].attributes, **compute.attributes}
    assert prefill["kvmesh.cached_tokens"] == cached
    assert prefill["kvmesh.computed_tokens"] == LENGTH - cached
    assert prefill["kvmesh.chunks"] == chunks
    moved = transfer.attributes
    assert moved["kvmesh.transfer.bytes"] > 0
    assert moved["kvmesh.transfer.transport"] == "tcp"
    assert (
        sum(int(rail.rpartition("=")[2]) for rail in moved["kvmesh.transfer.rails"].split(", "))
        == moved["kvmesh.transfer.bytes"]
    )
    assert (moved["kvmesh.transfer.operation"], moved["kvmesh.transfer.retries"]) == ("write", 0)
    ids = {s.attributes.get("kvmesh.request_id") for s in (spans["kvmesh.request"], spans["kvmesh.prefill"])}
    assert len(ids) == 1
    assert None not in ids


def check_borders(spans: dict[str, Span]) -> None:
    """Nested spans lie inside their parents, and the stages follow each other without overlap or hidden time."""
    for name, (parent, _) in ((name, above) for name, above in (TREE | FETCH).items() if name in spans):
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
    assert first.start_ns >= transfer.start_ns, "over tcp the writer may hear of the last byte when decode is at work"
    assert spans["kvmesh.generate"].start_ns >= first.end_ns - SLACK_NS
