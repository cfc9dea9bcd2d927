"""Views of vLLM's caches: whatever order the layers, blocks, heads and tokens lie in, a page is its block's bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvmesh.connectors.vllm.pages import pages_of
from kvmesh.errors import ConfigError

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 4, 8


def filled(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).to(torch.bfloat16).reshape(shape)


def block_bytes(tensor: torch.Tensor) -> set[bytes]:
    """Returns the two bytes of each value, in no order: a page may keep them in any."""
    raw = tensor.contiguous().view(torch.uint8).numpy().reshape(-1, 2)
    return {bytes(one) for one in raw}


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BLHNC"])
def test_a_page_has_the_bytes_of_its_block(order: str) -> None:
    sizes = {"L": 3, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    whole = filled(*(sizes[one] for one in order))
    for layer in range(3):
        view = whole.permute(*(order.index(one) for one in "LBHNC"))[layer]
        pages, _ = pages_of("layer", view, BLOCKS)
        assert pages.shape == (BLOCKS, HEADS * TOKENS * CONTENT * 2)
        for block in range(BLOCKS):
            assert {bytes(one) for one in pages[block].reshape(-1, 2)} == block_bytes(view[block])
        pages[2] = pages[4]
        assert torch.equal(view[2], view[4]), "a page is the cache's own memory"


def test_orders_that_differ_are_told_apart() -> None:
    plain, swapped = filled(BLOCKS, HEADS, TOKENS, CONTENT), filled(BLOCKS, TOKENS, HEADS, CONTENT).transpose(1, 2)
    assert pages_of("layer", plain, BLOCKS)[1] != pages_of("layer", swapped, BLOCKS)[1]


def test_a_kernels_smaller_blocks_make_one_page() -> None:
    whole = filled(BLOCKS * 2, HEADS, TOKENS, CONTENT)
    pages, _ = pages_of("layer", whole, BLOCKS)
    assert pages[5].tobytes() == whole[10:12].contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "tensor", [filled(BLOCKS + 1, HEADS, TOKENS, CONTENT), filled(BLOCKS, HEADS, TOKENS, CONTENT * 2)[..., :CONTENT]]
)
def test_blocks_that_do_not_lie_in_one_piece_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"KV cache of layer: .* does not lie in one piece"):
        pages_of("layer", tensor, BLOCKS)


def test_memory_of_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="device=meta: KvmeshConnector moves pages in host memory"):
        pages_of("layer", torch.empty(BLOCKS, 2, 4, 8, device="meta"), BLOCKS)
