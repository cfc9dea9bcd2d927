"""A plain table of requests: arrival, input and output lengths, and what else is told. One line is read at a time."""

from __future__ import annotations

import csv
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import Lane
from kvmesh.services.prefill.tenant_shares import MAX_WEIGHT, MIN_WEIGHT
from kvmesh.sim.workloads.workload import WHOLE, Reading, SimRequest, key

# Names of columns, compared without case, spaces and underscores: our own first, then those of public traces (Azure's,
# BurstGPT's).
TIMES_S = ("at_s", "time_s", "time", "timestamp", "arrival", "arrival_s", "arrival_time")
TIMES_MS = ("at_ms", "time_ms", "timestamp_ms", "arrival_ms")
INPUTS = ("input_tokens", "input", "input_length", "prompt_tokens", "prompt", "context_tokens", "request_tokens")
OUTPUTS = (
    "output_tokens", "output", "output_length", "completion_tokens", "generated_tokens", "response_tokens",
)  # fmt: skip
MOST_TOKENS = 1 << 40


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", "").replace(" ", "").lstrip("\ufeff")


@dataclass(frozen=True, slots=True)
class _Columns:
    """The column in which each figure stands; -1: in none."""

    time: int
    time_unit_s: float
    inputs: int
    outputs: int
    more: Mapping[str, int]


def read(path: Path, reading: Reading = WHOLE) -> Iterator[SimRequest]:
    """The requests of a file with a header, in its order. Times: numbers (seconds, or milliseconds where the column's
    name ends in ms) or ISO dates; the first request arrives at 0. No two prompts share a block, but for those of one
    `prefix`: a column of names with `prefix_tokens`, how many leading tokens all prompts of that name share.

    ConfigError names line and field: a column that is missing, no number, a time before the one above it."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from _requests(file, reading)
    except OSError as err:
        raise ConfigError(f"csv={str(path)!r}: {err.strerror}", field="csv") from None
    except UnicodeDecodeError:
        raise ConfigError(f"csv={str(path)!r}: is not UTF-8 text", field="csv") from None


def _requests(file: Any, reading: Reading) -> Iterator[SimRequest]:
    lines = csv.reader(file, strict=True)
    columns = _header(_next(lines) or [])
    start: float | None = None
    before, count = -math.inf, 0
    while (cells := _next(lines)) is not None:
        if not any(map(str.strip, cells)):
            continue
        row = _Row(cells, lines.line_num)
        at_s = row.time(columns.time) * columns.time_unit_s
        if at_s < before:
            raise row.bad("time", cells[columns.time], "is earlier than that of the line above")
        before = at_s
        if count >= reading.skip:
            start = at_s if start is None else start
            yield _request(row, columns, reading, count - reading.skip, (at_s - start) / reading.speed)
        count += 1
        if reading.limit is not None and count >= reading.skip + reading.limit:
            return


def _next(lines: Any) -> list[str] | None:
    try:
        found: list[str] | None = next(lines, None)
    except csv.Error as err:
        raise ConfigError(f"csv line {lines.line_num}: {err}", field="csv") from None
    return found


def _header(cells: Sequence[str]) -> _Columns:
    """ConfigError names the column that is missing, and what it may be called."""
    places = {_plain(cell): at for at, cell in reversed(list(enumerate(cells)))}

    def place(names: Sequence[str]) -> int:
        return next((places[_plain(name)] for name in names if _plain(name) in places), -1)

    seconds, millis = place(TIMES_S), place(TIMES_MS)
    for what, found, names in (
        ("time", max(seconds, millis), TIMES_S + TIMES_MS),
        ("input", place(INPUTS), INPUTS),
        ("output", place(OUTPUTS), OUTPUTS),
    ):
        if found < 0:
            why = f"no column of {what}: name it one of {', '.join(names)}"
            raise ConfigError(f"csv line 1: header={','.join(cells)[:80]!r}: {why}", field=what)
    more = {name: place((name,)) for name in _MORE}
    in_seconds = seconds >= 0
    return _Columns(
        seconds if in_seconds else millis, 1.0 if in_seconds else 0.001, place(INPUTS), place(OUTPUTS), more
    )


class _Row:
    """One line. Every reader raises a ConfigError that names the line, the field and the value."""

    def __init__(self, cells: Sequence[str], line: int) -> None:
        self._cells, self._line = cells, line

    def bad(self, field: str, value: str, why: str) -> ConfigError:
        return ConfigError(f"csv line {self._line}: {field}={value[:60]!r}: {why}", field=field)

    def cell(self, at: int, field: str) -> str:
        if at >= len(self._cells):
            raise self.bad(field, ",".join(self._cells), "the line is too short")
        return self._cells[at].strip()

    def time(self, at: int) -> float:
        text = self.cell(at, "time")
        try:
            found = float(text)
        except ValueError:
            try:
                told = datetime.fromisoformat(text[:26])  # microseconds at most
                found = (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()
            except ValueError:
                raise self.bad("time", text, "is neither a number nor an ISO date") from None
        if not math.isfinite(found):
            raise self.bad("time", text, "must be finite")
        return found

    def tokens(self, at: int, field: str, least: int) -> int:
        text = self.cell(at, field)
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not least <= found < MOST_TOKENS or found != int(found):
            raise self.bad(field, text, f"must be a whole number of at least {least}")
        return int(found)

    def number(self, at: int, field: str) -> float:
        text = self.cell(at, field)
        if not text:
            return 0.0
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not 0 <= found < math.inf:
            raise self.bad(field, text, "must be a number of at least 0")
        return found

    def lane(self, at: int, field: str) -> Lane:
        text = self.cell(at, field).lower()
        try:
            return Lane(text) if text else Lane.INTERACTIVE
        except ValueError:
            raise self.bad(field, text, f"must be one of {', '.join(one.value for one in Lane)}") from None

    def priority(self, at: int, field: str) -> int:
        text = self.cell(at, field)
        try:
            return int(text) if text else 0
        except ValueError:
            raise self.bad(field, text, "must be a whole number") from None

    def weight(self, at: int, field: str) -> float:
        weight = self.number(at, field) if self.cell(at, field) else 1.0
        if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            raise self.bad(field, self.cell(at, field), f"must be {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
        return weight


_MORE: dict[str, Callable[[_Row, int, str], Any]] = {
    **dict.fromkeys(("session", "origin", "tenant"), _Row.cell),
    "lane": _Row.lane,
    "priority": _Row.priority,
    **dict.fromkeys(("ttft_slo_s", "tbt_slo_s"), _Row.number),
    "tenant_weight": _Row.weight,
    "prefix": _Row.cell,
    "prefix_tokens": _Row.number,
}  # columns that may be there


def _request(row: _Row, columns: _Columns, reading: Reading, index: int, at_s: float) -> SimRequest:
    tokens = row.tokens(columns.inputs, "input", 1)
    more = {name: _MORE[name](row, at, name) for name, at in columns.more.items() if at >= 0}
    prefix, shared = more.pop("prefix", ""), int(more.pop("prefix_tokens", 0))
    output = reading.output(row.tokens(columns.outputs, "output", 0))
    keys = _keys(index, tokens, reading.block_tokens, prefix, shared)
    return SimRequest(index, at_s, tokens, output, keys, **more)


def _keys(index: int, tokens: int, block: int, prefix: str, shared: int) -> tuple[bytes, ...]:
    """Those of the shared prefix's full blocks by its name, the others by this request's number."""
    common = min(tokens, shared) // block if prefix else 0
    first = _number(prefix) if common else 0
    own = (index + 1) << 32
    return tuple(key(first + at if at < common else own + at) for at in range(tokens // block))


def _number(name: str) -> int:
    """Far from those of requests and of other names."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") << 64 | 1 << 127
