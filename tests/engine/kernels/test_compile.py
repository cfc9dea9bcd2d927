from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SMALLEST_SHARED = 99 << 10  # of the GPUs that we mean to run on
HOPPER_SHARED = 227 << 10
# Bytes that a thread keeps in memory for want of registers. Nobody serves float32 on a GPU.
SPILLS = {
    ("prefill", "bf16", "256"): 72,
    ("decode", "fp32", "96"): 256,
    ("prefill", "fp32", "96"): 360,
    ("decode/drafts", "bf16", "128"): 8,
    ("decode/drafts", "fp32", "96"): 616,
    ("latent/128/drafts", "bf16", "512"): 40,
    ("latent/128/drafts", "fp16", "512"): 40,
    ("latent/32/drafts", "bf16", "512"): 24,
    ("latent/16/drafts", "bf16", "512"): 88,
}
OF_CAPABILITY = {
    "80": {("delta", "bf16", "128"): 480},  # the state of a head stands in registers
    "100": {("convolve", "bf16", "512"): 24},
}


def most_shared(name: str, capability: str) -> int:
    """What the kernel may take. Candidates of prefill, `prefill/N`, are measured on a Hopper GPU alone; latent
    attention is cut by what the GPU is."""
    if name.startswith("latent"):
        return SMALLEST_SHARED if capability == "80" else HOPPER_SHARED
    return HOPPER_SHARED if name[-1].isdigit() else SMALLEST_SHARED


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("capability", "part", "extent", "kernels"),
    [
        ("90", "", "", 55 + 7),  # candidates are compiled for Hopper
        pytest.param("90", "", "all", 106 + 7, marks=pytest.mark.long),
        pytest.param("90", "latents", "all", 22 + 7, marks=pytest.mark.long),
        pytest.param("100", "", "", 55, marks=pytest.mark.long),
        *(pytest.param(gpu, "", "all", 106, marks=pytest.mark.long) for gpu in ("80", "100")),
        *(pytest.param(gpu, "latents", "all", 22, marks=pytest.mark.long) for gpu in ("80", "100")),
    ],
)
def test_every_kernel_compiles_for_a_gpu_fits_it_and_does_not_spill(
    capability: str, part: str, extent: str, kernels: int, device: torch.device, tmp_path: Path
) -> None:
    """The interpreter takes what the compiler would refuse; a process of its own has the compiler. The extremes are
    compiled for Hopper; all that is served, and for other GPUs, where there is time."""
    del device  # skips where there is no triton
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.support.engine.compiled", capability, part, extent]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)  # `-s` shows shared memory, registers and spills
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == kernels
    assert all(int(shared) <= most_shared(name, capability) for name, *_, shared, _, _ in lines), done.stdout
    spilling = {tuple(line[:3]): int(line[5]) for line in lines if line[5] != "0"}
    allowed = SPILLS | OF_CAPABILITY.get(capability, {})
    assert all(stack <= allowed.get(kernel, 0) for kernel, stack in spilling.items()), spilling
