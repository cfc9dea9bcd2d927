"""Starts ranks of the engine alone, one process each."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes


def run_ranks(main: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """Calls `main(rank, *args)` in `count` processes and waits for them; raises what one of them raised. They are
    forked from a process that has imported torch and the engine, which costs each of them seconds otherwise."""
    multiprocessing.set_forkserver_preload(["tests.support.engine.stepper"])
    start_processes(main, args, count, start_method="forkserver")  # type: ignore[no-untyped-call]
