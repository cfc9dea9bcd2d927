"""What front and rank say about memory that outlives them. Part of `kvmesh.node.messages`.

`life` and `serial` name one sealing, for ever: the same extent sealed again has another pair.
"""

from __future__ import annotations

import msgspec

from kvmesh.node.store_messages import Message


class WarmRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sealed block: `nbytes` at `offset` of the rank's host region, which stand in slot `slot` of its table."""

    slot: int
    offset: int
    nbytes: int
    life: int
    serial: int


# ── front → rank ──────────────────────────────────────────────────────────────────────────────────


class WarmSum(Message, frozen=True):
    """These were sealed: put the sums of their bytes down, when there is time. No answer. A block may go and its extent
    be written again meanwhile: a sum of what is there then is of a sealing that is over, and nobody will ask for it."""

    rows: tuple[WarmRow, ...]


class WarmVerify(Message, frozen=True):
    """Do the bytes have the sums that were put down for these sealings of an earlier life? Answered by WarmVerified,
    bit by bit. What is not looked at by `deadline_ns` is not verified. Nobody writes there meanwhile."""

    rows: tuple[WarmRow, ...]
    deadline_ns: int


# ── rank → front ──────────────────────────────────────────────────────────────────────────────────


class WarmVerified(Message, frozen=True):
    """Of `slots`, those in `good` have the bytes that were sealed."""

    slots: tuple[int, ...]
    good: tuple[int, ...]
