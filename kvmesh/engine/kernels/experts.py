"""Grouped products of a mixture of experts, without a look by the host: tokens are sorted by expert on the device, and
a list of tiles of fixed length says whose rows each program has. A program beyond the tiles that there are has nothing
to do. So a step's launches depend on its number of tokens alone, and can be captured.

Two kernels: gate and up of a tile's rows, gated at once; and down, each row's answer weighted and put where its choice
stands, for a sum over a token's choices in their order. Nothing is added atomically: results are the same every time.
Sums are float32; what `down` is given is rounded to the weights' dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvmesh.engine.kernels.tiles import MIN_TILE

SILU, GELU, CLAMPED = 0, 1, 2
COLUMNS, DEPTH = 64, 64  # of a tile's products, and inputs at a time
FEW, MANY = MIN_TILE, 64  # rows of a tile
ENOUGH = 32  # rows of an expert on average from which on tiles are of MANY


class RowTiles(NamedTuple):
    """Says which rows each program has. All int64, on the device."""

    order: torch.Tensor  # [T * chosen]: choices sorted by expert
    owners: torch.Tensor  # [most tiles]: the tile's expert; the number of experts where there is no such tile
    tile_ends: torch.Tensor  # [experts]: tiles up to this expert's last
    row_ends: torch.Tensor  # [experts]: rows up to this expert's last
    counts: torch.Tensor  # [experts]: rows


def rows_of_tile(choices: int, experts: int) -> int:
    """Returns the rows of a tile for so many choices of all tokens."""
    return MANY if choices >= ENOUGH * experts else FEW


def most_tiles(choices: int, experts: int, rows: int) -> int:
    """Returns how many tiles there may be, however the choices fall."""
    return min(choices, (choices + min(choices, experts) * (rows - 1)) // rows)


def row_tiles(chosen: torch.Tensor, experts: int, rows: int, first: int | None = None) -> RowTiles:
    """Sorts the choices `chosen [T, k]`, int64, into tiles of up to `rows` of one expert each. With `first` only the
    experts [first, first + experts) are here, in the tiles as 0 to experts - 1: choices of others are in no tile."""
    choices = chosen.flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=chosen.device)
    if first is not None:
        choices = choices - first
        choices = choices.where((choices >= 0) & (choices < experts), experts)
    counts.scatter_add_(0, choices, torch.ones_like(choices))
    counts = counts[:experts]
    tile_ends = ((counts + (rows - 1)) // rows).cumsum(0)
    tiles = torch.arange(most_tiles(len(choices), experts, rows), device=chosen.device)
    owners = torch.searchsorted(tile_ends, tiles, right=True)
    return RowTiles(choices.argsort(stable=True), owners, tile_ends, counts.cumsum(0), counts)


@triton.jit
def _own_rows(tile, owner, tile_ends, row_ends, counts, ROWS: tl.constexpr):
    """Returns the tile's rows in the order of experts, and which of them there are."""
    count = tl.load(counts + owner)
    end = tl.load(row_ends + owner)
    before = tl.load(tile_ends + owner) - (count + ROWS - 1) // ROWS
    rows = end - count + (tile - before) * ROWS + tl.arange(0, ROWS)
    return rows, rows < end


@triton.jit
def _gate_up(
    x,
    order,
    owners,
    tile_ends,
    row_ends,
    counts,
    weights,
    gate_up,
    bias,
    inner,
    x_row,
    chosen,
    alpha,
    limit,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GATE: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
):
    tile = tl.program_id(0)
    owner = tl.load(owners + tile)
    if owner >= EXPERTS:
        return
    rows, there = _own_rows(tile, owner, tile_ends, row_ends, counts, ROWS)
    choice = tl.load(order + rows, mask=there, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < INNER
    depth = tl.arange(0, DEPTH)
    given = x + (choice // chosen * x_row)[:, None]
    of_gate = gate_up + (owner * 2 * INNER + column) * HIDDEN
    of_up = of_gate + INNER * HIDDEN
    if SCALED:
        scale = tl.load(weights + choice, mask=there, other=0.0)[:, None]
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, HIDDEN, DEPTH):
        k = at + depth
        inside = k < HIDDEN
        part = tl.load(given + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        if SCALED:
            part = (part.to(tl.float32) * scale).to(x.dtype.element_ty)
        mask = inside[:, None] & valid[None, :]
        g = tl.load(of_gate[None, :] + k[:, None], mask=mask, other=0.0)
        u = tl.load(of_up[None, :] + k[:, None], mask=mask, other=0.0)
        gates = tl.dot(part, g, gates, input_precision="ieee")
        ups = tl.dot(part, u, ups, input_precision="ieee")
    if BIASED:
        added = bias + owner * 2 * INNER + column
        gates += tl.load(added, mask=valid, other=0.0).to(tl.float32)[None, :]
        ups += tl.load(added + INNER, mask=valid, other=0.0).to(tl.float32)[None, :]
    slope = gates
    if GATE == 1:  # x * (1 + tanh(y)) / 2 is x * sigmoid(2 y)
        slope = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    if GATE == 2:
        gates = tl.minimum(gates, limit)
        ups = tl.maximum(tl.minimum(ups, limit), -limit) + 1.0
        slope = alpha * gates
    small = tl.exp(-tl.abs(slope))  # overflows for nobody
    active = gates * (tl.where(slope < 0, small, 1.0) / (1.0 + small)) * ups
    place = inner + rows[:, None] * INNER + column[None, :]
    tl.store(place, active.to(inner.dtype.element_ty), mask=there[:, None] & valid[None, :])


@triton.jit
def _down(
    inner,
    order,
    owners,
    tile_ends,
    row_ends,
    counts,
    weights,
    down,
    bias,
    answers,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
):
    tile = tl.program_id(0)
    owner = tl.load(owners + tile)
    if owner >= EXPERTS:
        return
    rows, there = _own_rows(tile, owner, tile_ends, row_ends, counts, ROWS)
    choice = tl.load(order + rows, mask=there, other=0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid = column < HIDDEN
    depth = tl.arange(0, DEPTH)
    of_down = down + (owner * HIDDEN + column) * INNER
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, INNER, DEPTH):
        k = at + depth
        inside = k < INNER
        part = tl.load(inner + rows[:, None] * INNER + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        w = tl.load(of_down[None, :] + k[:, None], mask=inside[:, None] & valid[None, :], other=0.0)
        sums = tl.dot(part, w, sums, input_precision="ieee")
    if BIASED:
        sums += tl.load(bias + owner * HIDDEN + column, mask=valid, other=0.0).to(tl.float32)[None, :]
    if not SCALED:
        sums *= tl.load(weights + choice, mask=there, other=0.0)[:, None]
    tl.store(answers + choice[:, None] * HIDDEN + column[None, :], sums, mask=there[:, None] & valid[None, :])


def experts(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate: int,
    swiglu: tuple[float, float],
    scale_input: bool,
    first: int = 0,
    total: int = 0,
) -> torch.Tensor:
    """Returns the weighted sum of what each token's experts answer: `x [T, hidden]`, `chosen` int64 and `weights`
    float32 `[T, k]`, `gate_up [experts, 2 * inner, hidden]`, `down [experts, hidden, inner]` and their biases
    `[experts, outputs]` of x's dtype → float32 `[T, hidden]`. `gate` is SILU, GELU or CLAMPED, with `swiglu` of (alpha,
    limit); with `scale_input` weights multiply what an expert is given instead of its answer. Where there are `total`
    experts and these are some of them, number `first` and the following, choices of the others answer nothing."""
    tokens, hidden = x.shape
    count, _, inner = down.shape
    choices = chosen.numel()
    if not tokens:
        return x.new_zeros((0, hidden), dtype=torch.float32)
    partial = total > count
    rows = rows_of_tile(choices, total or count)
    tiles = row_tiles(chosen, count, rows, first if partial else None)
    middle = torch.empty((choices, inner), dtype=x.dtype, device=x.device)
    new_answers = torch.zeros if partial else torch.empty  # rows of others' choices are summed, and written by nobody
    answers = new_answers((choices, hidden), dtype=torch.float32, device=x.device)
    sizes = {"EXPERTS": count, "HIDDEN": hidden, "INNER": inner, "ROWS": rows, "COLUMNS": COLUMNS, "DEPTH": DEPTH}
    launch = {"SCALED": scale_input, "num_warps": 4, "num_stages": 3}
    programs = len(tiles.owners)
    _gate_up[(programs, -(-inner // COLUMNS))](
        x,
        *tiles,
        weights,
        gate_up,
        bias,
        middle,
        x.stride(0),
        chosen.shape[1],
        *swiglu,
        **sizes,
        GATE=gate,
        BIASED=bias is not None,
        **launch,
    )
    _down[(programs, -(-hidden // COLUMNS))](
        middle,
        *tiles,
        weights,
        down,
        down_bias,
        answers,
        **sizes,
        BIASED=down_bias is not None,
        **launch,
    )
    return answers.view(tokens, -1, hidden).sum(1)
