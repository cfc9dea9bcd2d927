"""The columns of `columns.Columns`: what is known of every instance that decisions read, as numbers. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.conductor.loads.sizes import MARKS

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

NO_ROW = NO_GROUP = -1
FEW = 16  # instances that are weighed, and told of, one and all: numpy would not be faster


class Field:
    """What a column holds: seconds, tokens, blocks, bytes; truths are 0 and 1."""

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
    # with samples; a fitted model takes 11: see `_model`
    PREFILL = 16
    DECODE = 27
    PULL = 38
    TRANSFER = 49  # bytes a second
    FITTED_CHUNK = 50
    # with registrations
    GROUP = 51
    PREFILLS = 52
    DECODES = 53
    ALONE = 54  # tokens it computes for a request of its own batch
    MIXES = 55
    LONGEST_PREFILL = 56
    LONGEST_DECODE = 57
    CAPACITY = 58
    MAX_RUNNING = 59  # inf: no limit
    CHUNK = 60
    KV_BYTES = 61
    NODE = 62  # a hash of its name
    # of its own accord
    SEALED = 63  # its slot in the block map; -1: none
    SENDING = 64  # bytes on their way from it
    ARRIVING = 65  # and to it
    # of its queue
    LONG_SHARE = 66
    LONG_CHUNK = 67
    SIZE_WEIGHT = 68
    LISTED = 69  # seconds of what was placed there; with a weight alone, as the marks
    MARK = 70  # the first of them, see sizes.marks


FIELDS = Field.MARK + MARKS
LOADS = Field.PREFILL
MODELS = Field.GROUP
