"""The rdma transport where ports have no IPv4 address: found by looking, other than where GIDs are said by hand."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.errors import TransferError
from kvmesh.transfer import EngineConfig, TransferEngine, TransferState
from kvmesh.transfer.transports.rdma import gids
from tests.transfer.conftest import Nest, nest

__all__ = ["nest"]

GUEST = {"ipv6_only": True, "timeout_s": 120}
MIB = 1 << 20


def config(side: str, **options: Any) -> EngineConfig:
    return EngineConfig(transports=("rdma",), nics=(f"rx{side}0", f"rx{side}1"), **options)


def carried(nest: Nest, here: dict[str, Any], there: dict[str, Any]) -> set[str]:
    """Rails that 4 MiB went over, right at the other end."""
    writer, target = nest.actor("writer#1", config("a", **here)), nest.actor("target#1", config("b", **there))
    writer.allocate(8 * MIB, seed=3)
    far = target.allocate(8 * MIB)
    target.window("writer#1", 1, [(far, 8 * MIB)])
    segment = writer.open(target.descriptor())
    batch = writer.start("write", segment, [(0, far, 8 * MIB)], 1)
    assert writer.engine.wait_sync(batch, 20)
    assert writer.engine.status(batch, 0).state is TransferState.COMPLETED
    assert target.read(0, 8 * MIB) == writer.read(0, 8 * MIB)
    assert writer.notify(segment, 1, b"end").state is TransferState.COMPLETED
    return {name for name, nbytes in writer.engine.carried(batch).rails if nbytes}


def test_global_addresses_are_found(nest: Nest) -> None:
    assert {gid.family for gid in gids.read_gids("rxa0", 1)} == {"ipv6", "link"}
    assert carried(nest, {}, {}) == {"rdma rxa0→rxb0", "rdma rxa1→rxb1"}


@pytest.mark.parametrize("mtu", [256, 1024])
def test_the_smaller_mtu_is_taken(nest: Nest, mtu: int) -> None:
    assert carried(nest, {"rdma_mtu": mtu}, {}) == {"rdma rxa0→rxb0", "rdma rxa1→rxb1"}


def test_link_local_addresses_by_hand(nest: Nest) -> None:
    (index,) = {g.index for nic in ("rxa0", "rxb0") for g in gids.read_gids(nic, 1) if g.family == "link"}
    assert carried(nest, {"rdma_gid_index": index}, {"rdma_gid_index": index}) == {"rdma rxa0→rxb0", "rdma rxa1→rxb1"}


def test_pairs_by_hand(nest: Nest) -> None:
    assert carried(nest, {"rdma_pairs": ("rxa1=rxb1", "rxa7=rxb0")}, {}) == {"rdma rxa1→rxb1"}


def test_no_such_gid() -> None:
    with pytest.raises(TransferError, match="has no GID at that index") as caught:
        TransferEngine("x#1", config("a", rdma_gid_index=77))
    assert caught.value.field == "rdma_gid_index"
