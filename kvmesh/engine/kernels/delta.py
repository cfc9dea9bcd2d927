"""Gated DeltaNet on a GPU: the causal convolution, the rule for one token of each sequence, and the rule for longer
ones by matrix products over chunks (`kvmesh.engine.attention.delta` has formulas and shapes). States are read, changed
and written where they lie. Sums are float32; a chunk's products are of TF32 numbers, which have more bits than those
that a model of 16 bits brings, and of a float32 model three such products make each, which keep its precision.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvmesh.engine.kernels.tiles import power_of_two

CHANNELS = 512  # that one program convolves
CHUNK = 16  # tokens whose products are made together: the smallest that a product of tiles takes
STEP_VALUES = 32  # columns of a state that one program has, for one token
CHUNK_VALUES = 32  # and for chunks: 64 do not fit the registers


@triton.jit
def _convolve(
    x,
    weights,
    known,
    slots,
    table,
    of_token,
    out,
    x_token,
    x_head,
    known_slot,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    run = tl.load(of_token + token)
    first, slot = tl.load(table + 2 * run), tl.load(slots + run).to(tl.int64)
    place = head * WIDTH + at
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = token + tap + 1 - TAPS
        before = source < first
        old = known + slot * known_slot + (source - first + TAPS - 1) * HEADS * WIDTH + place
        new = x + source.to(tl.int64) * x_token + head * x_head + at
        value = tl.load(old, mask=inside & before, other=0.0).to(tl.float32)
        value += tl.load(new, mask=inside & (source >= first), other=0.0).to(tl.float32)
        total += value * tl.load(weights + tap * HEADS * WIDTH + place, mask=inside, other=0.0)
    answer = total / (1.0 + tl.exp(-total))
    tl.store(out + token.to(tl.int64) * HEADS * WIDTH + place, answer.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _keep(
    x,
    known,
    slots,
    table,
    x_token,
    x_head,
    known_slot,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run, head = tl.program_id(0), tl.program_id(1)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    first, length = tl.load(table + 2 * run), tl.load(table + 2 * run + 1)
    target = known + tl.load(slots + run).to(tl.int64) * known_slot + head * WIDTH + at
    for tap in tl.static_range(TAPS - 1):  # ascending: what is read lies behind what is written
        source = length + tap + 1 - TAPS
        old = tl.load(target + (length + tap) * HEADS * WIDTH, mask=inside & (source < 0), other=0.0)
        new = x + (first + source).to(tl.int64) * x_token + head * x_head + at
        value = tl.where(source < 0, old, tl.load(new, mask=inside & (source >= 0), other=0.0))
        tl.store(target + tap * HEADS * WIDTH, value, mask=inside)


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    known: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    of_token: torch.Tensor,
) -> torch.Tensor:
    """Does what `delta.convolve` does, in two launches: who keeps a sequence's last inputs must not be before who reads
    those before them. `table` and `of_token` are those of `Runs`; `weight` is float32."""
    tokens, heads, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(CHANNELS, power_of_two(width))
    sizes = {"HEADS": heads, "WIDTH": width, "TAPS": len(weight), "BLOCK": block, "num_warps": 4}
    strides, blocks = (x.stride(0), x.stride(1), known.stride(0)), -(-width // block)
    if tokens:
        _convolve[(tokens, heads, blocks)](x, weight, known, slots, table, of_token, out, *strides, **sizes)
        _keep[(len(slots), heads, blocks)](x, known, slots, table, *strides, **sizes)
    return out


@triton.jit
def _unit(values, SCALE: tl.constexpr):
    """Returns rows divided by their length, times SCALE."""
    return values * (SCALE * tl.rsqrt(tl.sum(values * values, 1) + 1e-6))[:, None]


@triton.jit
def _step(
    x,
    log_decay,
    rate,
    states,
    slots,
    out,
    states_slot,
    VALUE_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, PADDED)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    own = x + row.to(tl.int64) * (VALUE_HEADS // REPEATS) * WIDTH + head // REPEATS * WIDTH
    q = tl.load(own + i, mask=i < KEYS, other=0.0).to(tl.float32)
    k = tl.load(own + KEYS + i, mask=i < KEYS, other=0.0).to(tl.float32)
    q *= SCALE * tl.rsqrt(tl.sum(q * q, 0) + 1e-6)
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    v = tl.load(own + 2 * KEYS + head % REPEATS * VALUES + j, mask=j < VALUES, other=0.0).to(tl.float32)
    place = states + tl.load(slots + row).to(tl.int64) * states_slot + head * KEYS * VALUES
    place += i[:, None] * VALUES + j[None, :]
    there = (i < KEYS)[:, None] & (j < VALUES)[None, :]
    gate = row * VALUE_HEADS + head
    state = tl.load(place, mask=there, other=0.0) * tl.exp(tl.load(log_decay + gate))
    written = (v - tl.sum(state * k[:, None], 0)) * tl.load(rate + gate)
    state += k[:, None] * written[None, :]
    tl.store(place, state, mask=there)
    answer = tl.sum(state * q[:, None], 0)
    target = out + (row.to(tl.int64) * VALUE_HEADS + head) * VALUES + j
    tl.store(target, answer.to(out.dtype.element_ty), mask=j < VALUES)


@triton.jit
def _chunks(
    x,
    log_decay,
    rate,
    states,
    slots,
    table,
    out,
    states_slot,
    VALUE_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    run, head = tl.program_id(0), tl.program_id(1)
    first, length = tl.load(table + 2 * run).to(tl.int64), tl.load(table + 2 * run + 1)
    i = tl.arange(0, PADDED)
    j = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    among = tl.arange(0, CHUNK)
    place = states + tl.load(slots + run).to(tl.int64) * states_slot + head * KEYS * VALUES
    place += i[:, None] * VALUES + j[None, :]
    there = (i < KEYS)[:, None] & (j < VALUES)[None, :]
    state = tl.load(place, mask=there, other=0.0)
    for start in range(0, length, CHUNK):
        # Tokens behind the last one have no decay, no rate and no key: they leave the state as it is.
        live = start + among < length
        token = first + start + among
        own = x + token[:, None] * (VALUE_HEADS // REPEATS) * WIDTH + head // REPEATS * WIDTH
        keys = live[:, None] & (i < KEYS)[None, :]
        q = _unit(tl.load(own + i[None, :], mask=keys, other=0.0).to(tl.float32), SCALE)
        k = _unit(tl.load(own + KEYS + i[None, :], mask=keys, other=0.0).to(tl.float32), 1.0)
        values = live[:, None] & (j < VALUES)[None, :]
        column = 2 * KEYS + head % REPEATS * VALUES + j[None, :]
        v = tl.load(own + column, mask=values, other=0.0).to(tl.float32)
        gate = token * VALUE_HEADS + head
        decay = tl.load(log_decay + gate, mask=live, other=0.0)
        b = tl.load(rate + gate, mask=live, other=0.0)[:, None]
        sums = tl.cumsum(decay, 0)
        since = tl.exp(sums)[:, None]
        # Of token i after token j; what lies above the diagonal would overflow.
        between = tl.exp(tl.minimum(sums[:, None] - sums[None, :], 0.0))
        between = tl.where(among[:, None] >= among[None, :], between, 0.0)
        keyed = tl.dot(k, tl.trans(k), input_precision=PRECISION)
        system = tl.where(among[:, None] > among[None, :], keyed * between * b, 0.0)
        # The inverse of 1 + system, row by row: nothing grows that the result does not have.
        inverse = (among[:, None] == among[None, :]).to(tl.float32)
        for at in range(1, CHUNK):
            row = tl.sum(tl.where(among[:, None] == at, system, 0.0), 0)
            known = tl.sum(row[:, None] * inverse, 0)
            inverse = tl.where(among[:, None] == at, inverse - known[None, :], inverse)
        right = (v - since * tl.dot(k, state, input_precision=PRECISION)) * b
        written = tl.dot(inverse, right, input_precision=PRECISION)
        asked = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
        answer = since * tl.dot(q, state, input_precision=PRECISION)
        answer += tl.dot(asked, written, input_precision=PRECISION)
        target = out + (token * VALUE_HEADS + head)[:, None] * VALUES + j[None, :]
        tl.store(target, answer.to(out.dtype.element_ty), mask=values)
        all_of_it = tl.sum(decay, 0)
        kept = k * tl.exp(all_of_it - sums)[:, None]
        state = state * tl.exp(all_of_it) + tl.dot(tl.trans(kept), written, input_precision=PRECISION)
    tl.store(place, state, mask=there)


def delta_rule(
    x: torch.Tensor,
    log_decay: torch.Tensor,
    rate: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    table: torch.Tensor,
    rows: int,
) -> torch.Tensor:
    """Does what `delta.delta_rule` does: the first `rows` sequences of `table`, of one token each, in one launch, and
    the others in another."""
    heads, keys, values = states.shape[1:]
    out = torch.empty((len(x), heads, values), dtype=x.dtype, device=x.device)
    sizes = {
        "VALUE_HEADS": heads,
        "REPEATS": heads // x.shape[1],
        "WIDTH": x.shape[2],
        "KEYS": keys,
        "VALUES": values,
        "PADDED": max(16, power_of_two(keys)),
        "SCALE": keys**-0.5,
        "num_warps": 4,
    }
    if rows:
        block = min(STEP_VALUES, power_of_two(values))
        grid = (rows, heads, -(-values // block))
        _step[grid](x, log_decay, rate, states, slots, out, states.stride(0), **sizes, BLOCK=block)
    if rows < len(slots):
        block = min(CHUNK_VALUES, max(16, power_of_two(values)))
        grid = (len(slots) - rows, heads, -(-values // block))
        parts = (states, slots[rows:], table[rows:], out, states.stride(0))
        precision = "tf32x3" if x.dtype == torch.float32 else "tf32"
        _chunks[grid](x, log_decay, rate, *parts, **sizes, BLOCK=block, CHUNK=CHUNK, PRECISION=precision)
    return out
