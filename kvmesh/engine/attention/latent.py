"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) over paged latents, by torch on any device.

A token has one row for all heads: its normed latent, and behind it the rotated key part that the heads share. Pages
are `[num_pages, layers, 1, 1, block_tokens, latent + rope]`. What a layer gives the plan, `qkv` elsewhere, is `[T, H *
(nope + rope) + latent + rope]`: the queries of a token, then its row. K and V of a head are products of the latent with
the head's part of the up-projection (`UpProjection`), and there are two ways to attend:

- decode is absorbed: the query is multiplied with the key part first (`UpProjection.absorb`) and meets the rows as they
  lie; what comes out is a mean of latents, which the value part turns into the answer (`UpProjection.values`).
- prefill is not: rows are gathered in tiles and expanded to K and V, which for many queries costs less, since a head's
  K and V are narrower than a latent.

Both walk over the context in tiles of `tile_tokens` from token 0 on, with a running softmax in float32. What is
computed for a request are the same calls over the same shapes whichever requests are beside it, at the price of one
walk a request: where torch answers equal calls with equal bits, a request's bits do not depend on its company.

Shapes: T tokens of the step, H query heads of this rank (the rows are the same at every rank), `nope` the width of the
query and key parts without rope. Invariant, as in `backend`: slots past a prompt's last token are zeroed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kvmesh.engine import ops
from kvmesh.engine.attention.backend import (
    AttentionBackend,
    MixedPlan,
    PageTable,
    SpanTokens,
    StepPlan,
    TokenSpan,
)
from kvmesh.engine.batch import Integers
from kvmesh.engine.config import AttentionSpec
from kvmesh.engine.config_latent import LatentConfig
from kvmesh.engine.rope import Rotation
from kvmesh.errors import InternalError

Array = npt.NDArray[np.int64]


class UpProjection:
    """Turns latents into the keys and values of H heads: `weight [H, nope + V, latent]`, for each head the rows of the
    key part before those of the value part (the order of DeepSeek's kv_b_proj)."""

    def __init__(self, weight: torch.Tensor, nope: int) -> None:
        self.heads, rows, self.latent = weight.shape
        self.nope, self.value_dim = nope, rows - nope
        self.weight = weight.contiguous()
        self.key, self.value = self.weight[:, :nope], self.weight[:, nope:]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Returns `[T, H, latent + rope]` of queries `[T, H, nope + rope]`."""
        absorbed = torch.bmm(q[..., : self.nope].transpose(0, 1), self.key).transpose(0, 1)
        return torch.cat((absorbed, q[..., self.nope :]), -1)

    def expand(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys `[H, n, nope]` and values `[H, n, V]` of latents `[n, latent]`."""
        both = functional.linear(latents, self.weight.flatten(0, 1))
        both = both.view(latents.shape[0], self.heads, self.nope + self.value_dim).transpose(0, 1)
        return both[..., : self.nope], both[..., self.nope :]

    def values(self, attended: torch.Tensor) -> torch.Tensor:
        """Returns `[T, H, V]` of means of latents `[T, H, latent]`."""
        return torch.bmm(attended.transpose(0, 1), self.value.transpose(1, 2)).transpose(0, 1)


class RunningSoftmax:
    """Is a softmax over keys that come in tiles, and the mean of the values by its weights, in float32. `rows` are the
    leading dimensions of what asks, `value_dim` is the width of the answer. The first tile must show each row a key."""

    def __init__(self, rows: Sequence[int], value_dim: int, device: torch.device) -> None:
        self.highest = torch.full((*rows, 1), -torch.inf, device=device)
        self.sum = torch.zeros((*rows, 1), device=device)
        self.mean = torch.zeros((*rows, value_dim), device=device)  # not yet divided by `sum`

    def add(self, scores: torch.Tensor, values: torch.Tensor, rows: slice = slice(None)) -> None:
        """Takes one tile for the rows `rows` of the last leading dimension: scores `[..., rows, n]` (overwritten) and
        values `[..., n, value_dim]`."""
        old, total, mean = self.highest[..., rows, :], self.sum[..., rows, :], self.mean[..., rows, :]
        highest = torch.maximum(old, scores.amax(-1, keepdim=True))
        shrink = (old - highest).exp_()
        weights = scores.sub_(highest).exp_()
        total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
        mean.mul_(shrink).add_(torch.matmul(weights, values))
        old.copy_(highest)

    def answer(self) -> torch.Tensor:
        """Returns the mean `[*rows, value_dim]`."""
        return self.mean.div_(self.sum)


def absorbed_costs_less(span: TokenSpan, sizes: LatentConfig, times: float) -> bool:
    """Says whether the queries of a span cost less absorbed than with the K and V of their context written out, by
    multiplications of a head, where one that is absorbed counts `times` as much in attention. Absorbing a query and
    its way back cost what it costs to write out a token."""
    pairs = span.length * span.start + span.length * (span.length + 1) // 2
    absorbed = 2 * sizes.latent + sizes.rope
    expanded = sizes.nope + sizes.rope + sizes.value
    product = sizes.latent * (sizes.nope + sizes.value)
    return pairs * times * absorbed + span.length * product < pairs * expanded + (span.start + span.length) * product


class LatentBackend(AttentionBackend):
    """Writes latent rows into pages and attends to them. It owns no memory but scratch, which for one request is a
    gathered tile in the pages' dtype and in float32, its expansion in prefill, `score_elements` of scores, and an
    answer in float32. `ups` are this rank's up-projections of each layer.

    Raises InternalError unless the pages have one plane of one head, as wide as a latent and its key part."""

    tile_tokens = 512
    score_elements = 8 * 2**20

    def __init__(self, pages: torch.Tensor, sizes: LatentConfig, ups: Sequence[UpProjection]) -> None:
        super().__init__(pages, ups[0].heads, [AttentionSpec(sizes.scale)] * len(ups))
        if self.planes != 1 or self.kv_heads != 1:
            raise InternalError(f"a latent is one plane of one head, got pages {tuple(pages.shape)}")
        if sizes.latent + sizes.rope != self.head_dim:
            raise InternalError(f"a latent of {sizes.latent} + {sizes.rope} in rows of {self.head_dim}")
        self.sizes, self.ups = sizes, tuple(ups)
        self.latent, self.scale = sizes.latent, sizes.scale
        self.query_width = self.num_heads * (sizes.nope + sizes.rope)
        self.layers = [pages[:, layer, 0, 0] for layer in range(self.num_layers)]
        self.decode = LatentDecodePlan(self)

    def plan_prefill(self, spans: Sequence[TokenSpan]) -> StepPlan:
        return LatentPrefillPlan(self, spans)

    def plan_decode(self, pages: Sequence[Sequence[int]], positions: Integers) -> StepPlan:
        return self.decode.plan(pages, positions)

    def plan_mixed(self, pages: Sequence[Sequence[int]], positions: Integers, spans: Sequence[TokenSpan]) -> StepPlan:
        if not spans:
            return self.plan_decode(pages, positions)
        if not pages:
            return self.plan_prefill(spans)
        return LatentMixedPlan(self, self.plan_decode(pages, positions), self.plan_prefill(spans), len(pages))

    def inputs(self, tokens: int) -> torch.Tensor:
        return torch.zeros(tokens, self.query_width + self.head_dim, dtype=self.dtype, device=self.device)

    def answer(self, qkv: torch.Tensor) -> torch.Tensor:
        return qkv.new_empty(qkv.shape[0], self.num_heads * self.sizes.value)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns views of the queries `[T, H, nope + rope]` and of the rows `[T, latent + rope]`."""
        width = self.sizes.nope + self.sizes.rope
        q = qkv[:, : self.query_width].view(qkv.shape[0], self.num_heads, width)
        return q, qkv[:, self.query_width :]

    def rotate(self, qkv: torch.Tensor, rotation: Rotation) -> None:
        """Norms the latents of rows where the rotation has a weight `[latent]`, and rotates the parts with position of
        queries and rows, in place. Pairs that lie side by side come to lie half a width apart, in queries and keys
        alike, which leaves their products."""
        q, rows = self.split(qkv)
        if rotation.norm_weight is not None:
            latents = rows[:, : self.latent]
            latents.copy_(ops.rms_norm(latents.contiguous(), rotation.norm_weight, rotation.eps))
        turned = torch.cat((q[..., self.sizes.nope :], rows[:, None, self.latent :]), 1)
        if self.sizes.interleaved:
            turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
        ops.rotate_heads(turned, rotation._replace(norm_weight=None))
        q[..., self.sizes.nope :] = turned[:, :-1]
        rows[:, self.latent :] = turned[:, -1]

    def tensor(self, array: Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def tiles(self, layer: int, page_ids: torch.Tensor, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the rows of tokens [0, end) of one request as tiles `(first token, [n, latent + rope])`."""
        step = max(1, self.tile_tokens // self.block_tokens)
        for first in range(0, -(-end // self.block_tokens), step):
            at = first * self.block_tokens
            rows = self.layers[layer].index_select(0, page_ids[first : first + step]).view(-1, self.head_dim)
            yield at, rows[: end - at]


class LatentPlan(StepPlan):
    """Writes rows where the tokens of a step go: `page_ids` and `slots`, int64 `[T]` as `positions`."""

    backend: LatentBackend
    page_ids: torch.Tensor
    slots: torch.Tensor

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        self.backend.layers[layer][self.page_ids, self.slots] = self.backend.split(qkv)[1]

    def rotate_and_write(self, layer: int, qkv: torch.Tensor, rotation: Rotation) -> None:
        self.backend.rotate(qkv, rotation)
        self.write(layer, qkv)


class LatentMixedPlan(MixedPlan):
    """Runs two plans in one step: the first `rows` tokens are decode's, the others prefill's."""

    backend: LatentBackend

    def rotate_and_write(self, layer: int, qkv: torch.Tensor, rotation: Rotation) -> None:
        self.backend.rotate(qkv, rotation)
        self.write(layer, qkv)


class LatentDecodePlan(LatentPlan):
    """Is the decode plan, absorbed, valid until the next one. Its page table is kept from step to step."""

    def __init__(self, backend: LatentBackend) -> None:
        self.backend = backend
        self.table = PageTable(backend)
        self.rows: list[tuple[torch.Tensor, int]] = []  # pages and end of each request
        self.positions = self.page_ids = self.slots = torch.empty(0, dtype=torch.int64, device=backend.device)

    def plan(self, pages: Sequence[Sequence[int]], positions: Integers) -> LatentDecodePlan:
        backend, block = self.backend, self.backend.block_tokens
        where = np.asarray(positions, dtype=np.int64)
        known, self.rows = self.rows, []  # none is known after a plan that fails
        fresh = self.table.update(pages, where + 1) if len(where) else np.zeros(0, dtype=np.bool_)
        current = self.table.ids[np.arange(len(where)), where // block].astype(np.int64)
        for row in np.flatnonzero(fresh).tolist():
            backend.zero_tail(int(current[row]), int(where[row]) % block)
        counts = where // block + 1
        if fresh.any() or len(where) != len(known):
            width = int(counts.max(initial=0))
            table = backend.tensor(self.table.ids[: len(where), :width].astype(np.int64))
            ids = [table[row, :count] for row, count in enumerate(counts.tolist())]
        else:
            ids = [kept for kept, _ in known]
        self.rows = list(zip(ids, (where + 1).tolist(), strict=True))
        self.positions, self.page_ids = backend.tensor(where), backend.tensor(current)
        self.slots = self.positions % block
        return self

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend, up = self.backend, self.backend.ups[layer]
        out = backend.answer(qkv) if out is None else out
        means = self.attend_absorbed(layer, up.absorb(backend.split(qkv)[0]))
        out.view(len(out), backend.num_heads, up.value_dim).copy_(up.values(means))
        return out

    def attend_absorbed(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Returns `[T, H, latent]` of absorbed queries `[T, H, latent + rope]`."""
        backend = self.backend
        out = q.new_empty(*q.shape[:2], backend.latent)
        if len(out) != len(self.rows):
            raise InternalError(f"{len(out)} queries for a plan of {len(self.rows)} rows: a newer one has been made")
        for row, (page_ids, end) in enumerate(self.rows):
            own = q[row].float() * backend.scale
            softmax = RunningSoftmax(own.shape[:1], backend.latent, q.device)
            for _, rows in backend.tiles(layer, page_ids, end):
                keys = rows.float()
                softmax.add(torch.matmul(own, keys.T), keys[:, : backend.latent])
            out[row] = softmax.answer()
        return out


class LatentPrefillPlan(LatentPlan):
    """Is the plan of a ragged batch of spans, not absorbed."""

    def __init__(self, backend: LatentBackend, spans: Sequence[TokenSpan]) -> None:
        self.backend, self.spans = backend, spans
        tokens = SpanTokens.of(backend, spans)
        self.ids = [backend.tensor(ids) for ids in tokens.ids]
        self.positions = backend.tensor(tokens.positions)
        self.page_ids = backend.tensor(tokens.page_ids)
        self.slots = self.positions % backend.block_tokens

    def attend(self, layer: int, qkv: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        backend, up = self.backend, self.backend.ups[layer]
        out = backend.answer(qkv) if out is None else out
        heads, q = out.view(len(out), backend.num_heads, up.value_dim), backend.split(qkv)[0]
        at = 0
        for span, page_ids in zip(self.spans, self.ids, strict=True):
            own = slice(at, at + span.length)
            heads[own] = self._span(layer, span, page_ids, q[own], up)
            at += span.length
        return out

    def _span(
        self, layer: int, span: TokenSpan, page_ids: torch.Tensor, q: torch.Tensor, up: UpProjection
    ) -> torch.Tensor:
        """Returns `[length, H, V]` in float32. A tile is expanded once; the queries that see it come in tiles, too."""
        backend = self.backend
        scaled = (q.float() * backend.scale).transpose(0, 1).contiguous()
        nope, rope = scaled[..., : up.nope], scaled[..., up.nope :]
        softmax = RunningSoftmax(scaled.shape[:2], up.value_dim, q.device)
        for first, rows in backend.tiles(layer, page_ids, span.start + span.length):
            keys, values = (part.float() for part in up.expand(rows[:, : backend.latent]))
            shared = rows[:, backend.latent :].float()
            height = max(1, backend.score_elements // max(1, up.heads * len(rows)))
            for at in range(max(first - span.start, 0), span.length, height):
                some = slice(at, min(at + height, span.length))
                scores = torch.matmul(nope[:, some], keys.transpose(1, 2))
                scores += torch.matmul(rope[:, some], shared.T)
                ahead = span.start + at - first  # the tile's rows up to this one are seen by every query
                if ahead + 1 < len(rows):
                    scores += torch.full(scores.shape[1:], -torch.inf, device=q.device).triu_(ahead + 1)
                softmax.add(scores, values, some)
        return softmax.answer().transpose(0, 1)
