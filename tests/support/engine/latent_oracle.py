"""Latent attention in float64 over rows that simply lie in order, and a hand that drives `LatentBackend` against it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvmesh.engine.attention.backend import TokenSpan
from kvmesh.engine.attention.latent import LatentBackend, UpProjection
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.rope import Rotation

# Of results about 1 in size: rounding of the absorbed query or of the expanded K and V, and of the result.
LATENT_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class LatentShape(NamedTuple):
    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    block_tokens: int
    dtype: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        return self.latent + self.rope

    @property
    def scale(self) -> float:
        return float((self.nope + self.rope) ** -0.5)

    @property
    def sizes(self) -> LatentConfig:
        return LatentConfig(0, self.latent, self.nope, self.rope, self.value, self.scale, False, True)

    def __str__(self) -> str:
        name = f"{self.heads}x{self.nope}+{self.rope}-v{self.value}-c{self.latent}-b{self.block_tokens}"
        return f"{name}-{str(self.dtype)[6:]}"


def dense_latent_attention(
    q: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, start: int, shape: LatentShape
) -> torch.Tensor:
    """Queries `[T, H, nope + rope]` at positions start.. against rows `[start + T, latent + rope]`, each head's K and V
    written out; float64 `[T, H, V]`."""
    q, rows, weight = q.double(), rows.double(), weight.double()
    latents, shared = rows[:, : shape.latent], rows[:, shape.latent :]
    keys = torch.einsum("nc,hdc->nhd", latents, weight[:, : shape.nope])
    keys = torch.cat((keys, shared[:, None].expand(-1, shape.heads, -1)), -1)
    values = torch.einsum("nc,hdc->nhd", latents, weight[:, shape.nope :])
    scores = torch.einsum("thd,nhd->htn", q, keys) * shape.scale
    behind = torch.arange(start, start + q.shape[0], device=q.device)[:, None]
    behind = behind - torch.arange(rows.shape[0], device=q.device)
    weights = scores.masked_fill(behind < 0, -torch.inf).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, values)


def normed_and_rotated(qkv: torch.Tensor, rotation: Rotation, shape: LatentShape) -> torch.Tensor:
    """Returns float64 of `qkv`'s form, whose queries' and rows' parts with position are rotated, from pairs side by
    side to halves, and whose latents are normed where there is a weight."""
    answer, width = qkv.double(), shape.nope + shape.rope
    rows = answer[:, shape.heads * width :]
    if rotation.norm_weight is not None:
        latents = rows[:, : shape.latent].clone()
        scale = (latents.square().mean(-1, keepdim=True) + rotation.eps).rsqrt()
        rows[:, : shape.latent] = latents * scale * rotation.norm_weight.double()
    heads = answer[:, : shape.heads * width].view(len(qkv), shape.heads, width)
    for part in (*heads[..., shape.nope :].unbind(1), rows[:, shape.latent :]):
        first, second = part[:, ::2].clone(), part[:, 1::2].clone()
        (cos, other_cos), (sin, other_sin) = (angle.double()[:, 0].chunk(2, -1) for angle in rotation[1:3])
        part[:] = torch.cat((first * cos + second * sin, second * other_cos + first * other_sin), -1)
    return answer


@dataclass
class LatentRequest:
    pages: tuple[int, ...]
    rows: torch.Tensor  # [layers, tokens, latent + rope], all that it will ever have
    done: int = 0


class LatentChunk(NamedTuple):
    request: LatentRequest
    length: int
    span: bool = True  # False: a decode row


class LatentBench:
    """Requests over one backend of two layers. Pages begin as `fill`; a request's tokens before a chunk are put there
    by hand."""

    layers = 2

    def __init__(
        self,
        shape: LatentShape,
        num_pages: int,
        fill: float = torch.nan,
        seed: int = 0,
        backend: type[LatentBackend] = LatentBackend,
        device: torch.device | None = None,
    ) -> None:
        self.shape, self.device = shape, device or torch.device("cpu")
        self.random = torch.Generator().manual_seed(seed)
        dims = (num_pages, self.layers, 1, 1, shape.block_tokens, shape.width)
        self.pages = torch.full(dims, fill, dtype=shape.dtype, device=self.device)
        self.free = torch.randperm(num_pages, generator=self.random).tolist()
        weight = self.normal(shape.heads, shape.nope + shape.value, shape.latent) * shape.latent**-0.5
        self.up = UpProjection(weight.to(shape.dtype), shape.nope)
        self.backend = backend(self.pages, shape.sizes, [self.up] * self.layers)

    def normal(self, *dims: int) -> torch.Tensor:
        return torch.randn(dims, generator=self.random).to(self.device, self.shape.dtype)

    def queries(self, tokens: int) -> torch.Tensor:
        return self.normal(tokens, self.shape.heads, self.shape.nope + self.shape.rope)

    def given(self, q: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """What a layer gives the plan: queries and rows side by side."""
        return torch.cat((q.flatten(1), torch.cat([q.new_empty(0, self.shape.width), *rows])), -1)

    def request(self, tokens: int, done: int = 0) -> LatentRequest:
        """One that will have `tokens` tokens and has `done` of them in its pages."""
        pages = tuple(self.free.pop() for _ in range(-(-tokens // self.shape.block_tokens)))
        request = LatentRequest(pages, self.normal(self.layers, tokens, self.shape.width), done)
        for at in range(done):
            page, slot = divmod(at, self.shape.block_tokens)
            self.pages[pages[page], :, 0, 0, slot] = request.rows[:, at]
        return request

    def step(self, chunks: Sequence[LatentChunk], plan_pages: dict[int, tuple[int, ...]] | None = None) -> None:
        """One step of the chunks, rows first, through every layer. Other pages than a request's own can be given to the
        plan by the chunk's place."""
        lists = [(plan_pages or {}).get(i, chunk.request.pages) for i, chunk in enumerate(chunks)]
        rows = [i for i, chunk in enumerate(chunks) if not chunk.span]
        assert rows == list(range(len(rows))), "rows come first"
        spans = [TokenSpan(c.request.done, c.length, lists[i]) for i, c in enumerate(chunks) if c.span]
        plan = self.backend.plan_mixed([lists[i] for i in rows], [chunks[i].request.done for i in rows], spans)
        starts = [range(c.request.done, c.request.done + c.length) for c in chunks]
        assert plan.positions.tolist() == [at for where in starts for at in where]
        for layer in range(self.layers):
            q = self.queries(plan.positions.shape[0])
            new = [c.request.rows[layer, c.request.done : c.request.done + c.length] for c in chunks]
            given = self.given(q, new)
            plan.write(layer, given)
            answer = plan.attend(layer, given)
            assert answer.shape == (q.shape[0], self.shape.heads * self.shape.value)
            self.compare(chunks, q, answer.view(q.shape[0], self.shape.heads, self.shape.value), layer)
        for chunk in chunks:
            chunk.request.done += chunk.length

    def compare(self, chunks: Sequence[LatentChunk], q: torch.Tensor, answer: torch.Tensor, layer: int) -> None:
        assert answer.dtype == self.shape.dtype
        at = 0
        for i, (request, length, _) in enumerate(chunks):
            rows = request.rows[layer, : request.done + length]
            expected = dense_latent_attention(q[at : at + length], rows, self.up.weight, request.done, self.shape)
            error = float((answer[at : at + length].double() - expected).abs().max()) if self.shape.heads else 0.0
            assert error <= LATENT_TOLERANCE[self.shape.dtype], f"chunk {i}, layer {layer}: off by {error}"
            at += length
        assert at == answer.shape[0]

    def tail(self, request: LatentRequest) -> torch.Tensor:
        """The slots past the last token on its page."""
        page, slot = divmod(request.done - 1, self.shape.block_tokens)
        return self.pages[request.pages[page], :, :, :, slot + 1 :]
