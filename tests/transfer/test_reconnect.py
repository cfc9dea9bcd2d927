"""A peer whose connections all break at once, again and again: it is dialled a few times, further and further apart,
however much waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvmesh.transfer import EngineConfig, SegmentDescriptor, TransferState
from tests.transfer.conftest import Nest, over

KIB = 1 << 10
LOAD_S = 3.0


class Breaking:
    """Takes connections and breaks each at once, with a reset."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                taken, _ = self._listener.accept()
            except OSError:
                return
            self.times.append(time.monotonic())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            taken.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@contextlib.contextmanager
def breaking() -> Iterator[Breaking]:
    made = Breaking()
    try:
        yield made
    finally:
        made.close()


@over("tcp")
@pytest.mark.slow
def test_many_requests_to_a_peer_that_breaks_every_connection_make_no_storm(nest: Nest) -> None:
    """Requests come all the time, hundreds at once: each fails with a cause."""
    config = EngineConfig(transports=("tcp",), connect_timeout_s=0.5)
    here, there = nest.actor("here#1", config), nest.actor("there#1", config)
    here.allocate(64 * KIB, seed=1)
    base = there.allocate(64 * KIB, seed=2)
    descriptor = SegmentDescriptor.decode(there.descriptor())
    with breaking() as server:
        endpoints = {"tcp": {**descriptor.endpoints["tcp"], "port": str(server.port)}}
        segment = here.open(dataclasses.replace(descriptor, endpoints=endpoints).encode())
        until, failed = time.monotonic() + LOAD_S, 0
        while time.monotonic() < until:
            statuses = here.transfer("read", segment, [(i * 64, base, 64) for i in range(256)])
            assert {status.state for status in statuses} == {TransferState.FAILED}
            assert all(status.cause for status in statuses)
            failed += len(statuses)
        dials = list(server.times)
    # Two streams, four attempts each: some eight at a time, and a rail that has failed rests 0.25, 0.5, 1, 2 s.
    assert failed >= 256
    assert 2 <= len(dials) <= 60, f"{len(dials)} connections for {failed} requests"
