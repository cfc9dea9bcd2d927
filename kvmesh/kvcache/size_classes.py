"""Sizes of extents for blocks of any length (layout "bytes"): whole pages, four sizes a doubling.

    1, 2, 3, 4, 5, 6, 7, 8 pages, then 10, 12, 14, 16, 20, 24, 28, 32, 40, ...

So a block leaves at most a fifth of its extent unused, beside what its last page leaves. Every node has the same sizes.
"""

from __future__ import annotations

PAGE = 4096
BYTES = "bytes"  # the layout


def size_class(nbytes: int) -> int:
    """Returns the bytes of the smallest extent that holds `nbytes`. Raises ValueError when `nbytes` is less than 1."""
    if nbytes < 1:
        raise ValueError(f"nbytes={nbytes}: must be at least 1")
    pages = -(-nbytes // PAGE)
    step = 1 << max((pages - 1).bit_length() - 3, 0)
    return -(-pages // step) * step * PAGE
