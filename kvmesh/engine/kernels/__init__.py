"""Triton kernels: attention over paged KV, what lies between the matrix products, draws, moves. Their oracles are in
tests/support/engine.

Attention and writes take one layer's pages as `[num_pages, 2, K, block_tokens, D]`, any strides but a dense last axis.
Page ids are multiplied in 64 bits: pools are larger than 2**31 elements.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType


@functools.cache
def kernels_for(device_type: str, name: str) -> ModuleType | None:
    """Returns the module of this package called `name` for a GPU; None elsewhere, and without triton, of which
    `attention.choice` warns. Only a process that computes on a GPU imports triton."""
    if device_type != "cuda":
        return None
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError:
        return None
