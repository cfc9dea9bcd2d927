"""What attention does with one tile of keys and values: scores, and a running softmax over base 2."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, softcap):
    """Returns softcap * tanh(scores / softcap), without an overflow on the way."""
    shrunk = tl.exp(-2 * tl.abs(scores) / softcap)
    size = softcap * (1 - shrunk) / (1 + shrunk)
    return tl.where(scores < 0, -size, size)


@triton.jit
def load_tile(pointers, there, WHOLE: tl.constexpr):
    """Loads one tile of keys or values. With `WHOLE` all of it is there, and `there` is not looked at."""
    if WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=there, other=0.0)


@triton.jit
def scores_of(query, keys, there, scale, softcap, CAPPED: tl.constexpr, WHOLE: tl.constexpr = False):
    """Returns the scores of `query [M, D]` for the keys at `keys [D, N]`, as exponents of 2: float32 `[M, N]`. Where
    `there` is false nothing is loaded."""
    products = tl.dot(query, load_tile(keys, there, WHOLE), input_precision="ieee")
    if CAPPED:
        return capped(products * scale, softcap) * LOG2_E
    else:
        return products * (scale * LOG2_E)


@triton.jit
def weigh(scores, best, WHOLE: tl.constexpr = False, factor=1.0, FOLDED: tl.constexpr = False):
    """Takes the scores of one tile, exponents of 2, into a running softmax. Returns the best score so far, what all
    that was summed before is to be multiplied by, and the weights of the tile. What a row does not see scores -inf; a
    row may see none of a tile, or of all so far, unless `WHOLE`. With `FOLDED` a score is `factor`, above 0, times what
    `scores` says: multiplied in the exponent, by the instruction that subtracts there."""
    peak = tl.max(scores, 1)
    if FOLDED:
        peak *= factor
    higher = tl.maximum(best, peak)
    base = higher if WHOLE else tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(best - base)
    if FOLDED:
        scores *= factor
    return higher, fade, tl.exp2(scores - base[:, None])


@triton.jit
def fold(
    scores, values, there, best, total, found, WHOLE: tl.constexpr = False, factor=1.0, FOLDED: tl.constexpr = False
):
    """Adds one tile, its values at `values [N, D]`, to a running softmax: the best score so far, the sum of 2 ** (score
    - best) and that sum weighted by the values. The other arguments are those of `weigh`."""
    higher, fade, part = weigh(scores, best, WHOLE, factor, FOLDED)
    value = load_tile(values, there, WHOLE)
    found = found * fade[:, None] + tl.dot(part.to(value.dtype), value, input_precision="ieee")
    return higher, total * fade + tl.sum(part, 1), found
