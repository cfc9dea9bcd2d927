"""Where the kernels run: on the GPU if there is one, else in the interpreter; Triton decides when it is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6,<3.7' (Linux only)")
    if torch.cuda.is_available():
        return torch.device("cuda")
    _count_with_numpy()
    return torch.device("cpu")


def _count_with_numpy() -> None:
    """Triton 3.6's interpreter takes a loop's bounds from arrays of one element, which numpy from 2.4 on does not call
    integers any more."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *rest: Any) -> None:
        patch(tensor, *rest)
        rest[-1].set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
