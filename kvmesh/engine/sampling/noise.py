"""Counter-based noise: one uniform number for each (seed, token_index), the same for ever and everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SCALE = 2.0**-53


def _mix(x: int) -> int:
    """Applies the finalizer of splitmix64: a bijection of 64 bits in which every input bit moves every output bit."""
    x = (x ^ (x >> 30)) * _FIRST & _MASK
    x = (x ^ (x >> 27)) * _SECOND & _MASK
    return x ^ (x >> 31)


def _key(seed: int) -> int:
    return _mix((seed + _GOLDEN) & _MASK)


def uniform(seed: int, token_index: int) -> float:
    """Returns the noise of one token: a multiple of 2**-53 in [0, 1). Any Python integer is a seed (its low 64 bits
    count)."""
    return (_mix((_key(seed) + (token_index + 1) * _GOLDEN) & _MASK) >> 11) * SCALE


class Noise:
    """Computes `uniform` of several rows at once: `at(indices)[i]` is `uniform(seeds[i], indices[i])`."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._keys = np.array([_key(seed) for seed in seeds], np.uint64)

    def at(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """float64 `[rows]`."""
        x = self._keys + (np.asarray(indices).astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
        noise: npt.NDArray[np.float64] = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * SCALE
        return noise
