"""Decides what goes straight between a device's pages and the network, and what through the host's memory. Pure.

rdma alone reaches a device's pages. So a rank pushes straight out of them to peers that it reaches by rdma, and through
staging to the others. It offers them as a landing only where every writer comes by rdma, which is sure where rdma is
its only transport: a writer without it would find a landing that it cannot reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_RUN = 4 << 10  # bytes: shorter ones are a work request each, and lie side by side in staging


class PagesUse(NamedTuple):
    """What pages are used for: `push`, bytes leave straight from them; `land`, peers write straight into them, and
    `flush` must follow before a step reads; `why`, for people."""

    push: bool
    land: bool
    flush: bool
    why: str


def choose_pages_use(transports: Sequence[str], missing: str, *, ordered: bool, flushable: bool) -> PagesUse:
    """Chooses for a rank whose engine uses `transports`. `missing`: why the pages are not registered, "" if they are;
    `ordered`: kernels see what a NIC wrote before its completion; `flushable`: the host can make them."""
    staged = "KV goes through host memory to and from the GPU"
    if "rdma" not in transports:
        return PagesUse(False, False, False, f"{staged}: rdma is not in use")
    if missing:
        return PagesUse(False, False, False, f"{staged}: {missing}")
    if tuple(transports) != ("rdma",):
        others = ", ".join(name for name in transports if name != "rdma")
        why = f"KV is pushed by rdma straight out of the GPU, and lands in host memory: peers may come by {others}"
        return PagesUse(True, False, False, why)
    if not (ordered or flushable):
        why = (
            "KV is pushed by rdma straight out of the GPU, and lands in host memory: the driver orders no writes to it"
        )
        return PagesUse(True, False, False, why)
    return PagesUse(True, True, not ordered, "KV is pushed straight out of the GPU, and lands in it, by rdma")


def straight(reached: bool, lengths: Sequence[int]) -> bool:
    """Says whether runs of these lengths are posted as they lie in pages to a peer that rdma reaches, or not."""
    return reached and min(lengths, default=0) >= LEAST_RUN
