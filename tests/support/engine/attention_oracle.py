"""Attention in float64 over K and V that simply lie in order, and a hand that drives a backend's plans against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvmesh.engine.attention.backend import AttentionBackend, TokenSpan
from kvmesh.engine.attention.native_backend import NativeAttention
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.config import AttentionSpec
from tests.support.engine.prefill_oracle import oldest_seen

BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention, "native": NativeAttention}
# Of results about 1 in size: rounding of the products, of the weights (bfloat16 ones in prefill), of the result.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, spec: AttentionSpec) -> torch.Tensor:
    """Queries `[T, H, D]` at positions start.. against `[start + T, K, D]`; float64 `[T, H * D]`."""
    queries = q.double().unflatten(1, (k.shape[1], -1))  # [T, K, group, D]
    scores = torch.einsum("tkgd,nkd->kgtn", queries, k.double()).flatten(0, 1) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    where, token = torch.arange(start, start + q.shape[0])[:, None], torch.arange(k.shape[0])
    scores = scores.masked_fill((token > where) | (token < oldest_seen(spec, where)), -torch.inf)
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.double()[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)].unflatten(0, (k.shape[1], -1))
    return torch.einsum("kgtn,nkd->tkgd", weights, v.double()).flatten(1)


class Shape(NamedTuple):
    kv_heads: int
    group: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kv_heads}x{self.group}x{self.head_dim}-b{self.block_tokens}-{str(self.dtype)[6:]}"


@dataclass
class Request:
    pages: tuple[int, ...]
    kv: torch.Tensor  # [layers, tokens, 2, K, D], all that it will ever have
    done: int = 0


class Chunk(NamedTuple):
    request: Request
    length: int
    span: bool = True  # False: a decode row


class Bench:
    """Requests over one backend. Pages begin as `fill`; a request's tokens before a chunk are put there by hand."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        specs: Sequence[AttentionSpec],
        num_pages: int,
        fill: float = torch.nan,
        seed: int = 0,
    ) -> None:
        self.shape, self.specs = shape, tuple(specs)
        self.random = torch.Generator().manual_seed(seed)
        dims = (num_pages, len(specs), 2, shape.kv_heads, shape.block_tokens, shape.head_dim)
        self.pages = torch.full(dims, fill, dtype=shape.dtype)
        self.backend = BACKENDS[name](self.pages, shape.kv_heads * shape.group, specs)
        self.free = torch.randperm(num_pages, generator=self.random).tolist()

    def normal(self, *dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=self.random).to(self.shape.dtype)

    def request(self, tokens: int, done: int = 0) -> Request:
        """One that will have `tokens` tokens and has `done` of them in its pages."""
        count = -(-tokens // self.shape.block_tokens)
        pages = tuple(self.free.pop() for _ in range(count))
        request = Request(
            pages, self.normal(len(self.specs), tokens, 2, self.shape.kv_heads, self.shape.head_dim), done
        )
        for at in range(done):
            page, slot = pages[at // self.shape.block_tokens], at % self.shape.block_tokens
            self.pages[page, :, :, :, slot] = request.kv[:, at]
        return request

    def step(self, chunks: Sequence[Chunk], plan_pages: dict[int, tuple[int, ...]] | None = None) -> list[torch.Tensor]:
        """One step of the chunks, rows first, through every layer: each layer's answer. Other pages than a request's
        own can be given to the plan by the chunk's place."""
        lists = {i: (plan_pages or {}).get(i, chunk.request.pages) for i, chunk in enumerate(chunks)}
        rows = [i for i, chunk in enumerate(chunks) if not chunk.span]
        spans = [TokenSpan(c.request.done, c.length, lists[i]) for i, c in enumerate(chunks) if c.span]
        assert rows == list(range(len(rows))), "rows come first"
        plan = self.backend.plan_mixed([lists[i] for i in rows], [chunks[i].request.done for i in rows], spans)
        starts = [range(c.request.done, c.request.done + c.length) for c in chunks]
        assert plan.positions.tolist() == [at for where in starts for at in where]
        heads = self.shape.kv_heads * self.shape.group
        answers = []
        for layer, spec in enumerate(self.specs):
            q = self.normal(plan.positions.shape[0], heads, self.shape.head_dim)
            new = [c.request.kv[layer, c.request.done : c.request.done + c.length] for c in chunks]
            qkv = torch.cat((q, torch.cat(new).flatten(1, 2)), 1)
            plan.write(layer, qkv)
            answers.append(plan.attend(layer, qkv))
            self.compare(chunks, q, answers[-1], layer, spec)
        for chunk in chunks:
            chunk.request.done += chunk.length
        return answers

    def compare(
        self, chunks: Sequence[Chunk], q: torch.Tensor, answer: torch.Tensor, layer: int, spec: AttentionSpec
    ) -> None:
        at = 0
        for i, (request, length, _) in enumerate(chunks):
            k, v = request.kv[layer, : request.done + length].unbind(1)
            expected = dense_attention(q[at : at + length], k, v, request.done, spec)
            error = float((answer[at : at + length].double() - expected).abs().max())
            assert error <= TOLERANCE[self.shape.dtype], f"chunk {i}, layer {layer}, {spec}: off by {error}"
            at += length
        assert at == answer.shape[0]

    def tail(self, request: Request) -> torch.Tensor:
        """The slots past the last token on its page."""
        page, slot = divmod(request.done - 1, self.shape.block_tokens)
        return self.pages[request.pages[page], :, :, :, slot + 1 :]


def shifted(pages: tuple[int, ...], index: int, num_pages: int) -> tuple[int, ...]:
    """A page table off by one in one place."""
    wrong: list[Any] = list(pages)
    wrong[index] = (wrong[index] + 1) % num_pages
    return tuple(wrong)
