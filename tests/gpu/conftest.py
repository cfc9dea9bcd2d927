from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import FAMILY_ZOO, ZOO, make_checkpoint


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of the checkpoint of that name in ZOO or FAMILY_ZOO, made once a session."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), seed=len(name), **(ZOO | FAMILY_ZOO)[name])
        return made[name]

    return get
