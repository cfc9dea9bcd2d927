"""Parts of contexts by the decode kernels, against torch: values and the logs of the sums of weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmesh.engine.attention.latent import UpProjection
from kvmesh.engine.attention.parts import LatentParts, PartBackend, QueryRun, part_backend
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.config_latent import LatentConfig
from tests.support.engine.paged import Shape, paged, supported

LENGTHS = (40, 0, 1, 75, 33)
QUERIES = (1, 1, 3, 1, 20)  # the last are rows of no kernel


def runs() -> list[QueryRun]:
    firsts = np.cumsum(QUERIES) - QUERIES
    made = [
        QueryRun(int(f), n, row, seen) for row, (f, n, seen) in enumerate(zip(firsts, QUERIES, LENGTHS, strict=True))
    ]
    # A draft's row apart from its request's others, as ranks of cp have it.
    return [*made, QueryRun(sum(QUERIES), 1, 3, LENGTHS[3] - 1), QueryRun(sum(QUERIES) + 1, 1, 0, LENGTHS[0] - 40 + 1)]


def same(mine: PartBackend, right: PartBackend, q: torch.Tensor, table: np.ndarray, tolerance: float) -> None:
    for one in (mine, right):
        one.plan(runs(), table)
    found, wanted = mine.attend(1, q), right.attend(1, q)
    assert (found.lse[1] == -torch.inf).all() and not found.values[1].any(), "a query that sees nothing"
    for a, b in zip(found, wanted, strict=True):
        assert not a.isnan().any()
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [Shape(8, 2, 24, 16), Shape(4, 1, 64, 16, torch.bfloat16)])
@pytest.mark.parametrize("processors", [1, 32])
def test_keys_and_values(shape: Shape, processors: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmesh.engine.attention import triton_backend, triton_parts

    monkeypatch.setattr(triton_backend, "PROCESSORS", processors)  # with many, rows are cut into several shares
    shape = supported(shape, device)
    memory = paged(shape, LENGTHS, device)
    specs = [AttentionSpec(0.3), AttentionSpec(0.3, softcap=4.0)]
    mine = part_backend(triton_backend.TritonAttention(memory.pool, shape.heads, specs))
    assert isinstance(mine, triton_parts.TritonParts)
    right = PartBackend(TorchAttention(memory.pool, shape.heads, specs))
    q = memory.qkv(sum(QUERIES) + 2)[:, : shape.heads]
    same(mine, right, q, memory.table.clamp(min=0).cpu().numpy(), shape.tolerance)


def test_latents(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmesh.engine.attention import triton_backend, triton_parts
    from kvmesh.engine.attention.triton_latent import TritonLatent

    monkeypatch.setattr(triton_backend, "PROCESSORS", 8)
    sizes = LatentConfig(0, 32, 12, 8, 10, 0.2, False, False)
    memory = paged(Shape(1, 1, 40, 16), LENGTHS, device)
    pages = memory.pool[:, :, :1].contiguous()  # one plane
    up = UpProjection(torch.randn(6, 22, 32, device=device), 12)
    made = TritonLatent(pages, sizes, [up, up])
    mine = part_backend(made)
    assert isinstance(mine, triton_parts.TritonLatentParts)
    q = torch.randn(sum(QUERIES) + 2, 6, 40, generator=torch.Generator().manual_seed(2)).to(device)
    same(mine, LatentParts(made), q, memory.table.clamp(min=0).cpu().numpy(), 2e-5)
