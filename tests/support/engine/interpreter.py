"""Triton's interpreter beside a newer numpy."""

from __future__ import annotations

from typing import Any


def count_with_numpy() -> None:
    """Triton 3.6's interpreter takes a loop's bounds from arrays of one element, which numpy from 2.4 on does not call
    integers any more."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        rest[-1].set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
