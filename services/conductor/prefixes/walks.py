"""Walks of a prompt's keys through a dict of masks: by kvmesh/native/chains.cpp where it is built, else in Python. Both
find the same. Pure."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

from kvmesh.kvcache.steady_map import SteadyBlockMap
from kvmesh.native import library

Masks = Mapping[bytes, int]
Runs = list[tuple[int, int]]  # (end, bitset): keys up to `end` that lie in the same slots

_OBJECT, _SIZE = ctypes.py_object, ctypes.c_ssize_t


class _Library:
    def __init__(self, lib: ctypes.PyDLL) -> None:
        self.chain: Callable[[Masks, tuple[bytes, ...], int, int], list[int]] = lib.kv_chain
        self.marks: Callable[[Masks, tuple[bytes, ...], int, tuple[int, ...]], list[int]] = lib.kv_marks
        self.lacking: Callable[[Masks, tuple[bytes, ...], int, int], int] = lib.kv_lacking
        lib.kv_chain.argtypes, lib.kv_chain.restype = (_OBJECT, _OBJECT, _OBJECT, _SIZE), _OBJECT
        lib.kv_marks.argtypes, lib.kv_marks.restype = (_OBJECT, _OBJECT, _OBJECT, _OBJECT), _OBJECT
        lib.kv_lacking.argtypes, lib.kv_lacking.restype = (_OBJECT, _OBJECT, _OBJECT, ctypes.c_void_p), _SIZE


@functools.cache
def functions() -> _Library | None:
    """None: there is no native code here."""
    lib = library.library()
    return None if lib is None else _Library(lib)


class WalkedMap(SteadyBlockMap):
    """As `SteadyBlockMap`, with the walks that a decision takes."""

    def prefix(self, keys: Sequence[bytes], at_least: int = 0) -> Runs:
        """See `SteadyBlockMap`."""
        native = functions()
        if native is None or type(keys) is not tuple:
            return super().prefix(keys, at_least)
        flat, shown = native.chain(self._masks, keys, 0, at_least), ~self._hidden
        runs: Runs = []
        at, last = 0, -1
        for end, raw in zip(flat[::2], flat[1::2], strict=True):
            mask = raw & shown
            if not mask and end > at_least:
                return runs if at >= at_least else [*runs, (at_least, 0)]
            at = end
            if mask == last:
                runs[-1] = at, mask
            else:
                runs.append((at, mask))
                last = mask
        return runs

    def lacking(self, keys: tuple[bytes, ...], slot: int) -> bytes:
        """Of each key 1 if that slot, which is shown, does not hold it, else 0."""
        native = functions()
        if native is None:
            masks, bit = self._masks, 1 << slot
            return bytes([not masks.get(key, 0) & bit for key in keys])
        found = (ctypes.c_ubyte * len(keys))()
        native.lacking(self._masks, keys, 1 << slot, ctypes.addressof(found))
        return bytes(found)


def of_marks(masks: Masks, keys: Sequence[bytes], positions: tuple[int, ...]) -> Runs:
    """Who has keys[position] of each of `positions`, which ascend: runs up to the last one that anybody has."""
    native = functions()
    if native is None or type(keys) is not tuple:
        there = map(masks.get, map(keys.__getitem__, positions), repeat(0))
        told = list(zip((position + 1 for position in positions), there, strict=True))
    else:
        flat = native.marks(masks, keys, 0, positions)
        told = list(zip(flat[::2], flat[1::2], strict=True))
    runs: Runs = []
    last = -1
    for end, mask in told:
        if mask == last:
            runs[-1] = end, mask
        else:
            runs.append((end, mask))
            last = mask
    if runs and not runs[-1][1]:
        runs.pop()
    return runs
