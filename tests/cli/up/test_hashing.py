"""How the first start with a checkpoint shows that its weights are hashed."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from kvmesh.cli.up import hashing
from kvmesh.engine import fingerprint as fp
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.errors import CheckpointError
from tests.support.checkpoints import make_checkpoint

GB = 10**9


class Clock:
    """A clock that somebody else turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def told(console: Console, steps: int) -> str:
    """What is shown while 2 GB are hashed, 0.1 GB each second."""
    clock = Clock()
    with hashing.shown("my[bold]model", console, clock) as tell:
        for step in range(1, steps + 1):
            clock.now += 1.0
            tell(step * GB // 10, 2 * GB)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_bar_on_a_terminal() -> None:
    text = told(Console(file=io.StringIO(), force_terminal=True, width=120), 20)
    assert "my[bold]model: fingerprint of the weights" in text
    assert "2.0/2.0 GB" in text


def test_now_and_then_a_line_elsewhere() -> None:
    text = told(Console(file=io.StringIO(), width=120), 20)
    assert text.splitlines() == [
        f"my[bold]model: fingerprint of the weights: {done} of 2.0 GB at 0.10 GB/s" for done in (0.5, 1.0, 1.5, 2.0)
    ]


def test_what_takes_no_time_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fp.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(fp, "RACY_S", -1.0)
    made = make_checkpoint(tmp_path / "a", tokenizer=False)
    shutil.copytree(made, tmp_path / "b")
    screen = Console(file=io.StringIO(), force_terminal=True, width=120)
    found = hashing.fingerprints([str(tmp_path / "a"), str(tmp_path / "b")], screen=screen)
    assert len(set(found.values())) == 1 and screen.file.getvalue() == ""  # type: ignore[attr-defined]
    with open_checkpoint(made) as checkpoint:
        taken = checkpoint.fingerprinted()
    assert (taken.hexdigest, taken.hashed_bytes) == (found[str(made)], 0), "an instance finds it done"
    with pytest.raises(CheckpointError):
        hashing.fingerprints([str(tmp_path)], screen=screen)
