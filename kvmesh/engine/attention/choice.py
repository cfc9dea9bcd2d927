"""Which attention backend the pages of a device get."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from kvmesh.engine import ops
from kvmesh.engine.attention.backend import AttentionBackend
from kvmesh.engine.attention.latent import LatentBackend, UpProjection
from kvmesh.engine.attention.native_backend import NativeAttention
from kvmesh.engine.attention.native_latent import NativeLatent
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.cpu import native

log = logging.getLogger(__name__)
WITHOUT_TRITON = "attention through torch, slower and without CUDA graphs (pip install 'kvmesh[cuda]'): %s"


def make_backend(pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> AttentionBackend:
    """Returns the backend registered for the pages' device, the torch one where none is."""
    return BACKENDS.get(pages.device.type, TorchAttention)(pages, num_heads, specs)


def make_latent_backend(pages: torch.Tensor, sizes: LatentConfig, ups: Sequence[UpProjection]) -> AttentionBackend:
    """Returns the backend of latent attention registered for the pages' device, the torch one where none is."""
    return LATENT_BACKENDS.get(pages.device.type, LatentBackend)(pages, sizes, ups)


def _latent_on_cpu(pages: torch.Tensor, sizes: LatentConfig, ups: Sequence[UpProjection]) -> AttentionBackend:
    """Returns the C++ operator's backend where it has been built, is wanted and computes in the pages' dtype, else
    torch's."""
    return (NativeLatent if ops.on_native(pages) else LatentBackend)(pages, sizes, ups)


def _latent_on_cuda(pages: torch.Tensor, sizes: LatentConfig, ups: Sequence[UpProjection]) -> AttentionBackend:
    """Returns the backend of Triton's kernels, which are imported only here, else torch's with a warning."""
    try:
        from kvmesh.engine.attention.triton_latent import TritonLatent
    except ImportError as error:
        log.warning(WITHOUT_TRITON, error)
        return LatentBackend(pages, sizes, ups)
    return TritonLatent(pages, sizes, ups)


def _on_cpu(pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> AttentionBackend:
    """Returns the C++ operators' backend where they have been built and are wanted (`kvmesh.engine.cpu.native`), else
    torch's."""
    if native.loaded():
        return NativeAttention(pages, num_heads, specs)
    return TorchAttention(pages, num_heads, specs)


def _on_cuda(pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> AttentionBackend:
    """Returns the backend of Triton's kernels, which are imported only here, else torch's with a warning."""
    try:
        from kvmesh.engine.attention.triton_backend import TritonAttention
    except ImportError as error:
        log.warning(WITHOUT_TRITON, error)
        return TorchAttention(pages, num_heads, specs)
    return TritonAttention(pages, num_heads, specs)


BACKENDS: dict[str, Callable[[torch.Tensor, int, Sequence[AttentionSpec]], AttentionBackend]] = {
    "cpu": _on_cpu,
    "cuda": _on_cuda,
}

LATENT_BACKENDS: dict[str, Callable[[torch.Tensor, LatentConfig, Sequence[UpProjection]], AttentionBackend]] = {
    "cpu": _latent_on_cpu,
    "cuda": _latent_on_cuda,
}
