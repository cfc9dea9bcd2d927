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
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvmesh import watched_files
from kvmesh.errors import TransferError
from kvmesh.rpc.authorisation import ROLE_NAME, identities
from kvmesh.rpc.certificates import Certificates, make_certificates, make_role_certificates
from kvmesh.transfer import EngineConfig, Range, TransferState
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
    return EngineConfig(**{"transports": ("tcp",), "leave_host": False, **fields, **options})


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

    def babble() -> None:
        with suppress(OSError):
            ends[0].sendall(bytes(64 * MIB))

    writer = threading.Thread(target=babble, daemon=True)
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


# ── engines ───────────────────────────────────────────────────────────────────────────────────────


def write(writer: Actor, target: Actor, nbytes: int, epoch: int = 1) -> str:
    """Writes all of the writer's memory to the target's; returns the cause of a failure, "" when it landed."""
    assert target.region is not None
    target.engine.open_window(writer.engine.name, epoch, [Range(target.region.base_offset, nbytes)])
    segment = writer.open(target.descriptor())
    (status,) = writer.transfer("write", segment, [(0, target.region.base_offset, nbytes)], epoch)
    target.engine.fence(writer.engine.name, epoch)
    assert (status.state is TransferState.COMPLETED) is (not status.cause), status
    return status.cause


def holds(actor: Actor, seed: int, nbytes: int) -> bool:
    assert actor.region is not None
    assert actor.region.memory is not None
    return bytes(actor.region.memory[:nbytes]) == pattern(seed, nbytes)


def test_many_sizes_arrive_in_both_directions(nest: Nest, certs: Certificates) -> None:
    one, other = nest.actor("one#1", secure(certs)), nest.actor("other#1", secure(certs))
    for actor, seed in ((one, 1), (other, 2)):
        actor.allocate(12 * MIB, seed=seed)
    for nbytes in (1, 4 * KIB, 100_000, 4 * MIB):
        assert write(one, other, nbytes, epoch=nbytes) == ""
        assert holds(other, 1, nbytes)
        assert other.region is not None
        copies = [(8 * MIB + at * 4 * KIB, other.region.base_offset + at, 513) for at in range(0, 800, 10)]
        segment = one.open(other.descriptor())
        assert all(s.state is TransferState.COMPLETED for s in one.transfer("read", segment, copies))
        for near, far, length in copies:
            assert one.region is not None
            assert other.region.memory is not None
            assert one.region.memory is not None
            at = far - other.region.base_offset
            assert bytes(one.region.memory[near : near + length]) == bytes(other.region.memory[at : at + length])


def test_keys_that_carried_enough_are_replaced(
    nest: Nest, certs: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "MAX_RECORDS", 700)  # a frame has 257
    one, other = nest.actor("one#1", secure(certs, trip_errors=100)), nest.actor("other#1", secure(certs))
    one.allocate(8 * MIB, seed=1)
    other.allocate(8 * MIB)
    for epoch in range(1, 6):
        assert write(one, other, 8 * MIB, epoch) == ""
    assert holds(other, 1, 8 * MIB)
    assert one.engine.counters()["tcp.keys_worn"] > 1


def test_a_plain_side_and_a_tls_side_name_the_setting(nest: Nest, certs: Certificates) -> None:
    guarded = nest.actor("guarded#1", secure(certs))
    plain = nest.actor("plain#1", transports=("tcp",))
    for actor in (guarded, plain):
        actor.allocate(4 * KIB, seed=1)
    for writer, target in ((plain, guarded), (guarded, plain)):
        cause = write(writer, target, 4 * KIB)
        assert "speaks no TLS over tcp, and this side does" in cause
        assert "transfer_network" in cause
        assert "tls_cert" in cause


def test_only_the_mesh_s_own_authority_is_believed_by_either_side(
    nest: Nest, certs: Certificates, tmp_path: Path
) -> None:
    strange = make_certificates(tmp_path / "strange")
    own, foreign = nest.actor("own#1", secure(certs)), nest.actor("foreign#1", secure(strange))
    for actor in (own, foreign):
        actor.allocate(4 * KIB, seed=1)
    assert "tls_ca vouches for" in write(own, foreign, 4 * KIB)
    assert "tls_ca vouches for" in write(foreign, own, 4 * KIB)
    # One who believes everybody, and whom nobody knows: the acceptor refuses it, and it hears what for.
    liar = replace(secure(strange), tls_ca=str(certs.ca))
    stranger = nest.actor("stranger#1", liar)
    stranger.allocate(4 * KIB)
    assert "does not take this side's tls_cert" in write(stranger, own, 4 * KIB)


def test_only_who_has_kv_is_believed_and_only_for_itself(nest: Nest, tmp_path: Path) -> None:
    wanted = {
        "one": identities(["instance/one"]), "two": identities(["store/two"]), "gateway": identities(["gateway"]),
        "nobody": (),
    }  # fmt: skip
    made = make_role_certificates(tmp_path, wanted)
    made["liar"] = made["two"]  # and says that it is "one"
    names = {"one": "one/0@1", "two": "two/0@1", "gateway": "gateway/0@1", "nobody": "nobody/0@1", "liar": "one/0@2"}
    actors = {who: nest.actor(name, secure(made[who])) for who, name in names.items()}
    for actor in actors.values():
        actor.allocate(4 * KIB, seed=1)
    for writer, target, why in (
        ("one", "two", ""),
        ("two", "one", ""),
        ("one", "gateway", "the certificate says gateway"),
        ("gateway", "one", "the certificate says gateway"),
        ("nobody", "one", "names no role"),
        ("one", "nobody", "names no role"),
        ("liar", "two", "engine 'one/0@2': the certificate is for store/two"),
        ("two", "liar", "engine 'one/0@2': the certificate is for store/two"),
    ):
        cause = write(actors[writer], actors[target], 4 * KIB)
        assert why in cause if why else cause == "", (writer, target)


def test_a_role_in_place_of_the_host(nest: Nest, certs: Certificates) -> None:
    target = nest.actor("target#1", secure(certs, host="0.0.0.0", advertise_host="127.0.0.2"))
    writer = nest.actor("writer#1", secure(certs, tls_server_name=ROLE_NAME))
    for actor in (target, writer):
        actor.allocate(4 * KIB, seed=1)
    assert write(writer, target, 4 * KIB) == ""


def test_a_certificate_must_name_the_host(nest: Nest, certs: Certificates) -> None:
    target = nest.actor("target#1", secure(certs, host="0.0.0.0", advertise_host="127.0.0.2"))
    writer = nest.actor("writer#1", secure(certs))
    named = nest.actor("named#1", secure(certs, tls_server_name="localhost"))
    for actor in (target, writer, named):
        actor.allocate(4 * KIB, seed=1)
    assert "does not name that address (tls_server_name)" in write(writer, target, 4 * KIB)
    assert write(named, target, 4 * KIB) == ""


def test_older_tls_is_refused(nest: Nest, certs: Certificates) -> None:
    target = nest.actor("target#1", secure(certs))
    endpoint = target.engine.local_descriptor().endpoints["tcp"]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(str(certs.ca))
    context.load_cert_chain(str(certs.cert), str(certs.key))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    where = endpoint["host"], int(endpoint["port"])
    with socket.create_connection(where, 10) as sock, pytest.raises(ssl.SSLError, match=r"(?i)version"):
        context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_renewed_files_are_read_again(certs: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "LOOK_S", 0.0)
    made = make_certificates(tmp_path)
    identity = identity_of(made)
    before = identity.contexts()
    assert identity.contexts() is before
    made.cert.write_bytes(b"not a certificate")
    assert identity.contexts() is before  # it goes on with what it has
    make_certificates(tmp_path)
    assert identity.contexts() is not before
    with pytest.raises(TransferError, match=r"tls_cert=.*missing"):
        TlsIdentity(str(tmp_path / "missing"), str(made.key), str(made.ca))
    for key in ("tls_cert", "tls_key", "tls_ca"):
        fields = dict.fromkeys(TLS_FIELDS[:3], "some.pem") | {key: ""}
        with pytest.raises(TransferError, match=f"{key}=''"):
            EngineConfig(**fields)  # type: ignore[arg-type]


# ── strangers, silence, death ─────────────────────────────────────────────────────────────────────


def test_strangers_who_say_nothing_are_dropped_and_bounded(
    nest: Nest, certs: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_STRANGERS", 4)
    target = nest.actor("target#1", secure(certs, connect_timeout_s=0.5))
    writer = nest.actor("writer#1", secure(certs))
    for actor in (target, writer):
        actor.allocate(4 * KIB, seed=1)
    endpoint = target.engine.local_descriptor().endpoints["tcp"]
    where = endpoint["host"], int(endpoint["port"])
    server: Any = target.engine._transports[0]._server  # type: ignore[attr-defined]
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(where, 10)) for _ in range(12)]
        until(lambda: len(server.connections()) <= 4, "the oldest are ended")
        assert write(writer, target, 4 * KIB) == ""
        begun = time.monotonic()
        for one in strangers:
            one.settimeout(10)
            assert one.recv(1) == b""
        assert time.monotonic() - begun < 60
        # One that sends a byte now and then does not live longer: the handshake has one deadline.
        slow = stack.enter_context(socket.create_connection(where, 10))
        for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 30:
            try:
                slow.sendall(bytes([byte]))
            except OSError:
                break
            if select.select([slow], [], [], 0.05)[0]:
                break
        else:
            pytest.fail("a stranger lives on by a byte now and then")


def test_garbage_ends_its_own_connection_alone(
    nest: Nest, certs: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    target = nest.actor("target#1", secure(certs, connect_timeout_s=0.5))
    writer = nest.actor("writer#1", secure(certs))
    for actor in (target, writer):
        actor.allocate(4 * KIB, seed=1)
    endpoint = target.engine.local_descriptor().endpoints["tcp"]
    where = endpoint["host"], int(endpoint["port"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = identity_of(certs).contexts().opener.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        talk.do_handshake()
    hello = outgoing.read()
    choose = random.Random(5)
    for turn in range(150):
        kind = turn % 4
        data = bytearray(hello)
        if kind == 0:
            data = bytearray(choose.randbytes(choose.randrange(1, 400)))
        elif kind == 1:
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        elif kind == 2:
            data = data[: choose.randrange(1, len(data))]
        else:
            data = bytearray(b"\x16\x03\x01" + choose.randbytes(2)) + bytearray(choose.randbytes(3000))
        with socket.create_connection(where, 10) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(10)
            try:
                while sock.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    assert write(writer, target, 4 * KIB) == ""
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_too_long_a_handshake_is_refused(certs: Certificates) -> None:
    mine, its = socket.socketpair()
    head = b"\x16\x03\x03\x40\x00"
    body = b"\x01\x00\x00\x04" + bytes(16380)

    def babble() -> None:
        try:
            while True:
                its.sendall(head + body)
        except OSError:
            pass

    talker = threading.Thread(target=babble, daemon=True)
    talker.start()
    with pytest.raises(TlsRefused):
        tls.accepted(mine, identity_of(certs), 5)
    mine.close()
    talker.join(10)
    its.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_falls_silent_ends_the_transfer_by_its_deadline(
    nest: Nest, certs: Certificates, how: signal.Signals
) -> None:
    target = nest.peer("target#1", secure(certs))
    base = target.allocate(16 * MIB)
    writer = nest.actor("writer#1", secure(certs, ack_timeout_s=0.5, request_timeout_s=3.0, connect_timeout_s=0.5))
    writer.allocate(16 * MIB, seed=1)
    target.window("writer#1", 1, [(base, 16 * MIB)])
    segment = writer.open(target.descriptor())
    (first,) = writer.transfer("write", segment, [(0, base, MIB)], 1)
    assert first.state is TransferState.COMPLETED
    (target.kill if how is signal.SIGKILL else target.freeze)()
    begun = time.monotonic()
    (status,) = writer.transfer("write", segment, [(0, base, 16 * MIB)], 1)
    took = time.monotonic() - begun
    if how is signal.SIGSTOP:
        target.thaw()
    assert status.state in (TransferState.FAILED, TransferState.TIMEOUT)
    assert status.cause
    assert not status.drained or how is signal.SIGKILL
    assert took < 60, took


# ── what the network sees ─────────────────────────────────────────────────────────────────────────


class RecordingProxy:
    """A TCP proxy that keeps every byte of both directions."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.seen: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target, self._socks = target, [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target, 10)
            self._socks += [near, far]
            for one, other in ((near, far), (far, near)):
                self._threads.append(threading.Thread(target=self._pump, args=(one, other), daemon=True))
                self._threads[-1].start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        kept = bytearray()
        try:
            while data := one.recv(1 << 16):
                kept += data
                other.sendall(data)
        except OSError:
            pass
        self.seen.append(bytes(kept))
        for sock in (one, other):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        for sock in self._socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(10)
        for sock in self._socks:
            sock.close()

    def windows_found(self, data: bytes, size: int = 32, stride: int = 4 * KIB) -> int:
        """How many windows of `data` went over the wire as they are."""
        whole = b"|".join(self.seen)
        return sum(data[at : at + size] in whole for at in range(0, len(data) - size, stride))


@pytest.fixture
def proxies() -> Iterator[list[RecordingProxy]]:
    made: list[RecordingProxy] = []
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("guarded", [True, False])
def test_no_window_of_the_bytes_is_on_the_wire(
    nest: Nest, certs: Certificates, proxies: list[RecordingProxy], guarded: bool
) -> None:
    """Writes, reads, end marks and greetings through a recording proxy; over plain tcp the same search finds them."""
    config = secure(certs) if guarded else EngineConfig(transports=("tcp",))
    target, asker = nest.actor("target#1", config), nest.actor("asker#1", config)
    base, size = target.allocate(4 * MIB, seed=1), 2 * MIB
    asker.allocate(4 * MIB, seed=2)
    plain = target.engine.local_descriptor()
    endpoint = plain.endpoints["tcp"]
    proxies.append(RecordingProxy((endpoint["host"], int(endpoint["port"]))))
    through = replace(plain, endpoints={"tcp": {**endpoint, "port": str(proxies[0].port)}})
    target.engine.open_window("asker#1", 1, [Range(base, size)])
    segment = asker.engine.open_segment(through)
    sent, got = pattern(2, 4 * MIB)[:size], pattern(1, 4 * MIB)[size:]
    assert all(s.state is TransferState.COMPLETED for s in asker.transfer("write", segment, [(0, base, size)], 1))
    mark = b"an end mark that says which request it was"
    asker.engine.notify(segment, 1, mark)
    until(lambda: bool(target.notified), "the end mark")
    assert all(s.state is TransferState.COMPLETED for s in asker.transfer("read", segment, [(size, base + size, size)]))
    asker.engine.close_segment(segment)
    target.engine.fence("asker#1", 1)
    proxy = proxies[0]
    until(lambda: sum(map(len, proxy.seen)) > 2 * size, "all that was recorded")
    found = [proxy.windows_found(data) for data in (sent, got)]
    told = [proxy.windows_found(data, len(data) - 1) for data in (mark, plain.token.encode(), b"asker#1")]
    assert all(found) is not guarded
    assert all(told) is not guarded
    assert any(found + told) is not guarded


def test_submitting_over_shm_needs_no_certificate_and_leaves_no_byte_outside(nest: Nest, certs: Certificates) -> None:
    one = nest.actor("one#1", secure(certs, transports=("auto",)))
    other = nest.actor("other#1", secure(certs, transports=("auto",)))
    for actor in (one, other):
        actor.allocate(4 * KIB, seed=1)
    assert write(one, other, 4 * KIB) == ""
    assert "tcp.connected" not in one.engine.counters()
    assert {choice.name: choice.why for choice in one.engine.choices if choice.used}["tcp"].endswith("over TLS")
