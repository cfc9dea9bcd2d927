from __future__ import annotations

import pytest
import torch

from tests.support.engine import write_oracle
from tests.support.engine.paged import Shape, paged

SHAPES = (Shape(2, 2, 16, 16), Shape(7, 1, 24, 16, torch.bfloat16), Shape(4, 4, 96, 64))


@pytest.mark.parametrize(
    "shape", [Shape(2, 2, 16, 16), Shape(7, 1, 24, 16, torch.bfloat16), Shape(4, 4, 96, 64)], ids=str
)
def test_only_the_named_slots_change(shape: Shape, device: torch.device) -> None:
    from kvmesh.engine.kernels.write import write_kv

    batch = paged(shape, (shape.block * 4,), device)
    slots = torch.tensor([shape.block * 5 + 3, 0, -1, shape.block * 2 - 1], dtype=torch.int64, device=device)
    qkv = batch.qkv(len(slots))
    wanted = batch.pool.clone()
    write_oracle.write_kv(qkv, wanted[:, 1], slots)
    write_kv(qkv, batch.pages, slots)
    assert torch.equal(batch.pool.nan_to_num(7), wanted.nan_to_num(7))


def test_pages_beyond_two_to_the_31_elements(device: torch.device) -> None:
    """A page's place is reckoned in 64 bits."""
    from kvmesh.engine.kernels.write import write_kv

    if device.type != "cuda":
        pytest.skip("needs 5 GB at once: on a GPU only")
    pages = torch.zeros(2**15 + 8, 2, 8, 64, 64, dtype=torch.bfloat16, device=device)
    assert pages.numel() > 2**31
    qkv = torch.randn(1, 24, 64, device=device).bfloat16()
    write_kv(qkv, pages, torch.tensor([(2**15 + 5) * 64 + 7], device=device))
    assert torch.equal(pages[2**15 + 5, :, :, 7], qkv[0, 8:].view(2, 8, 64))
