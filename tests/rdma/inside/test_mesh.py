"""The whole mesh with its KV moved by rdma: prefill on the NICs of one side, decode on those of the other, nothing else
configured. Tokens are the reference model's; metrics and traces say that both of the writer's NICs carried the bytes.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.checkpoints import make_checkpoint
from tests.support.mesh import harness
from tests.support.mesh.client import until
from tests.support.mesh.harness import Running, running_mesh
from tests.support.reference import assert_matches_reference
from tests.support.warm_processes import warm_services

# One processor, a dozen processes that import torch or gRPC, and the reference model.
GUEST = {"rails": 2, "memory_mb": 6144, "timeout_s": 560}
pytestmark = [pytest.mark.timeout(500), pytest.mark.asyncio(loop_scope="module")]

VOCAB, BLOCK = 301, 16
BLOCK_BYTES = 3 * 2 * 2 * BLOCK * 32 * 4  # layers, K and V, KV heads, tokens, head_dim, float32


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + i * i * 31 + i * 17) % (VOCAB - 10) + 5 for i in range(length)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_checkpoint(
        path, family="llama", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        vocab_size=VOCAB,
    )  # fmt: skip
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    harness.READY_S = 400.0
    flags: dict[str, dict[str, Any]] = {
        "prefill": {"nics": "rxa0,rxa1", "prefill_chunk_tokens": 64},
        "decode": {"nics": "rxb0,rxb1"},
    }
    folder = tmp_path_factory.mktemp("run")
    with warm_services():
        async with running_mesh(checkpoint, folder, block_tokens=BLOCK, transports="rdma", flags=flags) as running:
            yield running


def samples(running: Running, instance: str, name: str) -> Counter[tuple[str, str, str]]:
    """(transport, NIC, class) → the metric's value at this instance."""
    url = f"http://{running.mesh.processes[instance].spec.metrics}/metrics"
    with urllib.request.urlopen(url, timeout=20) as answer:
        text = answer.read().decode()
    found: Counter[tuple[str, str, str]] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                key = (sample.labels["transport"], sample.labels["nic"], sample.labels.get("class", ""))
                found[key] += int(sample.value)
    return found


def transfers(running: Running) -> list[dict[str, Any]]:
    """Attributes of the transfer spans written so far."""
    found = []
    for file in Path(running.mesh.run_dir, "traces").glob("*.jsonl"):
        for line in file.read_text().splitlines():
            span = json.loads(line)
            if span["name"] == "kvmesh.transfer":
                found.append(span["attributes"])
    return found


async def test_tokens_are_right_and_rdma_moved_the_kv(mesh: Running, checkpoint: Path) -> None:
    cold = prompt(1, 37)
    answer = await mesh.client.generate(cold, 8, timeout_s=200)
    assert (answer.error, answer.cached_tokens) == (None, 0)
    assert_matches_reference(checkpoint, cold, answer.tokens)
    warm = await mesh.client.generate(cold, 8, timeout_s=200)
    assert (warm.error, warm.cached_tokens, warm.tokens) == (None, 32, answer.tokens)
    prompts = [prompt(2, 160), *(prompt(3 + i, 21 + 11 * i) for i in range(4))]
    answers = await asyncio.gather(*(mesh.client.generate(p, 8, timeout_s=200) for p in prompts))
    for tokens, found in zip(prompts, answers, strict=True):
        assert found.error is None
        assert_matches_reference(checkpoint, tokens, found.tokens)
    await mesh.settled()

    blocks = sum(-(-len(p) // BLOCK) for p in [cold, *prompts])
    least = blocks * BLOCK_BYTES

    async def counted() -> Counter[tuple[str, str, str]] | None:
        moved = samples(mesh, "prefill-0", "kvmesh_node_transfer_bytes_total")
        return moved if moved.total() >= least else None

    moved = await until(counted, f"{least} bytes in the metrics")
    assert {transport for transport, _, _ in moved} == {"rdma"}
    assert {nic for (_, nic, klass), nbytes in moved.items() if klass == "handoff" and nbytes} == {"rxa0", "rxa1"}
    assert samples(mesh, "prefill-0", "kvmesh_node_transfer_errors_total").total() == 0

    async def traced() -> list[dict[str, Any]] | None:
        found = transfers(mesh)
        return found if len(found) == 2 + len(prompts) else None

    for told in await until(traced, "all transfer spans"):
        assert told["kvmesh.transfer.transport"] == "rdma"
        assert told["kvmesh.transfer.bytes"] > 0
        rails = [rail.partition("=") for rail in told["kvmesh.transfer.rails"].split(", ")]
        assert {name for name, _, _ in rails} <= {f"rdma rxa{i}→rxb{j}" for i in (0, 1) for j in (0, 1)}
        assert sum(int(nbytes) for _, _, nbytes in rails) == told["kvmesh.transfer.bytes"]


async def test_a_cable_is_pulled_and_requests_go_on(mesh: Running, checkpoint: Path) -> None:
    """The second prompt's KV has one rail left: it arrives all the same, and the tokens are right."""
    for state, seed in (("down", 31), ("up", 32)):
        setting = await asyncio.create_subprocess_exec("ip", "link", "set", "nica0", state)
        assert await setting.wait() == 0
        tokens = prompt(seed, 90)
        answer = await mesh.client.generate(tokens, 6, timeout_s=200)
        assert answer.error is None
        assert_matches_reference(checkpoint, tokens, answer.tokens)
    await mesh.settled()
