"""How the C++ operators are built and found: a build is of its sources, its torch and its CPU, or it is not used."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

import pytest
import torch

from kvmesh.engine.cpu import build, native
from kvmesh.native import compiling
from kvmesh.native.compiling import BuildFailed
from tests.support.compilers import needs_compiler


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources that compile in no time, instead of the operators'."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "two.h"\nextern "C" int answer() { return ANSWER; }\n')
    (folder / "two.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(native, "SOURCES", folder)
    monkeypatch.setattr(native, "FLAGS", ("-O1", "-fPIC"))
    return folder


@needs_compiler
def test_a_build_is_made_once_for_its_sources(sources: Path, tmp_path: Path) -> None:
    made = build.compile_into(tmp_path / "built")
    assert ctypes.CDLL(str(made)).answer() == 42
    before = made.stat().st_mtime_ns
    assert build.compile_into(tmp_path / "built") == made
    assert made.stat().st_mtime_ns == before
    (sources / "two.h").write_text("#define ANSWER 43\n")
    newer = build.compile_into(tmp_path / "built")
    assert ctypes.CDLL(str(newer)).answer() == 43
    assert set((tmp_path / "built").iterdir()) == {made, newer}, "two checkouts share it; nothing half made stays"


@needs_compiler
def test_the_oldest_builds_go(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "KEPT", 2)
    folder = tmp_path / "built"
    folder.mkdir()
    for age, name in enumerate(("kvmesh-newest", "kvmesh-older", "kvmesh-oldest"), start=1):
        for suffix in (".so", native.PROVEN):
            (folder / f"{name}{suffix}").touch()
            os.utime(folder / f"{name}{suffix}", (0, 1000 - age))
    made = build.compile_into(folder)
    kept = {made, folder / "kvmesh-newest.so", folder / f"kvmesh-newest{native.PROVEN}"}
    assert set(folder.iterdir()) == kept


@needs_compiler
def test_what_does_not_compile_says_why_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "one.cpp").write_text("int broken(")
    with pytest.raises(BuildFailed, match=r"one\.cpp.*error"):
        build.compile_into(tmp_path / "built")
    assert not list((tmp_path / "built").iterdir())


@needs_compiler
@pytest.mark.slow
def test_tiles_that_crash_are_not_used(sources: Path, tmp_path: Path) -> None:
    """They are tried in a process of their own; its end is no proof, however it ends."""
    (sources / "one.cpp").write_text("#include <cstdlib>\n__attribute__((constructor)) void begin() { abort(); }\n")
    made = build.compile_into(tmp_path / "built")
    made.with_suffix(native.PROVEN).touch()
    assert not build.prove_tiles(made)
    assert list((tmp_path / "built").iterdir()) == [made], "an older proof goes, too"


def test_install_goes_on_without_a_compiler(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    monkeypatch.setattr(build, "folders", lambda: [tmp_path / "built"])
    monkeypatch.setattr(native, "missing_features", list)
    assert build.main() == 0
    assert "no-such-compiler" in capsys.readouterr().err


def test_builds_for_others_are_not_used(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "folders", lambda: [tmp_path])
    monkeypatch.setattr(native, "missing_features", list)
    monkeypatch.delenv(native.SWITCH, raising=False)
    own = native.file_name()
    (tmp_path / own).write_bytes(b"not a library")
    assert "does not load" in native.why_not()
    monkeypatch.setattr(torch, "__version__", "1.0")
    assert native.file_name() != own
    assert "no build" in native.why_not()
    monkeypatch.setattr(native, "missing_features", lambda: ["avx512_bf16"])
    assert native.why_not() == "this CPU lacks avx512_bf16"
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.why_not() == "KVMESH_NATIVE=0"


def test_one_line_says_that_torch_runs_instead(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(native.SWITCH, "0")
    native.loaded.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert not native.loaded()
            assert not native.loaded()
        [record] = caplog.records
        assert "KVMESH_NATIVE=0" in record.getMessage()
    finally:
        native.loaded.cache_clear()


@pytest.mark.skipif(bool(native.why_not()), reason=f"no C++ operators: {native.why_not()}")
def test_the_operators_run_in_torchs_thread_pool() -> None:
    torch.ops.kvmesh.rms_norm(torch.ones(300, 1024), torch.ones(1024), 1e-6)
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
    assert len(runtimes) == 1
