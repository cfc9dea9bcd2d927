"""The bounds of bounds.py, found by kvmesh/native/rows.cpp: the same bits, in a tenth of the time. Pure.

What it does not know (instances whose queues go by size) is left to numpy.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvmesh.native import library
from kvmesh.services.conductor.candidates import prefix_holders
from kvmesh.services.conductor.candidates.bounds import (
    ROUNDING_S,
    AnswerBounds,
    CostBounds,
    Fetching,
    PromptBounds,
    left,
)
from kvmesh.services.conductor.candidates.columns import View
from kvmesh.services.conductor.candidates.fields import ColumnField, Floats, Mask, RareField
from kvmesh.services.conductor.candidates.prefix_holders import HeldBlocks
from kvmesh.services.conductor.candidates.selection import Selection
from kvmesh.services.conductor.domain import Schedule
from kvmesh.services.conductor.placing.scoring_context import ScoringContext
from kvmesh.services.conductor.placing.ties import TIE_CAP_S, TIE_FLOOR_S, TIE_SHARE
from kvmesh.services.conductor.prefixes.fetch_plan import FetchPlanner
from kvmesh.services.conductor.prefixes.grouped_survey import GroupedSurvey
from kvmesh.services.conductor.prefixes.index import PrefixSurvey
from kvmesh.services.conductor.score import SLOWEST, STALL_WEIGHT, TAIL_SHARE

_P, _D, _N = ctypes.c_void_p, ctypes.c_double, ctypes.c_int64


class _Request(ctypes.Structure):
    """The struct `Request` of rows.cpp."""

    _fields_ = (
        ("data", _P), ("stride", _N), ("count", _N), ("at", _P), ("able", _P), ("depth", _P), ("sealed", _P),
        ("wait", _P), ("queue", _P), ("short_queue", _P), ("yielding", _P), ("now", _D), ("prompt", _D), ("block", _D),
        ("tail_share", _D), ("stall_weight", _D), ("slowest", _D), ("rounding", _D), ("ttft_slo", _D), ("tbt_slo", _D),
        ("congestion", _D), ("chunked", _N), ("running", _N), ("prefill_bends", _N), ("decode_bends", _N),
        ("pull_bends", _N), ("beside", _N), ("tight", _N), ("prefill_fade", _P), ("decode_fade", _P), ("pull_fade", _P),
        ("ttft", _P), ("cost", _P),
    )  # fmt: skip


_FILLED = struct.Struct("Pqq8P10d7q3P2P")  # the same, filled in one go
_WAY = struct.Struct("8d")  # `Way` of rows.cpp
_EACH, _NO_FETCH = -1.0, (-1.0, 0.0, 0.0, 0.0)
_SCRATCH = 3  # rows: what waits, TTFT, cost


class _Library:
    """The functions of the native library, with their argument types. `fields` names the columns that they use."""

    def __init__(self, lib: ctypes.PyDLL) -> None:
        lib.kv_fields.restype = ctypes.c_char_p
        lib.kv_request_bytes.restype = _N
        if lib.kv_request_bytes() != ctypes.sizeof(_Request):
            raise ValueError(f"rows.cpp has requests of {lib.kv_request_bytes()}, not {ctypes.sizeof(_Request)} bytes")
        numbers = [getattr(ColumnField, name) for name in lib.kv_fields().decode().split()]
        self._numbers = np.array(numbers, dtype=np.int32)
        self.fields = self._numbers.ctypes.data
        self.wait, self.offer, self.free = lib.kv_wait, lib.kv_offer, lib.kv_free
        self.answers, self.depths, self.fewest = lib.kv_answers, lib.kv_depths, lib.kv_fewest
        self.held = lib.kv_held
        self.held.argtypes = _N, _N, _P, _P, _N, _P, _N, _P, _P, _P, _N, _P, _P, _P, _P, _P
        self.held.restype = None
        self.way = ctypes.create_string_buffer(_WAY.size)  # written before each call that reads it
        self.way_at = ctypes.addressof(self.way)
        self.wait.argtypes, self.wait.restype = (_P,), None
        self.offer.argtypes = _P, _P, _P, _D, _D, _P, ctypes.c_int, _P
        self.free.argtypes, self.free.restype = (_P, _P, _P, _P), None
        self.answers.argtypes, self.answers.restype = (_P, _D, _D, ctypes.c_int, _D, _P, _P), None
        self.depths.argtypes, self.depths.restype = (_P, _P, _N, _P, _N, _P), None
        self.fewest.argtypes, self.fewest.restype = (_P, _P, _N, _D, _D, _D, _D, _P, _P), _N


@functools.cache
def functions() -> _Library | None:
    """Returns the native functions, or None where they were not built."""
    lib = library.library()
    return None if lib is None else _Library(lib)


_DATA = 2 * ctypes.sizeof(_P)  # of an array object: after its reference count and its type, where data lies


def _asked_at(array: npt.NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _read_at(array: npt.NDArray[np.generic]) -> int:
    return _P.from_address(id(array) + _DATA).value or 0


_known = np.zeros(1)
# Its address; it is of the type that is asked for there, and lies in one piece. (Asking takes eight times as long.)
_at = _read_at if _read_at(_known) == _asked_at(_known) else _asked_at


class CompiledBounds(CostBounds):
    """`CostBounds` in native code, for a fleet without a queue that goes by size."""

    def __init__(
        self,
        request: Schedule,
        planner: FetchPlanner,
        scoring: ScoringContext,
        blocks: HeldBlocks,
        among: Selection,
        native: _Library,
    ) -> None:
        super().__init__(request, planner, scoring, blocks, among)
        self._native = native
        view, columns = self.view, self.view.columns
        count = len(columns)
        self._scratch = np.empty((_SCRATCH, count))
        scratch, row = _at(self._scratch), 8 * count
        rare = columns.rare
        self._has_queues = False
        self._request = _Request()
        _FILLED.pack_into(
            self._request, 0, columns.address, columns.stride, count, native.fields, _at(view.able), _at(blocks.depth),
            _at(blocks.sealed), scratch, scratch, scratch, 0, view.now, request.prompt_tokens, self.block,
            TAIL_SHARE, STALL_WEIGHT, SLOWEST, ROUNDING_S, scoring.ttft_slo_s, scoring.tbt_slo_s, planner.congestion,
            bool(rare(RareField.CHUNKED)), bool(rare(RareField.RUNNING)), bool(rare(RareField.PREFILL_BENDS)),
            bool(rare(RareField.DECODE_BENDS)), bool(rare(RareField.PULL_BENDS)), bool(rare(RareField.BESIDE)),
            bool(rare(RareField.RUNNING)) and scoring.tbt_slo_s < np.inf, 0, 0, 0, scratch + row, scratch + 2 * row,
        )  # fmt: skip
        self._way_told, self._way_at = native.way, native.way_at
        self._offered: tuple[PromptBounds, int] | None = None  # the last one, and where it keeps what it is offered
        self._told = ctypes.addressof(self._request)
        native.wait(self._told)
        self.__dict__.update(wait_s=self._scratch[0], by_size=None)
        if not request.priority and not rare(RareField.RANKED):
            self.__dict__["queue_s"] = self.wait_s
            if not rare(RareField.LONG):
                self.__dict__["short_queue_s"] = self.wait_s

    @cached_property
    def _fades(self) -> tuple[Floats, Floats, Floats]:
        """Computes the fading factors with numpy, whose exp2 differs from the C library's in the last bit."""
        found = (
            left(self.view, ColumnField.PREFILL),
            left(self.view, ColumnField.DECODE),
            left(self.view, ColumnField.PULL),
        )
        self._request.prefill_fade, self._request.decode_fade, self._request.pull_fade = map(_at, found)
        return found

    def _queues(self) -> None:
        """Fills in what only options to compute the prompt need."""
        if self._has_queues:
            return
        self._has_queues, told, rare = True, self._request, self.view.columns.rare
        if self.queue_s is not self.wait_s:
            told.queue = told.short_queue = _at(self.queue_s)
        if self.short_queue_s is not self.queue_s:
            told.short_queue = _at(self.short_queue_s)
        if rare(RareField.YIELDS) or self.scoring.overtaking.by_tenant:
            told.yielding = _at(self.yielding_s)

    def _kept(self, found: PromptBounds) -> int:
        if self._offered is None or self._offered[0] is not found:
            self._offered = found, _at(found.kept)
        return self._offered[1]

    def _offer_way(
        self, found: PromptBounds, room_s: Floats | float, among: Mask, local: float, *, instead: bool
    ) -> None:
        self._queues()
        room, rooms = (room_s, None) if isinstance(room_s, float | int) else (0.0, np.ascontiguousarray(room_s))
        more = None if rooms is None else _at(rooms)
        asked = self._told, self._way_at, _at(among), local, room, more, instead, self._kept(found)
        if self._native.offer(*asked):
            assert self._fades
            self._native.offer(*asked)

    def _offer_use(self, found: PromptBounds, pushed: float, room_s: Floats | float, among: Mask) -> None:
        _WAY.pack_into(self._way_told, 0, _EACH, self.usable_blocks, pushed, self.arriving, *_NO_FETCH)
        self._offer_way(found, room_s, among, -1.0, instead=False)

    def _offer_part(
        self,
        found: PromptBounds,
        part: Fetching,
        pushed: float,
        room_s: Floats | float,
        among: Mask,
        local: int,
        *,
        instead: bool,
    ) -> None:
        fetching = part.blocks, part.ahead, max(0, part.holders - 1), part.read_s
        cached = part.until * self.block
        _WAY.pack_into(self._way_told, 0, cached, self.usable_blocks, pushed, self.arriving, *fetching)
        self._offer_way(found, room_s, among, local, instead=instead)

    def _free(self, found: PromptBounds, here: Mask, end: int, pushed: float) -> None:
        self._queues()
        _WAY.pack_into(self._way_told, 0, end * self.block, self.usable_blocks, pushed, self.arriving, *_NO_FETCH)
        self._native.free(self._told, self._way_at, _at(here), self._kept(found))

    def _depths(self, among: Mask) -> Sequence[int]:
        ends = self.held.ends
        size = len(ends)
        asked, found = array("d", ends), (ctypes.c_char * size)()
        self._native.depths(self._request.depth, _at(among), len(among), asked.buffer_info()[0], size, found)
        return list(compress(ends, found.raw))

    def answers(self, *, alone: bool = False) -> AnswerBounds:
        count = len(self.view.columns)
        out, short = np.empty((5, count)), np.empty(count, dtype=np.bool_)
        blocks, whole = self._blocks()
        per_s = self.peers.transfer.bytes_per_s
        self._native.answers(self._told, blocks, whole, alone, per_s, _at(out), _at(short))
        return AnswerBounds(out[0], out[1], out[2], out[3], short, out[4])


def weights(
    request: Schedule, planner: FetchPlanner, scoring: ScoringContext, blocks: HeldBlocks, among: Selection
) -> CostBounds:
    """Returns the bounds of one request, compiled where that is possible."""
    native = functions()
    if native is None or among.view.columns.rare(RareField.BY_SIZE):
        return CostBounds(request, planner, scoring, blocks, among)
    return CompiledBounds(request, planner, scoring, blocks, among, native)


def held(view: View, survey: PrefixSurvey) -> HeldBlocks:
    """Returns what `prefix_holders.held` does, compiled where that is possible; `ends` holds exactly the values of
    `depth`, and 0."""
    native = functions()
    if native is None or isinstance(survey, GroupedSurvey):
        return prefix_holders.held(view, survey)
    columns, slots, runs = view.columns, view.columns.slots, survey.runs
    count, size = len(columns), len(runs)
    found = np.zeros((3, count))
    if not size:
        return HeldBlocks(found[0], found[1], found[2])
    bytes_each, coming_each = len(slots.row_of) // 8, len(columns.row_of_pending) // 8
    sealed = b"".join([run.sealed.to_bytes(bytes_each, "little") for run in runs])
    coming = b"".join([run.coming.to_bytes(coming_each, "little") for run in runs])
    ends = [0, *(run.end for run in runs)]
    levels, reached = np.empty(2 * count, dtype=np.int32), (ctypes.c_char * (size + 1))()
    ends_told = array("d", ends[1:])
    at, row = _at(found), 8 * count
    native.held(
        size, prefix_holders.told_apart(survey), ends_told.buffer_info()[0], sealed, bytes_each, coming, coming_each,
        slots.lower.to_bytes(bytes_each, "little"), _at(slots.row_of), _at(columns.row_of_pending), count, _at(levels),
        at, at + row, at + 2 * row, reached,
    )  # fmt: skip
    return HeldBlocks(found[0], found[1], found[2], list(compress(ends, b"\1" + reached.raw[1:])))


class NextToWeigh:
    """Answers which of many instances to weigh next; see `select.Screen`."""

    def __init__(self, native: _Library, bound: Floats, crowd: Floats) -> None:
        self._native, self._kept = native, (bound, crowd)
        self._rows, self._low = np.empty(len(bound), dtype=np.int32), _D()
        self._list = self._rows.data
        self._told = _at(bound), _at(crowd), len(bound)
        self._where = ctypes.addressof(self._low), _at(self._rows)

    def tied(self, best: float) -> tuple[float, Sequence[int] | None]:
        """Returns the least bound, and among the rows whose bound is as good those with the least crowd; None in place
        of rows when no bound is better than `best`."""
        size = self._native.fewest(*self._told, best, TIE_SHARE, TIE_FLOOR_S, TIE_CAP_S, *self._where)
        return self._low.value, None if size < 0 else self._list[:size]
