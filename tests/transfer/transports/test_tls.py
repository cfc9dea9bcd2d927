"""TLS of the tcp transport: one connection under many threads, whom it trusts, and what it says to those that it does
not."""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import TransferError
from kvmesh.rpc.certificates import Certificates, make_certificates
from kvmesh.transfer import EngineConfig, Opcode, Range, TransferRequest, TransferState
from kvmesh.transfer.config import TLS_FIELDS, tls_fields
from kvmesh.transfer.transports import serving, tls
from kvmesh.transfer.transports.tls import TlsIdentity, TlsRefused, TlsSocket
from tests.support.transfer.peer import Actor, pattern
from tests.transfer.conftest import Nest, until

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def identity_of(made: Certificates) -> TlsIdentity:
    return TlsIdentity(str(made.cert), str(made.key), str(made.ca))


def secure(made: Certificates, **options: Any) -> EngineConfig:
    fields = tls_fields(made.files, network="untrusted")
    return EngineConfig(**{"transports": ("tcp",), "leave_host": False, **fields, **options})  # type: ignore[arg-type]


def pair(made: Certificates, buffer_bytes: int = 64 * KIB) -> tuple[TlsSocket, TlsSocket]:
    """Two ends of one TLS connection over loopback, with small socket buffers: they are full soon."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        one = socket.create_connection(listener.getsockname(), 10)
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        sock.settimeout(None)
    ends: list[TlsSocket] = []
    accepting = threading.Thread(target=lambda: ends.append(tls.accepted(other, identity_of(made), 10)))
    accepting.start()
    opener = tls.opened(one, identity_of(made), "127.0.0.1", 10)
    accepting.join(10)
    return opener, ends[0]


# ── one connection, many threads ──────────────────────────────────────────────────────────────────

HEAD = 12  # writer (4 bytes), length of the payload (8)
WRITERS, MESSAGES = 3, 20


def payload(writer: int, number: int) -> bytes:
    """What this writer's message holds: as much as a few bytes and as a few pieces."""
    seed = writer * 100_000 + number
    return random.Random(seed).randbytes(random.Random(seed + 1).choice((1, 100, 16 * KIB, 70_000, 600_000)))


def write_all(end: TlsSocket, writer: int) -> None:
    choose = random.Random(writer)
    for number in range(MESSAGES):
        data = memoryview(payload(writer, number))
        head = memoryview(writer.to_bytes(4, "little") + len(data).to_bytes(8, "little"))
        cuts = sorted(choose.randrange(len(data) + 1) for _ in range(choose.randrange(5)))
        views = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True) if a < b]
        if choose.random() < 0.3:
            end.send_now([head, *views])
        else:
            end.send_views([head, *views])
    end.finish()


def read_all(end: TlsSocket, turn: threading.Lock, seen: dict[int, int]) -> None:
    """Reads whole messages until all are there, beside other readers; compares each with what its writer wrote."""
    while True:
        with turn:
            if sum(seen.values()) >= WRITERS * MESSAGES:
                return
            head = bytearray(HEAD)
            filled(end, memoryview(head))
            writer, nbytes = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
            body = bytearray(nbytes)
            filled(end, memoryview(body))
            assert body == payload(writer % 10, seen[writer])
            seen[writer] += 1


def filled(end: TlsSocket, view: memoryview) -> None:
    """By pieces, some of them asked for without waiting."""
    choose, at = random.Random(len(view)), 0
    while at < len(view):
        size = min(len(view) - at, choose.choice((7, 5_000, 100_000)))
        try:
            got = end.recv_views([view[at : at + size // 2], view[at + size // 2 : at + size]], choose.choice(
                (socket.MSG_WAITALL, socket.MSG_DONTWAIT)))  # fmt: skip
        except BlockingIOError:
            select.select([end.fileno()], [], [], 10)
            continue
        assert got, "the stream ended"
        at += got


def exchange(ends: tuple[TlsSocket, TlsSocket], timeout_s: float) -> list[BaseException]:
    """Three writers and two readers at either end, all at once. Returns what went wrong."""
    errors: list[BaseException] = []

    def guarded(what: Callable[..., None], *args: Any) -> threading.Thread:
        def body() -> None:
            try:
                what(*args)
            except BaseException as err:
                errors.append(err)
                for end in ends:
                    try:
                        end.shutdown(socket.SHUT_RDWR)
                    except OSError:
                        pass

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    threads = []
    for end in ends:
        turn, seen = threading.Lock(), dict.fromkeys(range(WRITERS), 0)
        threads += [guarded(write_all, end, writer) for writer in range(WRITERS)]
        threads += [guarded(read_all, end, turn, seen) for _ in range(2)]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            errors.append(TimeoutError("a thread hangs"))
            break
    for end in ends:
        end.close()
    return errors


def test_threads_of_both_ends_read_and_write_at_once(certs: Certificates) -> None:
    assert exchange(pair(certs), 60) == []


class LooksInside:
    """Stands for a TlsSocket's SSL object, and notices when two threads are inside at once, or one while the socket is
    waited for."""

    def __init__(self, end: TlsSocket) -> None:
        self._honest, self._inside = end._ssl, threading.Lock()
        self.overlaps = 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._honest, name)

        def watched(*args: Any) -> Any:
            if not self._inside.acquire(blocking=False):
                self.overlaps += 1
                raise AssertionError(f"two threads in the SSL object: {name}")
            try:
                return call(*args)
            finally:
                self._inside.release()

        return watched


class NoLock:
    """The broken variant: it keeps nobody out."""

    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


@pytest.mark.parametrize("broken", [False, True])
def test_no_two_threads_are_inside_the_ssl_object(certs: Certificates, broken: bool) -> None:
    ends = pair(certs)
    looks = [LooksInside(end) for end in ends]
    for end, look in zip(ends, looks, strict=True):
        end._ssl = look  # type: ignore[assignment]
        if broken:
            end._lock = NoLock()  # type: ignore[assignment]
    errors = exchange(ends, 60)
    assert bool(sum(look.overlaps for look in looks)) is broken
    assert bool(errors) is broken


def test_full_in_both_directions_is_no_deadlock(certs: Certificates) -> None:
    """Each end writes far more than the sockets hold before it reads anything: both writers wait inside the kernel, and
    the readers, which begin only then, are not kept out."""
    ends = pair(certs)
    data = os.urandom(4 * MIB)
    writers = [threading.Thread(target=end.sendall, args=(data,), daemon=True) for end in ends]
    for writer in writers:
        writer.start()
    for end in ends:
        until(lambda end=end: not select.select([], [end.fileno()], [], 0)[1], "a full socket")  # type: ignore[misc]
    for end in ends:
        got = bytearray(len(data))
        assert end.recv_views([memoryview(got)], socket.MSG_WAITALL) == len(data)
        assert got == data
    for writer in writers:
        writer.join(10)
        assert not writer.is_alive()
    for end in ends:
        end.close()


def test_little_is_held_beside_the_socket(certs: Certificates) -> None:
    """A peer that reads nothing: what is encrypted and not sent is one piece."""
    ends = pair(certs)
    writer = threading.Thread(target=lambda: pytest.raises(OSError, ends[0].sendall, bytes(64 * MIB)), daemon=True)
    writer.start()
    until(lambda: not select.select([], [ends[0].fileno()], [], 0)[1], "a full socket")
    assert ends[0]._outgoing.pending == 0
    assert len(ends[0]._unsent) <= tls.PIECE_BYTES
    until(lambda: bool(select.select([ends[1].fileno()], [], [], 0)[0]), "something to read")
    one = bytearray(1)
    assert ends[1].recv_into(memoryview(one)) == 1
    assert ends[1]._incoming.pending <= tls.PIECE_BYTES
    ends[0].shutdown(socket.SHUT_RDWR)
    writer.join(10)
    assert not writer.is_alive()
    for end in ends:
        end.close()
