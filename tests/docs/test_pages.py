"""Pages lead where they say: paths, links and anchors exist, and prose is as narrow as the habits want it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MENTION = re.compile(r"\bdocs/(?:[\w-]+/)*[\w-]+\.(?:md|svg)\b")
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
FENCE = re.compile(r"^```.*?^```[^\S\n]*$", re.MULTILINE | re.DOTALL)
FILLED = re.compile(
    r"^<!-- (?:filled by|results: begin|sizing: |conductor: ).*?^<!-- (?:until|results: end|end)",
    re.MULTILINE | re.DOTALL,
)
WIDTH = 120
OF_THEIR_TIME = {"adr", "CHANGELOG.md", "README.md", "conductor-speed.md", "transfer.md"}  # not wrapped anew


def versioned() -> Iterator[tuple[str, str]]:
    """Every text file that belongs to the project, without what is generated from protos."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in {".safetensors", ".jsonl", ".woff2", ".png"} or not path.is_file():
            continue
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(found) for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_every_page_that_is_mentioned_anywhere_is_there() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: no list of files")
    missing = {
        f"{name}: {found}"
        for name, text in versioned()
        for found in MENTION.findall(text)
        if not (ROOT / found).exists()
    }
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if "://" in target or target.startswith("mailto:"):
            continue
        at = (page.parent / target).resolve() if target else page
        if not at.exists() or (anchor and at.suffix == ".md" and anchor not in anchors(at)):
            dead.append(f"{target}#{anchor}")
    assert not dead


def test_prose_is_at_most_120_wide() -> None:
    """Tables, code and what benchmarks fill in are as wide as they are; a word longer than a line is let be."""
    wide = []
    for page in PAGES:
        if OF_THEIR_TIME & {*page.parts}:
            continue
        text = FILLED.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
        wide += [
            f"{page.relative_to(ROOT)}: {line[:60]}"
            for line in text.splitlines()
            if len(line) > WIDTH and not line.lstrip().startswith(("|", "#", "![")) and not line.startswith("    ")
        ]
    assert not wide


def test_every_page_can_be_reached_from_the_first() -> None:
    """By links from docs/index.md; decisions by their folder's list."""
    seen, ahead = set(), [ROOT / "docs" / "index.md"]
    while ahead:
        page = ahead.pop()
        if page in seen:
            continue
        seen.add(page)
        for target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            at = (page.parent / target).resolve()
            if at.suffix == ".md" and at.exists():
                ahead.append(at)
    assert not {str(page) for page in (ROOT / "docs").rglob("*.md")} - {str(page) for page in seen}
