"""vLLM's KV cache of a layer as plain memory: the bytes of each block in one piece."""

from __future__ import annotations

import numpy as np
import torch

from kvmesh.connectors.vllm.mover import Pages
from kvmesh.errors import ConfigError


def pages_of(name: str, tensor: torch.Tensor, blocks: int) -> tuple[Pages, tuple[object, ...]]:
    """Returns a layer's memory as [blocks, bytes of a block], and its shape and strides within a block. Raises
    ConfigError unless each block of it lies in host memory without gaps."""
    if tensor.device.type != "cpu":
        why = "KvmeshConnector moves pages in host memory; run it under vLLM for CPUs"
        raise ConfigError(f"device={tensor.device}: {why}")
    split, rest = divmod(tensor.shape[0], blocks)  # the attention kernel may use smaller blocks than the manager
    block = tensor[:split]
    size = tensor.element_size()
    span = size * (1 + sum((n - 1) * step for n, step in zip(block.shape, block.stride(), strict=True)))
    if rest or span != block.numel() * size:
        why = f"{tuple(tensor.shape)} with strides {tensor.stride()}: a block of {blocks} does not lie in one piece"
        raise ConfigError(f"KV cache of {name}: {why}")
    stride = tensor.stride(0) * split * size
    whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // size,), (1,), 0).view(torch.uint8).numpy()
    start = tensor.storage_offset() * size
    pages = np.lib.stride_tricks.as_strided(whole[start:], (blocks, span), (stride, 1))
    return pages, (str(tensor.dtype), tuple(block.shape), tuple(block.stride()))
