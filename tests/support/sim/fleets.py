"""Small meshes of made-up hardware, and requests for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvmesh.services.conductor.settings import AdmissionSettings, Settings
from kvmesh.services.conductor.settings import Mode as Admission
from kvmesh.sim.config import MeshMode, SimConfig
from kvmesh.sim.hardware.times import NodeSpec
from kvmesh.sim.report.records import Record
from kvmesh.sim.run import run
from kvmesh.sim.workloads.workload import SimRequest

BLOCK = 16
KV_BYTES = 1000  # a token
NEVER_REFUSE = Settings(admission=AdmissionSettings(mode=Admission.OFF), slo_ttft_s=1e6, slo_tbt_s=1e6)


@dataclass(frozen=True)
class Linear:
    """Seconds that anybody can add up."""

    def prefill_s(self, pieces: Sequence[tuple[int, int]]) -> float:
        return 0.002 + sum(1e-4 * new + 1e-7 * new * cached for new, cached in pieces)

    def decode_s(self, batch: int, context_tokens: float) -> float:
        return 0.005 + 0.001 * batch + 2e-6 * context_tokens

    def mixed_s(self, pieces: Sequence[tuple[int, int]], batch: int, context_tokens: float) -> float:
        return self.prefill_s(pieces) + self.decode_s(batch, context_tokens)


def node(**changes: Any) -> NodeSpec:
    told: dict[str, Any] = {
        "times": Linear(),
        "kv_tokens": 4096,
        "dram_tokens": 16384,
        "ssd_tokens": 0,
        "nic_bytes_per_s": 1e7,
        "ssd_read_bytes_per_s": 0.0,
        "kv_bytes_per_token": KV_BYTES,
    }
    return NodeSpec(**(told | changes))


def mesh(prefills: int = 1, decodes: int = 1, spec: NodeSpec | None = None, **changes: Any) -> SimConfig:
    """By default nobody is refused, messages take no time, and lines go by arrival."""
    told: dict[str, Any] = {
        "prefill": (spec or node(),) * prefills,
        "decode": (spec or node(),) * decodes,
        "conductor": NEVER_REFUSE,
        "block_tokens": BLOCK,
        "chunk_tokens": 512,
        "batch_tokens": 512,
        "long_tokens": 512,
        "size_weight": 0.0,
        "layers": 4,
        "hop_s": 0.0,
        "sample_s": 1.0,
    }
    return SimConfig(**(told | changes))


def coupled(mode: MeshMode, count: int = 1, spec: NodeSpec | None = None, **changes: Any) -> SimConfig:
    return mesh(mode=mode, coupled=(spec or node(),) * count, **changes)


def request(index: int, at_s: float, tokens: int, output: int, family: int | None = None, **told: Any) -> SimRequest:
    """Prompts of one `family` begin alike, each with whole blocks of it; without one it shares nothing."""
    name = f"f{family}" if family is not None else f"r{index}"
    keys = tuple(f"{name}:{n}".encode().ljust(16, b".") for n in range(tokens // BLOCK))
    return SimRequest(index, at_s, tokens, output, keys, **told)


def served(config: SimConfig, requests: Sequence[SimRequest]) -> list[Record]:
    """Records by index."""
    records: list[Record] = []
    run(config, requests, sink=records.append)
    return sorted(records, key=lambda record: record.index)
