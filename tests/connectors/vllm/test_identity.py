"""Which weights a checkpoint has: other bytes are another identity, and one that cannot be told is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvmesh.connectors.vllm.identity import checkpoint_identity
from kvmesh.errors import ConfigError


def checkpoint(folder: Path, *values: float) -> str:
    folder.mkdir()
    save_file({"w": np.array(values, np.float32)}, folder / "model.safetensors")
    return checkpoint_identity(str(folder))


def test_equal_weights_are_one_identity_wherever_they_lie(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a", 1.0, 2.0)
    assert first == checkpoint(tmp_path / "b", 1.0, 2.0) == checkpoint_identity(str(tmp_path / "a"))
    assert first != checkpoint(tmp_path / "c", 1.0, 2.5)


@pytest.mark.parametrize("name", ["", "org/name", "empty"])
def test_what_has_no_weights_here_must_be_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    folder = str(tmp_path / name) if name == "empty" else name
    with pytest.raises(ConfigError, match="has no safetensors whose hash could tell them; set model_identity"):
        checkpoint_identity(folder)
