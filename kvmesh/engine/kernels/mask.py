"""Logits under the masks of grammars: the rows that have one, -inf where the mask does not allow the token. Bit t % 32
of word t // 32 of a mask is token t's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096  # logits of one program
LEAST = tl.constexpr(-3.0e38)  # what is allowed stays above -inf, whatever the model says of it


@triton.jit(do_not_specialize=["vocab"])
def _mask(logits, rows, bits, masks, out, row_stride, vocab, words, SIZE: tl.constexpr):
    at, chunk = tl.program_id(0), tl.program_id(1)
    row, mask = tl.load(rows + at), tl.load(masks + at)
    i = chunk * SIZE + tl.arange(0, SIZE)
    word = tl.load(bits + mask * words + i // 32, mask=i < vocab, other=0)
    x = tl.load(logits + row * row_stride + i, mask=i < vocab, other=float("-inf")).to(tl.float32)
    allowed = ((word >> (i % 32)) & 1) != 0
    tl.store(out + at.to(tl.int64) * vocab + i, tl.where(allowed, tl.maximum(x, LEAST), float("-inf")), mask=i < vocab)


def masked(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Returns float32 `[len(rows), vocab]`: the `rows` (int64) of `logits [all rows, vocab]` under the masks number
    `masks` (int64 `[len(rows)]`) of `bits` (int32 `[all masks, ceil(vocab / 32)]`)."""
    vocab = logits.shape[-1]
    out = torch.empty(len(rows), vocab, dtype=torch.float32, device=logits.device)
    grid = (len(rows), triton.cdiv(vocab, BLOCK))
    _mask[grid](logits, rows, bits, masks, out, logits.stride(0), vocab, bits.stride(0), SIZE=BLOCK, num_warps=4)
    return out
