"""TLS of the tcp transport: one connection that several threads use at once, and its mutual handshake.

An SSL object must not be used by two threads at a time, and a thread that waits for the peer inside it would keep all
others out for as long. So the object works on memory (`ssl.MemoryBIO`), and this module moves the ciphertext:

    writer   `_sending`  ┌ `_lock` encrypt a piece ┐ send the ciphertext (may wait for the peer) ...
    reader   `_receiving`  wait for ciphertext ... ┌ `_lock` decrypt what came ┐ ...

`_sending` and `_receiving` keep the order of the ciphertext, one for each direction, and are held while the socket is
waited for. `_lock` guards the SSL object, is the innermost and is never held during I/O: a full socket in one direction
cannot stop the other one. At most `PIECE_BYTES` are encrypted ahead of the socket, and as many read ahead of OpenSSL.

Plaintext is decrypted straight into the views, and only after its record's tag was checked. There are no scatter calls
and no MSG_ZEROCOPY here, as the kernel sees nothing but ciphertext; small views are joined before they are encrypted.
TLS is 1.3 alone, without session tickets; the kernel's TLS is not used (it wants the socket inside the SSL object).
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvmesh.errors import TransferError
from kvmesh.rpc.authorisation import Identity, ServerRole, identities_in
from kvmesh.watched_files import WatchedFiles

PIECE_BYTES = 256 << 10
RECORD_BYTES = 16 << 10
MAX_HANDSHAKE_BYTES = 256 << 10  # of the peer's; chains of certificates have some KiB
MAX_RECORDS = 1 << 24  # of one direction and key: AES-GCM stands 2^24.5 (RFC 8446, 5.5); Python offers no new key
PART_S = 1.0
_HANDSHAKE_RECORD, _ALERT_RECORD = 0x16, 0x15
SETTING = "transfer_network and tls_cert, tls_key, tls_ca must be alike on both sides"


class TlsRefused(Exception):
    """The handshake showed that these two can never talk, or that one must not trust the other."""


class NotTls(TlsRefused):
    """What the peer sent is no TLS."""


class TlsIdentity:
    """The files that say who this process is and whom it trusts. They are read again when they have changed, so that a
    renewed certificate needs no restart; connections that exist keep theirs."""

    def __init__(self, cert: str, key: str, ca: str, server_name: str = "") -> None:
        """Raises TransferError, which names the field, when a file cannot be used."""
        # An engine reaches whoever has KV, of several roles: which they are, `TlsSocket.identities` says.
        self.server_name = server_name.replace("{role}", ServerRole.MEMBER)

        def load() -> TlsContexts:
            try:
                return TlsContexts.load(cert, key, ca)
            except (OSError, ValueError) as err:
                why = f"tls_cert={cert!r}, tls_key={key!r}, tls_ca={ca!r}: {_said(err)}"
                raise TransferError(why, field="tls_cert") from None

        self._files = WatchedFiles("certificates of the transfer engine", (cert, key, ca), load)

    def contexts(self) -> TlsContexts:
        """Returns the newest contexts."""
        return self._files.value()


class TlsContexts(NamedTuple):
    """The contexts of the two ends of connections."""

    opener: ssl.SSLContext
    acceptor: ssl.SSLContext

    @classmethod
    def load(cls, cert: str, key: str, ca: str) -> TlsContexts:
        """Raises OSError or ValueError when a file cannot be used."""
        made = cls(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        for context in made:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cafile=ca)
            context.load_cert_chain(cert, key, password="")  # an empty passphrase opens no key, and none is asked for
        made.opener.check_hostname = True
        made.acceptor.num_tickets = 0  # every connection is verified anew
        return made


class TlsSocket:
    """A connection after its handshake. It has the methods of a socket that the tcp transport uses, and may be read and
    written by any number of threads; what one call sends stays together."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_name: str | None = None) -> None:
        """The side with a `server_name` opens; None accepts."""
        self.raw = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._lock = threading.Lock()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._unsent = memoryview(b"")  # ciphertext that `send_now` left over
        self._buffer = memoryview(bytearray(PIECE_BYTES))  # what the socket gave; only `_receiving`'s holder uses it
        self._sent_records = self._received_records = 0

    # ── the handshake ─────────────────────────────────────────────────────────────────────────────

    def handshake(self, timeout_s: float) -> None:
        """Shakes hands within `timeout_s` in all. Raises NotTls, TlsRefused or OSError; no other thread may use the
        connection before it returns."""
        sock, before = self.raw, self.raw.gettimeout()
        deadline, got_bytes = time.monotonic() + timeout_s, 0
        try:
            while True:
                try:
                    self._ssl.do_handshake()
                    self._flush_handshake(deadline)
                    return
                except ssl.SSLWantReadError:
                    self._flush_handshake(deadline)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no TLS handshake within {timeout_s:g} s")
                sock.settimeout(left)
                try:
                    got = sock.recv_into(self._buffer[:RECORD_BYTES])
                except TimeoutError:
                    raise TimeoutError(f"no TLS handshake within {timeout_s:g} s") from None
                if not got:
                    raise ConnectionResetError("the peer closed the connection in the TLS handshake")
                if not got_bytes and self._buffer[0] not in (_HANDSHAKE_RECORD, _ALERT_RECORD):
                    raise NotTls("the peer speaks no TLS")
                got_bytes += got
                if got_bytes > MAX_HANDSHAKE_BYTES:
                    raise TlsRefused(f"a TLS handshake of more than {MAX_HANDSHAKE_BYTES} bytes")
                self._incoming.write(self._buffer[:got])
        except ssl.SSLError as err:
            with suppress(OSError):
                self._flush_handshake(deadline)  # the alert, which tells the peer why
            raise TlsRefused(explained(err)) from None
        finally:
            sock.settimeout(before)

    @property
    def identities(self) -> frozenset[Identity]:
        """What the peer's certificate says; only after the handshake."""
        shown = self._ssl.getpeercert() or {}
        names: Any = shown.get("subjectAltName", ())
        return identities_in(tuple(str(name).encode() for kind, name in names if kind == "URI"))

    def _flush_handshake(self, deadline: float) -> None:
        if self._outgoing.pending:
            self.raw.settimeout(max(0.001, deadline - time.monotonic()))
            self.raw.sendall(self._outgoing.read())

    # ── sending ───────────────────────────────────────────────────────────────────────────────────

    @property
    def worn(self) -> bool:
        """Says whether the keys have carried as much as they may: the connection should be replaced."""
        return max(self._sent_records, self._received_records) >= MAX_RECORDS

    def sendall(self, data: bytes) -> None:
        self.send_views([memoryview(data)])

    def send_views(self, views: Sequence[memoryview]) -> None:
        """Sends all views in order, after what `send_now` left over."""
        with self._sending:
            self._finish()
            for piece in _pieces(views):
                self.raw.sendall(self._encrypted(piece))

    def send_now(self, views: Sequence[memoryview]) -> list[memoryview]:
        """Encrypts all views and sends what the socket takes without waiting. Returns the ciphertext that is left,
        which `finish` sends; no view is needed any more."""
        with self._sending:
            ciphertext = b"".join([self._unsent, *map(self._encrypted, _pieces(views))])
            sent = 0
            try:
                sent = self.raw.send(ciphertext, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            finally:
                self._unsent = memoryview(ciphertext)[sent:]
            return [self._unsent] if self._unsent else []

    def finish(self) -> None:
        """Sends what `send_now` left over."""
        with self._sending:
            self._finish()

    def _finish(self) -> None:
        if self._unsent:
            rest, self._unsent = self._unsent, memoryview(b"")
            self.raw.sendall(rest)

    def _encrypted(self, piece: bytes | memoryview) -> bytes:
        """Returns the ciphertext of a piece; the caller holds `_sending`."""
        with self._lock:
            self._sent_records += -(-len(piece) // RECORD_BYTES)
            done = 0
            while done < len(piece):
                done += self._ssl.write(piece[done:] if done else piece)
            return self._outgoing.read()

    # ── receiving ─────────────────────────────────────────────────────────────────────────────────

    def recv_into(self, view: memoryview, nbytes: int = 0, flags: int = 0) -> int:
        return self.recv_views([view[:nbytes] if nbytes else view], flags)

    def recv_views(self, views: Sequence[memoryview], flags: int) -> int:
        """Fills the views in order and returns the number of bytes, as recvmsg does: all of them with MSG_WAITALL, but
        for the end of the stream (0 when nothing came before it); without, what there is, at least one byte. Raises
        BlockingIOError where nothing has come and MSG_DONTWAIT is set or the socket's SO_RCVTIMEO is over."""
        with self._receiving:
            filled = 0
            for view in views:
                at = 0
                while at < len(view):
                    got = self._decrypt_into(view[at:] if at else view)
                    at += got
                    filled += got
                    if got:
                        continue
                    if filled and not flags & socket.MSG_WAITALL:
                        return filled
                    try:
                        if not self._fetch(flags & socket.MSG_DONTWAIT):
                            return filled
                    except BlockingIOError:
                        if filled:
                            return filled
                        raise
            return filled

    def _decrypt_into(self, view: memoryview) -> int:
        """Returns how many bytes of what has come were put into `view`; 0: more must come first."""
        at, want = 0, len(view)
        with self._lock:
            if not self._incoming.pending and not self._ssl.pending():
                return 0  # cheaper than the error that says so
            try:
                while at < want:
                    got = int(self._ssl.read(want - at, view[at:] if at else view))
                    if not got:
                        break
                    self._received_records += 1
                    at += got
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                if not at:
                    raise ConnectionResetError("the peer ended TLS") from None
        return at

    def _fetch(self, flags: int) -> int:
        """Takes ciphertext from the socket; 0: its end. The caller holds `_receiving`."""
        got = self.raw.recv_into(self._buffer, 0, flags)
        if got:
            with self._lock:
                self._incoming.write(self._buffer[:got])
        return got

    @property
    def buffered(self) -> bool:
        """Says whether bytes may be read without the socket becoming readable."""
        with self._lock:
            return bool(self._incoming.pending or self._ssl.pending())

    # ── the socket ────────────────────────────────────────────────────────────────────────────────

    def fileno(self) -> int:
        return self.raw.fileno()

    def settimeout(self, seconds: float | None) -> None:
        self.raw.settimeout(seconds)

    def setsockopt(self, level: int, name: int, value: int | bytes) -> None:
        self.raw.setsockopt(level, name, value)

    def getsockname(self) -> tuple[str, int]:
        return self.raw.getsockname()  # type: ignore[no-any-return]

    def getpeername(self) -> tuple[str, int]:
        return self.raw.getpeername()  # type: ignore[no-any-return]

    def shutdown(self, how: int) -> None:
        """Ends the TCP connection at once; threads inside a call leave it."""
        self.raw.shutdown(how)

    def close(self) -> None:
        self.raw.close()


ByteStream = socket.socket | TlsSocket  # what a tcp connection's bytes go through


def opened(sock: socket.socket, identity: TlsIdentity, host: str, timeout_s: float) -> TlsSocket:
    """Returns the opener's end after the handshake; the peer's certificate must name `host`, as it must for gRPC, or
    the configured server name. Raises NotTls, TlsRefused or OSError."""
    secured = TlsSocket(sock, identity.contexts().opener, server_name=identity.server_name or host.partition("%")[0])
    secured.handshake(timeout_s)
    return secured


def accepted(sock: socket.socket, identity: TlsIdentity, timeout_s: float) -> TlsSocket:
    """Returns the acceptor's end after the handshake; the peer has shown a certificate of the mesh's authority. Raises
    NotTls, TlsRefused or OSError."""
    secured = TlsSocket(sock, identity.contexts().acceptor)
    try:
        secured.handshake(timeout_s)
    except TlsRefused as err:
        if not isinstance(err, NotTls):
            part(sock)
        raise
    return secured


def part(sock: socket.socket) -> None:
    """Lets a refused peer read why: closing at once, with its bytes unread, would reset the connection first. It takes
    at most PART_S."""
    deadline = time.monotonic() + PART_S
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            if not sock.recv(RECORD_BYTES):
                return


def looks_like_tls(first: bytes | bytearray) -> bool:
    """Says whether a connection that should begin with the length of a greeting (4 bytes, at most 16 KiB) begins with
    TLS."""
    return first[0] == _HANDSHAKE_RECORD and first[1] == 3 and first[2] != 0


def _pieces(views: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of all views in pieces of at most PIECE_BYTES; small views are joined, as each piece costs a
    record, a call and a system call."""
    batch: list[memoryview] = []
    room = PIECE_BYTES
    for view in views:
        at, nbytes = 0, len(view)
        while at < nbytes:
            part = view[at : at + room]
            batch.append(part)
            at += len(part)
            room -= len(part)
            if not room:
                yield batch[0] if len(batch) == 1 else b"".join(batch)
                batch, room = [], PIECE_BYTES
    if batch:
        yield batch[0] if len(batch) == 1 else b"".join(batch)


def explained(err: ssl.SSLError) -> str:
    """Returns what a failed handshake means in terms of the settings."""
    reason = (err.reason or str(err)).replace("_", " ").lower()
    if isinstance(err, ssl.SSLCertVerificationError):
        if "mismatch" in err.verify_message.lower():
            return f"its certificate does not name that address (tls_server_name): {err.verify_message}"
        return f"its certificate is none that tls_ca vouches for: {err.verify_message}"
    if "peer did not return a certificate" in reason:
        return "it shows no certificate (its tls_cert is not set)"
    if "alert" in reason:
        return f"it does not take this side's tls_cert: {reason}"
    if "protocol version" in reason or "unsupported protocol" in reason:
        return "it speaks an older TLS than 1.3"
    return reason


def _said(err: OSError | ValueError) -> str:
    if isinstance(err, ssl.SSLError):
        return (err.reason or str(err)).replace("_", " ").lower()
    if isinstance(err, OSError):
        return f"{err.strerror or err}{f': {err.filename}' if err.filename else ''}"
    return str(err)
