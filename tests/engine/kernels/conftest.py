"""Where the kernels run: on the GPU if there is one, else in the interpreter; Triton decides when it is imported."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support.engine.interpreter import count_with_numpy

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'triton>=3.6,<3.7' (Linux only)")
    if torch.cuda.is_available():
        return torch.device("cuda")
    count_with_numpy()
    return torch.device("cpu")
