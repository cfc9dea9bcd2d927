"""GPUs, and instances made of them."""

from __future__ import annotations

import json

import pytest

from kvmesh.errors import ConfigError
from kvmesh.sim.hardware.hardware import GIB, HARDWARE, changed, hardware
from kvmesh.sim.hardware.shapes import shape_of
from kvmesh.sim.hardware.times import node_spec
from tests.support.paths import ROOT


def test_every_preset_names_its_source_and_is_found_by_name() -> None:
    assert set(HARDWARE) == {"a100", "a800", "h100", "h800", "h20", "h200", "l20"}
    for name, gpu in HARDWARE.items():
        assert hardware(name.upper()) is gpu and gpu.source
    with pytest.raises(ConfigError, match="gpu='b300': choose one of a100"):
        hardware("b300")


def test_memory_is_what_a_gpu_tells_of_not_decimal_gigabytes() -> None:
    """An H200 of "141 GB" told CUDA of 139 whole GiB; 141e9 bytes would be 131, and all of 141 GiB it never told."""
    told = json.loads((ROOT / "benchmarks" / "results" / "gpu-h200.json").read_text(encoding="utf-8"))
    (line,) = [line for line in told["after"]["environment"]["lines"] if "NVIDIA H200" in line]
    (measured,) = [int(part.removesuffix(" GiB")) for part in line.split(", ") if part.endswith(" GiB")]
    assert measured * GIB <= hardware("h200").memory_bytes < (measured + 1) * GIB
    for one in HARDWARE.values():
        assert one.memory_bytes % GIB == 0, f"{one.name}: whole GiB, as datasheets count"


def test_the_papers_node() -> None:
    """8 x A800, LLaMA3-70B: 100 GB/s of NICs of which 87 are reached, 3M tokens in a terabyte."""
    spec = node_spec(hardware("a800"), 8, shape_of("llama3-70b"))
    assert spec.kv_bytes_per_token == 327_680
    assert spec.nic_bytes_per_s == pytest.approx(87e9)
    assert spec.dram_tokens == 1024 * GIB // 327_680 == 3_355_443
    assert spec.kv_tokens == pytest.approx((8 * 80 * 0.9 * GIB - 141.1e9) / 327_680, rel=1e-3)
    assert spec.ssd_tokens == 0


def test_half_a_node_has_half_of_everything() -> None:
    gpu = changed(hardware("h20"), ssd_gib=1000)
    whole, half = (node_spec(gpu, gpus, shape_of("llama3-8b")) for gpus in (8, 4))
    assert half.nic_bytes_per_s == whole.nic_bytes_per_s / 2
    assert half.ssd_read_bytes_per_s == whole.ssd_read_bytes_per_s / 2
    assert (half.dram_tokens, half.ssd_tokens) == (whole.dram_tokens // 2, whole.ssd_tokens // 2)


def test_a_latent_on_every_rank_takes_room_on_every_rank() -> None:
    """MLA: eight ranks keep eight copies in device memory, the store one."""
    shape = shape_of("deepseek-v3")
    spec = node_spec(hardware("h200"), 8, shape, weight_dtype="fp8")
    free = 139 * GIB * 0.9 - shape.params / 8
    assert spec.kv_tokens == int(free // 70_272)
    assert spec.dram_tokens == int(1024 * GIB // 70_272)


def test_weights_that_do_not_fit_are_told_with_their_size() -> None:
    with pytest.raises(ConfigError, match=r"llama3-70b.*weights \(131 GiB in bf16\) do not fit 1 x a800 \(80 GiB\)"):
        node_spec(hardware("a800"), 1, shape_of("llama3-70b"))
    with pytest.raises(ConfigError, match="gpus=0"):
        node_spec(hardware("a800"), 0, shape_of("llama3-70b"))
    with pytest.raises(ConfigError, match="tp=3: must divide"):
        node_spec(hardware("a800"), 3, shape_of("llama3-8b"))


def test_figures_of_a_node_can_be_changed() -> None:
    gpu = changed(hardware("a800"), nic_gbps=100, dram_gib=0.5, ssd_gib=10, ssd_gb_s=5)
    assert (gpu.node_nic_bytes_per_s, gpu.node_dram_bytes) == (12.5e9, 0.5 * GIB)
    assert (gpu.node_ssd_bytes, gpu.node_ssd_bytes_per_s) == (10 * GIB, 5e9)
    assert changed(hardware("a800")) == hardware("a800")
    for wrong, words in (({"nic_gbps": 0.0}, "nic_gbps=0: must be over 0"), ({"dram_gib": -1.0}, "dram_gib=-1")):
        with pytest.raises(ConfigError, match=words):
            changed(hardware("a800"), **wrong)
