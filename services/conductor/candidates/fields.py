"""The columns of `columns.Columns`: what is known of every instance that decisions read, as numbers. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmesh.services.conductor.loads.shortest_first import LASTS, MARKS, NOTED

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NO_ROW = NO_GROUP = -1
FEW = 16  # instances that are weighed, and told of, one and all: numpy would not be faster


class ColumnField:
    """The columns. Units are seconds, tokens, blocks and bytes; truth values are 0 and 1."""

    # changes with every placement and report
    BACKLOG = 0
    AS_OF = 1
    WORKS = 2
    RANKED = 3  # whether its queue goes by more than arrival
    YIELDS = 4  # whether nobody is refused for some of its queue
    REQUESTS = 5
    CONTEXT = 6
    RUNNING = 7  # rows that a prompt there is computed beside
    FREE_BLOCKS = 8
    FREE_PAGES = 9
    RESIDENCE = 10
    EACH = 11  # blocks of one placement on the average; 0: there is none
    SEEN = 12
    TIGHTEST = 13  # TBT SLO of those who are there
    OPEN = 14  # it may get work, unless it is silent or rests
    PENDING = 15  # its slot there
    LONG_SHARE = 16  # of its queue, as the next two
    LONG_CHUNK = 17
    SIZE_WEIGHT = 18
    LEASE = 19  # how long it may be silent
    COMING = 20  # share of its time that prompts take beside its rows
    # with samples; a fitted model takes 11: see instance_row.py
    PREFILL = 21
    DECODE = 32
    PULL = 43
    TRANSFER = 54  # bytes a second
    FITTED_CHUNK = 55
    # with registrations
    GROUP = 56
    PREFILLS = 57
    DECODES = 58
    ALONE = 59  # tokens it computes for a request of its own batch
    MIXES = 60
    LONGEST_PREFILL = 61
    LONGEST_DECODE = 62
    CAPACITY = 63
    MAX_RUNNING = 64  # inf: no limit
    CHUNK = 65
    KV_BYTES = 66
    NODE = 67  # a hash of its name
    # of its own accord
    SEALED = 68  # its slot in the block map; -1: none
    SENDING = 69  # bytes on their way from it
    ARRIVING = 70  # and to it
    LISTED = 71  # seconds of what was placed there; with a weight alone, as the marks
    MARK = 72  # the first of them, see sizes.marks
    LAST = MARK + MARKS  # the first of the greatest ranks
    SPEEDUP = LAST + LASTS  # with a weight alone


class RareField:
    """Properties that few instances have, or none. `Columns.rare` returns the rows that have one, so that nothing is
    computed for the others."""

    # with the load
    RANKED = 0  # see the fields
    YIELDS = 1
    RUNNING = 2
    LONG = 3  # chunks of long prompts in the queue
    BY_SIZE = 4
    BESIDE = 5  # it decodes, and prompts may be queued there
    # with samples
    CHUNKED = 6  # it is known to cut prompts into chunks
    PREFILL_BENDS = 7  # the fitted model, or its prior, has a knee
    DECODE_BENDS = 8
    PULL_BENDS = 9
    # with registrations
    LIMITED = 10  # its batch has a limit
    COUNT = 11


BENDS = {
    ColumnField.PREFILL: RareField.PREFILL_BENDS,
    ColumnField.DECODE: RareField.DECODE_BENDS,
    ColumnField.PULL: RareField.PULL_BENDS,
}

FIELDS = ColumnField.MARK + NOTED
LOADS = ColumnField.PREFILL
MODELS = ColumnField.GROUP
