"""Readable transcripts of the prefill brain. KVMESH_REWRITE=1 writes what it says now; read the diff."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.prefill.script import replay

FOLDER = ROOT / "tests" / "transcripts" / "prefill"
FILES = sorted(FOLDER.glob("*.txt"))


def test_there_are_transcripts() -> None:
    assert len(FILES) >= 10


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    now = replay(text)
    if os.environ.get("KVMESH_REWRITE"):
        path.write_text(now)
    assert now == text or os.environ.get("KVMESH_REWRITE")
