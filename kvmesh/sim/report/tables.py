"""A row for each request: written as they end, CSV anywhere, Parquet where pyarrow is."""

from __future__ import annotations

import csv
import math
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from kvmesh.errors import ConfigError
from kvmesh.sim.report.records import Record

COLUMNS = tuple(one.name for one in fields(Record) if one.metadata.get("column", True))
GROUP_ROWS = 20_000  # held at most before they are written
FORMATS = ("csv", "parquet")


class Table(Protocol):
    """Where rows go. `close` makes the file whole; without it a Parquet file cannot be read."""

    def add(self, record: Record) -> None: ...

    def close(self) -> None: ...


def open_table(path: Path) -> Table:
    """By the name's ending, .csv or .parquet. ConfigError: another one, or Parquet without pyarrow."""
    kind = path.suffix.lstrip(".")
    if kind == "csv":
        return CsvTable(path)
    if kind == "parquet":
        return ParquetTable(path)
    raise ConfigError(f"table={path.name!r}: must end in .{' or .'.join(FORMATS)}", field="table")


def _plain(value: Any) -> Any:
    """What a cell holds: nothing for what never came."""
    if isinstance(value, Enum):
        return value.value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class CsvTable:
    """Comma-separated, with a header; an empty cell is a time that never came."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._rows.writerow(COLUMNS)

    def add(self, record: Record) -> None:
        """One row."""
        cells = (_plain(getattr(record, name)) for name in COLUMNS)
        self._rows.writerow([f"{cell:.6f}" if isinstance(cell, float) else cell for cell in cells])

    def close(self) -> None:
        """Everything is in the file."""
        self._file.close()


def need_pyarrow() -> Any:
    """The module. ConfigError: it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        why = "needs pyarrow: pip install 'kvmesh[sim]'; csv needs nothing"
        raise ConfigError(f"table='parquet': {why}", field="table") from None
    return pyarrow


class ParquetTable:
    """Row groups of GROUP_ROWS, zstd."""

    def __init__(self, path: Path) -> None:
        pyarrow = self._arrow = need_pyarrow()
        kinds = {"int": pyarrow.int64(), "float": pyarrow.float64()}
        self._schema = pyarrow.schema(
            [(one.name, kinds.get(str(one.type), pyarrow.string())) for one in fields(Record) if one.name in COLUMNS]
        )
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._columns: list[list[Any]] = [[] for _ in COLUMNS]

    def add(self, record: Record) -> None:
        """One row; it may be written later."""
        for column, name in zip(self._columns, COLUMNS, strict=True):
            column.append(_plain(getattr(record, name)))
        if len(self._columns[0]) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._columns[0]:
            arrays = [
                self._arrow.array(column, one.type) for column, one in zip(self._columns, self._schema, strict=True)
            ]
            self._writer.write_table(self._arrow.Table.from_arrays(arrays, schema=self._schema))
        self._columns = [[] for _ in COLUMNS]

    def close(self) -> None:
        """Everything is in the file, its footer too."""
        self._flush()
        self._writer.close()
