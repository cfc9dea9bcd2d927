"""Attention over paged KV: the seam between models and the memory that holds K and V.

A backend plans a step once (which rows go to which pages, what each row attends to) and the plan then serves every
layer: `write` puts the step's K and V into `pages`, `attend` reads back what each token may see. The torch backend
runs anywhere; kernels for one device register themselves in BACKENDS.

Shapes: `pages [num_pages, layers, 2, K, block_tokens, D]`, `qkv [T, H + 2K, D]`: T tokens, H query heads, K KV heads.

Invariant: slots past a prompt's last token are zeroed, since pages are pushed whole, with nothing of other requests.
Backends for CPUs do so with pages that a decode step begins, too: torch's gathers and masks them, and 0 * NaN is NaN.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from kvmesh.engine.batch import Integers
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.cpu import native
from kvmesh.errors import InternalError

log = logging.getLogger(__name__)


class Span(NamedTuple):
    """Tokens [start, start + length) of one request, whose KV lies in `pages` from token 0 on."""

    start: int
    length: int
    pages: Sequence[int]


def seen_from(position: int, window: int) -> int:
    """The first token that the one at `position` sees."""
    return max(0, position - window + 1) if window else 0


class StepPlan(Protocol):
    """One step's attention. `positions` is int64 `[T]` on the device."""

    positions: torch.Tensor

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """K and V of all tokens into the pages of `layer`."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """`[T, H * D]`; `write` of the same layer comes first."""


class AttentionBackend(ABC):
    """Owns no memory but scratch: `pages` belong to the caller, who keeps one writer per page. `capturable`: a decode
    plan's work is launches alone, over buffers that stay (`kvmesh.engine.graphs`)."""

    capturable = False

    def __init__(self, pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> None:
        if not pages.is_contiguous():
            raise InternalError("pages must be contiguous")
        self.pages = pages
        self.num_pages, self.num_layers, _, self.kv_heads, self.block_tokens, self.head_dim = pages.shape
        self.num_heads = num_heads
        self.specs = tuple(specs)
        if len(self.specs) != self.num_layers:
            raise InternalError(f"{len(self.specs)} attention specs for {self.num_layers} layers")
        self.device, self.dtype = pages.device, pages.dtype

    @abstractmethod
    def plan_prefill(self, spans: Sequence[Span]) -> StepPlan:
        """Ragged batch; T = the sum of all lengths. Zeroes the rest of each span's last page."""

    @abstractmethod
    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> StepPlan:
        """One token a row; T = rows. The plan is valid until the next call."""

    def plan_mixed(self, pages: Sequence[Sequence[int]], positions: Integers, spans: Sequence[Span]) -> StepPlan:
        """Decode rows first, then the tokens of the spans, in one step; T = rows + the sum of all lengths."""
        if not spans:
            return self.plan_decode(pages, positions)
        if not pages:
            return self.plan_prefill(spans)
        return MixedPlan(self.plan_decode(pages, positions), self.plan_prefill(spans), len(pages))

    def page_array(self, pages: Sequence[int], end: int) -> np.ndarray:
        """int64 ids of the pages that hold tokens [0, end). InternalError when they are too few or do not exist."""
        count = -(-end // self.block_tokens)
        ids = np.asarray(pages[:count], dtype=np.int64)
        if len(ids) < count:
            raise InternalError(f"{end} tokens need {count} pages of {self.block_tokens}, got {len(ids)}")
        if ids.min() < 0 or ids.max() >= self.num_pages:
            raise InternalError(f"page ids {ids.min()}..{ids.max()} are outside 0..{self.num_pages - 1}")
        return ids


class MixedPlan:
    """Two plans side by side: the first `rows` tokens are decode's, the others prefill's."""

    def __init__(self, decode: StepPlan, prefill: StepPlan, rows: int) -> None:
        self.decode, self.prefill, self.rows = decode, prefill, rows
        self.positions = torch.cat((decode.positions, prefill.positions))

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self.decode.write(layer, qkv[: self.rows])
        self.prefill.write(layer, qkv[self.rows :])

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.decode.attend(layer, qkv[: self.rows]), self.prefill.attend(layer, qkv[self.rows :])))


def make_backend(pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> AttentionBackend:
    """The backend registered for the pages' device, the torch one where none is."""
    from kvmesh.engine.attention_torch import TorchAttention

    return BACKENDS.get(pages.device.type, TorchAttention)(pages, num_heads, specs)


def _on_cpu(pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> AttentionBackend:
    """The C++ operators where they have been built and are wanted (`kvmesh.engine.cpu.native`)."""
    if native.loaded():
        from kvmesh.engine.attention_native import NativeAttention

        return NativeAttention(pages, num_heads, specs)
    from kvmesh.engine.attention_torch import TorchAttention

    return TorchAttention(pages, num_heads, specs)


def _on_cuda(pages: torch.Tensor, num_heads: int, specs: Sequence[AttentionSpec]) -> AttentionBackend:
    """Triton's kernels, which nobody else should have to import."""
    try:
        from kvmesh.engine.attention_triton import TritonAttention
    except ImportError as error:
        from kvmesh.engine.attention_torch import TorchAttention

        log.warning("attention through torch, slower and without CUDA graphs (pip install 'kvmesh[cuda]'): %s", error)
        return TorchAttention(pages, num_heads, specs)
    return TritonAttention(pages, num_heads, specs)


BACKENDS: dict[str, Callable[[torch.Tensor, int, Sequence[AttentionSpec]], AttentionBackend]] = {
    "cpu": _on_cpu,
    "cuda": _on_cuda,
}
