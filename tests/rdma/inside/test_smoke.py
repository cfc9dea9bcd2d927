"""The guest itself: its devices carry one-sided writes from side a to side b, over a wire that can be cut."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

SIZE = 1 << 20  # bytes


def gid_index(context: Context, wanted: str) -> int:
    """Index of the GID whose text begins so."""
    for index in range(context.query_port(1).gid_tbl_len):
        if str(context.query_gid(1, index)).startswith(wanted):
            return index
    raise AssertionError(f"no GID {wanted} on {context.name}")


@dataclass
class End:
    """One device with one queue pair and one buffer."""

    context: Context
    cq: CQ
    events: CompChannel
    memory: MR
    qp: QP
    gid: int
    buffer: bytearray

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def connect(self, peer: End) -> None:
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
        self.qp.to_init(attr)
        destination = GID(str(peer.context.query_gid(1, peer.gid)))
        route = GlobalRoute(dgid=destination, sgid_index=self.gid, hop_limit=8)
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.dest_qp_num, attr.rq_psn, attr.path_mtu = peer.qp.qp_num, 7, e.IBV_MTU_4096
        attr.max_dest_rd_atomic, attr.min_rnr_timer = 4, 12
        self.qp.to_rtr(attr)
        attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.sq_psn, attr.max_rd_atomic = 10, 3, 6, 7, 4
        self.qp.to_rts(attr)

    def move(self, opcode: int, peer: End, offset: int, size: int) -> int:
        """Status of one RDMA operation between equal offsets of both buffers."""
        part = SGE(self.address + offset, size, self.memory.lkey)
        request = SendWR(wr_id=1, opcode=opcode, num_sge=1, sg=[part], send_flags=e.IBV_SEND_SIGNALED)
        request.set_wr_rdma(peer.memory.rkey, peer.address + offset)
        self.cq.req_notify()
        self.qp.post_send(request)
        request.close()
        fds = [int(f) for f in os.listdir("/proc/self/fd") if "infinibandevent" in link(f)]
        assert select.select(fds, [], [], 10)[0], "nothing completed in 10 s"
        while not (completions := self.cq.poll()[1]):
            pass
        return int(completions[0].status)


def link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def opened(device: str, gid: str) -> Iterator[End]:
    buffer = bytearray(SIZE)
    access = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
    with (
        Context(name=device) as context,
        PD(context) as pd,
        CompChannel(context) as events,
        CQ(context, 64, None, events) as cq,
    ):
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(16, 16, 1, 1))
        with MR(pd, SIZE, access, address=address) as memory, QP(pd, init) as qp:
            yield End(context, cq, events, memory, qp, gid_index(context, gid), buffer)


@pytest.fixture
def a() -> Iterator[End]:
    yield from opened("rxa0", "0000:0000:0000:0000:0000:ffff")


@pytest.fixture
def b() -> Iterator[End]:
    yield from opened("rxb0", "0000:0000:0000:0000:0000:ffff")


def test_every_rail_has_a_device_on_each_side() -> None:
    names = {device.name.decode() for device in get_device_list()}
    assert names == {"rxa0", "rxb0", "rxa1", "rxb1"}


def test_a_write_lands_where_it_was_sent_and_a_read_brings_it_back(a: End, b: End) -> None:
    a.connect(b)
    b.connect(a)
    text = os.urandom(100_001)
    a.buffer[4099 : 4099 + len(text)] = text
    assert a.move(e.IBV_WR_RDMA_WRITE, b, 4099, len(text)) == e.IBV_WC_SUCCESS
    assert b.buffer[4099 : 4099 + len(text)] == text
    assert not any(b.buffer[:4099]) and not any(b.buffer[4099 + len(text) :])
    a.buffer[:] = bytes(SIZE)
    assert a.move(e.IBV_WR_RDMA_READ, b, 0, SIZE) == e.IBV_WC_SUCCESS
    assert a.buffer == b.buffer


def test_bytes_cross_the_wire_between_the_sides(a: End, b: End) -> None:
    a.connect(b)
    b.connect(a)
    before = int(Path("/sys/class/net/nica0/statistics/tx_bytes").read_text())
    assert a.move(e.IBV_WR_RDMA_WRITE, b, 0, SIZE) == e.IBV_WC_SUCCESS
    assert int(Path("/sys/class/net/nica0/statistics/tx_bytes").read_text()) - before > SIZE
    subprocess.run(["tc", "qdisc", "add", "dev", "nica0", "root", "netem", "loss", "100%"], check=True)
    try:
        assert a.move(e.IBV_WR_RDMA_WRITE, b, 0, SIZE) == e.IBV_WC_RETRY_EXC_ERR
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", "nica0", "root"], check=True)
