"""One line on the terminal that tells how far a benchmark is; nothing where the output is no terminal."""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    """Put `text` in the place of the line told before; "" clears it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
