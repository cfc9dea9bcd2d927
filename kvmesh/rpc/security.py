"""TLS between services: who this process is, whom it trusts, and what a failed handshake means.

    tls_cert + tls_key            servers of this process speak TLS with this certificate
    tls_ca                        channels of this process speak TLS; the peer must be signed by one of these
    tls_cert + tls_key + tls_ca   mTLS: servers ask for a client certificate, channels present this one

Files are read at the start, and again when they have changed: connections made from then on use them, and those that
exist stay. A file that cannot be used is refused with one line in the log, and what was goes on.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import grpc

from kvmesh.errors import ConfigError, TlsFailed, Unavailable
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.watched_files import WatchedFiles

FIELDS = ("tls_cert", "tls_key", "tls_ca", "tls_server_name")
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_KEY = re.compile(rb"-----BEGIN (\w+ )*PRIVATE KEY-----")
_MOST_BYTES = 4 << 20  # of a PEM file; a bundle of all public authorities has a tenth


class Files(Protocol):
    """The TLS settings of a configuration: paths of PEM files ("" for none) and the name override."""

    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_ca(self) -> str: ...
    @property
    def tls_server_name(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """The `Files` of a program that is no service: a command line tool, a benchmark, a test."""

    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    tls_server_name: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> TlsFiles:
        """Reads KVMESH_TLS_CERT and so on, as services do."""
        return cls(**{name: env.get(f"KVMESH_{name.upper()}", "") for name in FIELDS})


@dataclass(frozen=True, kw_only=True)
class Security:
    """The checked PEM bytes; empty for none. `paths` are where they were read; `source` reads them again when their
    files have changed, and is None for bytes that come from no file."""

    cert: bytes = field(default=b"", repr=False)
    key: bytes = field(default=b"", repr=False)
    ca: bytes = field(default=b"", repr=False)
    server_name: str = ""
    paths: TlsFiles = field(default=TlsFiles(), compare=False)
    source: WatchedFiles[Security] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def load(cls, files: Files) -> Security:
        """Reads and checks the files. Raises ConfigError, which names field and path, when one is missing, unreadable,
        not PEM or encrypted, does not match the other, or makes no sense alone."""
        paths = TlsFiles(**{name: getattr(files, name) for name in FIELDS})
        pem_files = (paths.tls_cert, paths.tls_key, paths.tls_ca)
        source = WatchedFiles("certificates", pem_files, lambda: cls._read(paths))
        return replace(source.value(), source=source)

    @classmethod
    def _read(cls, paths: TlsFiles) -> Security:
        cert, key = load_pair(paths.tls_cert, paths.tls_key, "tls_cert", "tls_key")
        ca = b""
        if paths.tls_ca:
            ca = _read(paths.tls_ca, "tls_ca")
            _check_authorities(ca, paths.tls_ca, "tls_ca")
        elif paths.tls_server_name:
            raise _refuse("tls_server_name", paths.tls_server_name, "is of no use without tls_ca")
        return cls(cert=cert, key=key, ca=ca, server_name=paths.tls_server_name, paths=paths)

    def name_of(self, server: ServerRole) -> str:
        """Returns the name that the certificate of such a server must hold; "" for the address that is called."""
        return self.server_name.replace("{role}", server)

    def renewed(self) -> Security:
        """Returns what the files hold now, this object itself while that is the same. It may be called in any
        thread."""
        newest = self.source.value() if self.source is not None else self
        return self if newest == self else replace(newest, source=self.source)

    @property
    def asks_clients(self) -> bool:
        """Whether servers that are not public ask clients for certificates."""
        return bool(self.cert and self.ca)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Returns credentials for client channels; None means plaintext."""
        if not self.ca:
            return None
        return grpc.ssl_channel_credentials(self.ca, self.key or None, self.cert or None)

    def server_credentials(self, *, public: bool = False) -> grpc.ServerCredentials | None:
        """Returns credentials for listening servers; None means plaintext. A `public` server asks for no client
        certificate."""
        if not self.cert:
            return None
        pairs = [(self.key, self.cert)]
        mutual = bool(self.ca) and not public
        if self.source is None:
            return grpc.ssl_server_credentials(pairs, self.ca if mutual else None, require_client_auth=mutual)
        renewal: Any = _Renewal(self, mutual).configuration  # gRPC's types leave out that None means no change
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self, mutual), renewal, require_client_authentication=mutual
        )


class _Renewal:
    """Tells gRPC before each handshake which certificate to use, when there is another one."""

    def __init__(self, security: Security, mutual: bool) -> None:
        self._used = security
        self._mutual = mutual

    def configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the new certificate, None for the same. It is called in threads of gRPC."""
        newest = self._used.renewed()
        if newest is self._used:
            return None
        self._used = newest
        return _configuration(newest, self._mutual)


def _configuration(security: Security, mutual: bool) -> grpc.ServerCertificateConfiguration:
    pairs = [(security.key, security.cert)]
    return grpc.ssl_server_certificate_configuration(pairs, security.ca if mutual else None)


PLAINTEXT = Security()

_current = PLAINTEXT


def configure(files: Files) -> Security:
    """Makes channels and servers of this process use `files` from here on. Raises ConfigError as `Security.load` does;
    then nothing has changed."""
    global _current
    _current = Security.load(files)
    return _current


def use(security: Security) -> Security:
    """Makes this process use `security`; returns what it used before."""
    global _current
    before, _current = _current, security
    return before


def current() -> Security:
    """Returns what this process was configured with; plaintext when it was not configured."""
    return _current


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


def load_pair(cert_path: str, key_path: str, cert_field: str, key_field: str) -> tuple[bytes, bytes]:
    """Returns certificate (chain) and private key, both or neither. Raises ConfigError, which names field and path."""
    if not cert_path and not key_path:
        return b"", b""
    for name, path, other in ((cert_field, cert_path, key_field), (key_field, key_path, cert_field)):
        if not path:
            raise _refuse(name, path, f"is needed with {other}")
    cert, key = _read(cert_path, cert_field), _read(key_path, key_field)
    _check_authorities(cert, cert_path, cert_field)
    if not _KEY.search(key):
        raise _refuse(key_field, key_path, "holds no PEM private key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty passphrase opens no key; without one OpenSSL would ask the terminal.
        context.load_cert_chain(cert_path, key_path, password="")
    except ssl.SSLError as err:
        if err.reason == "KEY_VALUES_MISMATCH":
            why = f"is not the key of {cert_field}={cert_path!r}"
        elif b"ENCRYPTED" in key:
            why = "is encrypted; kvmesh needs a key without a passphrase"
        else:
            why = f"cannot be used with {cert_field}={cert_path!r} ({_reason(err)})"
        raise _refuse(key_field, key_path, why) from None
    except OSError as err:
        raise _refuse(key_field, key_path, err.strerror or str(err)) from None
    return cert, key


def watched_context(cert: str, key: str, cert_field: str, key_field: str) -> WatchedFiles[ssl.SSLContext] | None:
    """Returns the context of a listener that asks for no client certificate, made anew when the files have changed;
    None without files. Raises ConfigError as `load_pair` does."""

    def read() -> ssl.SSLContext:
        load_pair(cert, key, cert_field, key_field)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password="")
        return context

    return WatchedFiles(f"{cert_field}, {key_field}", (cert, key), read) if cert or key else None


def _check_authorities(pem: bytes, path: str, name: str) -> None:
    if _CERTIFICATE not in pem:
        raise _refuse(name, path, "holds no PEM certificate")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as err:
        why = _reason(err) if isinstance(err, ssl.SSLError) else "not ASCII"
        raise _refuse(name, path, f"holds a certificate that cannot be read ({why})") from None


def _read(path: str, name: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            found = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise _refuse(name, path, why or type(err).__name__) from None
    if len(found) > _MOST_BYTES:
        raise _refuse(name, path, f"is longer than {_MOST_BYTES} bytes")
    return found


def _reason(err: ssl.SSLError) -> str:
    return (err.reason or str(err)).replace("_", " ").lower()


def _refuse(name: str, path: str, why: str) -> ConfigError:
    return ConfigError(f"{name}={path!r}: {why}", field=name)


# ── what gRPC says of handshakes ──────────────────────────────────────────────────────────────────

_PEER = re.compile(r"ipv[46]:(\S+?): |unix:(\S+?): ")


def explain(details: str) -> Unavailable | None:
    """Returns what gRPC's error text about a failed connection means in terms of TLS, or None when it is not about
    that.

    The result is TlsFailed where gRPC is certain. A TLS server that meets plaintext or no certificate closes the
    connection silently before any HTTP/2, and so does a process that dies; the message then names the possible reasons.
    """
    if "failed to connect" not in details:
        return None
    peer = _PEER.search(details)
    where = (peer.group(1) or peer.group(2)).replace("%5B", "[").replace("%5D", "]") if peer else "the peer"
    if "WRONG_VERSION_NUMBER" in details:
        return TlsFailed(f"{where} speaks no TLS, and this side does: tls_ca is set here, tls_cert is not set there")
    if "CERTIFICATE_VERIFY_FAILED" in details:
        why = re.search(r"CERTIFICATE_VERIFY_FAILED: ([a-z0-9 ]+)", details)
        told = f": {why.group(1).strip()}" if why else ""
        return TlsFailed(f"{where} has a certificate that tls_ca does not vouch for{told}")
    if "Hostname Verification" in details:
        name = f"tls_server_name={_current.server_name!r}" if _current.server_name else "that address"
        role = ": it is of another role than that service's" if "{role}" in _current.server_name else ""
        return TlsFailed(f"{where} has a certificate that does not name {name}{role}")
    if "handshake failed" in details.lower():
        return TlsFailed(f"{where}: {details[-200:]}")
    if details.rstrip().endswith(("Socket closed", "Connection reset by peer")):
        closed = f"{where} closed the connection at once"
        if not _current.ca:
            return Unavailable(f"{closed}: it may speak TLS, and this side does not (tls_ca is not set)")
        if not _current.cert:
            return Unavailable(f"{closed}: it may want a client certificate (tls_cert is not set)")
        return Unavailable(f"{closed}: it may distrust this side's tls_cert, or be going down")
    return None
