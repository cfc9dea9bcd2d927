"""What only a CUDA device can show."""

from __future__ import annotations

import pytest
import torch

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device: needs an NVIDIA GPU and torch for CUDA (docs/reports/cuda.md)",
    ),
]
