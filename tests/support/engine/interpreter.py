"""Triton's interpreter beside a newer numpy."""

from __future__ import annotations

from typing import Any

import pytest


def count_with_numpy() -> None:
    """Triton 3.6's interpreter takes a loop's bounds from arrays of one element, which numpy from 2.4 on does not call
    integers any more."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        rest[-1].set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


def few_parts(patch: pytest.MonkeyPatch) -> None:
    """Makes `sample.cut` go by few parts and small chunks, which the interpreter is quick with."""
    import triton.language as tl

    from kvmesh.engine.kernels import sample

    for name, value in (("WAYS", tl.constexpr(4)), ("SPREAD", 256), ("GATHER", 128)):
        patch.setattr(sample, name, value)
