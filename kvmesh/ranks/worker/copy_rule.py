"""Decides who copies KV between a GPU's pages and pinned host memory: its copy engine, or a kernel on its processors.

The copy engine takes no processor from a step, and some microseconds for every piece, however short. A kernel moves all
pieces in one launch, and takes processors from the step beside it: few where the step can use them all. The figures are
of one H200 on PCIe 5 (docs/reports/cuda.md).
"""

from __future__ import annotations

PIECE_S = 8e-6  # the copy engine's time for a piece, where the bus would be faster
LAUNCH_S = 100e-6  # the kernel's table of pieces, and its launch
BUS = 50e9  # bytes a second
PROGRAM_OUT = 12e9  # bytes that one program of the kernel moves to the host in a second
PROGRAM_IN = 4.5e9  # and from the host: it waits for each of its reads
FULL_STEP = 256  # tokens: from here on products, and no longer reading weights, take a step's time

IDLE_PROGRAMS = 64
# By `into_pages`. A step that reads weights leaves processors waiting for memory, but writes to the host hold it up: 16
# programs moved 33 GB/s beside a decode step that then took 1.54 times as long, 4 programs 25 GB/s at 1.04 times.
SMALL_STEP_PROGRAMS = {False: 4, True: 16}
FULL_STEP_PROGRAMS = {False: 4, True: 8}  # of 132 processors that all have products to compute


def kernel_programs(*, pieces: int, nbytes: int, longest: int, into_pages: bool, step_tokens: int) -> int:
    """Returns how many programs of the kernel should copy `pieces` of `nbytes` altogether and of `longest` bytes at
    most, or 0 where the copy engine should do it. `step_tokens` are the rows and prompt tokens of the step that runs
    beside the copy; 0: no step does."""
    if not step_tokens:
        programs = IDLE_PROGRAMS
    elif step_tokens < FULL_STEP:
        programs = SMALL_STEP_PROGRAMS[into_pages]
    else:
        programs = FULL_STEP_PROGRAMS[into_pages]
    by_engine_s = max(pieces * PIECE_S, nbytes / BUS)
    rate = min(BUS, programs * (PROGRAM_IN if into_pages else PROGRAM_OUT))
    by_kernel_s = LAUNCH_S + pieces * longest / rate  # a shorter piece takes a program as many turns as the longest
    return programs if by_kernel_s < by_engine_s else 0
