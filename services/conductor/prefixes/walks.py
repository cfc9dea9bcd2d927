"""Walks of a prompt's keys through masks: in kvmesh/native where it is built, else in Python, with the same
results. Pure."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import cast

from kvmesh.kvcache.block_map import KEY_OBJECT_BYTES, BlockMap, int_size
from kvmesh.kvcache.keys import Keys, split
from kvmesh.native import library, mask_table

Masks = Mapping[bytes, int]
Runs = list[tuple[int, int]]  # (end, bitset): keys up to `end` that lie in the same slots

_OBJECT = ctypes.py_object


class _Library:
    def __init__(self, lib: ctypes.PyDLL) -> None:
        self.marks: Callable[[Masks, tuple[bytes, ...], int, tuple[int, ...]], list[int]] = lib.kv_marks
        lib.kv_marks.argtypes, lib.kv_marks.restype = (_OBJECT, _OBJECT, _OBJECT, _OBJECT), _OBJECT
        self.promise: Callable[..., int] = lib.kv_promise
        lib.kv_promise.argtypes = *(_OBJECT,) * 5, ctypes.c_char_p, ctypes.c_ssize_t, _OBJECT, _OBJECT
        lib.kv_promise.restype = ctypes.c_ssize_t


@functools.cache
def functions() -> _Library | None:
    """Returns the native functions, or None where they were not built."""
    lib = library.library()
    return None if lib is None else _Library(lib)


class WalkedMap(BlockMap):
    """A `BlockMap` whose keys are in a table of native code where that was built."""

    def __init__(self) -> None:
        super().__init__()
        native = mask_table.functions()
        self._table = None if native is None else mask_table.MaskTable(native, hash(b"masks"))
        if self._table is not None:
            self._masks = cast(dict[bytes, int], self._table)  # for whoever asks key by key; changed below alone

    def prefix(self, keys: Sequence[bytes], at_least: int = 0) -> Runs:
        if self._table is None:
            return super().prefix(tuple(keys), at_least)
        flat, shown = self._table.chain(Keys.of(keys).packed, at_least), ~self._hidden
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

    def bit(self, store_id: str, incarnation: int) -> int:
        """Returns the bit of that incarnation's slot; 0 when it shows nothing."""
        store = self._stores.get(store_id)
        return 1 << store.slot if store is not None and store.incarnation == incarnation else 0

    def lacking(self, keys: tuple[bytes, ...], slot: int) -> bytes:
        """Returns for each key 1 if that slot, which must be shown, does not hold it, else 0."""
        if self._table is None:
            masks, bit = self._masks, 1 << slot
            return bytes([not masks.get(key, 0) & bit for key in keys])
        return self._table.lacking(Keys.of(keys).packed, 1 << slot)

    def memory_bytes(self) -> int:
        if self._table is None:
            return super().memory_bytes()
        return super().memory_bytes() + self._table.memory_bytes - len(self._table) * KEY_OBJECT_BYTES

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _put(self, keys: Iterable[bytes], bit: int) -> bytes:
        if self._table is None:
            return super()._put(keys, bit)
        new, tally = self._table.add(b"".join(keys), bit, lambda mask: mask if mask & bit else mask | bit)
        self._tally(tally)
        return new

    def _take(self, keys: Iterable[bytes], bit: int) -> bytes:
        if self._table is None:
            return super()._take(keys, bit)

        def turned(mask: int) -> int:
            if not mask & bit:
                return mask
            left = mask ^ bit
            return left if left & (left - 1) or not left else self._only(left)

        gone, tally = self._table.take(b"".join(keys), turned)
        self._tally(tally)
        return gone

    def _held(self, packed: bytes | bytearray, bit: int) -> Iterable[bytes]:
        return super()._held(packed, bit) if self._table is None else split(self._table.held(bytes(packed), bit))

    def _tally(self, tally: mask_table.Tally) -> None:
        self._mask_bytes += sum(keys * (int_size(after) - int_size(before)) for keys, before, after in tally if keys)


def of_marks(masks: Masks, marked: tuple[bytes, ...], ends: tuple[int, ...]) -> Runs:
    """Returns who has each of these marks, in runs up to the last one that anybody has. The marks end at the blocks
    `ends`, ascending."""
    native = functions()
    if native is None:
        told = list(zip(ends, map(masks.get, marked, repeat(0)), strict=True))
    else:
        flat = native.marks(masks, marked, 0, ends)
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
