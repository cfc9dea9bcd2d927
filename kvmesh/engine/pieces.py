"""Steps with chunks of prompts, piece by piece: what lies between two attentions is captured, attention is launched.

Norms, products and residuals depend on the number of tokens alone, not on whose they are. So each bucket of tokens has
one captured piece before the first layer's attention, one between each layer's and the next one's, and one after the
last: layers + 1. The rotation, which is one launch with the write of KV, `on_layer` and attention are launched between
the pieces, over the step's own tokens only: the bucket's other tokens are computed with whatever the buffers hold,
write no KV and reach no result.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from kvmesh.engine.attention.backend import AttentionBackend
from kvmesh.engine.attention.grouped import GroupedAttention
from kvmesh.engine.capture import Capture, Launches, bucket_for, capture_sizes
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.expert_counts import ExpertCounts
from kvmesh.engine.models.blocks import DecoderModel, normed_by
from kvmesh.engine.rope import Rotation

# Operations of a layer from which on it hides its launches, kernel by kernel: an H200 beside a host that launches in
# 10 us took 13 ms by pieces and 17 launched for 512 tokens of a model of 8B, 2.2e11 a layer; for 1,024, 26.2 and 25.6.
LAUNCHES_FLOP = 3.5e11
LEAST_TOKENS, MOST_TOKENS = 256, 2048  # between which the largest bucket lies
MOST_PIECES = 2000  # of all buckets: a millisecond or two each at the start, and some 0.7 MiB of the driver's memory

AttendInto = Callable[[int, torch.Tensor, Rotation, torch.Tensor], torch.Tensor]


def token_buckets(most: int) -> tuple[int, ...]:
    """Returns the ascending token counts that pieces are captured for: multiples of 32, of 64 from 512 on, of 128 from
    1,024 on, up to the first that holds `most`. At most an eighth of a bucket is of no use from 256 tokens on; below
    that, reading the weights takes longer than the products of all its tokens."""
    sizes = [*range(32, 512, 32), *range(512, 1024, 64), *range(1024, MOST_TOKENS + 1, 128)]
    held = next((at for at, size in enumerate(sizes) if size >= most), len(sizes) - 1)
    return tuple(sizes[: held + 1])


def piece_sizes(own: ModelConfig, max_tokens: int | None) -> tuple[int, ...]:
    """Returns the token counts that are captured for the model that is one rank's (`parallel.share_of`), where a step
    has at most `max_tokens`: up to where launches no longer matter, and MOST_PIECES pieces, of the larger buckets."""
    projections = own.hidden_size * own.head_dim * 2 * (own.heads + own.kv_heads)
    of_token = 2 * (projections + 3 * own.hidden_size * own.intermediate_size)
    most = min(max(int(LAUNCHES_FLOP / of_token), LEAST_TOKENS), MOST_TOKENS)
    sizes = token_buckets(most if max_tokens is None else min(most, max_tokens))
    return sizes[-max(1, MOST_PIECES // (own.layers + 1)) :]


class PieceGraphs:
    """Captures the pieces of `model` for the token counts `sizes`, ascending, and computes steps by them. The
    constructor captures, which takes seconds; afterwards `sizes` are the token counts captured, `failed` is why some
    were not. `backend` is what attends: it says the shapes. `counts` has what the step's own tokens choose."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend | GroupedAttention,
        sizes: tuple[int, ...],
        capture: Capture,
        counts: ExpertCounts | None = None,
    ) -> None:
        self._model, self._counts = model, counts
        most, device, dtype = sizes[-1], backend.device, backend.dtype
        self._token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        self._x = torch.zeros(most, model.config.hidden_size, dtype=dtype, device=device)
        self._qkv = backend.inputs(most)
        self._attended = backend.answer(self._qkv).zero_()
        if counts is not None:
            self._live = torch.zeros(most, counts.chosen, dtype=torch.int64, device=device)
        angles = model.rope(self._positions)
        local = angles if model.local_rope is model.rope else model.local_rope(self._positions)
        self._angles = [angles, local]
        self._pieces, self.failed = capture_sizes(
            "a step of {} tokens in pieces", sizes, self._works, capture, model.group
        )
        self.sizes = tuple(sorted(self._pieces))

    @property
    def count(self) -> int:
        """How many pieces were captured."""
        return sum(map(len, self._pieces.values()))

    def _works(self, tokens: int) -> list[Launches]:
        return [self._work(index, tokens) for index in range(len(self._model.layers) + 1)]

    def _work(self, index: int, tokens: int) -> Launches:
        """Returns what lies between the attentions of layers `index` - 1 and `index`."""
        model = self._model
        x, qkv, attended = self._x[:tokens], self._qkv[:tokens], self._attended[:tokens]

        def work() -> None:
            if index:
                with nullcontext() if self._counts is None else self._counts.only(self._live[:tokens]):
                    answer, normed = model.layers[index - 1].after(x, attended, model.input_norm(index))
            else:
                answer, *angles = model.embedded(self._token_ids[:tokens], self._positions[:tokens])
                for own, made in zip(self._angles, angles, strict=True):
                    for kept, new in zip(own, made, strict=True):
                        kept[:tokens].copy_(new)
                normed = normed_by(model.input_norm(0), answer)
            if answer is not x:  # a layer may add to the residual in place
                x.copy_(answer)
            if index < len(model.layers):
                qkv.copy_(model.layers[index].attention.project(normed))

        return work

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttendInto) -> torch.Tensor | None:
        """Computes what `DecoderModel.hidden` does, valid until the next step; None where no bucket is large enough.
        `attend` leaves its answer in its last argument."""
        count = len(token_ids)
        size = bucket_for(count, self.sizes)
        if size is None:
            return None
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        if self._counts is not None:
            self._live[:count] = 1
            self._live[count:size] = 0
        first, *rest = self._pieces[size]
        first()
        angles = [(cos[:count], sin[:count]) for cos, sin in self._angles]
        for layer, piece in enumerate(rest):
            attend(layer, self._qkv[:count], self._model.rotation(layer, angles), self._attended[:count])
            piece()
        return self._x[:count]
