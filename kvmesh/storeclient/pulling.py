"""A node is asked to copy blocks from others: it pulls them into its own memory by itself."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import grpc

from kvmesh.rpc import status
from kvmesh.rpc.pb import blocks_pb2 as pb
from kvmesh.rpc.pb import common_pb2
from kvmesh.storeclient.choice import Holder
from kvmesh.storeclient.peers import Peers

PULL_BLOCKS = 512  # of one call
PULL_MS = 60_000  # at most
HOLDERS = 64  # named in one call
AT_ONCE = 4  # calls of one operation


def portions(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """As many keys as one call may carry."""
    return (keys[at : at + PULL_BLOCKS] for at in range(0, len(keys), PULL_BLOCKS))


async def pull(peers: Peers, address: str, keys: Sequence[bytes], holders: Iterable[Holder], deadline: float) -> bytes:
    """One byte a key: 1 it is in the memory of the node at `address` now. Until `deadline` (monotonic). KvmeshError:
    that node does not answer, or does not want any."""
    lives = {(holder.store_id, holder.incarnation): holder for holder in holders}
    left_s = max(deadline - time.monotonic(), 0.001)
    request = pb.PullBlocksRequest(
        keys=b"".join(keys),
        holders=[
            common_pb2.InstanceRef(instance_id=one.store_id, address=one.address, incarnation=one.incarnation)
            for one in list(lives.values())[:HOLDERS]
        ],
        timeout_ms=max(1, min(int(left_s * 1000), PULL_MS)),
        background=True,
    )
    async with peers.use(address) as peer:
        try:
            return (await peer.stub.Pull(request, timeout=left_s + 1)).held
        except grpc.RpcError as error:
            raise status.from_rpc_error(error) from None
