"""GPUs by their datasheets, and what of those figures software reaches.

Every preset names its source. The efficiencies are the same for all GPUs and all figures; they were set from general
knowledge of dense transformers on such machines, before anything was compared with a paper's results, and each says
on what ground (docs/operate/simulator.md repeats them). Units: FLOP/s, bytes, bytes a second, seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from kvmesh.errors import ConfigError

TERA, GIGA, GIB = 1e12, 1e9, 1 << 30
GIGABIT = 1e9 / 8  # bytes


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What of the datasheet is reached."""

    # Large matrix products in bf16 with tensor parallelism reach 55 to 70% of the dense peak on A100 and H100.
    linear: float = 0.60
    # FlashAttention-2 forward, causal, head 128: about 190 of 312 TFLOP/s on A100, 350 to 400 of 989 on H100.
    attention: float = 0.50
    # Reading weights and KV in a decode step: kernels that do nothing but read reach 80 to 90% of HBM, small GEMMs and
    # paged attention less.
    memory: float = 0.75
    # NCCL's bus bandwidth of large all-reduces: about 230 of 300 GB/s on 8 A100.
    all_reduce: float = 0.75
    # A small all-reduce over NVLink, start to end.
    all_reduce_s: float = 15e-6
    # Of one step beside its kernels: scheduling, input tensors, launches, sampling.
    step_s: float = 0.003
    # Pinned host memory to device over PCIe, large copies: 25 to 27 of 32 GB/s on PCIe 4.0 x16.
    host: float = 0.80
    # RDMA through a transfer engine: Mooncake publishes 87 of 100 GB/s over 4 x 200 Gb/s.
    network: float = 0.87
    # Of the device memory, for weights and KV: serving engines leave a tenth to activations and graphs.
    device_memory: float = 0.90


@dataclass(frozen=True, slots=True)
class Hardware:
    """A GPU and its share of a node. `node_*` figures are those of a node of 8 GPUs."""

    name: str
    flops: float  # dense bf16, a second
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float  # to the other GPUs, one way
    host_bytes_per_s: float  # to the host's memory, one way
    node_nic_bytes_per_s: float  # all NICs of a node, one way
    source: str
    node_dram_bytes: float = 1024 * GIB  # for KV: Mooncake's 3M tokens of LLaMA3-70B are 0.98 TB a node
    node_ssd_bytes: float = 0.0
    node_ssd_bytes_per_s: float = 13.8 * GIGA  # two PCIe 4.0 x4 drives of 6.9 GB/s
    fp8_flops: float = 0.0  # dense; 0: has no units for it
    efficiency: Efficiency = field(default_factory=Efficiency)


GPUS_OF_A_NODE = 8


FP8 = 2.0  # times as many FLOP/s as in bf16, on GPUs since Hopper and Ada


def _gpu(name: str, tflops: float, gib: float, gb_s: float, link: float, pcie: int, nics: float, said: str) -> Hardware:
    """`gib`: memory. What datasheets call GB of it are 2^30 bytes, a little less than that for a process: an H200 of
    "141 GB" tells CUDA of 139 GiB (benchmarks/results/gpu-h200.json), while 141e9 bytes would be 131. `link`: datasheet
    GB/s, both ways together; `pcie`: its generation, 16 lanes; `nics`: Gb/s of a node."""
    host = {4: 32, 5: 64}[pcie] * GIGA
    fp8 = 0.0 if name in ("a100", "a800") else FP8 * tflops * TERA
    nic = nics * GIGABIT
    return Hardware(name, tflops * TERA, gib * GIB, gb_s * GIGA, link / 2 * GIGA, host, nic, said, fp8_flops=fp8)


HARDWARE = {
    one.name: one
    for one in (
        _gpu("a100", 312, 80, 2039, 600, 4, 8 * 200, "NVIDIA A100 80GB SXM datasheet (2021); DGX A100: 8 x 200 Gb/s"),
        _gpu("a800", 312, 80, 2039, 400, 4, 4 * 200, "as A100, NVLink 400 GB/s; NICs: FAST'25, 4 x 200 Gb/s"),
        _gpu("h100", 989, 80, 3350, 900, 5, 8 * 400, "NVIDIA H100 SXM datasheet (2023); DGX H100: 8 x 400 Gb/s"),
        _gpu("h800", 989, 80, 3350, 400, 5, 8 * 400, "as H100, NVLink 400 GB/s; NICs: Mooncake's 8 x 400 Gb/s"),
        _gpu("h20", 148, 96, 4000, 900, 5, 8 * 400, "NVIDIA H20 datasheet (2023); NICs as in HGX H100"),
        _gpu("h200", 989, 139, 4800, 900, 5, 8 * 400, "NVIDIA H200 datasheet (2024), memory measured; NICs as H100"),
        _gpu("l20", 119.5, 48, 864, 64, 4, 2 * 200, "NVIDIA L20 datasheet (2023), no NVLink; NICs: assumed"),
    )
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """A preset. ConfigError names the ones there are."""
    if name.lower() not in HARDWARE:
        raise ConfigError(f"gpu={name!r}: choose one of {', '.join(HARDWARE)}", field="gpu")
    return HARDWARE[name.lower()]


def changed(
    base: Hardware,
    *,
    nic_gbps: float | None = None,
    dram_gib: float | None = None,
    ssd_gib: float | None = None,
    ssd_gb_s: float | None = None,
) -> Hardware:
    """`base` with other figures of its node; None keeps. ConfigError: a negative one, or none where some is needed."""
    for name, value in (("nic_gbps", nic_gbps), ("ssd_gb_s", ssd_gb_s)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value:g}: must be over 0", field=name)
    for name, value in (("dram_gib", dram_gib), ("ssd_gib", ssd_gib)):
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value:g}: must be at least 0", field=name)

    def other(value: float | None, unit: float, kept: float) -> float:
        return kept if value is None else value * unit

    return replace(
        base,
        node_nic_bytes_per_s=other(nic_gbps, GIGABIT, base.node_nic_bytes_per_s),
        node_dram_bytes=other(dram_gib, GIB, base.node_dram_bytes),
        node_ssd_bytes=other(ssd_gib, GIB, base.node_ssd_bytes),
        node_ssd_bytes_per_s=other(ssd_gb_s, GIGA, base.node_ssd_bytes_per_s),
    )
