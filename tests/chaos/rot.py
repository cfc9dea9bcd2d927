"""Changes to what a dead node left: on its SSD, and in memory that outlives it."""

from __future__ import annotations

import random
from pathlib import Path

PAGE = 4096
FLIPS = 24
# What begins a page that is no payload: a removal that cannot be read any more is said to be forgotten, a bucket whose
# first page is lost is lost as a whole (docs/internals/tiers.md).
MAGIC = (b"kvm-buck", b"kvmR", b"kvm-foot")


def disk(folder: Path, rng: random.Random, most: int = FLIPS) -> int:
    """Flips a bit in `most` pages of payload of the SSD tier; in how many."""
    pages = [
        (path, at)
        for path in sorted(folder.rglob("bucket-*.kv"))
        for at in range(0, path.stat().st_size - PAGE + 1, PAGE)
        if _is_payload(path, at)
    ]
    some = rng.sample(pages, min(most, len(pages)))
    for path, at in some:
        _flip(path, at + rng.randrange(PAGE), rng)
    return len(some)


def memory(folder: Path, rng: random.Random, *, tables_only: bool) -> int:
    """Flips bits of a warm segment, and of the tables beside it; how many."""
    patterns = ("*.sums", "table") if tables_only else ("*.sums", "table", "*.kv")
    files = [path for pattern in patterns for path in sorted(folder.rglob(pattern)) if path.stat().st_size]
    for _ in range(FLIPS if files else 0):
        path = rng.choice(files)
        _flip(path, rng.randrange(path.stat().st_size), rng)
    return FLIPS if files else 0


def _is_payload(path: Path, at: int) -> bool:
    with path.open("rb") as file:
        file.seek(at)
        page = file.read(PAGE)
    return not page.startswith(MAGIC) and any(page)


def _flip(path: Path, at: int, rng: random.Random) -> None:
    mode = path.stat().st_mode
    path.chmod(mode | 0o200)
    try:
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    finally:
        path.chmod(mode)
