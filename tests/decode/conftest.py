from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ckpt") / "qwen3"
    make_checkpoint(path, family="qwen3")
    return path
