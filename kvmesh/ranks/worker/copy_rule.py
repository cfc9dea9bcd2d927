"""Decides who copies KV between a GPU's pages and pinned host memory: its copy engine, or a kernel on its processors.

The copy engine takes no processor from a step, and some microseconds for every piece, however short. A kernel moves all
pieces in one launch, and takes processors from the step beside it: few where the step can use them all. The figures are
of one H200 on PCIe 5 (docs/reports/cuda.md), but for LAUNCH_S, which is an estimate.
"""

from __future__ import annotations

PIECE_S = 8e-6  # the copy engine's time for a piece, where the bus would be faster
LAUNCH_S = 60e-6  # the kernel's table of pieces, and its launch
BUS = 50e9  # bytes a second
PROGRAM_OUT = 12e9  # bytes that one program of the kernel moves to the host in a second
PROGRAM_IN = 4.5e9  # and from the host: it waits for each of its reads
FULL_STEP = 256  # tokens: from here on products, and no longer reading weights, take a step's time

IDLE_PROGRAMS = 64
SMALL_STEP_PROGRAMS = 16  # a step that reads weights leaves processors waiting for memory
FULL_STEP_PROGRAMS = {False: 4, True: 8}  # by `into_pages`; of 132 processors that all have products to compute


def kernel_programs(*, pieces: int, nbytes: int, longest: int, into_pages: bool, step_tokens: int) -> int:
    """Returns how many programs of the kernel should copy `pieces` of `nbytes` altogether and of `longest` bytes at
    most, or 0 where the copy engine should do it. `step_tokens` are the rows and prompt tokens of the step that runs
    beside the copy; 0: no step does."""
    if not step_tokens:
        programs = IDLE_PROGRAMS
    elif step_tokens < FULL_STEP:
        programs = SMALL_STEP_PROGRAMS
    else:
        programs = FULL_STEP_PROGRAMS[into_pages]
    by_engine_s = max(pieces * PIECE_S, nbytes / BUS)
    rate = min(BUS, programs * (PROGRAM_IN if into_pages else PROGRAM_OUT))
    by_kernel_s = LAUNCH_S + pieces * longest / rate  # a shorter piece takes a program as many turns as the longest
    return programs if by_kernel_s < by_engine_s else 0
