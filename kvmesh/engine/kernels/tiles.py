"""Sizes of the kernels' tiles. What a program holds at a time must fit a GPU's shared memory (99 KiB on the smallest
that we mean to run on): K and V tiles twice, as loads of the next overlap products of this one, and the queries once.
"""

from __future__ import annotations

from typing import NamedTuple

TILE_BYTES = 16 << 10  # of one K or V tile
MIN_TILE = 16  # what a tensor core's product takes at least, along each axis


class Tiles(NamedTuple):
    keys: int  # tokens of a K or V tile: divides block_tokens, so that a tile lies in one page
    padded_dim: int


def power_of_two(value: int) -> int:
    """Returns the smallest power of two that is at least `value` and MIN_TILE."""
    return max(MIN_TILE, 1 << (value - 1).bit_length())


def tiles_for(head_dim: int, itemsize: int, block_tokens: int) -> Tiles:
    """Chooses the tiles of the kernels. `block_tokens` is a power of two from 16 on."""
    padded = power_of_two(head_dim)
    return Tiles(max(MIN_TILE, min(block_tokens, 64, TILE_BYTES // (padded * itemsize))), padded)
