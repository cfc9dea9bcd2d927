"""Files are read again when they have changed, and what was goes on while they are of no use."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvmesh import watched_files
from kvmesh.errors import ConfigError
from kvmesh.watched_files import WatchedFiles


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


def numbers(path: Path) -> WatchedFiles[int]:
    def read() -> int:
        try:
            return int(path.read_text())
        except ValueError:
            raise ConfigError("no number") from None

    return WatchedFiles("numbers", [str(path), ""], read)


def test_what_changed_is_read_and_what_is_wrong_is_said_once(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watched_files, "LOOK_S", 0.0)
    caplog.set_level(logging.WARNING)
    watched = numbers(file)
    assert watched.value() == 1
    for bad in ("x", None):
        caplog.clear()
        file.unlink() if bad is None else file.write_text(bad)
        assert [watched.value() for _ in range(3)] == [1, 1, 1]
        assert [one.message.partition(":")[0] for one in caplog.records] == ["numbers are not renewed"]
    other = file.with_name("other")
    other.write_text("2")
    file.symlink_to(other)
    assert watched.value() == 2
    before = file.stat()
    other.write_text("3")  # in place, as long as before, and dated back
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert watched.value() == 3


def test_files_are_looked_at_now_and_then(file: Path) -> None:
    watched = numbers(file)
    file.write_text("2")
    assert watched.value() == 1, "within LOOK_S"


def test_the_first_reading_must_work(file: Path) -> None:
    file.write_text("x")
    with pytest.raises(ConfigError):
        numbers(file)
