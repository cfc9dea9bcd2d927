"""What lies between the products, against float64, in place and over shapes that fit no block."""

from __future__ import annotations

import pytest
import torch

from kvmesh.engine.config_rope import RopeConfig
from kvmesh.engine.rope import RotaryEmbedding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEP = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor | float = 0.0) -> None:
    """Within three roundings of the result, or of what was added up to it."""
    step = 3 * STEP[got.dtype]
    assert ((got.double() - wanted).abs() <= step * (wanted.abs() + size) + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 100), (5, 2560), (0, 8)])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_norm(dtype: torch.dtype, rows: int, size: int, wide_weight: bool, device: torch.device) -> None:
    from kvmesh.engine.kernels import fused

    x = random(rows, 2 * size, dtype=dtype, device=device)[:, :size] * 3  # rows lie apart
    weight = random(size, dtype=torch.float32 if wide_weight else dtype, device=device, seed=1)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    close(fused.rms_norm(x, weight, 1e-5), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 300), (2, 2100), (0, 8)])
def test_gated(dtype: torch.dtype, activation: str, rows: int, size: int, device: torch.device) -> None:
    from kvmesh.engine.kernels import fused

    x = random(rows, 2 * size, dtype=dtype, device=device) * 4
    if rows:
        x[0, 0], x[0, 1] = 60.0, -60.0  # where exponentials of a wrong sign overflow
    gate, up = x.double().chunk(2, -1)
    act = torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    close(fused.gated(x, activation), act * up, up.abs() * 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "partial"), [(16, 1.0), (24, 1.0), (128, 1.0), (64, 0.5), (20, 0.5)])
@pytest.mark.parametrize("norm", ["none", "same", "float32"])
def test_rotation(dtype: torch.dtype, dim: int, partial: float, norm: str, device: torch.device) -> None:
    """Heads beyond the rotated ones, and elements beyond the rotary part, stay as they are (or are only normed)."""
    from kvmesh.engine.kernels import fused

    tokens, heads, more = 5, 11, 3
    rope = RotaryEmbedding(RopeConfig(partial=partial), dim, dtype, device)
    cos, sin = rope(torch.tensor([0, 1, 7, 300, 4000], device=device))
    weight = None
    if norm != "none":
        weight = random(heads, dim, dtype=torch.float32 if norm == "float32" else dtype, device=device, seed=2)
    qkv = random(tokens, heads + more, dim, dtype=dtype, device=device)
    x = qkv.double()
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        x[:, :heads] *= weight.double()
    wanted = x[:, :heads].clone()
    rotary = cos.shape[-1]
    turned = x[:, :heads, :rotary].roll(rotary // 2, -1)
    wanted[..., :rotary] = x[:, :heads, :rotary] * cos.double() + turned * sin.double()
    before = qkv.clone()
    fused.rotate_heads(qkv, heads, cos, sin, weight, 1e-6)
    close(qkv[:, :heads], wanted, x[:, :heads].abs().amax())
    assert torch.equal(qkv[:, heads:], before[:, heads:])


def test_only_a_gpus_process_gets_the_kernels(device: torch.device) -> None:
    del device  # skips where there is no triton
    from kvmesh.engine.kernels import fused, kernels_for, sample

    assert kernels_for("cpu", "fused") is None
    assert kernels_for("cuda", "fused") is fused and kernels_for("cuda", "sample") is sample
