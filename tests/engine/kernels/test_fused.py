"""What lies between the products, against float64, in place and over shapes that fit no block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from kvmesh.engine.config_rope import RopeConfig
from kvmesh.engine.rope import RotaryEmbedding, Rotation
from tests.support.engine import write_oracle
from tests.support.engine.paged import Shape, paged

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEP = {torch.float32: 1e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor | float = 0.0) -> None:
    """Within three roundings of the result, or of what was added up to it."""
    step = 3 * STEP[got.dtype]
    assert ((got.double() - wanted).abs() <= step * (wanted.abs() + size) + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 100), (2, 2560), (0, 8)])
@pytest.mark.parametrize("wide_weight", [False, True])
def test_norm(dtype: torch.dtype, rows: int, size: int, wide_weight: bool, device: torch.device) -> None:
    from kvmesh.engine.kernels import fused

    x = random(rows, 2 * size, dtype=dtype, device=device).mul_(3)[:, :size]  # rows lie apart
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
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 100), (2, 2560), (0, 8)])
@pytest.mark.parametrize("wide_weight", [False, True])
@pytest.mark.parametrize("normed_before", [False, True])
def test_add_and_norm_is_the_addition_and_the_norm_to_the_last_bit(
    dtype: torch.dtype, rows: int, size: int, wide_weight: bool, normed_before: bool, device: torch.device
) -> None:
    from kvmesh.engine.kernels import fused

    kind = torch.float32 if wide_weight else dtype
    residual = random(rows, 2 * size, dtype=dtype, device=device).mul_(50)[:, :size]  # rows lie apart
    x = random(rows, 3 * size, dtype=dtype, device=device, seed=1).mul_(3)[:, size : 2 * size]
    weight, inner = (random(size, dtype=kind, device=device, seed=seed) for seed in (2, 3))
    addend = fused.rms_norm(x, inner, 1e-5) if normed_before else x
    total, before = residual + addend, x.clone()
    normed = fused.add_rms_norm(residual, x, weight, 1e-5, inner if normed_before else None)
    if dtype == torch.bfloat16 and device.type == "cpu":  # the interpreter cuts bfloat16 off, torch rounds it
        close(residual, total.double())
        total = residual
    assert torch.equal(residual, total) and torch.equal(x, before)
    assert torch.equal(normed, fused.rms_norm(total, weight, 1e-5))
    exact = total.double() * (total.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    close(normed, exact)


@dataclass(frozen=True)
class Written:
    """A step's `qkv` before and after `rotate_and_write`, the pages after it, and what the oracle says of both."""

    before: torch.Tensor
    qkv: torch.Tensor
    queries: torch.Tensor
    pages: torch.Tensor
    wanted: torch.Tensor
    size: float  # of the largest element that was rotated


def written(
    shape: Shape,
    partial: float,
    norm: str,
    device: torch.device,
    slots: Sequence[int],
    positions: Sequence[int],
    slot_dtype: torch.dtype = torch.int32,
) -> Written:
    from kvmesh.engine.kernels import fused

    rope = RotaryEmbedding(RopeConfig(partial=partial), shape.dim, shape.dtype, device)
    heads, weight = shape.heads + shape.kv_heads, None
    if norm != "none":
        kind = torch.float32 if norm == "float32" else shape.dtype
        weight = random(heads, shape.dim, dtype=kind, device=device, seed=2)
    cos, sin = rope(torch.tensor(positions, dtype=torch.int64, device=device))
    rotation = Rotation(heads, cos, sin, weight, 1e-6)
    batch = paged(shape, (shape.block * 3 + 1,), device)
    batch.pool.nan_to_num_(-5.0)
    where = torch.tensor(slots, dtype=slot_dtype, device=device)
    qkv = batch.qkv(len(slots) + 1)[1:]  # begins within an allocation
    before = qkv.clone()
    queries, pages = write_oracle.rotate_and_write(before, batch.pool[:, 1], where, rotation)
    other = batch.pool[:, 0].clone()
    fused.rotate_and_write(qkv, batch.pages, where, rotation)
    assert torch.equal(batch.pool[:, 0], other), "another layer's"
    size = float(write_oracle.rotated(before, rotation).abs().max()) if slots else 0.0
    return Written(before, qkv, queries, batch.pages, pages, size)


def check(made: Written, shape: Shape, slots: Sequence[int]) -> None:
    """Queries are rotated where they are, keys in their slots; values and all that nobody was to write are the same to
    the last bit."""
    heads, block = shape.heads, shape.block
    close(made.qkv[:, :heads], made.queries, made.size)
    assert torch.equal(made.qkv[:, heads:], made.before[:, heads:]), "keys and values of the step"
    close(made.pages[:, 0], made.wanted[:, 0], made.size)
    assert torch.equal(made.pages[:, 1].double(), made.wanted[:, 1]), "values"
    others = torch.ones(made.pages.shape[0], block, dtype=torch.bool, device=made.pages.device)
    for slot in slots:
        if slot >= 0:
            others[slot // block, slot % block] = False
    kept, wanted = (
        x.transpose(1, 3)[others[:, :, None].expand(-1, -1, shape.kv_heads)] for x in (made.pages, made.wanted)
    )
    assert torch.equal(kept.double(), wanted), "slots of nobody in this step"


HEADS = {
    "64": (Shape(14, 2, 64, 16), 1.0),
    "80, a part": (Shape(4, 4, 80, 16), 0.5),
    "96": (Shape(3, 3, 96, 32), 1.0),
    "128": (Shape(8, 2, 128, 16), 1.0),
    "128, a part": (Shape(5, 1, 128, 64), 0.75),
    "256": (Shape(4, 2, 256, 16), 1.0),
    "20, a part": (Shape(2, 1, 20, 16), 0.5),
}


NORMS = ("none", "same", "float32")


@pytest.mark.parametrize(
    ("heads", "dtype", "norm"),
    [(heads, dtype, NORMS[(i + j) % 3]) for i, heads in enumerate(HEADS) for j, dtype in enumerate(DTYPES)],
    ids=str,
)
def test_rotation_and_write(heads: str, dtype: torch.dtype, norm: str, device: torch.device) -> None:
    """All sizes of heads in each dtype and with each norm; tokens at both sides of a block's border, of several
    requests, and one that leaves no trace."""
    shape, partial = HEADS[heads]
    shape = replace(shape, dtype=dtype)
    block = shape.block
    slots = (block * 2 - 1, block * 5, -1, 0, block * 3 + 7)
    check(written(shape, partial, norm, device, slots, (block - 1, block, 0, 300, 4000)), shape, slots)


@pytest.mark.parametrize("slots", [(), (-1,), (37,), (-1, -1, -1)])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_few_tokens_and_none(slots: tuple[int, ...], slot_dtype: torch.dtype, device: torch.device) -> None:
    """The queries of a row that stands for nobody are rotated, too: no other row may depend on it."""
    shape = Shape(6, 2, 64, 16)
    check(written(shape, 1.0, "same", device, slots, range(len(slots)), slot_dtype), shape, slots)


def test_only_a_gpus_process_gets_the_kernels(device: torch.device) -> None:
    del device  # skips where there is no triton
    from kvmesh.engine.kernels import fused, kernels_for, sample

    assert kernels_for("cpu", "fused") is None
    assert kernels_for("cuda", "fused") is fused and kernels_for("cuda", "sample") is sample
