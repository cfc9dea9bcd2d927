"""Key → mask in native code (table.cpp): what a dict of 16-byte keys would say, in less memory, and walks of many keys
that do not wait for memory at each of them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator

from kvmesh.kvcache.keys import KEY_BYTES
from kvmesh.native import library

_P, _N, _OBJECT, _RAW = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.py_object, ctypes.c_char_p
Tally = list[tuple[int, int, int]]  # keys, what their mask was, what it is: 0 and more keys at a time


class _Library:
    def __init__(self, lib: ctypes.PyDLL) -> None:
        def function(name: str, result: object, *arguments: object) -> Callable[..., object]:
            found: Callable[..., object] = getattr(lib, f"kv_table_{name}")
            found.restype, found.argtypes = result, arguments  # type: ignore[attr-defined]
            return found

        self.new = function("new", _P, ctypes.c_uint64)
        self.free = function("free", None, _P)
        self.count = function("count", _N, _P)
        self.bytes = function("bytes", _N, _P)
        self.get = function("get", _OBJECT, _P, _OBJECT, _OBJECT)
        self.masks = function("masks", _OBJECT, _P)
        self.change = function("change", _N, _P, _RAW, _N, _OBJECT, ctypes.c_int, _OBJECT, _OBJECT, _P)
        self.held = function("held", _N, _P, _RAW, _N, _OBJECT, _P)
        self.chain = function("chain", _OBJECT, _P, _RAW, _N, _OBJECT, _N)
        self.lacking = function("lacking", _N, _P, _RAW, _N, _OBJECT, _P)


@functools.cache
def functions() -> _Library | None:
    """None: there is no native code here."""
    lib = library.library()
    return None if lib is None else _Library(lib)


class MaskTable:
    """Masks are ints above 0, kept as the objects that they are. One thread; MemoryError where there is no room.
    `salt` keeps keys from being made up so that they collide."""

    def __init__(self, native: _Library, salt: int) -> None:
        self._native = native
        self._at = native.new(salt & (1 << 64) - 1)
        if not self._at:
            raise MemoryError("no room for a table of masks")
        self._room = ctypes.create_string_buffer(0)

    def __del__(self) -> None:
        if at := getattr(self, "_at", None):
            self._native.free(at)

    def __len__(self) -> int:
        count = self._native.count(self._at)
        assert isinstance(count, int)
        return count

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, dict) and not other and not len(self))

    __hash__ = None  # type: ignore[assignment]

    def get(self, key: bytes, default: int = 0) -> int:
        """As a dict's. TypeError: no bytes."""
        return self._native.get(self._at, key, default)  # type: ignore[return-value]

    def values(self) -> Iterator[int]:
        """One for each key."""
        return iter(self._native.masks(self._at))  # type: ignore[call-overload, no-any-return]

    @property
    def memory_bytes(self) -> int:
        """Keys included, masks not."""
        return self._native.bytes(self._at)  # type: ignore[return-value]

    def add(self, packed: bytes, fresh: int, turned: Callable[[int], int]) -> tuple[bytes, Tally]:
        """Keys that are not there get the mask `fresh`, the others what `turned` makes of theirs. Returns those that
        were changed, packed, and how many masks became what, of those that were there. `turned` is asked once for
        neighbours that share a mask and leaves it by returning the same object; it may not use this table."""
        return self._change(packed, fresh, 1, turned)

    def take(self, packed: bytes, turned: Callable[[int], int]) -> tuple[bytes, Tally]:
        """As `add`, of those keys alone that are there; one whose mask becomes 0 goes."""
        return self._change(packed, 0, 0, turned)

    def _change(self, packed: bytes, fresh: int, adds: int, turned: Callable[[int], int]) -> tuple[bytes, Tally]:
        changed = self._scratch(len(packed))
        flat: list[int] = []
        size = len(packed) // KEY_BYTES
        count = self._native.change(self._at, packed, size, fresh, adds, turned, flat, changed)
        assert isinstance(count, int)
        return ctypes.string_at(changed, count * KEY_BYTES), list(zip(*[iter(flat)] * 3, strict=True))

    def held(self, packed: bytes, bit: int) -> bytes:
        """Those of these keys whose mask has `bit`, packed, in their order."""
        found = self._scratch(len(packed))
        count = self._native.held(self._at, packed, len(packed) // KEY_BYTES, bit, found)
        assert isinstance(count, int)
        return ctypes.string_at(found, count * KEY_BYTES)

    def chain(self, packed: bytes, at_least: int) -> list[int]:
        """Who has the leading keys: end, mask, end, mask ... of runs that share one object (0: nobody). The last run is
        the first one of nobody's that ends beyond `at_least`, one key of it, or ends with the keys."""
        return self._native.chain(self._at, packed, len(packed) // KEY_BYTES, 0, at_least)  # type: ignore[return-value]

    def lacking(self, packed: bytes, bit: int) -> bytes:
        """Of each key 1 if its mask lacks that bit, else 0."""
        size = len(packed) // KEY_BYTES
        found = self._scratch(size)
        self._native.lacking(self._at, packed, size, bit, found)
        return ctypes.string_at(found, size)

    def _scratch(self, nbytes: int) -> int:
        """Where an answer of so many bytes can lie until the next question. (For a buffer of its own each would make
        a type, too: that takes longer than the answer.)"""
        if len(self._room) < nbytes:
            self._room = ctypes.create_string_buffer(1 << nbytes.bit_length())
        return ctypes.addressof(self._room)
