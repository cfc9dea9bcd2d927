"""A row a request: CSV and Parquet hold the same."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import pytest

from kvmesh.errors import ConfigError
from kvmesh.sim.report import tables
from kvmesh.sim.report.records import REFUSED, Record
from tests.support.sim.records import done

RECORDS = [
    done(0, tenant='a "b", c', cached_tokens=512, tbt_s=math.nan),
    Record(1, "r1", 2.5, 10, 1, outcome=REFUSED, reason="ttft"),
]


def write(path: Path) -> Path:
    table = tables.open_table(path)
    for record in RECORDS:
        table.add(record)
    table.close()
    return path


def test_csv_holds_every_field_and_nothing_for_what_never_came(tmp_path: Path) -> None:
    with write(tmp_path / "t.csv").open() as file:
        first, second = csv.DictReader(file)
    assert tuple(first) == tables.COLUMNS
    assert (first["tenant"], first["cached_tokens"], first["ttft_s"], first["tbt_s"]) == (
        'a "b", c',
        "512",
        "0.500000",
        "",
    )
    assert (second["outcome"], second["reason"], second["ttft_s"], second["lane"]) == (
        "refused",
        "ttft",
        "",
        "interactive",
    )


def test_parquet_holds_the_same_with_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install -e .[sim]")
    monkeypatch.setattr(tables, "GROUP_ROWS", 1)  # a row group a row
    file = parquet.ParquetFile(write(tmp_path / "t.parquet"))
    rows = file.read().to_pylist()
    assert file.num_row_groups == 2
    assert tuple(rows[0]) == tables.COLUMNS
    assert (rows[0]["tenant"], rows[0]["cached_tokens"], rows[0]["ttft_s"], rows[0]["tbt_s"]) == (
        'a "b", c',
        512,
        0.5,
        None,
    )
    assert (rows[1]["outcome"], rows[1]["lane"], rows[1]["finish_s"]) == ("refused", "interactive", None)


def test_without_pyarrow_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"table='parquet': needs pyarrow: pip install 'kvmesh\[sim\]'"):
        tables.open_table(tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match=r"must end in \.csv or \.parquet"):
        tables.open_table(tmp_path / "t.xlsx")
