"""The handoff's interleavings as stories: tests/transcripts/handoff/*.txt says what happens and why.

A change of behaviour shows as a diff of these files: KVMESH_REWRITE=1 (or `python -m tests.support.decode.story`)
rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.decode import story

STORIES = sorted(story.FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    story.check_input(text)
    now = story.run(text)
    if os.environ.get("KVMESH_REWRITE"):
        path.write_text(now, encoding="utf-8")
    assert now == text or os.environ.get("KVMESH_REWRITE")


def test_the_stories_are_there() -> None:
    assert len(STORIES) >= 25
