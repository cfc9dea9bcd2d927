"""Entry points of installed packages: read once, and again when a package comes or goes."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvmesh import plugins
from kvmesh.errors import ConfigError, TransferError
from kvmesh.plugins import Plugins

GROUP = "kvmesh.tests"


def install(folder: Path, package: str, line: str) -> None:
    """Does as pip does: a folder of metadata, put in place whole."""
    info = folder / f"{package}-1.0.dist-info"
    made = folder.parent / info.name
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text(f"[{GROUP}]\n{line}\n")
    made.rename(info)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "packages"
    found.mkdir()
    monkeypatch.syspath_prepend(found)
    return found


def test_packages_are_read_once_until_one_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = plugins.entry_points

    def counted(**what: Any) -> Any:
        reads.append(what["group"])
        return read(**what)

    monkeypatch.setattr(plugins, "entry_points", counted)
    names = Plugins(GROUP, {"own": "os:getpid"})
    assert list(names) == list(names) == ["own"]
    assert reads == [GROUP]
    install(folder, "one", "first = os:getcwd")
    assert list(names) == ["own", "first"]
    assert "first" in names
    assert reads == [GROUP, GROUP]


def test_who_may_take_a_name_that_is_taken(folder: Path) -> None:
    install(folder, "one", "own = sys:exit")
    built_in = {"own": "os:getpid"}
    with pytest.raises(ConfigError, match="field='own': os:getpid and sys:exit have this name"):
        Plugins(GROUP, built_in).find("own", "field")
    reserved = Plugins(GROUP, built_in, own_first=True, error=TransferError)
    assert reserved.find("own", "field") == EntryPoint("own", "os:getpid", GROUP)
    assert list(reserved) == ["own"]
    with pytest.raises(TransferError, match="field='gone': choose one of own"):
        reserved.load("gone", "field")


def test_a_folder_of_the_path_that_is_not_there_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "none"), *sys.path])
    assert plugins.installed(GROUP) == ()
