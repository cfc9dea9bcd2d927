"""Runs a vLLM engine whose connector waits for CUDA events where torch has no CUDA: they are over at once, as all that
they would wait for is. Used with the Python of vLLM's own environment."""

import os
import runpy
import sys
from pathlib import Path

import torch


class DoneEvent:
    """Stands for an event of a device that computes before it returns."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record(self, *args: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


if __name__ == "__main__":
    # In place of this file's folder, where another module is called mooncake. Mooncake alone is there: the rest of its
    # environment is not vLLM's.
    sys.path[0] = os.environ["EXTRA_PYTHONPATH"]
    if not torch.cuda.is_available():
        torch.cuda.Event = DoneEvent  # type: ignore[assignment,misc]
    driver = Path(__file__).parents[2] / "tests" / "connectors" / "vllm" / "engine_driver.py"
    runpy.run_path(str(driver), run_name="__main__")
